"""From samples to results: one row per cell, gains per data set and budget, acceptance by depth and rank; JSON and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_v4tree.bench.measure import Ranks, Sample
from trtllm_v4tree.bench.plan import PLAIN, GridPlan
from trtllm_v4tree.bench.samples import DiskError, latest
from trtllm_v4tree.bench.stats import Estimate, median, ratio_of_sums, relative_gain

DECODE_PHASES = ("draft", "verify", "accept", "commit", "host")


@dataclass(frozen=True)
class Cell:
    """One speculation at one data set and batch size.

    tokens_per_second: while the batch is full; run_tokens_per_second: to the end of the last sequence. to_plain, to_linear:
    ratio of the former within a block. phases: milliseconds per round. same_text: share of prompts whose token ids are
    those of plain decoding in the same block.
    """

    dataset: str
    batch: int
    kind: str
    budget: int
    speculation: str
    blocks: int
    tokens_per_second: Estimate
    run_tokens_per_second: Estimate
    accepted_length: Estimate
    round_ms: Estimate
    to_plain: Estimate | None
    to_linear: Estimate | None
    run_to_linear: Estimate | None
    phases: dict[str, float]
    same_text: float


@dataclass(frozen=True)
class Gain:
    """Accepted length over all batch sizes, of a tree against the chain of the same budget, the prompts paired."""

    dataset: str
    budget: int
    speculation: str
    fixed: bool
    linear: Estimate
    tree: Estimate
    gain: Estimate


@dataclass(frozen=True)
class Acceptance:
    """Children met and followed by depth and rank, over all batch sizes; `walks` is the number of verify passes."""

    dataset: str
    speculation: str
    walks: int
    offered: Ranks
    accepted: Ranks


@dataclass(frozen=True)
class Results:
    """All that a report draws. `about` says with what it was measured; `batch_spread` is the most that an accepted length moves
    between batch sizes over the same prompts (None where no prompt was measured at two sizes)."""

    about: dict[str, Any]
    complete: bool
    datasets: list[str]
    budgets: list[int]
    batch_sizes: list[int]
    cells: list[Cell]
    gains: list[Gain]
    acceptance: list[Acceptance]
    batch_spread: float | None

    def cell(self, dataset: str, batch: int, speculation: str) -> Cell | None:
        return next(
            (c for c in self.cells if (c.dataset, c.batch, c.speculation) == (dataset, batch, speculation)), None
        )

    def fixed_gains(self) -> list[Gain]:
        return [g for g in self.gains if g.fixed]

    def fixed_name(self, budget: int) -> str | None:
        return next((g.speculation for g in self.gains if g.fixed and g.budget == budget), None)

    def fixed_cells(self) -> list[Cell]:
        """Cells of the tree fixed before looking, one per data set, budget and batch size."""
        names = {g.speculation for g in self.gains if g.fixed}
        return [c for c in self.cells if c.kind == "tree" and c.speculation in names]

    def others(self) -> list[str]:
        """Speculations that are neither plain nor chain nor tree of the grid: `auto` and the like."""
        return list(dict.fromkeys(c.speculation for c in self.cells if c.kind == "other"))

    def share_of_fastest(self, cell: Cell) -> float | None:
        """Speed over that of the fastest of plain, chains and trees at the same data set and batch size, known only afterwards."""
        same = [
            c for c in self.cells if (c.dataset, c.batch) == (cell.dataset, cell.batch) and c.kind in ("linear", "tree")
        ]
        best = max([1.0, *(c.to_plain.value for c in same if c.to_plain)])
        return cell.to_plain.value / best if cell.to_plain else None

    def to_dict(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def summarise(samples: Iterable[Sample], plan: GridPlan, about: dict[str, Any], complete: bool) -> Results:
    """Results of all blocks in which every speculation was measured."""
    kept = _whole_blocks(latest(samples), plan)
    batches = [b for b in plan.batch_sizes if any(s.batch == b for s in kept)]
    datasets = [d for d in plan.datasets if any(s.dataset == d for s in kept)]
    cells = [
        _cell(group, kept, plan)
        for dataset, batch, name in itertools.product(datasets, batches, plan.speculations())
        if (group := _select(kept, dataset, batch, name))
    ]
    gains = [
        _gain(kept, plan, d, budget, tree) for d in datasets for budget in plan.budgets for tree in plan.trees(budget)
    ]
    acceptance = [_acceptance(kept, d, name) for d in datasets for name in plan.speculations() if name != PLAIN]
    spread = _batch_spread(kept, plan, datasets, batches)
    return Results(about, complete, datasets, list(plan.budgets), batches, cells, gains, acceptance, spread)


def _whole_blocks(samples: Sequence[Sample], plan: GridPlan) -> list[Sample]:
    names = plan.speculations()
    have: dict[tuple[str, int, int], set[str]] = {}
    for s in samples:
        have.setdefault((s.dataset, s.batch, s.block), set()).add(s.speculation)
    return [s for s in samples if have[s.dataset, s.batch, s.block].issuperset(names)]


def _select(samples: Sequence[Sample], dataset: str, batch: int | None, name: str) -> list[Sample]:
    chosen = [
        s for s in samples if s.dataset == dataset and s.speculation == name and (batch is None or s.batch == batch)
    ]
    return sorted(chosen, key=lambda s: (s.batch, s.block))


def _cell(group: list[Sample], samples: Sequence[Sample], plan: GridPlan) -> Cell:
    first = group[0]
    role = plan.role(first.speculation)
    plain = _select(samples, first.dataset, first.batch, PLAIN)
    chain = plan.linear(role.budget) if role.budget in plan.budgets and role.kind != "linear" else None
    linear = _select(samples, first.dataset, first.batch, chain) if chain else []
    emitted, rounds = _by_prompt(group)
    return Cell(
        dataset=first.dataset,
        batch=first.batch,
        kind=role.kind,
        budget=role.budget,
        speculation=first.speculation,
        blocks=len(group),
        tokens_per_second=median([s.full_speed for s in group]),
        run_tokens_per_second=median([s.run_speed for s in group]),
        accepted_length=ratio_of_sums(emitted, rounds),
        round_ms=median([1000 * s.full_seconds / s.full_rounds for s in group]),
        to_plain=_ratio(group, plain, "full_speed") if role.kind != "plain" else None,
        to_linear=_ratio(group, linear, "full_speed"),
        run_to_linear=_ratio(group, linear, "run_speed"),
        phases=_phases(group),
        same_text=_same_text(group, plain),
    )


def _ratio(group: Sequence[Sample], base: Sequence[Sample], speed: str) -> Estimate | None:
    """Median over blocks of the ratio of speeds within a block."""
    if not base:
        return None
    return median([getattr(a, speed) / getattr(b, speed) for a, b in zip(group, base, strict=True)])


def _by_prompt(group: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """(emitted, rounds) by prompt, summed over blocks and batch sizes, prompts in rising order."""
    sums: dict[int, list[int]] = {}
    for s in group:
        for prompt, emitted, rounds in zip(s.prompts, s.emitted, s.rounds, strict=True):
            total = sums.setdefault(prompt, [0, 0])
            total[0] += emitted
            total[1] += rounds
    ordered = [sums[p] for p in sorted(sums)]
    return [e for e, _ in ordered], [r for _, r in ordered]


def _phases(group: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds per round by phase: the shares of the whole run times the round while the batch is full."""
    seconds = {p: sum(s.phases[p] for s in group) for p in DECODE_PHASES}
    total = sum(seconds.values()) or 1.0
    round_ms = 1000 * sum(s.full_seconds for s in group) / sum(s.full_rounds for s in group)
    return {p: round_ms * seconds[p] / total for p in DECODE_PHASES}


