"""Two results of `v4tree bench` set side by side: ratio and 95 % interval of every cell, and what forbids the comparison.

Pure functions of `Results`; only `load` touches a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_v4tree.bench.results import Cell, Results, read_results
from trtllm_v4tree.bench.stats import Estimate
from trtllm_v4tree.errors import InputError

FILE = "results.json"
BY_CHANCE = 0.05
"""Share of unchanged cells whose 95 % interval excludes 1 all the same."""


class ComparisonError(InputError):
    """Results that cannot be read, or that do not answer the same question."""


@dataclass(frozen=True)
class Change:
    """A cell that both results have; ratios are after / before. `relative` is of the speed over plain decoding of its own run,
    in which a machine that was slower that day cancels; None for plain decoding itself."""

    dataset: str
    batch: int
    speculation: str
    before: Cell
    after: Cell
    speed: Estimate
    relative: Estimate | None
    accepted: Estimate

    @property
    def verdict(self) -> str:
        return "faster" if surely(self.speed) > 0 else "slower" if surely(self.speed) < 0 else ""


def load(path: Path) -> Results:
    """Results of a file or of the directory that holds `results.json`; ComparisonError says what is wrong with it."""
    file = path / FILE if path.is_dir() else path
    try:
        return read_results(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ComparisonError(f"{file} is no result of v4tree bench ({reason}): give its results.json.") from error


def check_comparable(before: Results, after: Results, any_machine: bool = False) -> list[str]:
    """What a reader must know of two results that can be compared; ComparisonError if they cannot."""
    for name, mine, theirs in _questions(before, after):
        if mine != theirs:
            raise ComparisonError(
                f"the results differ in {name} ({mine} and {theirs}): accepted lengths and speeds of other work say nothing "
                "about a change; measure both with the same data sets and options."
            )
    warnings = []
    machines = [
        f"{r.about['machine'].get('processor')}, {r.about['machine'].get('cores')} cores" for r in (before, after)
    ]
    if machines[0] != machines[1]:
        if not any_machine:
            raise ComparisonError(
                f"the results are of different machines ({machines[0]}; {machines[1]}): measure both on one, or give "
                "--any_machine to see the ratios all the same."
            )
        warnings.append(f"different machines: {machines[0]}; {machines[1]}.")
    return warnings + _cautions(before, after)


def changes(before: Results, after: Results) -> list[Change]:
    """Every cell that both have, in the order of the second."""
    old = {(c.dataset, c.batch, c.speculation): c for c in before.cells}
    pairs = [(old.get((c.dataset, c.batch, c.speculation)), c) for c in after.cells]
    return [_change(a, b) for a, b in pairs if a is not None]


def summary(found: Sequence[Change]) -> str:
    """How many cells changed, against how many would by chance."""
    faster, slower = (sum(c.verdict == v for c in found) for v in ("faster", "slower"))
    sized = sum(c.speed.has_interval for c in found)
    middle = math.exp(sum(math.log(c.speed.value) for c in found) / len(found)) if found else 1.0
    return (
        f"{len(found)} cells in both; geometric mean of the speed ratios {middle:.3f}; {faster} surely faster, {slower} surely slower "
        f"(about {BY_CHANCE * sized:.0f} of {sized} would be by chance)."
    )


def ratio_of(after: Estimate, before: Estimate) -> Estimate:
    """after / before of two independent estimates; the interval joins theirs on a logarithmic scale."""
    if min(after.low, before.low, after.value, before.value) <= 0:
        return Estimate(after.value / before.value if before.value > 0 else math.nan, -math.inf, math.inf)
    value = math.log(after.value / before.value)
    down = math.hypot(math.log(after.value / after.low), math.log(before.high / before.value))
    up = math.hypot(math.log(after.high / after.value), math.log(before.value / before.low))
    return Estimate(math.exp(value), math.exp(value - down), math.exp(value + up))


def surely(ratio: Estimate) -> int:
    """1 if the interval lies above 1, -1 if below, 0 if it holds 1 or if there is none."""
    if not ratio.has_interval:
        return 0
    return 1 if ratio.low > 1 else -1 if ratio.high < 1 else 0


def _change(before: Cell, after: Cell) -> Change:
    relative = ratio_of(after.to_plain, before.to_plain) if after.to_plain and before.to_plain else None
    return Change(
        after.dataset, after.batch, after.speculation, before, after,
        ratio_of(after.tokens_per_second, before.tokens_per_second),
        relative,
        ratio_of(after.accepted_length, before.accepted_length),
    )  # fmt: skip


def _questions(before: Results, after: Results) -> list[tuple[str, Any, Any]]:
    """What must be equal, as (name, before, after); content of data sets only where both have noted it."""
    shared = set(before.datasets) & set(after.datasets)
    if not shared:
        return [("their data sets", before.datasets, after.datasets)]
    of: list[tuple[str, Callable[[Results], Any]]] = [
        ("the number of prompts", lambda r: r.about["settings"].get("num_prompts")),
        ("the new tokens per prompt", lambda r: r.about["settings"].get("max_tokens")),
    ]
    contents = [r.about.get("data") for r in (before, after)]
    if all(contents):
        for name in sorted(shared):
            of.append((f"the content of {name}", lambda r, name=name: r.about["data"].get(name, "")[:12]))  # type: ignore[misc]
    return [(name, get(before), get(after)) for name, get in of]


def _cautions(before: Results, after: Results) -> list[str]:
    found = []
    for label, results in (("first", before), ("second", after)):
        if not results.complete:
            found.append(f"the {label} run was not finished: its intervals are wider.")
        loads = [load for load in results.about.get("load_average", []) if load is not None]
        cores = results.about["machine"].get("cores") or 1
        if max(loads, default=0.0) > cores + 1:
            found.append(f"the machine had a load of {max(loads):.1f} on {cores} cores during the {label} run.")
    versions = [r.about.get("versions", {}) for r in (before, after)]
    moved = [f"{k} {versions[0].get(k)} to {v}" for k, v in versions[1].items() if versions[0].get(k) != v]
    if moved:
        found.append(f"other versions: {', '.join(moved)}.")
    return found
