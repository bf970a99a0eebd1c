"""`auto`: the most tokens per second, by what rounds cost and what drafts are worth on this machine, for this text, now.

An arm is a draft round with a number of nodes to verify, or plain decoding. Rounds run in stretches of one arm, as a fixed shape would
run them and at its cost; between two stretches is learnt from the first, and the next arm chosen:

* the plan, the arm with the most tokens per millisecond. Tokens come from `Lengths`, milliseconds from `Costs`, each a model corrected by
  what was measured;
* or, for a few rounds, one that could be better, in turn with the best of the other kind (plain against drafting). `Probes` may lose a
  small share of the time. One that brings more than the plan goes on.

A look, which judges a draft round by calibrated scores, takes as long as a layer. Of settled rounds one in `_LOOK_EVERY` is looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.costs import PLAIN, Arm, Costs
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.base import Candidates, Choice, Lists, Shape
from trtllm_v4tree.runtime.policies.judge import Judge
from trtllm_v4tree.runtime.policies.lengths import Lengths
from trtllm_v4tree.runtime.policies.probes import Plan, Probes, differ
from trtllm_v4tree.runtime.tree import Ints

_SHORT, _LONG, _SHORT_ONES = 4, 32, 16
_LOYALTY, _KIND_LOYALTY = 1.005, 1.01
_LOOKS_FIRST, _LOOK_EVERY, _WIDE_EVERY, _MOST_ROWS = 8, 64, 4, 8
_NEW_TEXT = 0.5
_WARM, _PLAIN_TURN, _PATIENCE = 3, 4, 4
_CHILL, _CHILL_SHARE = 4, 4
_PAUSE, _LONG_PAUSE = 96, 128


class _Plans(NamedTuple):
    """For one batch size: the plan, the draft round that could most likely be better, the best of the other kind; what a
    plain round takes; the draft round for wide looks."""

    best: Plan
    rival: Plan
    other: Plan
    plain_ms: float
    wide: Shape


class _Stretch:
    """Rounds of one arm: how many, whether it is tried only, whether those before it were of the other kind, and what they took and
    brought. Rounds with a prefill, or with another draft round for a look, do not count. The first rounds behind a switch, or of an arm
    that was never run, are `cold`: they do not say what such rounds take."""

    def __init__(self, plan: Plan, rounds: int, probe: bool, switch: bool, fresh: bool = False) -> None:
        self.plan, self.probe, self.switch = plan, probe, switch
        self.cold = _WARM if switch or fresh else 0
        self.rounds = rounds + (_WARM if fresh and not switch else 0)
        self.ms: list[float] = []
        self.accepted: list[int] = []
        self.begun = 0

    @property
    def full(self) -> bool:
        return len(self.ms) >= self.rounds or self.begun >= _PATIENCE * self.rounds

    @property
    def warm(self) -> bool:
        """Whether its cold rounds are over."""
        return len(self.ms) >= self.cold

    @property
    def opens(self) -> bool:
        """Whether its first round is under way, if that is cold: what a look adds to it does not matter."""
        return self.switch and not self.ms


class AutoPolicy:
    """seconds: running sums of the engine's clock by phase, read at the start of every round; now: the clock itself, in seconds."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        max_nodes: int,
        table: LatencyTable,
        seconds: Mapping[str, float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.shapes, self.max_nodes = tuple(shapes), max_nodes
        self.costs = Costs(table, self.shapes, max_nodes)
        self.lengths = Lengths(self.shapes, max_nodes, table.chances)
        self._seconds, self._now, self._judge, self._probes = seconds, now, Judge(), Probes()
        self.plan = Plan(PLAIN, 0, 1.0, 1.0)
        self._plans: dict[int, _Plans] = {}
        self._stretch = _Stretch(self.plan, 0, False, False)
        self._stretches = self._rested = self._drafted = 0
        self._known: set[Arm] = set()
        self._chill, self._counted = 0, _CHILL * _CHILL_SHARE
        self._shape: Shape | None = None
        self._runs = self._looks = False
        self._rows = slice(None)
        self._total = self._prefill = self._learning = 0.0

    def shape(self, batch: int) -> Shape | None:
        self._account(batch)
        if self._stretch.full or batch != self._stretch.plan.batch:
            self._begin(batch)
        self._stretch.begun += 1
        self._shape, self._looks, self._runs = self._stretch.plan.arm.shape, False, True
        if self._shape is not None:
            self._drafted += 1
            if self._stretch.opens or self._drafted % self._look_every() == 0:
                self._start_look()
        return self._shape

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        if self._looks:
            began = self._now()
            self._look(candidates)
            self._learning += self._now() - began
        return Choice(candidates.scores, np.minimum(rooms, self._stretch.plan.arm.nodes))

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        stretch = self._stretch
        if self._looks:
            began = self._now()
            self._judge.learn(_part(candidates, self._rows), kept[self._rows], visited.paths[self._rows])
            self._learning += self._now() - began
        if self._shape == stretch.plan.arm.shape:
            stretch.accepted += [len(path) - 1 for path in visited.paths]

    # ---------------------------------------------------------------- looks

    def _look_every(self) -> int:
        return min(_LOOK_EVERY, _LOOKS_FIRST + self.lengths.looks // 2)

    def _start_look(self) -> None:
        """Some looks go to a wide draft round, which tells of many others."""
        self._looks = True
        if self.lengths.looks % _WIDE_EVERY == 0:
            self._shape = self._plans[self._stretch.plan.batch].wide

    def _look(self, candidates: Candidates) -> None:
        """At a few sequences of the batch, others each time."""
        assert self._shape is not None
        first = self.lengths.looks * _MOST_ROWS % len(candidates.parents)
        self._rows = slice(first, first + _MOST_ROWS)
        part = _part(candidates, self._rows)
        self.lengths.look(part, self._judge.judge(part, self._shape).probabilities, self._shape)

    # ---------------------------------------------------------------- stretches

    def _account(self, batch: int) -> None:
        """Takes down how long the last round took, unless there was a prefill in it, or another draft round for a look. Nor of the first
        rounds behind a prefill, whose weights come from memory again: whatever arm is in use then would look slow. Where prefills follow
        each other closely most rounds count all the same."""
        total, prefill = sum(self._seconds.values()), self._seconds["prefill"]
        ms, self._total = 1e3 * (total - self._total - self._learning), total
        prefilled, self._prefill, self._learning = prefill > self._prefill, prefill, 0.0
        runs, self._runs = self._runs, False
        if prefilled and self._counted >= _CHILL * _CHILL_SHARE:
            self._chill, self._counted = _CHILL, 0
        if prefilled and runs:
            self.lengths.forget(_NEW_TEXT * max(1, batch - self._stretch.plan.batch) / batch)
        elif runs and self._chill > 0 and self._stretch.warm:
            self._chill -= 1
        elif runs and (self._stretch.opens or self._shape == self._stretch.plan.arm.shape):
            self._chill, self._counted = max(0, self._chill - 1), self._counted + 1
            self._stretch.ms.append(ms)

    def _begin(self, batch: int) -> None:
        """Learns from the stretch that ends and chooses the next one."""
        last = self._stretch
        pays = self._learn(last)
        self._rested = 0 if last.probe else self._rested + len(last.ms)
        if last.full:
            self._plans.clear()
            self.costs.age()
        if batch not in self._plans:
            self._plans[batch] = self._weigh(batch)
        plans = self._plans[batch]
        self.plan, self._stretches = plans.best, self._stretches + 1
        plan, rounds, probe = plans.best, _SHORT if self._stretches < _SHORT_ONES else _LONG, False
        if last.probe and pays and last.plan.batch == batch:
            plan, rounds, probe = last.plan, len(last.ms), True
        elif (burst := self._burst(plans)) is not None:
            plan, rounds, probe = *burst, True
        self._stretch = _Stretch(plan, rounds, probe, differ(plan.arm, last.plan.arm), plan.arm not in self._known)
        self._known.add(plan.arm)

    def _burst(self, plans: _Plans) -> tuple[Plan, int] | None:
        """What to try, and how many rounds of it, if it is time to."""
        known = self._probes.compared
        turn = plans.best.arm.shape is None or not known or self._probes.bursts % _PLAIN_TURN == 0
        if known and self._rested < (_LONG_PAUSE if turn else _PAUSE):
            return None
        other = plans.other if turn else plans.rival
        rounds = self._probes.rounds(plans.best, other, plans.plain_ms)
        return (other, rounds) if rounds else None

    def _learn(self, stretch: _Stretch) -> bool:
        """Tells the models what a stretch took and brought, and returns whether it brought more than the plan would have."""
        plan, cold = stretch.plan, stretch.cold
        if stretch.accepted:
            self.lengths.see(plan.arm, stretch.accepted)
        if len(stretch.ms) < cold + 2:
            return False
        typical = statistics.fmean(stretch.ms[cold:])
        plain_ms = self.costs.plain_ms(plan.batch)
        self.costs.saw(plan.batch, plan.arm, stretch.ms[cold:])
        if stretch.switch:
            self._probes.switched((sum(stretch.ms[:cold]) - cold * typical) / plain_ms)
        if not stretch.probe:
            self._probes.earn(len(stretch.ms) * typical / plain_ms)
        tokens = plan.batch + plan.batch * sum(stretch.accepted) / max(1, len(stretch.accepted))
        return tokens / typical > self.plan.rate

    def _weigh(self, batch: int) -> _Plans:
        """The best arm for a batch size, and what could be better."""
        ms, tokens, used = self.costs.rounds_ms(batch), batch * self.lengths.curves(), self.plan.arm
        rates, doubts = tokens / ms, self.costs.doubts(batch) + self.lengths.doubts()[:, None]
        if used.shape is not None:
            rates[self.shapes.index(used.shape), used.nodes - 1] *= _LOYALTY
        best = divmod(int(rates.argmax()), self.max_nodes)
        hopes = rates * np.exp(doubts)
        hopes[best] = 0.0
        near = divmod(int(hopes.argmax()), self.max_nodes)

        def plan_of(place: tuple[int, int], doubt: float) -> Plan:
            arm = Arm(self.shapes[place[0]], place[1] + 1)
            return Plan(arm, batch, float(ms[place]), float(tokens[place]), doubt)

        doubt = self.costs.doubt(batch)
        draft, rival = plan_of(best, doubt), plan_of(near, float(doubts[near]))
        plain, wide = Plan(PLAIN, batch, self.costs.plain_ms(batch), float(batch), doubt), self._wide(batch, best[0])
        draft_bonus, plain_bonus = (1.0, _KIND_LOYALTY) if used.shape is None else (_KIND_LOYALTY, 1.0)
        if plain.rate * plain_bonus >= draft.rate * draft_bonus:
            return _Plans(plain, draft, draft, plain.ms, wide)
        return _Plans(draft, rival, plain, plain.ms, wide)

    def _wide(self, batch: int, row: int) -> Shape:
        """The widest draft round that takes no longer than that of a row and a plain pass."""
        table = self.costs.table
        ms = [table.draft_ms(*shape, batch) for shape in self.shapes]
        most = ms[row] + table.target_ms(batch, 1)
        return max((s for s, own in zip(self.shapes, ms, strict=True) if own <= most), key=lambda s: s[0] * s[1])


def _part(candidates: Candidates, rows: slice) -> Candidates:
    return Candidates(candidates.parents[rows], candidates.tokens[rows], candidates.scores[rows])
