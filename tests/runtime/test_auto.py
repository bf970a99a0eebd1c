"""`auto` on made-up machines: beside the best fixed choice, never far below plain decoding, and learning what its table gets wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from trtllm_v4tree.runtime.accept import walk
from trtllm_v4tree.runtime.clock import PHASES
from trtllm_v4tree.runtime.costs import PLAIN, Arm
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.auto import AutoPolicy
from trtllm_v4tree.runtime.policies.base import Candidates, Policy, Shape
from trtllm_v4tree.runtime.policies.fixed import FixedPolicy
from trtllm_v4tree.runtime.policies.probes import Plan, Probes
from trtllm_v4tree.runtime.tree import Speculation, select_nodes

from .test_policy_rules import random_round, usual

SHAPES: tuple[Shape, ...] = ((1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (2, 2), (3, 2), (4, 3))
BATCHES, NODES = (1, 4, 16), (1, 2, 4, 8, 16)
FIXED = (None, *(Speculation(s, 1, s + 1) for s, k in SHAPES if k == 1), Speculation(3, 2, 6), Speculation(4, 3, 8))


def machine(per_node: float, per_step: float, host: float = 0.1) -> LatencyTable:
    """Milliseconds in plain steps: what a further node per sequence and a draft step add."""
    return LatencyTable(
        {(b, n): b**0.3 * (1 + per_node * (n - 1)) for b in BATCHES for n in NODES},
        {(s, k, b): b**0.3 * per_step * s * (1 + 0.2 * (k - 1)) for s, k in SHAPES for b in BATCHES},
        dict.fromkeys(BATCHES, host),
        usual(SHAPES),
    )


@dataclass
class World:
    """The target follows a drafted token with `skill` times the drafter's probability, on a machine that takes what `real` says.

    The first rounds after a switch between plain decoding and drafting take `cold` times as long, the first four behind a prefill `chill`
    times. What the policy times of itself, with
    two looks at the clock, takes `tick` milliseconds of host time.
    """

    real: LatencyTable
    skill: float
    seed: int = 0
    cold: float = 1.0
    tick: float = 0.0
    chill: float = 1.0
    looks: int = 0
    run_length: int = 0
    drafted: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def run(self, policy: Policy | None, batch: int, rounds: int) -> float:
        """Tokens per millisecond over `rounds` rounds of a batch, after a prefill."""
        rng, tokens, spent = np.random.default_rng(self.seed), 0, 0.0
        self.seconds["prefill"] += 0.01
        for number in range(rounds):
            shape = policy.shape(batch) if policy else None
            emitted, took = self._round(policy, shape, batch, rng)
            took = self._with_switch(shape is not None, took)
            took = {phase: ms * (self.chill if number < 4 else 1.0) for phase, ms in took.items()}
            for phase, ms in took.items():
                self.seconds[phase] += ms / 1e3
            tokens, spent = tokens + emitted, spent + sum(took.values())
        return tokens / spent

    def now(self) -> float:
        self.looks += 1
        return self.looks // 2 * self.tick / 1e3

    def _with_switch(self, drafted: bool, took: dict[str, float]) -> dict[str, float]:
        """What a round takes in its place in the row, the looks at the clock since the last one included."""
        self.run_length = self.run_length + 1 if drafted == self.drafted else 0
        self.drafted = drafted
        factor = self.cold if self.run_length < 3 else 1.0
        took = {phase: factor * ms for phase, ms in took.items()}
        took["host"] += self.looks // 2 * self.tick
        self.looks = 0
        return took

    def _round(
        self, policy: Policy | None, shape: Shape | None, batch: int, rng: np.random.Generator
    ) -> tuple[int, dict[str, float]]:
        noise = rng.normal(1, 0.05)
        host = self.real.overhead_ms(batch) * noise
        if policy is None or shape is None:
            return batch, {"verify": self.real.target_ms(batch, 1) * noise, "host": host}
        drafted, chosen = self._draft(shape, batch, rng)
        choice = policy.choose(drafted, np.full(batch, 16))
        tree = select_nodes(choice.scores, drafted.parents, drafted.tokens, choice.budgets, [0] * batch)
        follow = [[chosen[b].get(c, -5) for c in row] for b, row in enumerate(tree.candidates)]
        visited = walk(tree.parents, tree.tokens, follow)
        policy.observe(drafted, tree.candidates, visited)
        nodes = len(tree.parents[0])
        took = {
            "draft": self.real.draft_ms(*shape, batch) * noise,
            "verify": self.real.target_ms(batch, nodes) * noise,
            "host": host,
        }
        return sum(map(len, visited.paths)), took

    def _draft(self, shape: Shape, batch: int, rng: np.random.Generator) -> tuple[Candidates, list[dict[int, int]]]:
        """Candidates with a token of their own each, and the target's token after each node: a child by its chance, or none."""
        drafted = random_round(rng, shape, batch)
        tokens = np.tile(np.arange(10, 10 + drafted.tokens.shape[1]), (batch, 1))
        chosen: list[dict[int, int]] = []
        for up, scores in zip(drafted.parents.tolist(), drafted.scores.tolist(), strict=True):
            after: dict[int, int] = {}
            for node in (-1, *range(len(up))):
                children = [c for c, parent in enumerate(up) if parent == node]
                local = [np.exp(scores[c] - (scores[node] if node >= 0 else 0.0)) for c in children]
                if children:
                    chances = self.skill * np.array(local)
                    pick = rng.choice(len(children) + 1, p=[*chances, max(0.0, 1 - chances.sum())])
                    after[node] = 10 + children[pick] if pick < len(children) else -9
            chosen.append(after)
        return drafted._replace(tokens=tokens), chosen


