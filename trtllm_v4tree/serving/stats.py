"""Counters and gauges of the engine thread. Written by that thread alone; a snapshot may be read from any thread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.request import Request


@dataclass
class Stats:
    """Counters grow for the life of the process; gauges are those of the last round."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    deadline_exceeded: int = 0
    engine_faults: int = 0
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    ready: int = 0
    slots_active: int = 0
    slots_free: int = 0
    queue_depth: int = 0
    pages_used: int = 0
    pages_free: int = 0
    scratch_bytes: int = 0

    def count_round(self, emitted: int) -> None:
        """One verify pass of one request that emitted `emitted` tokens."""
        self.rounds += 1
        self.round_tokens += emitted
        self.accepted_by_depth += [0] * (emitted - len(self.accepted_by_depth))
        for depth in range(emitted):
            self.accepted_by_depth[depth] += 1

    def observe(self, engine: Engine, bytes_per_node: int) -> None:
        """Takes the gauges from an engine between rounds; `bytes_per_node` are those of its scratch."""
        pools = engine.pools
        self.slots_active, self.slots_free = engine.num_active, len(pools.slots)
        self.queue_depth = engine.num_queued
        self.pages_used, self.pages_free = len(pools.pages.taken), len(pools.pages)
        nodes = 1 if engine.policy is None else engine.policy.max_nodes
        self.scratch_bytes = nodes * engine.num_active * bytes_per_node

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class Tally:
    """How much of a request's counts the statistics have taken already."""

    tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0

    def settle(self, request: Request, stats: Stats) -> None:
        """Adds what is new to the statistics."""
        m = request.metrics
        new_rounds, new_tokens = m.rounds - self.rounds, m.round_tokens - self.round_tokens
        if new_rounds == 1:
            stats.count_round(new_tokens)
        else:
            assert new_rounds == 0, "statistics are settled after every round"
        stats.emitted_tokens += len(request.output_ids) - self.tokens
        self.tokens = len(request.output_ids)
        self.rounds, self.round_tokens = m.rounds, m.round_tokens
