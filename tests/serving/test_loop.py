"""The engine thread by itself: cancel in every phase, deadline, a bounded queue, faults, drain. Slots and pages come back each time."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree import SamplingParams
from trtllm_v4tree.serving import owner as owner_module
from trtllm_v4tree.serving import wire
from trtllm_v4tree.serving.events import Code, Event, Submission
from trtllm_v4tree.serving.loop import MAX_FAULTS, EngineLoop
from trtllm_v4tree.serving.owner import Owner
from trtllm_v4tree.serving.remote import RemoteLoop
from trtllm_v4tree.serving.stats import Tally

LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


class Asked:
    """A submitted request and its events."""

    def __init__(
        self,
        backend: Any,
        params: SamplingParams = SHORT,
        prompt: Any = "Once upon a time",
        timeout_s: float | None = None,
    ) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.ticket = backend.submit(Submission("id", prompt, params, timeout_s), self.events.put)

    def first(self) -> Event:
        return self.events.get(timeout=30)

    def last(self) -> Event:
        while not (event := self.events.get(timeout=60)).last:
            pass
        return event

    def code(self) -> Code | None:
        error = self.last().error
        return None if error is None else error.code


@pytest.fixture(scope="module")
def shared(engine_dir: Path) -> Iterator[EngineLoop]:
    loop = EngineLoop.load(engine_dir, "s3_k2_d6", threads=1, max_queue=4)
    yield loop
    loop.stop()


@pytest.fixture
def loop(shared: EngineLoop) -> Iterator[EngineLoop]:
    """The loop, which must be empty again afterwards."""
    yield shared
    deadline = time.monotonic() + 10
    while shared.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    pools = shared.engine.pools
    assert not pools.slots.taken and not pools.pages.taken and not shared.busy


def test_events_join_to_the_whole_output(loop: EngineLoop) -> None:
    asked, events = Asked(loop, LONG), []
    while not events or not events[-1].last:
        events.append(asked.first())
    assert sum(len(e.token_ids) for e in events) == 400 == events[-1].usage.completion_tokens
    assert len(events) > 10 and events[-1].finish_reason == "length"


def test_cancel_while_decoding_prefilling_and_queued(loop: EngineLoop) -> None:
    decoding = Asked(loop, LONG)
    decoding.first()
    decoding.ticket.cancel()
    assert decoding.code() is Code.CANCELLED
    prefilling = Asked(loop, LONG, [5] * 1600)
    time.sleep(0.02)
    prefilling.ticket.cancel()
    assert prefilling.code() is Code.CANCELLED
    running = [Asked(loop, LONG) for _ in range(16)]
    queued = [Asked(loop, LONG) for _ in range(3)]
    for asked in (*queued, *running):
        asked.ticket.cancel()
    assert {a.code() for a in (*queued, *running)} == {Code.CANCELLED}


def test_a_cancel_frees_within_a_round(loop: EngineLoop) -> None:
    asked = Asked(loop, LONG)
    asked.first()
    asked.ticket.cancel()
    event = asked.last()
    assert event.error is not None and event.usage.completion_tokens < 100
    assert not loop.engine.pools.slots.taken


def test_deadline(loop: EngineLoop) -> None:
    assert Asked(loop, LONG, timeout_s=0.05).code() is Code.DEADLINE_EXCEEDED
    assert Asked(loop, SHORT, timeout_s=30.0).code() is None


def test_full_queue_is_unavailable_and_nothing_else_is_hurt(loop: EngineLoop) -> None:
    many = [Asked(loop, SamplingParams(max_tokens=40, temperature=0.0)) for _ in range(16 + 4 + 6)]
    codes = [a.code() for a in many]
    assert codes.count(None) >= 20 and set(codes) == {None, Code.UNAVAILABLE}


def test_bad_requests_are_refused(loop: EngineLoop) -> None:
    for prompt in ("", [], [99999], [5] * 5000):
        assert Asked(loop, SHORT, prompt).code() is Code.INVALID_ARGUMENT


def _raising(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, method: str, after: int, times: int = 1) -> None:
    """Makes calls number `after` .. `after + times - 1` of an executor method raise."""
    whole, calls = getattr(loop.engine.executor, method), iter(range(10**9))

    def call(*args: Any) -> Any:
        number = next(calls)
        if after <= number < after + times:
            raise RuntimeError("injected")
        return whole(*args)

    monkeypatch.setattr(loop.engine.executor, method, call)


@pytest.mark.parametrize("method", ["target", "draft", "commit"])
def test_a_fault_ends_the_pass_and_the_loop_goes_on(
    method: str, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Asked(loop).last()
    faults = loop.stats.engine_faults
    with monkeypatch.context() as patch:
        _raising(loop, patch, method, after=6)
        batch = [Asked(loop, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)) for _ in range(4)]
        codes = [a.code() for a in batch]
    assert Code.INTERNAL in codes and set(codes) <= {None, Code.INTERNAL} and loop.stats.engine_faults == faults + 1
    assert loop.ready
    again = Asked(loop).last()
    assert again.finish_reason == want.finish_reason and again.usage.completion_tokens == 5


def test_a_fault_in_prefill_leaves_decoding_requests_alone(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    want = Asked(loop, LONG)
    text = ""
    while not (event := want.first()).last:
        text += event.text
    text += event.text
    running = Asked(loop, LONG)
    got = running.first().text
    with monkeypatch.context() as patch:
        whole = loop.engine._prefill

        def prefill(*_: Any) -> Any:
            raise RuntimeError("injected")

        patch.setattr(loop.engine, "_prefill", prefill)
        assert Asked(loop).code() is Code.INTERNAL
        patch.setattr(loop.engine, "_prefill", whole)
    while not (event := running.first()).last:
        got += event.text
    assert got + event.text == text and event.finish_reason == "length"


def test_rounds_that_emit_nothing_are_counted(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in deterministic mode where a choice must be made again: the token comes from a later prefill."""
    want = [Asked(loop, SHORT, [5 + i, 7]).last().usage.completion_tokens for i in range(4)]
    rounds, emitted = loop.stats.rounds, loop.stats.emitted_tokens
    with monkeypatch.context() as patch:
        patch.setattr(loop.engine, "deterministic", True)
        patch.setattr("trtllm_v4tree.runtime.engine.is_certain", lambda _, chosen, *args: np.zeros(len(chosen), bool))
        running = [Asked(loop, SHORT, [5 + i, 7]) for i in range(4)]
        assert [a.last().usage.completion_tokens for a in running] == want == [5] * 4
    assert loop.stats.rounds - rounds == 4 * 4 and loop.stats.emitted_tokens - emitted == 4 * 5


