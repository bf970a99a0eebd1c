"""Samples of a made-up engine: acceptance falls with depth, a second child catches some of what the first one misses."""

from __future__ import annotations

import numpy as np

from trtllm_v4tree.bench.measure import Ranks, Sample
from trtllm_v4tree.bench.plan import PLAIN, GridPlan, Unit
from trtllm_v4tree.runtime.tree import parse_speculation

PREDICTABLE = {"gsm8k": 0.72, "mbpp": 0.66, "sharegpt": 0.58}
PHASES = ("host", "draft", "verify", "accept", "commit", "prefill")


def full_plan(**changes: object) -> GridPlan:
    """The default grid, or a part of it."""
    values = {
        "datasets": tuple(PREDICTABLE),
        "budgets": (5, 6, 7, 8),
        "batch_sizes": (1, 2, 4, 8, 16, 32, 64),
        "shapes": ((3, 2), (4, 3)),
        "others": (),
        "num_prompts": 12,
        "max_tokens": 128,
        "min_blocks": 4,
    }
    return GridPlan(**(values | changes))  # type: ignore[arg-type]


def samples(plan: GridPlan) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [make_sample(plan, unit, name, rng) for unit in plan.units() for name in plan.speculations()]


def make_sample(plan: GridPlan, unit: Unit, name: str, rng: np.random.Generator) -> Sample:
    length, offered, accepted = _acceptance(name, PREDICTABLE.get(unit.dataset, 0.6))
    tokens = plan.max_tokens - 1
    rounds = [max(1, round(tokens / length * rng.normal(1, 0.03))) for _ in unit.prompts]
    phases = _phases(name, unit.batch)
    step = sum(phases.values()) * rng.normal(1, 0.02)
    seconds = step * max(rounds)
    return Sample(
        dataset=unit.dataset, batch=unit.batch, block=unit.block, speculation=name, prompts=list(unit.prompts),
        tokens=tokens * unit.batch, seconds=seconds,
        full_tokens=round(length * min(rounds) * unit.batch), full_seconds=step * min(rounds), full_rounds=min(rounds),
        rounds=rounds, emitted=[tokens] * unit.batch, offered=_times(offered, sum(rounds)), accepted=_times(accepted, sum(rounds)),
        phases={p: phases.get(p, 0.0) * max(rounds) for p in PHASES}, digests=list(unit.prompts), prefill_seconds=0.1,
    )  # fmt: skip


def _acceptance(name: str, first: float) -> tuple[float, list[list[float]], list[list[float]]]:
    """Expected accepted length; children met and followed per walk, by depth and rank."""
    spec = parse_speculation(name) if name != PLAIN else None
    if spec is None:
        return 1.0, [], []
    depth = min(spec.steps, spec.budget - 1)
    width = 1 if spec.topk == 1 else min(spec.topk, 1 + (spec.budget - 1) // (depth + 1))
    reach, length = 1.0, 1.0
    offered, accepted = [], []
    for level in range(depth):
        chances = [first * 0.75**level * 0.25**rank for rank in range(width)]
        offered.append([reach] * width)
        accepted.append([reach * p for p in chances])
        reach *= sum(chances)
        length += reach
    return length, offered, accepted


def _phases(name: str, batch: int) -> dict[str, float]:
    """Seconds per round by phase: verifying grows with nodes and batch, drafting with steps."""
    spec = parse_speculation(name) if name != PLAIN else None
    nodes, steps = (1, 0) if spec is None else (spec.budget, spec.steps)
    return {
        "host": 2e-4 + 1e-5 * batch,
        "draft": 2e-4 * steps * (1 + batch / 16),
        "verify": 2e-3 * (1 + 0.06 * (nodes * batch - 1)),
        "accept": 1e-4 if spec else 2e-5,
        "commit": 2e-4 * (1 + batch / 32),
    }


def _times(table: list[list[float]], walks: int) -> Ranks:
    return [[round(x * walks) for x in row] for row in table]
