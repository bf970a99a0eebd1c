"""The engine thread: the only one that touches an `Engine`. Everyone else submits, cancels and gets events.

Between two rounds it takes what was submitted, ends what was cancelled or ran out of time, and hands out what the round emitted.
An exception in a pass ends the requests in that pass; the others go on, since a pass writes nothing of theirs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trtllm_v4tree import native
from trtllm_v4tree.accounting import state_bytes
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.llm import LLM
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.request import Request
from trtllm_v4tree.serving.events import Code, Event, ServingError, Submission, Usage, failure, invalid
from trtllm_v4tree.serving.logs import log
from trtllm_v4tree.serving.stats import Stats, Tally
from trtllm_v4tree.tokenizer import EngineTokenizer

MAX_FAULTS = 8  # consecutive failed passes after which the engine is given up
PATIENCE_US = 50  # of the native operators' idle threads: between passes the server and its clients need the core


class Shown(NamedTuple):
    """How much of a request's output its events have carried."""

    tokens: int = 0
    characters: int = 0


@dataclass
class LoopTicket:
    """A request inside the loop; `sink` gets its events from the engine thread and must not block."""

    submission: Submission
    sink: Callable[[LoopTicket, Event], None]
    loop: EngineLoop
    submitted: float = field(default_factory=time.monotonic)
    request: Request | None = None
    cancelled: bool = False
    first_token: float | None = None
    shown: Shown = field(default_factory=Shown)
    tally: Tally = field(default_factory=Tally)
    error: ServingError | None = None

    def cancel(self) -> None:
        """Ends the request in any phase before the next round; no effect on one that has ended."""
        self.cancelled = True
        self.loop.wake()

    @property
    def expired(self) -> bool:
        timeout = self.submission.timeout_s
        return timeout is not None and time.monotonic() - self.submitted > timeout

    def usage(self) -> Usage:
        if self.request is None:
            return Usage()
        m = self.request.metrics
        return Usage(m.prompt_tokens, len(self.request.output_ids), m.rounds, m.round_tokens)


