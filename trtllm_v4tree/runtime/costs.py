"""What a round costs on this machine, now: the engine's latency table, corrected by the rounds that were run.

The table was measured when the engine was built, with another load, perhaps with other threads. Of every part of a round the running
mean of measured over predicted time is kept, by batch size and draft shape where there are enough rounds, else over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.latency import LatencyTable

Floats = NDArray[np.float64]
Key = tuple[object, ...]
_MEMORY, _ENOUGH = 48, 3
_WILD, _SLACK = 3.0, 1.3
_ROW_MS = 0.01


class _Scale:
    """Running mean of the log of measured over predicted; single rounds count at most `_WILD` times the mean so far."""

    def __init__(self) -> None:
        self.log, self.count = 0.0, 0

    def add(self, ratio: float) -> None:
        value = math.log(min(max(ratio, 0.02), 50.0))
        if self.count >= _ENOUGH:
            value = min(max(value, self.log - math.log(_WILD)), self.log + math.log(_WILD))
        self.count += 1
        self.log += (value - self.log) / min(self.count, _MEMORY)

    def cap(self, ratio: float) -> None:
        """The mean is hardly more than this; without a mean it says nothing."""
        if self.count:
            self.log = min(self.log, math.log(_SLACK * max(ratio, 0.02)))


class Costs:
    """Milliseconds of each part of a round; `plain_*`, `round_*` record what a round took."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._scales: dict[Key, _Scale] = {}

    def plain_ms(self, batch: int) -> float:
        """One plain step, host work included."""
        return (self.table.target_ms(batch, 1) + self.table.overhead_ms(batch)) * self._scale("plain", batch)

    def draft_ms(self, shape: tuple[int, int], batch: int) -> float:
        return self.table.draft_ms(*shape, batch) * self._scale("draft", batch, shape)

    def verify_ms(self, batch: int, max_nodes: int) -> Floats:
        """Of passes over 1, 2, .. nodes per sequence: [max_nodes]. A pass over roots alone is a plain step."""
        curve = self.table.target_curve(batch, max_nodes) * self._scale("verify", batch)
        curve[0] = self.table.target_ms(batch, 1) * self._scale("plain", batch)
        return curve

    def rest_ms(self, batch: int) -> float:
        """Accept, commit and host work of a round that drafts."""
        return self.table.overhead_ms(batch) * self._scale("rest", batch)

    def backlog_ms(self, batch: int, rows: int) -> float:
        """What a draft round takes longer where the drafter has not read `rows` rows of each sequence."""
        return _ROW_MS * rows * batch * self._scale("backlog", batch)

    def saw_backlog(self, batch: int, rows: int, ms: float) -> None:
        self._add(False, ms / (_ROW_MS * rows * batch), "backlog", batch)

    def saw_plain(self, batch: int, ms: float, at_most: bool = False) -> None:
        """A plain step; `at_most`: the next ones take no longer, and perhaps less."""
        ratio = ms / (self.table.target_ms(batch, 1) + self.table.overhead_ms(batch))
        self._add(at_most, ratio, "plain", batch)

    def saw_round(
        self, batch: int, shape: tuple[int, int], nodes: int, ms: Mapping[str, float], at_most: bool = False
    ) -> None:
        """ms: `verify`, `rest` and perhaps `draft` of a round that verified trees of up to `nodes` nodes; `at_most` as above."""
        if "draft" in ms:
            self._add(at_most, ms["draft"] / self.table.draft_ms(*shape, batch), "draft", batch, shape)
        if nodes > 1:
            self._add(at_most, ms["verify"] / self.table.target_ms(batch, nodes), "verify", batch)
        self._add(at_most, ms["rest"] / self.table.overhead_ms(batch), "rest", batch)

    def known(self, batch: int, drafting: bool) -> bool:
        """Whether enough rounds of this kind were run at about this batch size."""
        scale = self._scales.get(("verify" if drafting else "plain", bucket(batch)))
        return scale is not None and scale.count >= _ENOUGH

    def _add(self, at_most: bool, ratio: float, part: str, batch: int, *more: object) -> None:
        key: Key = (part, bucket(batch), *more)
        for end in range(1, len(key) + 1):
            scale = self._scales.setdefault(key[:end], _Scale())
            (scale.cap if at_most else scale.add)(ratio)

    def _scale(self, part: str, batch: int, *more: object) -> float:
        """The most special mean that has enough rounds; 1 where nothing was run."""
        key: Key = (part, bucket(batch), *more)
        for end in range(len(key), 0, -1):
            scale = self._scales.get(key[:end])
            if scale is not None and scale.count >= _ENOUGH:
                return math.exp(scale.log)
        return 1.0


def bucket(batch: int) -> int:
    """Batch sizes that share their corrections: 1, 2, 3-4, 5-8, ..."""
    return (batch - 1).bit_length()
