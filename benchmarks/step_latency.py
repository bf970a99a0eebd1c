"""Latency of the engine's graphs: target step by nodes and batch, draft rounds, commit.

    python benchmarks/step_latency.py --engine_dir ENGINE [--context 300] [--threads 0] [--repeats 200] [--json]

Prints the median and the minimum in microseconds of repeated calls on the same feeds, which are made before the clock
starts. Run it on an idle machine: ONNX Runtime's threads spin, and a busy core stalls every operator of the other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tables import (
    Sequences,
    StepTables,
    Tree,
    commit_tables,
    draft_tables,
    step_tables,
)

NODES, BATCHES = (1, 2, 4, 6, 8, 16), (1, 4, 16)
ACCEPTED = 3
WARM_UP = 10


@dataclass(frozen=True)
class Row:
    """One line of the table, times in microseconds."""

    case: str
    batch: int
    median_us: float
    min_us: float


class Cases:
    """Calls to time, on sequences that all hold `context` tokens."""

    def __init__(self, executor: OnnxRuntimeExecutor, context: int) -> None:
        self.executor, self.context, self.sizes = executor, context, executor.sizes
        self.shapes = [shape for shape in executor.manifest.draft_shapes if self.sizes.has_mtp]
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[str, int, Callable[[], object]]]:
        batches = [b for b in BATCHES if b <= self.sizes.max_batch_size]
        for batch in batches:
            for nodes in NODES:
                yield f"target N={nodes}", batch, partial(self.executor.target, self.step(batch, nodes).feeds)
        for batch in batches:
            for steps, topk in self.shapes:
                yield f"draft s{steps}_k{topk}", batch, self.draft(batch, steps, topk)
        for batch in batches:
            yield f"commit of {ACCEPTED}", batch, self.commit(batch)

    def sequences(self, batch: int) -> Sequences:
        pages = 1 + np.arange(batch * self.sizes.pages_per_seq).reshape(batch, -1)
        return Sequences(np.arange(1, batch + 1), np.full(batch, self.context), pages)

    def step(self, batch: int, nodes: int) -> StepTables:
        """A binary tree of `nodes` nodes behind every sequence, all logits wanted."""
        parents = np.broadcast_to((np.arange(nodes) - 1) // 2, (batch, nodes)).copy()
        tokens = self.rng.integers(0, self.executor.config.vocab_size, (batch, nodes))
        wanted = np.broadcast_to(np.arange(nodes), (batch, nodes)).copy()
        return step_tables(self.sizes, self.sequences(batch), Tree.make(parents, tokens), wanted)

    def draft(self, batch: int, steps: int, topk: int) -> Callable[[], object]:
        """A draft round after ACCEPTED tokens."""
        self.executor.prepare_draft(steps, topk)
        tokens = self.rng.integers(0, self.executor.config.vocab_size, (batch, ACCEPTED))
        feeds, _ = draft_tables(self.sizes, self.sequences(batch), np.full(batch, ACCEPTED), tokens, steps)
        return partial(self.executor.draft, steps, topk, feeds)

    def commit(self, batch: int) -> Callable[[], object]:
        """The leftmost path of a tree of 8 nodes, with the drafter's rows if there is a drafter."""
        step = self.step(batch, 8)
        path = np.broadcast_to(np.array([0, 1, 3]), (batch, ACCEPTED)).copy()
        feeds = commit_tables(self.sizes, step, path, np.full(batch, ACCEPTED))
        scratch, drafted = self.executor.target(step.feeds).scratch, None
        if self.shapes:
            steps, topk = self.shapes[0]
            self.executor.prepare_draft(steps, topk)
            tokens = self.rng.integers(0, self.executor.config.vocab_size, (batch, ACCEPTED))
            tables, kept = draft_tables(self.sizes, self.sequences(batch), np.full(batch, ACCEPTED), tokens, steps)
            drafted = self.executor.draft(steps, topk, tables).scratch
            feeds.update(kept)
        return partial(self.executor.commit, scratch, drafted, feeds)


def measure(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and minimum of `repeats` calls after a warm-up, in microseconds."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--context", type=int, default=300, help="tokens that every sequence holds")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads; 0 is one per core")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    args = parser.parse_args()
    manifest = Manifest.read(args.engine_dir)
    if not 0 <= args.context <= manifest.sizes.max_seq_len - max(NODES):
        parser.error(f"--context {args.context} is out of range: the engine holds {manifest.sizes.max_seq_len} tokens.")
    executor = OnnxRuntimeExecutor(args.engine_dir, manifest, args.threads)
    if not args.json:
        print(f"{'case':<16} {'batch':>5} {'median us':>10} {'min us':>9}")
    for case, batch, call in Cases(executor, args.context):
        row = Row(case, batch, *measure(call, args.repeats))
        line = f"{row.case:<16} {row.batch:>5} {row.median_us:>10.0f} {row.min_us:>9.0f}"
        print(json.dumps(asdict(row)) if args.json else line, flush=True)


if __name__ == "__main__":
    main()
