"""`v4tree compare`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_v4tree.cli.generate import CHAT, check_one_given, encode
from trtllm_v4tree.cli.output import print_json
from trtllm_v4tree.errors import RequestError

if TYPE_CHECKING:
    from trtllm_v4tree.bench.lockstep import Comparison, Difference, Place
    from trtllm_v4tree.bench.second_opinion import SecondOpinion

REFERENCE = "Engine that decodes; its inputs and states are given to both."
OTHER = "Engine compared with it, of the same checkpoint and limits."
RTOL = "Largest difference allowed, relative to the largest magnitude of an output in a call."
LAYERS = "A line per layer of every scratch output."
POLYGRAPHY = "Ask polygraphy's comparator too (pip install polygraphy)."
DISAGREE = 1


def compare(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help=REFERENCE)],
    other_engine_dir: Annotated[Path, typer.Option("--other_engine_dir", help=OTHER)],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", help=CHAT)] = None,
    prompt_token_ids: Annotated[str | None, typer.Option("--prompt_token_ids", help="Token ids, e.g. 0,2,17.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="Output tokens.")] = 160,
    speculation: Annotated[str, typer.Option("--speculation", help="none, sN_kK_dD, auto or another policy.")] = "none",
    rtol: Annotated[float, typer.Option("--rtol", help=RTOL)] = 1e-4,
    layers: Annotated[bool, typer.Option("--layers", help=LAYERS)] = False,
    polygraphy: Annotated[bool, typer.Option("--polygraphy", help=POLYGRAPHY)] = False,
    threads: Annotated[int, typer.Option("--threads", help="Threads of an engine; 0 is all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> int:
    """Run two engines over the same step inputs of a real decode and compare every output; exit status 1 if they disagree."""
    from trtllm_v4tree import LLM, SamplingParams
    from trtllm_v4tree.bench.lockstep import Comparison, Lockstep
    from trtllm_v4tree.bench.second_opinion import SecondOpinion

    check_one_given(prompt=prompt, chat=chat, prompt_token_ids=prompt_token_ids)
    if not 0 <= rtol < math.inf:
        raise RequestError(f"rtol is {rtol}: give a number from 0, e.g. 1e-4.")
    opinion = SecondOpinion() if polygraphy else None
    llm = LLM(engine_dir, threads=threads)
    comparison = Comparison(llm.manifest.config, opinion.watch if opinion else None)
    llm.engine.executor = Lockstep(
        llm.engine.executor, LLM(other_engine_dir, threads=threads).engine.executor, comparison
    )
    llm.set_speculation(speculation)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for _ in llm.stream(encode(llm, prompt, chat, prompt_token_ids), params):
        pass
    return report(comparison, rtol, opinion, layers, as_json)


def report(comparison: Comparison, rtol: float, opinion: SecondOpinion | None, layers: bool, as_json: bool) -> int:
    """Prints what was found; the exit status."""
    agreed = opinion.agreed(rtol) if opinion is not None else None
    agree = comparison.agrees(rtol) and (agreed is None or agreed[0] == agreed[1])
    if as_json:
        print_json(facts(comparison, rtol, agreed) | {"agree": agree})
    else:
        console = Console(highlight=False)
        console.print(_table(comparison.found if layers else comparison.by_output(), rtol))
        if agreed is not None:
            console.print(f"polygraphy passes {agreed[0]:,} of {agreed[1]:,} outputs")
        console.print(
            f"the engines {'agree' if agree else '[red]disagree[/]'} within {rtol:g} of the largest magnitude"
        )
    return 0 if agree else DISAGREE


def facts(comparison: Comparison, rtol: float, polygraphy: tuple[int, int] | None) -> dict[str, Any]:
    """What `--json` prints; infinite figures as text, which JSON lacks."""
    outputs = [
        place._asdict() | {k: _finite(v) for k, v in dataclasses.asdict(found).items()} | {"agree": found.agrees(rtol)}
        for place, found in comparison.found.items()
    ]
    counted = None if polygraphy is None else {"passed": polygraphy[0], "outputs": polygraphy[1]}
    return {"rtol": rtol, "outputs": outputs, "polygraphy": counted}


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _table(found: Mapping[Place, Difference], rtol: float) -> Table:
    """A section per graph; fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("output", no_wrap=True)
    for column in ("values", "max abs", "max rel", "1-cosine", "|norm-1|"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for graph in dict.fromkeys(place.graph for place in found):
        own = [(place, d) for place, d in found.items() if place.graph == graph]
        table.add_row(f"[bold]{escape(graph)}")
        for place, d in own:
            figures = (d.max_abs, d.max_rel, max(0.0, 1 - d.cosine), abs(d.norm_ratio - 1))
            name = place.output if place.layer is None else f"{place.output} [{place.layer}]"
            table.add_row(f"  {escape(name)}", f"{d.values:,}", *(f"{f:.1e}" for f in figures), _verdict(d, rtol))
    return table


def _verdict(d: Difference, rtol: float) -> str:
    if not d.values:
        return "unseen"
    if d.unequal:
        return f"[red]{d.unequal:,} differ"
    return "agrees" if d.agrees(rtol) else "[red]differs"
