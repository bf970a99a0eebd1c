"""Decodes one block of prompts with one speculation and returns what was seen. The only file that drives an engine for a grid.

The clock starts when every prompt has its first token, so prefill is not in it. `full_*` is the part until the first
sequence finishes, in which the batch is full; `tokens` and `seconds` go on to the last one.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.request import Phase, Request
from trtllm_v4tree.runtime.tables import Tree

Ranks = list[list[int]]
"""Counts by depth (from 0, the root's children) and child rank (from 0, the draft's first choice)."""


@dataclass(frozen=True)
class Sample:
    """One block with one speculation. Lists by prompt are in the order of `prompts`.

    tokens, full_tokens: emitted in the time; rounds, emitted: verify passes and their tokens by prompt; offered, accepted:
    children that the walk met and that it followed; phases: seconds by phase within `seconds`; digests: CRC of the token ids.
    """

    dataset: str
    batch: int
    block: int
    speculation: str
    prompts: list[int]
    tokens: int
    seconds: float
    full_tokens: int
    full_seconds: float
    full_rounds: int
    rounds: list[int]
    emitted: list[int]
    offered: Ranks
    accepted: Ranks
    phases: dict[str, float]
    digests: list[int]
    prefill_seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def full_speed(self) -> float:
        return self.full_tokens / self.full_seconds

    @property
    def run_speed(self) -> float:
        return self.tokens / self.seconds


class Ranker:
    """Collects trees and walks of a run; counts by depth and child rank afterwards, so that a round pays for one append."""

    def __init__(self) -> None:
        self._rounds: list[tuple[Tree, Walk]] = []

    def __call__(self, tree: Tree, walk: Walk) -> None:
        self._rounds.append((tree, walk))

    def counts(self) -> tuple[Ranks, Ranks]:
        """(offered, accepted); a child's rank is its place among its siblings, which is the draft's order."""
        offered: dict[tuple[int, int], int] = {}
        accepted: dict[tuple[int, int], int] = {}
        for tree, walk in self._rounds:
            for row, count in enumerate(walk.counts.tolist()):
                path = walk.path[row, :count].tolist()
                _count_path(tree.parents[row], path, offered, accepted)
        return _table(offered), _table(accepted, like=offered)


def _count_path(
    parents: np.ndarray, path: list[int], offered: dict[tuple[int, int], int], accepted: dict[tuple[int, int], int]
) -> None:
    for depth, node in enumerate(path):
        followed = path[depth + 1] if depth + 1 < len(path) else -1
        for rank, child in enumerate(np.flatnonzero(parents == node).tolist()):
            key = (depth, rank)
            offered[key] = offered.get(key, 0) + 1
            if child == followed:
                accepted[key] = accepted.get(key, 0) + 1


def _table(counts: dict[tuple[int, int], int], like: dict[tuple[int, int], int] | None = None) -> Ranks:
    keys = like if like is not None else counts
    depths = 1 + max((d for d, _ in keys), default=-1)
    widths = [1 + max((r for d, r in keys if d == depth), default=-1) for depth in range(depths)]
    return [[counts.get((d, r), 0) for r in range(width)] for d, width in enumerate(widths)]


@dataclass(frozen=True)
class Timed:
    """A decode of one batch: requests in order and the times of `Sample`."""

    requests: list[Request]
    tokens: int
    seconds: float
    full_tokens: int
    full_seconds: float
    full_rounds: int
    phases: dict[str, float]
    prefill_seconds: float


def decode(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
    """Greedy decoding of `prompts` as one batch of an idle engine; the end token does not end a sequence."""
    assert engine.idle
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    requests = [engine.submit(p, params) for p in prompts]
    try:
        _prefill(engine, requests)
        return _decode(engine, requests, time.perf_counter() - started)
    finally:
        _abandon(engine, requests)


def _prefill(engine: Engine, requests: list[Request]) -> None:
    """Until every request has its first token. Those that have it are parked meanwhile, so all start together."""
    while any(r.phase is not Phase.FINISHED and not (r.output_ids and r.phase is Phase.QUEUED) for r in requests):
        engine.step()
        for request in requests:
            if request.phase is Phase.DECODE:
                request.phase = Phase.QUEUED
    for request in requests:
        if request.phase is Phase.QUEUED:
            request.phase = Phase.DECODE


def _decode(engine: Engine, requests: list[Request], prefill_seconds: float) -> Timed:
    before = sum(len(r.output_ids) for r in requests)
    phases = dict(engine.clock.seconds)
    full_tokens, full_seconds, rounds = 0, 0.0, 0
    started = time.perf_counter()
    while not engine.idle:
        engine.step()
        if not full_seconds:
            rounds += 1
            if any(r.phase is Phase.FINISHED for r in requests):
                full_seconds = time.perf_counter() - started
                full_tokens = sum(len(r.output_ids) for r in requests) - before
    seconds = time.perf_counter() - started
    spent = {name: engine.clock.seconds[name] - phases[name] for name in phases}
    tokens = sum(len(r.output_ids) for r in requests) - before
    return Timed(requests, tokens, seconds, full_tokens, full_seconds, rounds, spent, prefill_seconds)


def _abandon(engine: Engine, requests: list[Request]) -> None:
    """Cancels what has not finished, so that the engine is idle again."""
    running = [r for r in requests if r.finish_reason is None]
    for request in running:
        engine.cancel(request)
    if running:
        engine.step()


def sample(
    engine: Engine, dataset: str, batch: int, block: int, speculation: str, prompts: dict[int, list[int]], order: Sequence[int],
    max_tokens: int,
) -> Sample:  # fmt: skip
    """Decodes the prompts `order` (indices into `prompts`) with the speculation that the engine is set to."""
    ranker = Ranker()
    engine.observer = ranker
    try:
        run = decode(engine, [prompts[i] for i in order], max_tokens)
    finally:
        engine.observer = None
    offered, accepted = ranker.counts()
    return Sample(
        dataset, batch, block, speculation, list(order),
        run.tokens, run.seconds, run.full_tokens, run.full_seconds, run.full_rounds,
        [r.metrics.rounds for r in run.requests],
        [r.metrics.round_tokens for r in run.requests],
        offered, accepted, run.phases,
        [zlib.crc32(np.asarray(r.output_ids, "<i4").tobytes()) for r in run.requests],
        run.prefill_seconds,
    )  # fmt: skip
