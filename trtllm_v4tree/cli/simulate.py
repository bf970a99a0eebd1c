"""`v4tree simulate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_v4tree.cli.output import print_json, printable
from trtllm_v4tree.errors import RequestError

if TYPE_CHECKING:
    from trtllm_v4tree.bench.prediction import Prediction
    from trtllm_v4tree.bench.roofline import Roofline
    from trtllm_v4tree.config import ModelConfig

CONFIG = "flash, pro, or a directory with config.json."
ACCEPTANCE = "results.json of `v4tree bench`; without it, the paper's accepted lengths at D=8."


def simulate(
    config: Annotated[str, typer.Option("--config", help=CONFIG)] = "flash",
    hardware: Annotated[str, typer.Option("--hardware", help="h200x8, b200x8 or rtxpro6000.")] = "h200x8",
    acceptance: Annotated[Path | None, typer.Option("--acceptance", help=ACCEPTANCE)] = None,
    batch_sizes: Annotated[str, typer.Option("--batch_sizes", help="Sequences decoded together.")] = "1,4,16,64",
    context: Annotated[int, typer.Option("--context", help="Tokens of every sequence so far.", min=1)] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Predict tokens/s of plain, linear and tree decoding on published hardware by a roofline; prints what it assumes."""
    from trtllm_v4tree.bench.prediction import comparison, from_paper, from_results, predict
    from trtllm_v4tree.bench.roofline import HARDWARE, Assumptions, Roofline
    from trtllm_v4tree.cli.bench import integers

    if hardware not in HARDWARE:
        raise RequestError(f"--hardware {hardware[:30]!r} is unknown: give {', '.join(HARDWARE)}.")
    batches = integers("--batch_sizes", batch_sizes, 1)
    accepted = from_results(acceptance) if acceptance is not None else from_paper()
    roofline = Roofline(_config(config), HARDWARE[hardware], context, Assumptions())
    predictions = predict(roofline, accepted, batches)
    compared = comparison(predictions, acceptance is not None)
    if as_json:
        print_json(_facts(config, roofline, predictions, compared))
    else:
        _show(config, roofline, predictions, compared)


def _config(name: str) -> ModelConfig:
    from trtllm_v4tree.bench.published import NAMES, published
    from trtllm_v4tree.config import ModelConfig

    return published(name) if name in NAMES else ModelConfig.from_pretrained(Path(name))


def _memory(roofline: Roofline) -> str:
    """What the model takes, and whether it fits."""
    from trtllm_v4tree.bench.footprint import cache_bytes, checkpoint_bytes

    cache, hardware = cache_bytes(roofline.config), roofline.hardware
    weights, room = checkpoint_bytes(roofline.config) / 1e9, hardware.devices * hardware.memory / 1e9
    fits = (
        "fits" if not roofline.spilled else f"does not fit: {roofline.spilled:.0%} of the experts stay in host memory"
    )
    return (
        f"weights {weights:,.1f} GB on {room:,.0f} GB, which {fits}; cache {cache.per_token:,.2f} bytes a token, "
        f"{(cache.window + cache.state) / 1e6:.2f} MB a sequence"
    )


def _facts(config: str, roofline: Roofline, predictions: list[Prediction], compared: list[str]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "config": config,
        "hardware": asdict(roofline.hardware),
        "context": roofline.context,
        "memory": _memory(roofline),
        "assumptions": asdict(roofline.given),
        "assumptions_text": roofline.given.lines(roofline.hardware),
        "predictions": [
            asdict(p) | {"tree_over_linear": p.tree_over_linear, "tree_over_plain": p.tree_over_plain}
            for p in predictions
        ],
        "comparison": compared,
    }


def _show(config: str, roofline: Roofline, predictions: list[Prediction], compared: list[str]) -> None:
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(printable(config))}, {roofline.hardware.name}, context {roofline.context}: a prediction, not a measurement[/]"
    )
    console.print(_memory(roofline))
    console.print("Assumptions:")
    for line in roofline.given.lines(roofline.hardware):
        console.print(f"  - {line}")
    console.print(_table(predictions))
    for line in compared:
        console.print(escape(line))


def _table(predictions: list[Prediction]) -> Table:
    table = Table()
    table.add_column("data set")
    for name in ("batch", "D", "tree", "plain", "linear", "tree tokens/s", "tree/plain", "tree/linear"):
        table.add_column(name, justify="right")
    for p in predictions:
        table.add_row(
            escape(printable(p.dataset)), str(p.batch), str(p.budget), p.tree_name, f"{p.plain:,.0f}", f"{p.linear:,.0f}", f"{p.tree:,.0f}",
            f"{p.tree_over_plain:.2f}", f"{p.tree_over_linear:.3f}",
        )  # fmt: skip
    return table
