"""Coalescing: what a consumer that lags gets is fewer and larger events, with the same tokens, text and logprobs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_v4tree import SamplingParams
from trtllm_v4tree.runtime.sampling import TokenLogprobs
from trtllm_v4tree.serving.events import Code, Event, ServingError, Submission, Usage, failure
from trtllm_v4tree.serving.outbox import Outbox
from trtllm_v4tree.serving.requests import Generation
from trtllm_v4tree.serving.triton_models import _Live, _Model


def event(number: int, last: bool = False) -> Event:
    return Event(
        [number], f"<{number}>", [TokenLogprobs(-float(number), [])], "length" if last else None, usage=Usage(3, number)
    )


def joined(events: list[Event]) -> Event:
    whole = events[0]
    for later in events[1:]:
        whole = whole.then(later)
    return whole


@given(st.lists(st.sampled_from(["a", "b", "c", "take"]), max_size=60))
def test_what_is_taken_is_what_was_put_in_order(script: list[str]) -> None:
    outbox, put, taken = Outbox[str](), dict[str, list[Event]](), dict[str, list[Event]]()
    for number, step in enumerate([*script, "a", "take"]):
        if step == "take":
            if len(outbox):
                for key, found in outbox.take().items():
                    taken.setdefault(key, []).append(found)
            continue
        outbox.put(step, event(number))
        put.setdefault(step, []).append(event(number))
        assert len(outbox) <= 3, "one event per request waits, however late its taker is"
    assert {k: joined(v) for k, v in taken.items()} == {k: joined(v) for k, v in put.items()}


def test_no_event_is_lost_between_threads() -> None:
    outbox, seen = Outbox[int](), dict[int, list[Event]]()

    def produce(key: int) -> None:
        for number in range(500):
            outbox.put(key, event(number, number == 499))

    def consume() -> None:
        while taken := outbox.take():
            for key, found in taken.items():
                seen.setdefault(key, []).append(found)

    taker = threading.Thread(target=consume)
    producers = [threading.Thread(target=produce, args=(key,)) for key in range(4)]
    for thread in (taker, *producers):
        thread.start()
    for thread in producers:
        thread.join(timeout=30)
    outbox.close()
    taker.join(timeout=30)
    assert [joined(seen[key]).token_ids for key in range(4)] == [list(range(500))] * 4


class Errors:
    """triton_python_backend_utils' TritonError."""

    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __new__(cls, message: str, code: str) -> Any:
        return code


class Utils:
    """The part of triton_python_backend_utils that the models use."""

    Tensor = staticmethod(lambda name, value: (name, value))
    InferenceResponse = staticmethod(lambda output_tensors, error=None: (dict(output_tensors), error))
    TritonError = Errors
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Sender:
    """A response sender whose client does not read before `reading` is set."""

    def __init__(self) -> None:
        self.reading, self.sent, self.gone = threading.Event(), list[Any](), False

    def send(self, response: Any, flags: int) -> None:
        assert self.reading.wait(30)
        self.sent.append((*response, flags))

    def is_cancelled(self) -> bool:
        return self.gone


class Texts(_Model):
    """The answering side of a model by itself."""

    def generation(self, tensors: Any, request_id: str, timeout_s: float | None) -> Generation:
        raise NotImplementedError

    def outputs(self, live: _Live, found: Event) -> list[Any]:
        return [("text_output", found.text), *self._common_outputs(live, found)]


class Ticket:
    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


@pytest.fixture
def answering() -> Any:
    """A model whose two threads run, and a maker of live requests."""
    model = Texts(Utils())
    threads = [threading.Thread(target=run, daemon=True) for run in (model._answer, model._poll_cancelled)]
    for thread in threads:
        thread.start()

    def live(logprobs: int | None = None) -> _Live:
        submission = Submission("id", [1], SamplingParams(max_tokens=9, logprobs=logprobs))
        made = _Live(Sender(), Generation(submission), Ticket())
        model._live.add(made)
        return made

    yield model, live
    model._closing = True
    model._outbox.close()
    for thread in threads:
        thread.join(timeout=30)


def wait_for(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(3000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it did not happen within 30 s")


def test_a_slow_client_gets_one_larger_response_with_every_logprob(answering: Any) -> None:
    model, make = answering
    live = make(logprobs=0)
    model._outbox.put(live, event(0))
    wait_for(lambda: len(model._outbox) == 0)  # the first is being sent, and its client does not read
    for number in range(1, 50):
        model._outbox.put(live, event(number, number == 49))
    live.sender.reading.set()
    wait_for(lambda: live not in model._live)
    sent = live.sender.sent
    assert len(sent) == 2 and [flags for *_, flags in sent] == [0, 1]
    assert "".join(out["text_output"] for out, *_ in sent) == "".join(f"<{n}>" for n in range(50))
    logprobs = np.concatenate([out["output_log_probs"].reshape(-1) for out, *_ in sent])
    assert logprobs.tolist() == [-float(n) for n in range(50)]
    assert sent[-1][0]["cum_log_probs"].item() == -sum(range(50)) and sent[-1][0]["completion_tokens"].item() == 49


@pytest.mark.parametrize("code", [Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL])
def test_text_that_waits_is_sent_before_an_error(answering: Any, code: Code) -> None:
    model, make = answering
    live = make()
    model._outbox.put(live, event(0))
    wait_for(lambda: len(model._outbox) == 0)
    model._outbox.put(live, event(1))
    model._outbox.put(live, failure(ServingError(code, "it ended"), Usage(3, 2)))
    live.sender.reading.set()
    wait_for(lambda: live not in model._live)
    sent = live.sender.sent
    assert [out.get("text_output") for out, *_ in sent] == ["<0>", "<1>", None]
    assert [flags for *_, flags in sent] == [0, 0, 1] and [bool(error) for _, error, _ in sent] == [False, False, True]


def test_a_client_that_goes_between_two_responses_cancels_once(answering: Any) -> None:
    model, make = answering
    live, other = make(), make()
    for request in (live, other):
        request.sender.reading.set()
        model._outbox.put(request, event(0))
    live.sender.gone = True
    wait_for(lambda: live.ticket.cancels == 1)
    model._outbox.put(live, event(1))
    model._outbox.put(live, failure(ServingError(Code.CANCELLED, "the request was cancelled."), Usage(3, 2)))
    model._outbox.put(other, event(1, last=True))
    wait_for(lambda: not model._live)
    assert live.ticket.cancels == 1 and other.ticket.cancels == 0
    finals = Counter(flags for *_, flags in live.sender.sent)
    assert finals[1] == 1 and live.sender.sent[-1][1] == "CANCELLED"
    assert [out["text_output"] for out, *_ in other.sender.sent] == ["<0>", "<1>"]
