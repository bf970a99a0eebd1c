"""Time per phase of a round: one clock read per phase, no state besides the sums."""

from __future__ import annotations

import time

PHASES = ("host", "draft", "verify", "accept", "commit", "prefill")


class PhaseClock:
    """`mark(phase)` attributes the time since the last mark to that phase; sums are in seconds."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    @property
    def total_ms(self) -> float:
        """All phases up to the last mark."""
        return 1e3 * sum(self.seconds.values())

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
