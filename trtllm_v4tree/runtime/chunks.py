"""How many prompt tokens one prefill pass takes: a whole chunk, or while streams run as many as do not make them wait.

A stream's gap beside a prefill is its own round and the pass before it. What both take is learnt from the passes of this engine, on
this machine, with the load it has now.
"""

from __future__ import annotations

_STALL = 2.5  # a round and the pass before it, over the round alone
_STEP = 4  # chunks are multiples of this; also the smallest
_FIRST = 16  # before anything has been measured
_MEMORY, _WILD, _ENOUGH = 64, 3.0, 4


class Line:
    """Milliseconds as base + slope * x, a least-squares fit of the latest passes; those far above it count as a little above it."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, x, ms, x * x, x * ms, older passes counting less

    def add(self, x: float, ms: float) -> None:
        if self.count >= _ENOUGH:
            ms = min(ms, _WILD * self.at(x))
        self.count += 1
        keep = 1.0 - 1.0 / min(self.count, _MEMORY)
        n, sx, sy, sxx, sxy = self._sums
        self._sums = (keep * n + 1.0, keep * sx + x, keep * sy + ms, keep * sxx + x * x, keep * sxy + x * ms)

    def fit(self) -> tuple[float, float]:
        """(base, slope), neither below zero. Where x hardly varied, a line through the origin."""
        n = self._sums[0]
        x, y, xx, xy = (total / n for total in self._sums[1:])
        through_origin = y / x
        slope = (xy - x * y + through_origin) / (max(xx - x * x, 0.0) + 1.0)
        slope = min(max(slope, 1e-9), through_origin)
        return y - slope * x, slope

    def at(self, x: float) -> float:
        base, slope = self.fit()
        return base + slope * x


class Chunks:
    """`prefill` is fed with tokens (padding included) and milliseconds of every prefill pass, `decode` with sequences and
    milliseconds of every round."""

    def __init__(self, largest: int, max_num_tokens: int = 0) -> None:
        self.largest, self.max_num_tokens = largest, max_num_tokens
        self.prefill, self.decode = Line(), Line()

    def tokens(self, decoding: int, nodes: int) -> int:
        """Prompt tokens of a pass before a round over `decoding` sequences of up to `nodes` nodes each."""
        if not decoding:
            return self.largest
        if self.max_num_tokens:
            return self._stepped(self.max_num_tokens - decoding * nodes)
        if not self.prefill.count or not self.decode.count:
            return min(_FIRST, self.largest)
        base, slope = self.prefill.fit()
        return self._stepped(((_STALL - 1.0) * self.decode.at(decoding) - base) / slope)

    def _stepped(self, tokens: float) -> int:
        return min(max(_STEP, int(min(tokens, self.largest)) // _STEP * _STEP), self.largest)