def test_a_fault_outside_the_pass_ends_its_request_only(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Asked(loop, LONG)
    running.first()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_encode", lambda _: 1 // 0)
        assert Asked(loop).code() is Code.INTERNAL
    whole = Tally.settle

    def settle(tally: Any, request: Any, stats: Any) -> None:
        if request.params.seed == 7:
            raise RuntimeError("injected")
        whole(tally, request, stats)

    with monkeypatch.context() as patch:
        patch.setattr(Tally, "settle", settle)
        for count in (1, 50):
            broken = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, seed=7)
            assert Asked(loop, broken).code() is Code.INTERNAL
        assert running.code() is None and loop.ready
    assert Asked(loop).code() is None


def test_the_socket_carries_the_same_and_a_lost_connection_cancels(loop: EngineLoop, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    owner = Owner(loop, tmp_path / "engine.sock")
    remote = RemoteLoop(tmp_path / "engine.sock")
    assert Asked(remote).last().usage.completion_tokens == Asked(loop).last().usage.completion_tokens == 5
    assert Asked(remote, SHORT, [99999]).code() is Code.INVALID_ARGUMENT
    assert remote.stats()["ready"] == 1
    cancelled = loop.stats.cancelled
    asked = Asked(remote, LONG)
    asked.first()
    remote.close()
    assert asked.code() is Code.UNAVAILABLE
    deadline = time.monotonic() + 5
    while loop.stats.cancelled == cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.stats.cancelled == cancelled + 1
    assert Asked(remote).code() is None, "it connects again"
    owner.close()


def test_drain_lets_running_requests_end_and_cuts_at_the_grace_time(engine_dir: Path) -> None:
    loop = EngineLoop.load(engine_dir, "none", threads=1)
    running = Asked(loop, SHORT)
    running.first()
    assert loop.drain(30.0) and running.code() is None
    assert Asked(loop).code() is Code.UNAVAILABLE and not loop.ready
    loop.stop()
    loop = EngineLoop.load(engine_dir, "none", threads=1)
    running = Asked(loop, SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True))
    running.first()
    assert not loop.drain(0.1) and running.code() is Code.UNAVAILABLE
    loop.stop()


