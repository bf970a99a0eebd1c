"""`auto`: the most tokens per second, by what rounds cost and what drafts are worth on this machine, for this text, now.

The union of the other policies: calibrated scores, nodes of all sequences against one measured cost, plain decoding among the choices.
Three loops, from slow to fast:

* plan: every `_PLAN_EVERY` rounds that drafted and for every new batch size, the draft round with the most tokens per millisecond,
  or plain decoding. Tokens come from acceptance by depth and rank, corrected by what was accepted lately (`Trust`), times the gain that
  choosing per round has brought over a static tree; milliseconds come from `Costs`.
* choose: in every round, nodes per sequence until more cost more than they bring at the rate of the plan. A pass costs what its
  widest tree costs, so every sequence fills that width.
* probe: what is not in use is tried now and then, since its cost and its acceptance drift. Probes may lose `_SHARE` of the time. One
  that brings more than the plan would goes on for as long as it does, and is soon planned with.

Looking at the clock and learning cost as much as a layer. Once a plan has settled, that is done in one round of `_PLAIN_LOOKS` or
`_DRAFT_LOOKS`; the rounds between follow the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.costs import Costs
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.base import Candidates, Choice, Floats, Lists, Shape
from trtllm_v4tree.runtime.policies.judge import Judge
from trtllm_v4tree.runtime.policies.rules import expected_lengths, expected_tokens, worth_verifying
from trtllm_v4tree.runtime.tree import Ints

_PLAN_SOON, _PLAN_EVERY, _TOUR = 2, 16, 8
_LOYALTY = 1.01
_GAIN_MEMORY = 1 / 64
_TRUST_MEMORY, _TRUSTING, _NEW_TEXT = 128.0, 24.0, 0.5
_SHARE, _SAVED = 0.01, 4.0
_BURST, _DRAFT_PROBE, _PLAIN_PROBE, _MOST_UNREAD = 12, 2, 5, 128
_WARM, _COLD = 3, 5
_DRAFT_EVERY, _PLAIN_EVERY = 16, 256
_PLAIN_LOOKS, _DRAFT_LOOKS = 8, 4


class Plan(NamedTuple):
    """A draft round, None for plain decoding; tokens per millisecond that the whole batch gets by it; how long a round takes, and how
    many nodes per sequence it verifies if it always verifies as many."""

    shape: Shape | None
    rate: float
    ms: float
    nodes: int = 1


class _Round(NamedTuple):
    """A round that is under way: batch, draft round, most nodes per sequence, and the clock at its start if it is looked at.

    So many rounds `like_it` went before it in a row. The first ones take up to twice as long as those that follow, since other code and
    data are in the caches. Its host time holds `learning_ms` of planning and learning, which most rounds do without.
    """

    batch: int
    shape: Shape | None
    nodes: int
    clock: dict[str, float] | None
    like_it: int = 0
    learning_ms: float = 0.0


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
        self.costs = Costs(table)
        self._seconds, self._now, self._judge, self._probes = seconds, now, Judge(self.shapes), Probes()
        self._trust, self._gain, self._planned = Trust(), 1.0, 0
        self._plan_after, self._until_plan = _PLAN_SOON, 0
        self._lengths: dict[Shape, Floats] = {}
        self._plans: dict[int, tuple[Plan, Plan]] = {}
        self._in_use: Shape | None = None
        self._near: Shape | None = None
        self.plan = self._chosen = Plan(None, 0.0, 0.0)
        self._last: _Round | None = None
        self._before: _Round | None = None
        self._unread, self._restarted = _MOST_UNREAD, True
        self._prefill_seconds, self._passed = 0.0, 0

    def shape(self, batch: int) -> Shape | None:
        self._account(batch)
        if self._may_pass(batch):
            self._passed += 1
            self._until_plan -= self.plan.shape is not None
            self._last = _Round(batch, self.plan.shape, 1, None, self._in_a_row(self.plan.shape))
            return self.plan.shape
        self._probes.passed(self._passed)
        self._passed = 0
        began = self._now()
        if self._until_plan <= 0 or self._probes.over:
            self._forget_plans()
        self.plan, other = self._plans_for(batch)
        if other.shape is None and self._probes.surplus > 0:
            self._probes.stop()
        learning_ms = 1e3 * (self._now() - began)
        chosen = self.plan
        behind = self.costs.backlog_ms(batch, self._unread) if other.shape is not None else 0.0
        if self._probes.due(self.plan, other, self.costs.known(batch, other.shape is not None), behind):
            chosen = other
        self._in_use, self._chosen = self.plan.shape, chosen
        self._until_plan -= chosen.shape is not None
        self._last = _Round(batch, chosen.shape, 1, dict(self._seconds), self._in_a_row(chosen.shape), learning_ms)
        return chosen.shape

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        assert self._last is not None and self._last.shape is not None
        batch, shape = len(rooms), self._last.shape
        judged = self._judge.judge(candidates, shape)
        expected = batch + self._trust.factor * (expected_tokens(judged.probabilities, self.max_nodes) - batch)
        nodes = worth_verifying(expected, self.costs.verify_ms(batch, len(expected)), self.plan.rate)
        if not self.costs.known(batch, drafting=True):
            nodes = self._plan_of(shape, batch, self.costs.verify_ms(batch, self.max_nodes)).nodes
        self._last = self._last._replace(nodes=nodes)
        if self._last.clock is not None:
            began = self._now()
            self._judge.count(candidates, judged)
            self._trust.claim(float(expected[nodes - 1]) - batch)
            self._note_gain(expected[nodes - 1] / batch, shape, nodes)
            self._has_learnt_since(began)
        return Choice(judged.scores, np.minimum(rooms, nodes))

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        if self._last is not None and self._last.clock is not None:
            began = self._now()
            self._judge.learn(candidates, kept, visited)
            tokens = sum(map(len, visited.paths))
            self._trust.see(tokens - len(visited.paths), len(visited.paths))
            self._probes.brought(tokens - self._chosen.ms * self.plan.rate)
            self._has_learnt_since(began)

    def _has_learnt_since(self, began: float) -> None:
        assert self._last is not None
        self._last = self._last._replace(learning_ms=self._last.learning_ms + 1e3 * (self._now() - began))

    def _may_pass(self, batch: int) -> bool:
        """Whether this round can follow the plan without a look at anything."""
        drafting = self.plan.shape is not None
        unsettled = self._until_plan <= 0 or (drafting and self._plan_after < _PLAN_EVERY)
        if batch not in self._plans or self._probes.busy or unsettled:
            return False
        return self._passed + 1 < (_DRAFT_LOOKS if drafting else _PLAIN_LOOKS) and self.costs.known(batch, drafting)

    def _in_a_row(self, shape: Shape | None) -> int:
        """How many rounds went before that drafted, or did not, as one with `shape` does."""
        before = self._before
        return before.like_it + 1 if before is not None and (before.shape is None) == (shape is None) else 0

    def _note_gain(self, tokens: float, shape: Shape, nodes: int) -> None:
        """Tokens expected of the chosen nodes against those of the best static tree of as many."""
        static = 1 + self._trust.factor * float(self._static(shape)[nodes - 1] - 1)
        self._gain += _GAIN_MEMORY * (tokens / static - self._gain)

    def _account(self, batch: int) -> None:
        """Tells the costs what the last round took, if it was looked at. A round with a prefill in it says nothing; one whose drafter had
        rows to catch up with says nothing of drafting, but what those rows cost, if their number is known (not after a restart).
        """
        last, self._last = self._last, None
        before, self._before = self._before, last
        prefilled, self._prefill_seconds = self._seconds["prefill"] > self._prefill_seconds, self._seconds["prefill"]
        if last is None:
            return
        if prefilled:
            self._restart(max(1, batch - last.batch) / batch)
            return
        if last.clock is not None:
            ms = {phase: 1e3 * (s - last.clock[phase]) for phase, s in self._seconds.items()}
            self._learn_costs(last, ms, before is not None and before.shape == last.shape)
        self._unread = min(self._unread + 1, _MOST_UNREAD) if last.shape is None else 0
        self._restarted = self._restarted and last.shape is None

    def _learn_costs(self, last: _Round, ms: Mapping[str, float], again: bool) -> None:
        """`again`: the round before had the same shape."""
        rest = max(0.0, ms["host"] + ms["accept"] + ms["commit"] - last.learning_ms)
        self._probes.spent(sum(ms.values()), self.costs.plain_ms(last.batch))
        if last.shape is not None and self._unread and not self._restarted:
            longer = ms["draft"] - self.costs.draft_ms(last.shape, last.batch)
            self.costs.saw_backlog(last.batch, self._unread, longer)
        known = self.costs.known(last.batch, last.shape is not None)
        warm = last.like_it >= (_WARM if known else _COLD)
        if not (warm or known):
            return
        if last.shape is None:
            self.costs.saw_plain(last.batch, ms["verify"] + rest, at_most=not warm)
        else:
            draft = {"draft": ms["draft"]} if again and not self._unread else {}
            parts = {**draft, "verify": ms["verify"], "rest": rest}
            self.costs.saw_round(last.batch, last.shape, last.nodes, parts, at_most=not warm)

    def _restart(self, share: float) -> None:
        """A share of the sequences is new; what was learnt of those before them holds in part."""
        self._unread, self._restarted = _MOST_UNREAD, True
        self._probes.restart()
        self._judge.restart(_NEW_TEXT * share)
        self._trust.forget(_NEW_TEXT * share)
        self._plan_after, self._until_plan = _PLAN_SOON, 0

    def _forget_plans(self) -> None:
        """New plans from here on, soon again after a restart."""
        self._until_plan = self._plan_after
        self._plan_after = min(2 * self._plan_after, _PLAN_EVERY)
        self._planned += 1
        self._lengths.clear()
        self._plans.clear()

    def _static(self, shape: Shape) -> Floats:
        """Tokens a pass emits with the best static tree of 1, 2, .. nodes: [n]."""
        if shape not in self._lengths:
            rates = self._judge.acceptance.rates()
            self._lengths[shape] = np.array(expected_lengths(rates, shape, self.max_nodes))
        return self._lengths[shape]

    def _plans_for(self, batch: int) -> tuple[Plan, Plan]:
        """The plan for a batch size, and the best of the other kind: plain against drafting."""
        if batch not in self._plans:
            ms = self.costs.plain_ms(batch)
            plain = Plan(None, batch / ms, ms)
            verify_ms = self.costs.verify_ms(batch, self.max_nodes) + self.costs.rest_ms(batch)
            draft = max((self._plan_of(s, batch, verify_ms) for s in self._considered()), key=self._preferred)
            self._near = draft.shape
            self._plans[batch] = (plain, draft) if self._preferred(plain) >= self._preferred(draft) else (draft, plain)
        return self._plans[batch]

    def _considered(self) -> Sequence[Shape]:
        """Draft rounds near the last plan, and in turn a few of the others, since weighing one takes as long as drafting a token."""
        if self._near is None:
            return self.shapes
        steps, topk = self._near
        near = [s for s in self.shapes if abs(s[0] - steps) <= 1 and abs(s[1] - topk) <= 1]
        return list(dict.fromkeys([*near, *self.shapes[self._planned % _TOUR :: _TOUR]]))

    def _plan_of(self, shape: Shape, batch: int, verify_ms: Floats) -> Plan:
        """The best static tree of a draft round, by what a round takes beside drafting with 1, 2, .. nodes: [max_nodes]."""
        lengths = self._gain * (1 + self._trust.factor * (self._static(shape) - 1))
        ms = self.costs.draft_ms(shape, batch) + verify_ms[: len(lengths)]
        best = 1 + int(np.argmax(lengths[1:] / ms[1:]))
        return Plan(shape, batch * float(lengths[best] / ms[best]), float(ms[best]), best + 1)

    def _preferred(self, plan: Plan) -> float:
        """Its rate, a little more for what is in use."""
        return plan.rate * (_LOYALTY if plan.shape == self._in_use else 1.0)


class Trust:
    """Drafted tokens accepted lately over those expected: what calibration has not caught up with yet."""

    def __init__(self) -> None:
        self._seen = self._claimed = 0.0
        self._claim = 0.0

    @property
    def factor(self) -> float:
        return (self._seen + _TRUSTING) / (self._claimed + _TRUSTING)

    def claim(self, tokens: float) -> None:
        """So many drafted tokens are expected of this round."""
        self._claim = tokens / self.factor

    def see(self, tokens: int, batch: int) -> None:
        """So many were accepted."""
        self.forget(1 - 0.5 ** (batch / _TRUST_MEMORY))
        self._seen += tokens
        self._claimed += self._claim

    def forget(self, share: float) -> None:
        self._seen *= 1 - share
        self._claimed *= 1 - share


class Probes:
    """When to try what is not in use: a share of the time may be lost with it, saved up to a limit; what costs more than the limit
    is tried when that is reached, and paid off afterwards."""

    def __init__(self) -> None:
        self.over = False
        self._since, self._left, self.surplus = 0, 0, 0.0
        self._saved = self._limit = self._round_ms = 0.0

    def spent(self, ms: float, plain_ms: float) -> None:
        """A round took so long."""
        if not self._limit:
            self._saved += _SAVED * plain_ms
        self._limit, self._round_ms = _SAVED * plain_ms, ms
        self._saved = min(self._saved + _SHARE * ms, self._limit)

    @property
    def busy(self) -> bool:
        """Whether a burst is under way, or a new plan is due after one."""
        return self._left > 0 or self.over

    def passed(self, rounds: int) -> None:
        """So many rounds went by without a look; they took about as long as those that were looked at."""
        self._since += rounds
        self._saved = min(self._saved + _SHARE * rounds * self._round_ms, self._limit)

    def restart(self) -> None:
        """New sequences have come: another text, perhaps."""
        self._since = max(self._since, _DRAFT_EVERY)

    def due(self, plan: Plan, other: Plan, known: bool, behind_ms: float = 0.0) -> bool:
        """Whether this round goes to `other`, which first makes up for `behind_ms`; of what is not known yet, a burst of rounds."""
        self._since += 1
        self.over = False
        wait = 1 if not known else _PLAIN_EVERY if other.shape is None else _DRAFT_EVERY
        if not self._left and self._since >= wait:
            rounds = _BURST if not known else _PLAIN_PROBE if other.shape is None else _DRAFT_PROBE
            self._start(rounds, rounds * other.ms * max(0.0, 1 - other.rate / plan.rate) + behind_ms)
        if not self._left:
            return False
        if self._left > 1 or self.surplus <= 0:
            self._left -= 1
        self.over = not self._left
        self._since = 0
        return True

    def brought(self, tokens: float) -> None:
        """A round of the burst brought so many tokens more than the plan would have in its time."""
        self.surplus += tokens

    def stop(self) -> None:
        """What was tried is the plan now."""
        self._left, self.surplus = 0, 0.0

    def _start(self, rounds: int, loss: float) -> None:
        if self._saved >= min(loss, self._limit):
            self._saved = max(self._saved - loss, -_SAVED * self._limit)
            self._left, self._since, self.surplus = rounds, 0, 0.0
