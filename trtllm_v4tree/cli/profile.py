"""`v4tree profile`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trtllm_v4tree.cli.output import printable, stderr
from trtllm_v4tree.errors import RequestError, V4TreeError

if TYPE_CHECKING:
    from trtllm_v4tree.bench.profile import Overhead, PhaseRow
    from trtllm_v4tree.bench.tracer import Event
    from trtllm_v4tree.llm import LLM

_CHILD = "V4TREE_PROFILE_CHILD"
EVENTS = "events.json"
SPECULATION = "One or several of none, sN_kK_dD, separated by commas."
DATASET = "NAME=PATH[:FIELD]; without it, made-up token ids."
NSYS = "auto uses Nsight Systems if `nsys` is on PATH and `nvtx` installed; off is the built-in timer."


def profile(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Table, picture and trace go here.")],
    speculation: Annotated[str, typer.Option("--speculation", help=SPECULATION)] = "none,s5_k1_d6,s3_k2_d6",
    batch_size: Annotated[int, typer.Option("--batch_size", help="Sequences together.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="New tokens per sequence.", min=2)] = 64,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs per speculation, traced and untraced each.", min=1)
    ] = 3,
    dataset: Annotated[str | None, typer.Option("--dataset", help=DATASET)] = None,
    nsys: Annotated[str, typer.Option("--nsys", help=NSYS)] = "auto",
    threads: Annotated[int, typer.Option("--threads", help="Threads of the engine; 0 is all cores.")] = 0,
) -> None:
    """Show where the time of a round goes: median, p99 and share of every phase, as a table, a picture and a trace."""
    from trtllm_v4tree import LLM
    from trtllm_v4tree.bench.report import check_installed
    from trtllm_v4tree.llm import check_engine

    if nsys not in ("auto", "off"):
        raise RequestError(f"--nsys is {nsys[:20]!r}: give auto or off.")
    check_installed()
    names = [name.strip() for name in speculation.split(",") if name.strip()] or ["none"]
    for name in names:
        check_engine(engine_dir, name)
    _make(output_dir)
    if nsys == "auto" and _under_nsys(output_dir):
        return
    llm = LLM(engine_dir, threads=threads)
    prompts = _prompts(llm, dataset, batch_size, max_tokens)
    for name in names:
        llm.set_speculation(name)
    _measure(llm, names, prompts, max_tokens, repeats, output_dir)


def _make(output_dir: Path) -> None:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"output_dir {output_dir} cannot be made ({error.strerror}): give another directory."
        ) from None


def _measure(
    llm: LLM, names: list[str], prompts: list[list[int]], max_tokens: int, repeats: int, output_dir: Path
) -> None:
    from trtllm_v4tree.bench.profile import profile as run

    events, overhead = run(llm, names, prompts, max_tokens, repeats)
    if os.environ.get(_CHILD):
        (output_dir / EVENTS).write_text(
            json.dumps({"overhead": asdict(overhead), "events": [asdict(e) for e in events]})
        )
        return
    _publish(events, overhead, "built-in timer", output_dir)


def _under_nsys(output_dir: Path) -> bool:
    """Runs this command again below nsys and publishes what its report says; False where nsys cannot be used."""
    from trtllm_v4tree.bench import nsys
    from trtllm_v4tree.bench.tracer import has_nvtx

    if nsys.find() is None or not has_nvtx():
        missing = "nsys is not on PATH" if nsys.find() is None else "the package nvtx is not installed"
        stderr.print(f"{missing}: using the built-in timer.")
        return False
    arguments = [*sys.argv[1:], "--nsys", "off"]
    command = [sys.executable, "-m", "trtllm_v4tree.cli.main", *arguments]
    report = output_dir / "profile"
    nsys.record(command, report, {_CHILD: "1"})
    try:
        events, source = nsys.events(nsys.export(report)), "Nsight Systems (NVTX ranges)"
        overhead = _saved(output_dir)[1]
    except V4TreeError as error:
        stderr.print(f"{printable(str(error))} Using the built-in timer's figures of that run.")
        (events, overhead), source = _saved(output_dir), "built-in timer (under nsys)"
    else:
        events = _counted(events, _saved(output_dir)[0])
    (output_dir / EVENTS).unlink(missing_ok=True)
    _publish(events, overhead, source, output_dir)
    return True


def _counted(traced: list[Event], timed: list[Event]) -> list[Event]:
    """The last ranges of a trace, as many per speculation as the timer counted: warm-up runs come first and are left out."""
    from collections import Counter

    left = Counter(e.speculation for e in timed)
    kept = []
    for event in reversed(traced):
        if left[event.speculation] > 0:
            left[event.speculation] -= 1
            kept.append(event)
    return kept[::-1]


def _saved(output_dir: Path) -> tuple[list[Event], Overhead]:
    from trtllm_v4tree.bench.profile import Overhead
    from trtllm_v4tree.bench.stats import Estimate
    from trtllm_v4tree.bench.tracer import Event

    data = json.loads((output_dir / EVENTS).read_text())
    overhead = data["overhead"]
    return [Event(**e) for e in data["events"]], Overhead(**{**overhead, "compared": Estimate(**overhead["compared"])})


def _publish(events: list[Event], overhead: Overhead, source: str, output_dir: Path) -> None:
    """profile.json, profile.png and the table on stdout."""
    from trtllm_v4tree.bench.figures import styled
    from trtllm_v4tree.bench.machine import machine, versions
    from trtllm_v4tree.bench.profile import table
    from trtllm_v4tree.bench.profile_figure import phases
    from trtllm_v4tree.bench.report import rendered
    from trtllm_v4tree.bench.results import write_whole

    rows = table(events)
    data = {
        "source": source, "machine": machine(), "versions": versions(), "command": ["v4tree", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d %H:%M"), "overhead": asdict(overhead), "phases": [asdict(r) for r in rows],
    }  # fmt: skip
    write_whole(output_dir / "profile.json", json.dumps(data, indent=1).encode())
    with styled():
        write_whole(output_dir / "profile.png", rendered(phases, rows)[0])
    Console().print(_shown(rows, source))
    stderr.print(_overhead_text(overhead))
    stderr.print(f"{output_dir / 'profile.png'}, profile.json")


def _overhead_text(overhead: Overhead) -> str:
    c = overhead.compared
    return (
        f"tracing costs {overhead.range_us:.2f} us a range, {overhead.counted:.2%} of the time by count; "
        f"traced against untraced runs {c.value:+.1%} (95 % {c.low:+.1%} to {c.high:+.1%})"
    )


def _shown(rows: list[PhaseRow], source: str) -> Table:
    shown = Table(title=f"phases, {source}", title_justify="left")
    for name in ("speculation", "phase"):
        shown.add_column(name)
    for name in ("ranges", "median ms", "p99 ms", "share", "batch", "nodes"):
        shown.add_column(name, justify="right")
    for r in rows:
        shown.add_row(
            r.speculation,
            r.phase,
            str(r.count),
            f"{r.median_ms:.3f}",
            f"{r.p99_ms:.3f}",
            f"{r.share:.1%}",
            f"{r.batch:.1f}",
            f"{r.nodes:.1f}",
        )
    return shown


def _prompts(llm: LLM, dataset: str | None, batch: int, max_tokens: int) -> list[list[int]]:
    """`batch` prompts of a data set in the chat format, or made-up ones of 64 tokens; cut to leave room for max_tokens."""
    sizes = llm.manifest.sizes
    if batch > sizes.max_batch_size:
        raise RequestError(
            f"--batch_size {batch} is more than this engine's {sizes.max_batch_size}: give less or build with a larger --max_batch_size."
        )
    room = sizes.max_seq_len - max_tokens
    if room < 1:
        raise RequestError(
            f"--max_tokens {max_tokens} leaves no room for a prompt within {sizes.max_seq_len}: give less."
        )
    found = _from_dataset(llm, dataset, batch) if dataset else _made_up(llm, batch)
    return [found[i % len(found)][:room] for i in range(batch)]


def _from_dataset(llm: LLM, dataset: str, batch: int) -> list[list[int]]:
    from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts

    return [llm.encode_chat([("user", text)]) for text in load_prompts(DatasetSpec.parse(dataset), batch)]


def _made_up(llm: LLM, batch: int) -> list[list[int]]:
    vocabulary: Any = llm.manifest.config.vocab_size
    return [[(17 * i + 31 * j + i * j) % vocabulary for j in range(64)] for i in range(1, batch + 1)]