def made(world: World, table: LatencyTable | None = None) -> AutoPolicy:
    return AutoPolicy(SHAPES, 16, table or world.real, world.seconds, world.now)


def round_ms(world: World, arm: Arm, batch: int) -> float:
    assert arm.shape is not None
    draft = world.real.draft_ms(*arm.shape, batch)
    return draft + world.real.target_ms(batch, arm.nodes) + world.real.overhead_ms(batch)


MACHINES = {
    "free nodes": machine(0.01, 0.05),
    "some cost": machine(0.12, 0.15),
    "dear nodes": machine(0.6, 0.3),
    "dear drafts": machine(0.05, 2.0),
}


@pytest.mark.parametrize("skill", [0.9, 0.3])
@pytest.mark.parametrize("kind", MACHINES)
def test_auto_is_beside_the_best_fixed_choice(kind: str, skill: float) -> None:
    world = World(MACHINES[kind], skill)
    policy = made(world)
    world.run(policy, 4, 100)
    speed = world.run(policy, 4, 150)
    fixed = {s.name if s else "none": world.run(FixedPolicy(s) if s else None, 4, 400) for s in FIXED}
    assert speed >= 0.94 * max(fixed.values())
    assert speed >= 0.97 * fixed["none"]


@pytest.mark.parametrize("lie", [0.3, 3.0])
def test_a_wrong_table_is_found_out(lie: float) -> None:
    """The table promises cheap passes over trees where they are dear, or the other way round."""
    world = World(machine(0.12, 0.15) if lie > 1 else machine(0.6, 0.3), 0.8)
    table = LatencyTable(
        {(b, n): ms * (lie if n > 1 else 1) for (b, n), ms in world.real.target.items()},
        {key: ms * lie for key, ms in world.real.draft.items()},
        world.real.overhead,
        world.real.chances,
    )
    policy = made(world, table)
    world.run(policy, 4, 80)
    speed = world.run(policy, 4, 120)
    best = max(world.run(FixedPolicy(s) if s else None, 4, 60) for s in FIXED)
    assert speed >= 0.95 * best


def test_another_text_changes_the_plan_and_back() -> None:
    world = World(machine(0.25, 0.15), 0.9)
    policy = made(world)
    world.run(policy, 4, 100)
    drafting = policy.plan
    world.skill = 0.2
    world.run(policy, 4, 60)
    assert world.run(policy, 4, 100) >= 0.95 * world.run(None, 4, 100)
    plain = policy.plan
    world.skill = 0.9
    world.run(policy, 4, 700)
    assert (drafting.arm.shape is not None, plain.arm.shape, policy.plan.arm.shape is not None) == (True, None, True)


def test_a_cold_start_is_not_what_drafting_takes() -> None:
    world = World(machine(0.25, 0.15), 0.9, cold=3.0)
    policy = made(world)
    world.run(policy, 1, 150)
    assert policy.plan.arm.shape is not None
    assert policy.plan.ms < 1.1 * round_ms(world, policy.plan.arm, 1)
    best = max(world.run(FixedPolicy(s) if s else None, 1, 100) for s in FIXED)
    assert world.run(policy, 1, 150) >= 0.93 * best


