"""Ranges of a round for a profile: who runs (draft, verify, accept, commit, prefill, host), how long, over what batch and nodes.

A `Tracer` is put into an engine by `tracing` as its executor and its clock and taken out again; the engine knows nothing of it.
Ranges go to NVTX where the package `nvtx` is installed, and always into a list.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_v4tree.runtime.clock import PhaseClock
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.executor import DraftResult, Executor, Scratch, StepResult
from trtllm_v4tree.runtime.request import Phase, Request
from trtllm_v4tree.runtime.tables import Feeds

RANGES = ("draft", "verify", "accept", "commit", "prefill", "host")


@dataclass(frozen=True)
class Event:
    """One range: `batch` sequences, `nodes` tree nodes of each (0 where it has none)."""

    speculation: str
    phase: str
    batch: int
    nodes: int
    seconds: float

    @property
    def label(self) -> str:
        """The range's name in a trace; `parse_label` reads it."""
        return label_of(self.speculation, self.phase, self.batch, self.nodes)


def label_of(speculation: str, phase: str, batch: int, nodes: int) -> str:
    return f"{phase} b{batch} n{nodes} {speculation}"


def parse_label(label: str, seconds: float) -> Event | None:
    """The event of a range's name, or None for a range that is not a tracer's."""
    parts = label.split()
    if len(parts) != 4 or parts[0] not in RANGES or parts[1][0] != "b" or parts[2][0] != "n":
        return None
    try:
        return Event(parts[3], parts[0], int(parts[1][1:]), int(parts[2][1:]), seconds)
    except ValueError:
        return None


class Tracer:
    """One open range at a time: opening one closes the one before, so the ranges of a step cover it without gaps."""

    def __init__(self, speculation: str, requests: Sequence[Request]) -> None:
        self.speculation, self.requests = speculation, requests
        self.events: list[Event] = []
        self.prefilling = False
        self._phase, self._batch, self._nodes, self._since = "", 0, 0, 0.0
        self._nvtx: Any = _nvtx()
        self._range: Any = None

    def open(self, phase: str, batch: int = 0, nodes: int = 0) -> None:
        """Closes what is open and opens a range, without a batch of its own for that of the range before."""
        self.close()
        self._phase, self._nodes = phase, nodes
        self._batch = batch or self._batch
        if self._nvtx is not None:
            self._range = self._nvtx.start_range(label_of(self.speculation, phase, self._batch, nodes), domain="v4tree")
        self._since = time.perf_counter()

    def close(self) -> None:
        if not self._phase:
            return
        seconds = time.perf_counter() - self._since
        if self._range is not None:
            self._nvtx.end_range(self._range)
        self.events.append(Event(self.speculation, self._phase, self._batch, self._nodes, seconds))
        self._phase, self._range = "", None


class TracedExecutor:
    """The executor of an engine, with a range around every call."""

    def __init__(self, inner: Executor, tracer: Tracer) -> None:
        self._inner, self._tracer = inner, tracer
        self._decode_only = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step_begins(self) -> None:
        self._decode_only = False

    def target(self, feeds: Feeds) -> StepResult:
        """The first pass of a step that has prompts to read is a prefill: one range up to the end of its commit."""
        reading = any(r.phase is Phase.PREFILL for r in self._tracer.requests)
        self._tracer.prefilling = reading and not self._decode_only
        self._decode_only = True
        batch, nodes = feeds["token_ids"].shape
        self._tracer.open("prefill" if self._tracer.prefilling else "verify", batch, nodes)
        result = self._inner.target(feeds)
        if not self._tracer.prefilling:
            self._tracer.open("accept", batch, nodes)
        return result

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult:
        candidates = topk + (steps - 1) * topk * topk if steps else 0
        self._tracer.open("draft" if steps else "prefill", len(feeds["positions"]), candidates)
        result = self._inner.draft(steps, topk, feeds)
        self._tracer.open("host")
        return result

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        if not self._tracer.prefilling:
            self._tracer.open("commit")
        self._inner.commit(step, draft, feeds)
        self._tracer.open("host")


class TracedClock(PhaseClock):
    """The engine's clock, which also tells the tracer where a step begins and where accepting ends."""

    def __init__(self, tracer: Tracer, executor: TracedExecutor) -> None:
        super().__init__()
        self._tracer, self._executor = tracer, executor

    def start(self) -> None:
        super().start()
        self._executor.step_begins()
        self._tracer.open("host")

    def mark(self, phase: str) -> None:
        super().mark(phase)
        if phase == "accept":
            self._tracer.open("host")


@contextlib.contextmanager
def tracing(engine: Engine, speculation: str, requests: Sequence[Request]) -> Iterator[Tracer]:
    """Traces the steps of `engine` within the block; `requests` are those it works on."""
    tracer = Tracer(speculation, requests)
    executor, clock = engine.executor, engine.clock
    traced = TracedExecutor(executor, tracer)
    engine.executor, engine.clock = traced, TracedClock(tracer, traced)
    try:
        yield tracer
    finally:
        tracer.close()
        engine.executor, engine.clock = executor, clock


def has_nvtx() -> bool:
    return importlib.util.find_spec("nvtx") is not None


def _nvtx() -> Any:
    if not has_nvtx():
        return None
    import nvtx

    return nvtx
