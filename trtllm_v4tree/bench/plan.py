"""What a grid measures: which speculations, which prompts in which block, in which order. Pure values; no engine, no clock."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.policies.names import parse_adaptive
from trtllm_v4tree.runtime.tree import parse_speculation

PLAIN = "none"


class Role(NamedTuple):
    """What a speculation stands for in the grid. kind: plain, linear, tree or other; budget is 0 where it has none."""

    kind: str
    budget: int


@dataclass(frozen=True)
class Unit:
    """One block of one cell group: `prompts` (indices) of a data set decoded together once per speculation."""

    dataset: str
    batch: int
    block: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class GridPlan:
    """The grid: every data set x batch size x speculation, in blocks of `batch` prompts.

    `shapes` are (steps, topk) of the trees; the first is the one fixed before looking. `others` are further speculations
    by name. A cell has at least `min_blocks` blocks, so that a median over blocks has an interval.
    """

    datasets: tuple[str, ...]
    budgets: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    others: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    min_blocks: int

    def linear(self, budget: int) -> str:
        return f"s{budget - 1}_k1_d{budget}"

    def trees(self, budget: int) -> list[str]:
        """Tree shapes that draft enough candidates for this budget, the fixed one first."""
        enough = [(s, k) for s, k in self.shapes if budget - 1 <= k + (s - 1) * k * k]
        return [f"s{s}_k{k}_d{budget}" for s, k in enough]

    def speculations(self) -> list[str]:
        """Every configuration of the grid once: plain, then per budget the chain and the trees, then the others."""
        per_budget = [name for d in self.budgets for name in (self.linear(d), *self.trees(d))]
        return list(dict.fromkeys((PLAIN, *per_budget, *self.others)))

    def role(self, name: str) -> Role:
        if name == PLAIN:
            return Role("plain", 0)
        for budget in self.budgets:
            if name == self.linear(budget):
                return Role("linear", budget)
            if name in self.trees(budget):
                return Role("tree", budget)
        return Role("other", _budget_of(name))

    def fixed_tree(self, budget: int) -> str | None:
        """The tree fixed before looking: the first shape that fits."""
        return next(iter(self.trees(budget)), None)

    def units(self) -> list[Unit]:
        """All blocks: first one of every cell, then so that whenever one stops, every cell is about equally far."""
        placed = [
            (block / count, Unit(dataset, batch, block, self._prompts(batch, block)))
            for batch in self.batch_sizes
            for count in [self.blocks(batch)]
            for dataset in self.datasets
            for block in range(count)
        ]
        return [unit for _, unit in sorted(placed, key=lambda pair: pair[0])]

    def blocks(self, batch: int) -> int:
        return max(self.min_blocks, -(-self.num_prompts // batch))

    def order(self, unit: Unit) -> list[str]:
        """The unit's speculations, rotated from block to block and turned round in every second: A B C, B A C, ..."""
        names = self.speculations()
        start = unit.block % len(names)
        turned = names[start:] + names[:start]
        return turned if unit.block % 2 == 0 else turned[::-1]

    def _prompts(self, batch: int, block: int) -> tuple[int, ...]:
        """`batch` prompts of a block; the list is gone through again where it ends."""
        return tuple((block * batch + i) % self.num_prompts for i in range(batch))


def parse_shape(text: str) -> tuple[int, int]:
    """`s3_k2` -> (3, 2); RequestError for anything else."""
    spec = None
    with contextlib.suppress(RequestError):
        spec = parse_speculation(f"{text}_d2")
    if spec is None:
        raise RequestError(f"shape {text!r} is unknown: give sN_kK with N and K from 1, for example s3_k2.")
    return spec.steps, spec.topk


def check_budgets(shapes: Sequence[tuple[int, int]], budgets: Sequence[int]) -> None:
    """RequestError for a budget that no shape can fill."""
    for budget in budgets:
        if shapes and not any(budget - 1 <= k + (s - 1) * k * k for s, k in shapes):
            names = ", ".join(f"s{s}_k{k}" for s, k in shapes)
            raise RequestError(f"budget {budget} is more than any of the shapes {names} drafts: give a larger shape.")


def _budget_of(name: str) -> int:
    """Most nodes of a tree: D of `sN_kK_dD` or `NAME_dD`, 0 where a name has none."""
    adaptive = parse_adaptive(name)
    if adaptive is not None:
        return adaptive[1] or 0
    try:
        spec = parse_speculation(name)
    except RequestError:
        return 0
    return spec.budget if spec is not None else 0