class EngineLoop:
    """Runs one engine on one thread. `max_queue` bounds the requests that wait for a slot; more are refused as UNAVAILABLE."""

    def __init__(self, engine: Engine, tokenizer: EngineTokenizer | None, max_queue: int = 256) -> None:
        self.engine, self.tokenizer, self.max_queue = engine, tokenizer, max_queue
        self.stats = Stats()
        self._bytes_per_node = int(state_bytes(engine.config, engine.sizes).per_node)
        self._inbox: deque[LoopTicket] = deque()
        self._live: list[LoopTicket] = []
        self._changed = threading.Condition()
        self._draining = self._stopping = self._given_up = False
        self._faults = 0
        self._round_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="v4tree-engine", daemon=True)

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        speculation: str,
        threads: int = 0,
        max_queue: int = 256,
        deterministic: bool = False,
        max_num_tokens: int = 0,
    ) -> EngineLoop:
        """Loads an engine directory and starts its thread."""
        llm = LLM(engine_dir, speculation, threads=threads, deterministic=deterministic, max_num_tokens=max_num_tokens)
        native.set_patience(PATIENCE_US)
        loop = cls(llm.engine, llm.tokenizer, max_queue)
        loop.start()
        return loop

    def start(self) -> None:
        self._thread.start()
        self._observe()

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self._thread.is_alive() and not self._draining and not self._given_up

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> LoopTicket:
        """From any thread, at once. A refusal comes as an event, as the result does."""
        return self.submit_to(submission, lambda _, event: on_event(event))

    def submit_to(self, submission: Submission, sink: Callable[[LoopTicket, Event], None]) -> LoopTicket:
        """As `submit`; the sink learns which ticket an event belongs to."""
        ticket = LoopTicket(submission, sink, self)
        with self._changed:
            self._inbox.append(ticket)
            self._changed.notify()
        return ticket

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def drain(self, grace_s: float) -> bool:
        """Refuses new requests and lets the accepted ones end; those left after `grace_s` are cancelled. True if none was."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        deadline = time.monotonic() + grace_s
        while self.busy and time.monotonic() < deadline:
            time.sleep(0.02)
        left = list(self._live)
        for ticket in left:
            ticket.error = ServingError(
                Code.UNAVAILABLE,
                f"the server stops and the request did not end within the grace time of {grace_s:g} s.",
            )
            ticket.cancel()
        while left and self.busy and time.monotonic() < deadline + 5.0:
            time.sleep(0.02)
        return not left

    def stop(self, grace_s: float = 0.0) -> None:
        """Drains and ends the thread."""
        self.drain(grace_s)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)

    @property
    def busy(self) -> bool:
        return bool(self._live or self._inbox)

    @property
    def round_s(self) -> float:
        """How long the running round has taken; 0 between two."""
        began = self._round_began
        return 0.0 if began is None else time.monotonic() - began

    # ---------------------------------------------------------------- the engine thread

    def _run(self) -> None:
        while self._wait_for_work():
            self._round_began = time.monotonic()
            self._take_inbox()
            self._end_unwanted()
            try:
                if self.engine.step():
                    self._faults = 0
            except Exception as error:
                self._fault(error)
            self._deliver()
            self._observe()
            self._round_began = None

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._inbox or self._live or self._stopping):
                self._changed.wait()
            return not (self._stopping and not self._live and not self._inbox)

    def _take_inbox(self) -> None:
        while self._inbox:
            ticket = self._inbox[0]
            try:
                ticket.request = self._admit(ticket)
            except ServingError as error:
                self._refuse(ticket, error)
            except Exception as error:
                log("admission_failed", logging.ERROR, exc_info=True, request_id=ticket.submission.request_id)
                reason = f"the request could not be read ({type(error).__name__})."
                self._refuse(ticket, ServingError(Code.INTERNAL, reason))
            else:
                self.stats.requests += 1
                self.stats.prompt_tokens += len(ticket.request.prompt_ids)
                self._live.append(ticket)
            self._inbox.popleft()

    def _admit(self, ticket: LoopTicket) -> Request:
        if self._draining:
            raise ServingError(Code.UNAVAILABLE, "the server is stopping and takes no new requests.")
        if self._given_up:
            raise ServingError(
                Code.UNAVAILABLE,
                f"the engine failed {MAX_FAULTS} passes in a row and is not ready: restart the server.",
            )
        if ticket.cancelled:
            raise ServingError(Code.CANCELLED, "the request was cancelled.")
        if self.engine.num_queued - len(self.engine.pools.slots) >= self.max_queue:
            raise ServingError(
                Code.UNAVAILABLE, f"the queue is full ({self.max_queue} requests wait): try again later."
            )
        submission = ticket.submission
        try:
            return self.engine.submit(self._encode(submission), submission.params, submission.request_id)
        except RequestError as error:
            raise ServingError(Code.INVALID_ARGUMENT, str(error)) from error

    def _encode(self, submission: Submission) -> list[int]:
        prompt = submission.prompt
        if not prompt:
            raise invalid("prompt", "is empty: give at least one token.")
        if isinstance(prompt, list) and not isinstance(prompt[0], tuple):
            return prompt  # type: ignore[return-value]
        if self.tokenizer is None:
            raise invalid("prompt", "is text and this engine has no tokenizer: give token ids.")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.chat(prompt)  # type: ignore[arg-type]

    def _end_unwanted(self) -> None:
        for ticket in self._live:
            assert ticket.request is not None
            if ticket.expired and ticket.error is None:
                ticket.error = ServingError(
                    Code.DEADLINE_EXCEEDED,
                    f"the request did not end within its {ticket.submission.timeout_s:g} s.",
                    "timeout",
                )
            if ticket.cancelled or ticket.error is not None:
                self.engine.cancel(ticket.request)

    def _fault(self, error: Exception) -> None:
        """Ends the requests of the pass that raised."""
        self._faults += 1
        self._given_up |= self._faults >= MAX_FAULTS
        self.stats.engine_faults += 1
        failed = self.engine.abort_pass()
        log("engine_fault", logging.ERROR, exc_info=True, requests=[r.id for r in failed], consecutive=self._faults)
        for ticket in self._live:
            if ticket.request in failed or self._given_up:
                assert ticket.request is not None
                self.engine.cancel(ticket.request)
                ticket.error = ServingError(
                    Code.INTERNAL, f"the engine failed in this request's pass ({type(error).__name__})."
                )

    # ---------------------------------------------------------------- events

    def _deliver(self) -> None:
        for ticket in self._live:
            try:
                self._deliver_one(ticket)
            except Exception as error:
                self._give_up_on(ticket, error)
        self._live = [t for t in self._live if t.request is not None and t.request.finish_reason is None]

    def _give_up_on(self, ticket: LoopTicket, error: Exception) -> None:
        """Ends a request whose events cannot be handed out; the others go on."""
        log("delivery_failed", logging.ERROR, exc_info=True, request_id=ticket.submission.request_id)
        assert ticket.request is not None
        self.engine.cancel(ticket.request)
        ticket.error = ServingError(Code.INTERNAL, f"the result could not be handed out ({type(error).__name__}).")
        if ticket.request.finish_reason is not None:
            with contextlib.suppress(Exception):
                self._end(ticket, failure(ticket.error, ticket.usage()))

    def _deliver_one(self, ticket: LoopTicket) -> None:
        request, tally = ticket.request, ticket.tally
        assert request is not None
        if ticket.error is not None and request.finish_reason in ("cancelled", "error"):
            self._end(ticket, failure(ticket.error, ticket.usage()))
            return
        if request.finish_reason == "cancelled":
            self._end(ticket, failure(ServingError(Code.CANCELLED, "the request was cancelled."), ticket.usage()))
            return
        new = len(request.output_ids) - tally.tokens
        if new and ticket.first_token is None:
            ticket.first_token = time.monotonic()
        if request.finish_reason is None and not (new and ticket.submission.stream):
            tally.settle(request, self.stats)
            return
        self._hand_out(ticket, request)

    def _hand_out(self, ticket: LoopTicket, request: Request) -> None:
        """What came since the last event of this request."""
        shown, text = ticket.shown, request.text
        event = Event(
            request.output_ids[shown.tokens :],
            text[shown.characters :],
            request.logprobs[shown.tokens :],
            request.finish_reason,
            request.stop_reason,
            ticket.usage(),
        )
        ticket.shown = Shown(len(request.output_ids), len(text))
        ticket.tally.settle(request, self.stats)
        if event.last:
            self._end(ticket, event)
        else:
            ticket.sink(ticket, event)

    def _refuse(self, ticket: LoopTicket, error: ServingError) -> None:
        if error.code is Code.CANCELLED:
            self.stats.cancelled += 1
        else:
            self.stats.refused += 1
        log("refused", request_id=ticket.submission.request_id, code=error.code.value, reason=error.message)
        ticket.sink(ticket, failure(error))

    def _end(self, ticket: LoopTicket, event: Event) -> None:
        code = event.error.code if event.error else None
        name = {None: "finished", Code.CANCELLED: "cancelled", Code.DEADLINE_EXCEEDED: "deadline_exceeded"}.get(
            code, "failed"
        )
        setattr(self.stats, name, getattr(self.stats, name) + 1)
        now = time.monotonic()
        log(
            name,
            request_id=ticket.submission.request_id,
            finish_reason=event.finish_reason,
            code=code.value if code else None,
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            accepted_length=round(event.usage.accepted_length, 3),
            ttft_ms=None if ticket.first_token is None else round(1e3 * (ticket.first_token - ticket.submitted), 2),
            total_ms=round(1e3 * (now - ticket.submitted), 2),
        )
        ticket.sink(ticket, event)

    def _observe(self) -> None:
        self.stats.ready = int(self.ready)
        self.stats.observe(self.engine, self._bytes_per_node)