def _same_text(group: Sequence[Sample], plain: Sequence[Sample]) -> float:
    pairs = [a == b for s, p in zip(group, plain, strict=True) for a, b in zip(s.digests, p.digests, strict=True)]
    return float(np.mean(pairs))


def _gain(samples: Sequence[Sample], plan: GridPlan, dataset: str, budget: int, tree: str) -> Gain:
    of_tree = _by_prompt(_select(samples, dataset, None, tree))
    of_linear = _by_prompt(_select(samples, dataset, None, plan.linear(budget)))
    return Gain(
        dataset, budget, tree, tree == plan.fixed_tree(budget),
        ratio_of_sums(*of_linear), ratio_of_sums(*of_tree), relative_gain(of_tree, of_linear),
    )  # fmt: skip


def _acceptance(samples: Sequence[Sample], dataset: str, name: str) -> Acceptance:
    group = _select(samples, dataset, None, name)
    walks = sum(sum(s.rounds) for s in group)
    return Acceptance(dataset, name, walks, _sum_ranks(s.offered for s in group), _sum_ranks(s.accepted for s in group))


def _batch_spread(samples: Sequence[Sample], plan: GridPlan, datasets: list[str], batches: list[int]) -> float | None:
    """Over all chains and trees; a speculation that adapts itself is left out."""
    names = [n for n in plan.speculations() if plan.role(n).kind in ("linear", "tree")]
    spreads = [_spread([_select(samples, d, b, n) for b in batches]) for d in datasets for n in names]
    return max((s for s in spreads if s is not None), default=None)


