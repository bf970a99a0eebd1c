"""`v4tree bench_compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from trtllm_v4tree.cli.output import print_json, printable, stderr

if TYPE_CHECKING:
    from trtllm_v4tree.bench.changes import Change
    from trtllm_v4tree.bench.stats import Estimate

BEFORE = "results.json of a `v4tree bench` before a change, or its directory."
AFTER = "The same after the change."
ONLY = "Print only cells that surely changed."
_WIDTH = 132


def bench_compare(
    before: Annotated[Path, typer.Argument(help=BEFORE)],
    after: Annotated[Path, typer.Argument(help=AFTER)],
    changed: Annotated[bool, typer.Option("--changed", help=ONLY)] = False,
    any_machine: Annotated[bool, typer.Option("--any_machine", help="Compare results of different machines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Set two results of `v4tree bench` side by side: ratio and 95 % interval per cell, sure changes marked."""
    from trtllm_v4tree.bench.changes import changes, check_comparable, load, summary

    old, new = load(before), load(after)
    for warning in check_comparable(old, new, any_machine):
        stderr.print(printable(f"note: {warning}"))
    found = changes(old, new)
    shown = [c for c in found if c.verdict] if changed else found
    if as_json:
        print_json({"summary": summary(found), "cells": [_facts(c) for c in shown]})
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    console.print(_table(shown))
    console.print(summary(found))


def _facts(change: Change) -> dict[str, object]:
    return {
        "dataset": change.dataset,
        "batch": change.batch,
        "speculation": change.speculation,
        "speed": asdict(change.speed),
        "over_plain": change.relative and asdict(change.relative),
        "accepted_length": asdict(change.accepted),
        "verdict": change.verdict,
    }


def _table(shown: list[Change]) -> Table:
    table = Table(title="after over before, 95 % intervals", title_justify="left")
    for name, justify in (("data set", "left"), ("batch", "right"), ("speculation", "left"), ("tokens/s", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("ratio", "over plain", "accepted length"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for c in shown:
        speeds = f"{c.before.tokens_per_second.value:.0f} > {c.after.tokens_per_second.value:.0f}"
        ratios = [_ratio(c.speed), _ratio(c.relative), _ratio(c.accepted)]
        style = {"faster": "green", "slower": "red"}.get(c.verdict)
        table.add_row(c.dataset, str(c.batch), c.speculation, speeds, *ratios, c.verdict, style=style)
    return table


def _ratio(ratio: Estimate | None) -> str:
    """`1.08 (1.02 to 1.13) *`, the asterisk where the interval excludes 1."""
    from trtllm_v4tree.bench.changes import surely
    from trtllm_v4tree.bench.report import estimate_text

    if ratio is None:
        return ""
    return f"{estimate_text(ratio)}{' *' if surely(ratio) else '  '}"