@pytest.mark.parametrize("per_node", [0.12, 0.45])
def test_rounds_behind_a_prompt_are_not_what_rounds_take(per_node: float) -> None:
    """Many short texts, of which each begins with four slow rounds: with drafting they are a larger share than with plain decoding."""
    world = World(machine(per_node, 0.15), 0.8, chill=2.5)
    policy = made(world)
    for _ in range(60):
        world.run(policy, 1, 25)
    arm = policy.plan.arm if policy.plan.arm.shape is not None else Arm((1, 1), 2)
    assert arm.shape is not None
    told = policy.costs.rounds_ms(1)[SHAPES.index(arm.shape), arm.nodes - 1] / policy.costs.plain_ms(1)
    true = round_ms(world, arm, 1) / (world.real.target_ms(1, 1) + world.real.overhead_ms(1))
    assert told == pytest.approx(true, rel=0.08)


def test_what_learning_takes_is_not_what_drafting_takes() -> None:
    world = World(machine(0.25, 0.15), 0.9, tick=0.2)
    policy = made(world)
    world.run(policy, 1, 150)
    assert policy.plan.arm.shape is not None
    assert policy.plan.ms < 1.1 * round_ms(world, policy.plan.arm, 1)


def test_short_probes_find_out_that_drafting_has_become_cheap() -> None:
    """Probes of two rounds, all of them cold."""
    world = World(machine(0.9, 1.5), 0.9, cold=1.3)
    policy = made(world, machine(0.25, 0.15))
    world.run(policy, 1, 200)
    assert policy.plan.arm.shape is None
    world.real = machine(0.1, 0.1)
    world.run(policy, 1, 3000)
    assert policy.plan.arm.shape is not None


@pytest.mark.parametrize(
    ("kind", "skill"),
    [("dear nodes", 0.9), ("dear drafts", 0.9), ("some cost", 0.9), ("free nodes", 0.9), ("some cost", 0.3)],
)
def test_a_settled_policy_costs_nothing_beside_the_best_arm(kind: str, skill: float) -> None:
    """Plain decoding, a chain or a wide tree is the best; every look and every switch takes what it takes on a small engine."""
    ratios = []
    for seed in range(3):
        world = World(MACHINES[kind], skill, seed=seed, cold=1.2, tick=0.1)
        policy = made(world)
        world.run(policy, 2, 700)
        speed = world.run(policy, 2, 500)
        ratios.append([speed / world.run(FixedPolicy(s) if s else None, 2, 500) for s in FIXED])
    assert np.mean(ratios, axis=0).min() >= 0.97


def test_a_round_between_looks_costs_no_look_at_the_clock() -> None:
    world = World(machine(0.12, 0.15), 0.9)
    policy = made(world)
    world.run(policy, 4, 1500)
    assert policy.plan.arm.shape is not None
    looks, before = policy.lengths.looks, world.looks
    world.run(policy, 4, 640)
    assert policy.lengths.looks - looks <= 640 / 32
    assert world.looks - before <= 4 * (policy.lengths.looks - looks + 1)


def test_probes_lose_no_more_than_their_share() -> None:
    probes, lost, spent = Probes(), 0.0, 0.0
    plain, draft = Plan(PLAIN, 4, 1.0, 4.0), Plan(Arm((3, 2), 6), 4, 4.0, 0.6 * 16.0)
    probes.rounds(plain, draft, 1.0)
    for _ in range(5000):
        rounds = probes.rounds(plain, draft, 1.0)
        lost += rounds * draft.ms * (1 - draft.rate / plain.rate)
        probes.earn(1.0)
        spent += 1.0 + rounds * draft.ms
    assert 0.3 * 0.007 * spent < lost < 0.007 * spent + 5


def test_a_kind_that_was_never_run_is_tried_at_once() -> None:
    probes = Probes()
    plain, draft = Plan(PLAIN, 1, 1.0, 1.0), Plan(Arm((3, 2), 6), 1, 9.0, 0.9)
    assert probes.rounds(plain, draft, 1.0) > 3
    assert probes.rounds(plain, draft, 1.0) == 0
    assert probes.rounds(plain._replace(batch=16), draft._replace(batch=16), 1.0) == 0


def test_a_probe_that_pays_goes_on_until_it_does_not() -> None:
    """Drafting comes to pay while plain decoding is in use: once it is tried, it stays."""
    world = World(machine(0.9, 1.5), 0.9)
    policy = made(world)
    world.run(policy, 4, 300)
    assert policy.plan.arm == PLAIN
    world.real = machine(0.02, 0.05)
    world.run(policy, 4, 1500)
    assert policy.plan.arm.shape is not None
    assert world.run(policy, 4, 200) > 1.3 * world.run(None, 4, 200)
