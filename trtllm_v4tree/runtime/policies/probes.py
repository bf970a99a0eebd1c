"""When to try what is not in use: bursts of rounds, paid from a small share of the time."""

from __future__ import annotations

import math
from typing import NamedTuple

from trtllm_v4tree.runtime.costs import Arm

_SHARE, _MOST, _START = 0.007, 48.0, 2.0
_SAME_KIND, _OTHER_KIND = 3, 5
_SAME_EXTRA, _OTHER_EXTRA, _MEMORY = 1.0, 2.0, 0.25


class Plan(NamedTuple):
    """An arm for a batch size, what a round of it takes and how many tokens the whole batch gets by it; the standard deviation of the
    logarithm of its rate against that of what is in use."""

    arm: Arm
    batch: int
    ms: float
    tokens: float
    doubt: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


class Probes:
    """A share of the time may be lost, saved up to a limit; a burst starts when what it is expected to lose is there: little where the
    other arm may well be the better one, which it then soon is, or is known not to be. Time is counted in plain rounds, so that savings
    outlive a change of the batch. A switch between plain decoding and drafting costs extra, since other code and data are in the caches
    and the drafter has rows to catch up with; how much is learnt."""

    def __init__(self) -> None:
        self.bursts = 0
        self.compared = False
        self._saved, self._extra = _START, _OTHER_EXTRA

    def earn(self, plain_rounds: float) -> None:
        """So much time went by."""
        self._saved = min(self._saved + _SHARE * plain_rounds, _MOST)

    def rounds(self, plan: Plan, other: Plan, plain_ms: float) -> int:
        """How many rounds to give to `other` now: a burst if it can be paid, else none. The first of the other kind is
        free."""
        switch = differ(plan.arm, other.arm)
        rounds, extra = (_OTHER_KIND, self._extra) if switch else (_SAME_KIND, _SAME_EXTRA)
        loss = extra + rounds * other.ms / plain_ms * max(0.0, 1 - math.exp(other.doubt) * other.rate / plan.rate)
        if (self.compared or not switch) and self._saved < min(loss, _MOST):
            return 0
        self._saved = max(self._saved - loss, 0.0)
        self.compared |= switch
        self.bursts += 1
        return rounds

    def switched(self, plain_rounds: float) -> None:
        """The first rounds after a switch took so much longer than those that followed."""
        self._extra += _MEMORY * (max(0.0, plain_rounds) - self._extra)


def differ(one: Arm, other: Arm) -> bool:
    """Whether one of two arms drafts and the other does not."""
    return (one.shape is None) != (other.shape is None)
