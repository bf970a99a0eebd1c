"""Profiles an engine: traced decoding, the table of phases, the cost of tracing itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_v4tree.bench.stats import Estimate, median
from trtllm_v4tree.bench.tracer import RANGES, Event, Tracer, tracing
from trtllm_v4tree.llm import LLM
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.request import Request

COST = "cost"
"""Stands for a speculation in the ranges that are opened to see what a range costs."""


@dataclass(frozen=True)
class PhaseRow:
    """One phase of one speculation: ranges seen, median and p99 in milliseconds, share of all time, mean batch and nodes."""

    speculation: str
    phase: str
    count: int
    median_ms: float
    p99_ms: float
    share: float
    batch: float
    nodes: float


@dataclass(frozen=True)
class Overhead:
    """What tracing costs. `counted`: cost of one range times ranges per second of decoding; `compared`: traced time over
    untraced of the same work, minus 1, runs interleaved."""

    range_us: float
    counted: float
    compared: Estimate


def table(events: Iterable[Event]) -> list[PhaseRow]:
    """Rows by speculation in order of appearance, then by phase."""
    groups: dict[tuple[str, str], list[Event]] = {}
    totals: dict[str, float] = {}
    for event in events:
        groups.setdefault((event.speculation, event.phase), []).append(event)
        totals[event.speculation] = totals.get(event.speculation, 0.0) + event.seconds
    order = {name: i for i, name in enumerate(totals)}
    keys = sorted(groups, key=lambda key: (order[key[0]], RANGES.index(key[1])))
    return [_row(groups[key], totals[key[0]]) for key in keys]


def _row(events: Sequence[Event], total: float) -> PhaseRow:
    ms = 1000 * np.array([e.seconds for e in events])
    return PhaseRow(
        events[0].speculation, events[0].phase, len(events), float(np.median(ms)), float(np.percentile(ms, 99)),
        float(ms.sum() / 1000 / total), float(np.mean([e.batch for e in events])), float(np.mean([e.nodes for e in events])),
    )  # fmt: skip


def run_traced(
    llm: LLM, speculation: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[Event], float]:
    """(events, seconds) of a traced generation of `prompts` together, prefill included."""
    requests: list[Request] = []
    with tracing(llm.engine, speculation, requests) as tracer:
        seconds = _generate(llm, prompts, max_tokens, requests)
    return tracer.events, seconds


def run_untraced(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    return _generate(llm, prompts, max_tokens, [])


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, requests: list[Request]) -> float:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    requests += [llm.engine.submit(p, params) for p in prompts]
    started = time.perf_counter()
    try:
        while not llm.engine.idle:
            llm.engine.step()
    finally:
        for request in requests:
            llm.engine.cancel(request)
        if not llm.engine.idle:
            llm.engine.step()
    return time.perf_counter() - started


def profile(
    llm: LLM, speculations: Sequence[str], prompts: Sequence[Sequence[int]], max_tokens: int, repeats: int
) -> tuple[list[Event], Overhead]:
    """Traced and untraced runs in turn, the first of each not counted; events of the traced ones."""
    events: list[Event] = []
    ratios, per_second = [], []
    for repeat in range(-1, repeats):
        for name in speculations:
            llm.set_speculation(name)
            if repeat % 2:
                seen, traced = run_traced(llm, name, prompts, max_tokens)
                untraced = run_untraced(llm, prompts, max_tokens)
            else:
                untraced = run_untraced(llm, prompts, max_tokens)
                seen, traced = run_traced(llm, name, prompts, max_tokens)
            if repeat >= 0:
                events += seen
                ratios.append(traced / untraced - 1)
                per_second.append(len(seen) / traced)
    one = range_cost()
    return events, Overhead(1e6 * one, one * float(np.mean(per_second)), median(ratios))


def range_cost(count: int = 2000) -> float:
    """Seconds that opening and closing one range takes, the least of five rounds: what is left without other programs."""
    best = float("inf")
    for _ in range(5):
        tracer = Tracer(COST, [])
        started = time.perf_counter()
        for _ in range(count):
            tracer.open("host", 4, 8)
        tracer.close()
        best = min(best, (time.perf_counter() - started) / count)
    return best