def _spread(groups: Sequence[Sequence[Sample]]) -> float | None:
    """Highest less lowest accepted length of groups, each prompt that all of them have counted once in each."""
    rates = [_per_pass(group) for group in groups]
    common = set.intersection(*(set(r) for r in rates)) if rates else set()
    if len(groups) < 2 or not common:
        return None
    lengths = [sum(r[p][0] for p in common) / sum(r[p][1] for p in common) for r in rates]
    return max(lengths) - min(lengths)


def _per_pass(group: Sequence[Sample]) -> dict[int, tuple[float, float]]:
    """Mean (emitted, rounds) of each prompt over its blocks."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for s in group:
        for prompt, emitted, rounds in zip(s.prompts, s.emitted, s.rounds, strict=True):
            seen.setdefault(prompt, []).append((emitted, rounds))
    return {p: (float(np.mean([e for e, _ in x])), float(np.mean([r for _, r in x]))) for p, x in seen.items()}


def _sum_ranks(tables: Iterable[Ranks]) -> Ranks:
    total: Ranks = []
    for table in tables:
        for depth, counts in enumerate(table):
            if depth == len(total):
                total.append([])
            row = total[depth]
            row += [0] * (len(counts) - len(row))
            for rank, count in enumerate(counts):
                row[rank] += count
    return total


# ------------------------------------------------------------------ files


def write_results(results: Results, directory: Path) -> None:
    """`results.json` and `results.csv`, each replaced whole; DiskError if they cannot be written."""
    write_whole(directory / "results.json", json.dumps(results.to_dict(), indent=1).encode())
    write_whole(directory / "results.csv", _csv(results.cells).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file at once, or leaves it as it was and raises DiskError."""
    scratch = path.with_name(path.name + ".part")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DiskError(
            f"{path} cannot be written ({error.strerror or error}): the samples are kept; free space and resume."
        ) from error


def read_results(path: Path) -> Results:
    """Results as `write_results` wrote them; raises ValueError, KeyError or TypeError for anything else."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.pop("format") != 1:
        raise ValueError("format is not 1")
    cells = [Cell(**{k: _estimate(k, v) for k, v in c.items()}) for c in data.pop("cells")]
    gains = [Gain(**{k: _estimate(k, v) for k, v in g.items()}) for g in data.pop("gains")]
    acceptance = [Acceptance(**a) for a in data.pop("acceptance")]
    return Results(cells=cells, gains=gains, acceptance=acceptance, **data)


def _estimate(name: str, value: Any) -> Any:
    return Estimate(**value) if isinstance(value, dict) and name != "phases" else value


def _csv(cells: Sequence[Cell]) -> str:
    """One line per cell, estimates as value, low and high."""
    out = io.StringIO()
    rows = [_flat(c) for c in cells]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(cell).items():
        if name == "phases":
            row.update({f"{p}_ms": round(ms, 4) for p, ms in value.items()})
        elif name in _ESTIMATES:
            ends = value or {"value": "", "low": "", "high": ""}
            row.update({name if end == "value" else f"{name}_{end}": _rounded(x) for end, x in ends.items()})
        else:
            row[name] = value
    return row


_ESTIMATES = {
    "tokens_per_second",
    "run_tokens_per_second",
    "accepted_length",
    "round_ms",
    "to_plain",
    "to_linear",
    "run_to_linear",
}


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
