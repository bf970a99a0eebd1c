"""Two engines over the same step inputs: one decodes, the other runs every call beside it from the same state, and outputs are compared.

Put into an engine as its executor, as a tracer is; the engine knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import contract
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import NULL_SCORE
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.runtime.executor import DraftResult, Executor, Scratch, StepResult
from trtllm_v4tree.runtime.tables import Feeds

Floats = NDArray[np.float64]


class Place(NamedTuple):
    """An output of a graph, of one trunk layer where the output has a row per layer."""

    graph: str
    output: str
    layer: int | None


@dataclass(frozen=True)
class Difference:
    """How far `values` values of `calls` calls differ: the worst call counts.

    max_rel is relative to the largest magnitude of the output in the call; norm_ratio is other over reference, that which is
    farthest from 1; unequal counts integers that differ. Rows that do not exist (null scores, infinities in both) are left out.
    """

    calls: int = 0
    values: int = 0
    unequal: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    norm_ratio: float = 1.0

    def agrees(self, rtol: float) -> bool:
        return self.max_rel <= rtol and self.unequal == 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.calls + other.calls,
            self.values + other.values,
            self.unequal + other.unequal,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            min(self.cosine, other.cosine),
            max(self.norm_ratio, other.norm_ratio, key=_off_one),
        )


def _off_one(ratio: float) -> float:
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def comparable(reference: NDArray[Any], other: NDArray[Any]) -> tuple[Floats, Floats]:
    """Both as flat float64 without what stands for "no value" in both."""
    x, y = (np.asarray(a, np.float64).ravel() for a in (reference, other))
    nothing = (x == y) & (np.abs(x) >= abs(NULL_SCORE) / 10)
    return x[~nothing], y[~nothing]


def difference(reference: NDArray[Any], other: NDArray[Any]) -> Difference:
    """Of one output in one call. A value that only one of the two has makes it infinite."""
    if np.issubdtype(reference.dtype, np.integer):
        return Difference(1, reference.size, int((reference != other).sum()))
    x, y = comparable(reference, other)
    if not x.size:
        return Difference(1)
    with np.errstate(all="ignore"):
        gap = float(np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf).max())
        largest, norms = float(np.abs(x).max()), (float(np.linalg.norm(x)), float(np.linalg.norm(y)))
        cosine = float(x @ y) / (norms[0] * norms[1]) if all(norms) else float(norms[0] == norms[1])
    return Difference(
        calls=1,
        values=x.size,
        max_abs=gap,
        max_rel=gap / largest if math.isfinite(gap) and largest else (math.inf if gap else 0.0),
        cosine=cosine if math.isfinite(cosine) else 0.0,
        norm_ratio=norms[1] / norms[0] if norms[0] else (math.inf if norms[1] else 1.0),
    )


Watch = Callable[[Place, NDArray[Any], NDArray[Any]], None]


class Comparison:
    """Differences by place, over all calls so far; `watch` sees the outputs themselves."""

    def __init__(self, config: ModelConfig, watch: Watch | None = None) -> None:
        self.config, self.watch = config, watch
        self.found: dict[Place, Difference] = {}

    def add(self, graph: str, reference: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        """Outputs of one call of a graph, by name; both have the same names and shapes."""
        assert reference.keys() == other.keys()
        for name in reference:
            for place, x, y in self._parts(graph, name, _array(reference[name]), _array(other[name])):
                self.found[place] = self.found.get(place, Difference()) + difference(x, y)
                if self.watch is not None:
                    self.watch(place, x, y)

    def _parts(
        self, graph: str, name: str, x: NDArray[Any], y: NDArray[Any]
    ) -> Iterator[tuple[Place, NDArray[Any], NDArray[Any]]]:
        """The output, or a part per layer: scratch is [layers of the kind, B, N, ..]."""
        layers = self._layers(name) if graph == "target_step" else ()
        if not layers:
            yield Place(graph, name, None), x, y
        for row, layer in enumerate(layers):
            yield Place(graph, name, layer), x[row], y[row]

    def _layers(self, name: str) -> tuple[int, ...]:
        """Trunk layers that the rows of a scratch output belong to."""
        c, kind = self.config, name.split("_")[0]
        if kind == "window":
            return tuple(range(c.num_layers))
        return {"csa": c.layers_of("csa"), "idx": c.layers_of("csa"), "hca": c.layers_of("hca")}.get(kind, ())

    def by_output(self) -> dict[Place, Difference]:
        """Layers taken together."""
        merged: dict[Place, Difference] = {}
        for place, found in self.found.items():
            whole = place._replace(layer=None)
            merged[whole] = merged.get(whole, Difference()) + found
        return merged

    def agrees(self, rtol: float) -> bool:
        return all(found.agrees(rtol) for found in self.found.values())


class Lockstep:
    """The executor of an engine that decodes with `reference` and runs `other` beside it.

    Before every call both hold the same state: after a commit what `other` wrote is compared, then made equal again.
    """

    def __init__(self, reference: Executor, other: Executor, comparison: Comparison) -> None:
        check_same(reference, other)
        self.reference, self.other, self.comparison = reference, other, comparison
        self.config, self.sizes = reference.config, reference.sizes
        self.draft_shapes = tuple(s for s in reference.draft_shapes if s in other.draft_shapes)
        self.bit_exact = reference.bit_exact
        self._names = [t.name for t in contract.states(self.config, self.sizes)]

    def prepare_draft(self, steps: int, topk: int) -> None:
        for executor in (self.reference, self.other):
            executor.prepare_draft(steps, topk)

    def target(self, feeds: Feeds) -> StepResult:
        mine, its = self.reference.target(feeds), self.other.target(feeds)
        self.comparison.add(
            "target_step", {"logits": mine.logits, **mine.scratch}, {"logits": its.logits, **its.scratch}
        )
        return mine

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult:
        mine, its = (e.draft(steps, topk, feeds) for e in (self.reference, self.other))
        graph = f"draft_s{steps}_k{topk}" if steps else "draft_catchup"
        self.comparison.add(graph, _drafted(mine), _drafted(its))
        return mine

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        before = {name: self.reference.state(name).copy() for name in self._names}
        for executor in (self.reference, self.other):
            executor.commit(step, draft, feeds)
        mine, its = ({name: e.state(name) for name in self._names} for e in (self.reference, self.other))
        written = {name: _changed(before[name], mine[name], its[name]) for name in self._names}
        self.comparison.add(
            "commit",
            {n: mine[n][rows] for n, rows in written.items()},
            {n: its[n][rows] for n, rows in written.items()},
        )
        for name, rows in written.items():
            its[name][rows] = mine[name][rows]
            self.other.load_state(name, its[name])

    def reset(self, slot: int) -> None:
        for executor in (self.reference, self.other):
            executor.reset(slot)

    def state(self, name: str) -> NDArray[np.float32]:
        return self.reference.state(name)

    def load_state(self, name: str, values: NDArray[np.float32]) -> None:
        for executor in (self.reference, self.other):
            executor.load_state(name, values)


def check_same(reference: Executor, other: Executor) -> None:
    """ConfigError unless both take the same inputs."""
    for mine, its, what in ((reference.config, other.config, "model"), (reference.sizes, other.sizes, "limits")):
        a, b = mine.to_dict(), its.to_dict()
        differing = [name for name in a if a[name] != b[name]]
        if differing:
            raise ConfigError(
                f"the engines differ in their {what} ({', '.join(differing[:4])}), so they take different inputs: "
                "build both from one checkpoint with the same limits."
            )


def _drafted(result: DraftResult) -> dict[str, Any]:
    candidates = {"draft_tokens": result.tokens, "draft_parents": result.parents, "draft_scores": result.scores}
    return {**result.scratch, **(candidates if result.tokens.size else {})}


def _changed(before: NDArray[Any], *after: NDArray[Any]) -> NDArray[np.int64]:
    """Rows that any of the commits wrote."""
    flat = before.reshape(len(before), -1)
    different = [(state.reshape(flat.shape) != flat).any(axis=1) for state in after]
    return np.flatnonzero(np.any(different, axis=0))


def _array(value: Any) -> NDArray[Any]:
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())
