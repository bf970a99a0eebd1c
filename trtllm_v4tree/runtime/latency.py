"""The latency table of an engine: milliseconds of each part of a round by batch and nodes, and what drafts bring, both from rounds on the
machine that built it (`rehearsal.py`)."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.errors import EngineFormatError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """`target[(batch, nodes)]` and `draft[(steps, topk, batch)]` in milliseconds, `overhead` of a plain round's host work and
    commit; `chances[(steps, topk)]` that the root and the first, second, .. best node of a draft round are accepted."""

    target: dict[tuple[int, int], float]
    draft: dict[tuple[int, int, int], float]
    overhead: dict[int, float]
    chances: dict[tuple[int, int], list[float]]

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
                "chances": [[*key, own] for key, own in self.chances.items()],
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
                {(int(s), int(k)): [float(p) for p in own] for s, k, own in data["chances"]},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineFormatError(f"{path} is not a latency table ({error}): build the engine again.") from error
