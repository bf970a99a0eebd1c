"""The latency table of an engine: milliseconds of each graph by batch and nodes, measured on the machine that built it."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.executor import Executor
from trtllm_v4tree.runtime.executors import make_executor
from trtllm_v4tree.runtime.tables import Sequences, Tree, commit_tables, draft_tables, step_tables
from trtllm_v4tree.runtime.tree import Ints, chain

_BATCHES = (1, 4, 16, 64)
_NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
_CONTEXT = 200
_MANY = 16
"""From so many sequences on a pass takes milliseconds: fewer repeats do, and one node of each touches every weight."""
Floats = NDArray[np.float64]
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
        """A pass over `nodes` nodes per sequence."""
        return float(self.target_curve(batch, nodes)[-1])

    @functools.lru_cache(maxsize=512)  # noqa: B019 (one table per engine)
    def target_curve(self, batch: int, max_nodes: int) -> Floats:
        """Passes over 1, 2, .. nodes: [max_nodes]. Between what was measured interpolated, beyond it scaled."""
        low, high, share, scale = self._between(batch)
        curve = (1 - share) * self._nodes_curve(low, max_nodes) + share * self._nodes_curve(high, max_nodes)
        curve *= scale
        curve.flags.writeable = False
        return curve

    def _nodes_curve(self, batch: int, max_nodes: int) -> Floats:
        nodes, ms = zip(*sorted((n, ms) for (b, n), ms in self.target.items() if b == batch), strict=True)
        wanted = np.arange(1, max_nodes + 1)
        return np.interp(wanted, nodes, ms) * np.maximum(1.0, wanted / nodes[-1])

    def draft_ms(self, steps: int, topk: int, batch: int) -> float:
        low, high, share, scale = self._between(batch)
        return ((1 - share) * self.draft[steps, topk, low] + share * self.draft[steps, topk, high]) * scale

    def overhead_ms(self, batch: int) -> float:
        low, high, share, scale = self._between(batch)
        return ((1 - share) * self.overhead[low] + share * self.overhead[high]) * scale

    @functools.lru_cache(maxsize=512)  # noqa: B019 (one table per engine)
    def _between(self, batch: int) -> tuple[int, int, float, float]:
        """The batches measured below and above, the share of the latter, and what to scale with beyond the last."""
        measured = sorted(self.overhead)
        if batch >= measured[-1]:
            return measured[-1], measured[-1], 0.0, batch / measured[-1]
        high = next(b for b in measured if b >= batch)
        low = max((b for b in measured if b <= batch), default=high)
        return low, high, 0.0 if low == high else (batch - low) / (high - low), 1.0

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
        for (kind, first, second), ms in _times_ms(calls, repeats if batch < _MANY else repeats // 2 + 1).items():
            if kind == "overhead":
                table.overhead[batch] = ms
            elif kind == "target":
                table.target[batch, first] = ms
            else:
                table.draft[first, second, batch] = ms
    return table


def measure_engine(directory: Path, manifest: Manifest, report: Callable[[str, float], None]) -> str:
    """The table of an engine directory as JSON."""
    return measure(make_executor(directory, manifest), manifest.draft_shapes, report).to_json()


def _calls(executor: Executor, batch: int, nodes: list[int], shapes: list[tuple[int, int]]) -> dict[_Key, _Pair]:
    """Every call to time with what runs before it in the round loop: nothing before a plain step, else the other graph."""
    drafts = {shape: _draft_call(executor, batch, *shape) for shape in shapes}
    targets = {n: _target_call(executor, batch, n) for n in nodes}
    draft = drafts[shapes[len(shapes) // 2]] if shapes else None
    target = targets[nodes[len(nodes) // 2 if batch < _MANY else 0]]
    calls: dict[_Key, _Pair] = {("overhead", 0, 0): (_commit_call(executor, batch), None)}
    for n, call in targets.items():
        calls["target", n, 0] = (call, draft if n > 1 else None)
    for (steps, topk), call in drafts.items():
        calls["draft", steps, topk] = (call, target)
    return calls


def _times_ms(calls: Mapping[_Key, _Pair], repeats: int) -> dict[_Key, float]:
    """Lower quartile of `repeats` calls: what the machine takes when other programs leave it alone. All calls are interleaved, so that
    a drift meets them alike.

    The second call of a pair runs before each, untimed; every third call comes back from other graphs and does not count.
    """
    times: dict[_Key, list[float]] = {key: [] for key in calls}
    for _ in range(-(-repeats // 2)):
        for key, (call, before) in calls.items():
            times[key] += [_time_ms(call, before) for _ in range(3)][1:]
    return {key: sorted(ms)[len(ms) // 4] for key, ms in times.items()}


def _time_ms(call: _Call, before: _Call | None) -> float:
    if before is not None:
        before()
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


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