def test_an_engine_that_always_fails_is_given_up(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop.load(engine_dir, "none", threads=1)
    _raising(loop, monkeypatch, "target", after=0, times=10**6)
    for _ in range(MAX_FAULTS):
        assert Asked(loop).code() is Code.INTERNAL
    assert Asked(loop).code() is Code.UNAVAILABLE and not loop.ready
    loop.stop()


class Peer:
    """A process at the owner's socket that sends requests and does not read before it is asked to."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.count = 0

    def submit(self, params: SamplingParams, prompt: Any = "Once upon a time") -> None:
        submission = Submission(f"peer-{self.count}", prompt, params)
        self.socket.sendall(wire.frame({"op": "submit", "id": self.count, "submission": submission.to_json()}))
        self.count += 1

    def results(self) -> tuple[list[Event], int]:
        """Reads until every request has ended; each one's events as one, and the number of frames."""
        found: dict[int, Event] = {}
        frames = 0
        with self.socket.makefile("rb") as stream:
            while len(found) < self.count or not all(e.last for e in found.values()):
                message = wire.read(stream)
                assert message is not None, "the connection ended early"
                frames += 1
                for number, data in message["events"]:
                    event = Event.from_json(data)
                    found[number] = found[number].then(event) if number in found else event
        return [found[n] for n in range(self.count)], frames


@pytest.fixture
def owner(loop: EngineLoop, tmp_path: Path) -> Iterator[Owner]:
    tmp_path.chmod(0o700)
    made = Owner(loop, tmp_path / "engine.sock")
    yield made
    made.close()


def _wait_for_finished(loop: EngineLoop, count: int) -> None:
    deadline = time.monotonic() + 120
    while loop.stats.finished < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_peer_that_does_not_read_holds_up_nobody_and_loses_nothing(loop: EngineLoop, owner: Owner) -> None:
    text = _joined(Asked(loop, LONG)).text
    stopped = replace(LONG, stop=[text[100:106], text[200:209]])
    asked = (replace(LONG, logprobs=20), replace(LONG, logprobs=20), stopped)
    before, peer = loop.stats.finished, Peer(owner.path)
    for params in asked:
        peer.submit(params)
    _wait_for_finished(loop, before + 3)
    assert Asked(RemoteLoop(owner.path)).code() is None, "others are served beside it"
    results, frames = peer.results()
    assert [r.text for r in results] == [text, text, text[: min(text.find(s) for s in stopped.stop)]]
    assert [len(r.logprobs) for r in results] == [400, 400, 0] and results[2].stop_reason in stopped.stop
    assert frames < results[0].usage.rounds, "what waited came together"


def test_a_peer_that_leaves_too_much_unread_is_cut_off(
    loop: EngineLoop, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "MAX_BACKLOG", 2)
    peer = Peer(owner.path)
    for _ in range(6):
        peer.submit(replace(LONG, logprobs=20))
    with pytest.raises(AssertionError, match="ended early"):
        peer.socket.settimeout(60)
        _wait_until_closed(owner)
        peer.results()
    assert Asked(loop).code() is None


def test_an_owner_that_cannot_accept_for_a_while_goes_on(
    loop: EngineLoop, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, failures = owner._listener, iter(range(3))

    class Failing:
        """No descriptor is free the first times."""

        def accept(self) -> Any:
            if next(failures, None) is not None:
                raise OSError(24, "Too many open files")
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    monkeypatch.setattr(owner, "_listener", Failing())
    for _ in range(3):
        assert Asked(RemoteLoop(owner.path)).code() is None
    assert next(failures, None) is None, "it had to try again"


def _wait_until_closed(owner: Owner) -> None:
    deadline = time.monotonic() + 120
    while owner._connections:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_stream_the_result_is_one_event(loop: EngineLoop, owner: Owner) -> None:
    want = _joined(Asked(loop, LONG))
    for backend in (loop, RemoteLoop(owner.path)):
        found: queue.Queue[Event] = queue.Queue()
        backend.submit(Submission("id", "Once upon a time", LONG, stream=False), found.put)
        event = found.get(timeout=60)
        assert event.last and (event.token_ids, event.text) == (want.token_ids, want.text)


def test_a_request_without_stream_can_be_cancelled(loop: EngineLoop, owner: Owner) -> None:
    found: queue.Queue[Event] = queue.Queue()
    long = replace(LONG, max_tokens=2000)
    ticket = RemoteLoop(owner.path).submit(Submission("id", "Once upon a time", long, stream=False), found.put)
    while not loop.stats.slots_active:
        time.sleep(0.01)
    ticket.cancel()
    event = found.get(timeout=60)
    assert event.error is not None and event.error.code is Code.CANCELLED and not event.token_ids


def _joined(asked: Asked) -> Event:
    """The events of a request as one."""
    whole = asked.first()
    while not whole.last:
        whole = whole.then(asked.first())
    return whole
