"""Tokens per second of plain, linear and tree decoding on published hardware, from a roofline and measured accepted lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_v4tree.bench import paper
from trtllm_v4tree.bench.results import Results, read_results
from trtllm_v4tree.bench.roofline import Roofline
from trtllm_v4tree.bench.stats import mean_of
from trtllm_v4tree.errors import InputError
from trtllm_v4tree.runtime.tree import parse_speculation

PAPER_TREE = "s3_k2_d8"


@dataclass(frozen=True)
class Accepted:
    """Accepted lengths of one data set at one budget: of the chain and of a tree by name."""

    dataset: str
    budget: int
    tree_name: str
    linear: float
    tree: float


@dataclass(frozen=True)
class Prediction:
    """Tokens per second at one batch size, over all sequences."""

    dataset: str
    batch: int
    budget: int
    tree_name: str
    plain: float
    linear: float
    tree: float

    @property
    def tree_over_linear(self) -> float:
        return self.tree / self.linear

    @property
    def tree_over_plain(self) -> float:
        return self.tree / self.plain


def from_paper() -> list[Accepted]:
    """The paper's accepted lengths at D=8; the tree's shape there is taken to be s3_k2, as in its best cell."""
    return [Accepted(d, 8, PAPER_TREE, linear, tree) for d, (linear, tree) in paper.ACCEPTED_D8.items()]


def from_results(path: Path) -> list[Accepted]:
    """The accepted lengths of a `results.json`; InputError for a file that is none, or has no trees."""
    try:
        results: Results = read_results(path)
        found = [
            Accepted(g.dataset, g.budget, g.speculation, g.linear.value, g.tree.value) for g in results.fixed_gains()
        ]
    except OSError as error:
        raise InputError(
            f"acceptance {path} cannot be read ({error.strerror}): give the results.json of `v4tree bench`."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise InputError(f"acceptance {path} is no results.json of `v4tree bench` ({error}): run it first.") from None
    if not found:
        raise InputError(f"acceptance {path} has no tree beside a chain: run `v4tree bench` with --shapes.")
    return found


def predict(roofline: Roofline, accepted: Sequence[Accepted], batch_sizes: Sequence[int]) -> list[Prediction]:
    return [_one(roofline, a, batch) for a in accepted for batch in batch_sizes]


def _one(roofline: Roofline, a: Accepted, batch: int) -> Prediction:
    spec = parse_speculation(a.tree_name)
    assert spec is not None
    linear = roofline.round(batch, a.budget, a.budget - 1, 1, a.linear)
    tree = roofline.round(batch, a.budget, spec.steps, spec.topk, a.tree)
    return Prediction(
        a.dataset,
        batch,
        a.budget,
        a.tree_name,
        batch / roofline.plain(batch),
        batch * a.linear / linear,
        batch * a.tree / tree,
    )


def comparison(predictions: Sequence[Prediction], measured: bool) -> list[str]:
    """What the prediction says beside the paper's throughput figures, and why the two differ."""
    budgets = sorted({p.budget for p in predictions})
    means = {d: mean_of([p.tree_over_linear for p in predictions if p.budget == d]) for d in budgets}
    best = max(predictions, key=lambda p: p.tree_over_linear)
    source = (
        "accepted lengths measured on the engine of --acceptance, another model"
        if measured
        else "the paper's accepted lengths at D=8"
    )
    lines = [
        f"From {source}: mean tree/linear " + ", ".join(f"{m:.3f} at D={d}" for d, m in means.items()) + ".",
        f"The paper measured about 1 at D=5, 1.08 to 1.10 from D=6, at best {paper.BEST_THROUGHPUT} ({paper.BEST_CELL}); "
        f"best predicted {best.tree_over_linear:.3f} ({best.dataset}, {best.tree_name}, batch {best.batch}).",
    ]
    too_high = [f"D={d} by {m / _published(d) - 1:+.1%}" for d, m in means.items() if abs(m / _published(d) - 1) > 0.02]
    if too_high:
        lines.append(
            f"Prediction less paper: {', '.join(too_high)}. A roofline charges a chain for each of its D-1 draft steps and a tree only for its "
            "levels; it does not charge a tree for masks, gathers by node ids, less regular kernels and host work, so it leans to the tree."
        )
    return lines


def _published(budget: int) -> float:
    """Middle of the paper's range of tree/linear."""
    return 1.0 if budget <= 5 else sum(paper.THROUGHPUT_FROM_D6) / 2
