"""The latency table of an engine: median milliseconds of each graph by batch and nodes, measured on the machine that built it."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.executor import Executor, OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tables import Sequences, Tree, commit_tables, draft_tables, step_tables
from trtllm_v4tree.runtime.tree import Ints, chain

_BATCHES = (1, 4, 16, 64)
_NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
_CONTEXT = 200
_Call = Callable[[], object]
_Pair = tuple[_Call, _Call | None]
_Key = tuple[str, int, int]
"""Graph, then nodes or steps, then topk."""


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """`target[(batch, nodes)]` and `draft[(steps, topk, batch)]` in milliseconds, `overhead` of a round's host work and commit."""

    target: dict[tuple[int, int], float]
    draft: dict[tuple[int, int, int], float]
    overhead: dict[int, float]

    def target_ms(self, batch: int, nodes: int) -> float:
        """Interpolated in nodes, at the next batch measured (scaled beyond the last)."""
        b, scale = self._bucket(batch)
        x, y = self._curve(b)
        beyond = nodes / x[-1] if nodes > x[-1] else 1.0
        return float(np.interp(nodes, x, y)) * scale * beyond

    @functools.lru_cache(maxsize=16)  # noqa: B019 (one table per engine)
    def _curve(self, batch: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        nodes, ms = zip(*sorted((n, ms) for (b, n), ms in self.target.items() if b == batch), strict=True)
        return nodes, ms

    def draft_ms(self, steps: int, topk: int, batch: int) -> float:
        b, scale = self._bucket(batch)
        return self.draft[steps, topk, b] * scale

    def overhead_ms(self, batch: int) -> float:
        b, scale = self._bucket(batch)
        return self.overhead[b] * scale

    def _bucket(self, batch: int) -> tuple[int, float]:
        batches = sorted(self.overhead)
        at_least = [b for b in batches if b >= batch]
        return (at_least[0], 1.0) if at_least else (batches[-1], batch / batches[-1])

    def to_json(self) -> str:
        return json.dumps(
            {
                "unit": "ms",
                "target": [[*key, ms] for key, ms in self.target.items()],
                "draft": [[*key, ms] for key, ms in self.draft.items()],
                "overhead": [[key, ms] for key, ms in self.overhead.items()],
            }
        )

    @classmethod
    def read(cls, path: Path) -> LatencyTable:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                {(int(b), int(n)): float(ms) for b, n, ms in data["target"]},
                {(int(s), int(k), int(b)): float(ms) for s, k, b, ms in data["draft"]},
                {int(b): float(ms) for b, ms in data["overhead"]},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineFormatError(f"{path} is not a latency table ({error}): build the engine again.") from error


def measure(
    executor: Executor, shapes: Iterable[tuple[int, int]], report: Callable[[str, float], None], repeats: int = 9
) -> LatencyTable:
    """Times every graph at a middling context. Works on the bin and on slots of an executor that serves nobody.

    Tokens differ from call to call, so that other experts are read each time, and a pass over more than one node comes after a draft
    round, as in the round loop: warm caches and equal tokens halve the cost of a tree and not that of a token.
    """
    sizes = executor.sizes
    batches = [b for b in _BATCHES if b < sizes.max_batch_size] + [sizes.max_batch_size]
    nodes = [n for n in _NODES if n < sizes.max_verify_tokens] + [sizes.max_verify_tokens]
    table = LatencyTable({}, {}, {})
    shapes = list(shapes)
    for index, batch in enumerate(batches):
        report(f"timing batch {batch}", index / len(batches))
        calls = _calls(executor, batch, nodes, shapes)
        for (kind, first, second), ms in _medians_ms(calls, repeats).items():
            if kind == "overhead":
                table.overhead[batch] = ms
            elif kind == "target":
                table.target[batch, first] = ms
            else:
                table.draft[first, second, batch] = ms
    return table


def measure_engine(directory: Path, manifest: Manifest, report: Callable[[str, float], None]) -> str:
    """The table of an engine directory as JSON."""
    return measure(OnnxRuntimeExecutor(directory, manifest), manifest.draft_shapes, report).to_json()


def _calls(executor: Executor, batch: int, nodes: list[int], shapes: list[tuple[int, int]]) -> dict[_Key, _Pair]:
    """Every call to time with what runs before it in the round loop: nothing before a plain step, else the other graph."""
    drafts = {shape: _draft_call(executor, batch, *shape) for shape in shapes}
    targets = {n: _target_call(executor, batch, n) for n in nodes}
    draft = drafts[shapes[len(shapes) // 2]] if shapes else None
    target = targets[nodes[len(nodes) // 2]]
    calls: dict[_Key, _Pair] = {("overhead", 0, 0): (_commit_call(executor, batch), None)}
    for n, call in targets.items():
        calls["target", n, 0] = (call, draft if n > 1 else None)
    for (steps, topk), call in drafts.items():
        calls["draft", steps, topk] = (call, target)
    return calls


def _medians_ms(calls: Mapping[_Key, _Pair], repeats: int) -> dict[_Key, float]:
    """Median of `repeats` calls after three that do not count; the second call of a pair runs before each, untimed."""
    medians = {}
    for key, (call, before) in calls.items():
        times = []
        for _ in range(repeats + 3):
            if before is not None:
                before()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        medians[key] = 1e3 * statistics.median(times[3:])
    return medians


def _sequences(executor: Executor, batch: int) -> Sequences:
    """Sequences of equal length whose pages are all the bin."""
    sizes = executor.sizes
    length = min(_CONTEXT, sizes.max_seq_len // 2)
    slots = np.arange(1, batch + 1)
    return Sequences(slots, np.full(batch, length), np.zeros((batch, sizes.pages_per_seq), np.int64))


def _target_call(executor: Executor, batch: int, nodes: int) -> Callable[[], object]:
    every = np.broadcast_to(np.arange(nodes), (batch, nodes))
    seqs, rng = _sequences(executor, batch), np.random.default_rng(nodes)

    def call() -> object:
        tree = Tree.make(chain(batch, nodes), _tokens(executor, rng, batch, nodes))
        return executor.target(step_tables(executor.sizes, seqs, tree, every).feeds)

    return call


def _tokens(executor: Executor, rng: np.random.Generator, batch: int, count: int) -> Ints:
    return rng.integers(0, executor.config.vocab_size, (batch, count))


def _commit_call(executor: Executor, batch: int) -> Callable[[], object]:
    seqs = _sequences(executor, batch)._replace(slots=np.zeros(batch, np.int64))
    tree = Tree.make(chain(batch, 1), np.zeros((batch, 1), np.int64))
    step = step_tables(executor.sizes, seqs, tree, np.zeros((batch, 1), np.int64))
    scratch = executor.target(step.feeds).scratch
    path, counts = np.zeros((batch, 1), np.int64), np.ones(batch, np.int64)
    return lambda: executor.commit(scratch, None, commit_tables(executor.sizes, step, path, counts))


def _draft_call(executor: Executor, batch: int, steps: int, topk: int) -> Callable[[], object]:
    seqs = _sequences(executor, batch)
    pending, rng = np.full(batch, 2), np.random.default_rng(steps)

    def call() -> object:
        tokens = _tokens(executor, rng, batch, 2)
        return executor.draft(steps, topk, draft_tables(executor.sizes, seqs, pending, tokens, steps)[0])

    executor.prepare_draft(steps, topk)
    return call
