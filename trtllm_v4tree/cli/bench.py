"""`v4tree bench`."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trtllm_v4tree.cli.output import printable, stderr
from trtllm_v4tree.errors import RequestError, V4TreeError

if TYPE_CHECKING:
    from trtllm_v4tree.bench.grid import Grid, Prompts, Tick
    from trtllm_v4tree.bench.plan import GridPlan
    from trtllm_v4tree.bench.samples import SampleFile
    from trtllm_v4tree.llm import LLM

QUICK_SECONDS = 140.0
_FULL = {
    "budgets": "5,6,7,8",
    "batch_sizes": "1,2,4,8,16,32,64",
    "shapes": "s3_k2,s4_k3",
    "num_prompts": 60,
    "max_tokens": 128,
    "policies": "auto,best_first,shared_budget,entropy,recent_length",
}
_QUICK = {
    "budgets": "6,8",
    "batch_sizes": "1,4",
    "shapes": "s3_k2",
    "num_prompts": 12,
    "max_tokens": 64,
    "policies": "auto",
}

DATASET = "NAME=PATH or NAME=PATH:FIELD (gsm8k and mbpp JSON lines, sharegpt JSON, or any JSON lines); may be repeated."
SHAPES = "Tree shapes sN_kK; the first is the one fixed before looking. Default: s3_k2,s4_k3."
POLICIES = (
    "Policies that adapt themselves: auto, best_first, shared_budget, entropy, recent_length, calibrated, each also as NAME_dD; "
    "none leaves them out. Default: the first five."
)
OTHERS = "Further speculations by name, e.g. s2_k2_d4."
MINUTES = "Stop after this long with what has been measured; every cell is then about equally far."
BATCHES = "Batch sizes. Default: 1,2,4,8,16,32,64."


def bench(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    dataset: Annotated[list[str], typer.Option("--dataset", help=DATASET)],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Samples, results and report go here.")],
    budgets: Annotated[str | None, typer.Option("--budgets", help="Verified tokens D. Default: 5,6,7,8.")] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch_sizes", help=BATCHES)] = None,
    shapes: Annotated[str | None, typer.Option("--shapes", help=SHAPES)] = None,
    policies: Annotated[str | None, typer.Option("--policies", help=POLICIES)] = None,
    others: Annotated[str, typer.Option("--others", help=OTHERS)] = "",
    num_prompts: Annotated[int | None, typer.Option("--num_prompts", help="Per data set. Default: 60.", min=1)] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max_tokens", help="New tokens per prompt. Default: 128.", min=4)
    ] = None,
    min_blocks: Annotated[int, typer.Option("--min_blocks", help="Batches per cell at least.", min=1)] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="A useful answer in under 3 minutes.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help=MINUTES, min=0.1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the samples in output_dir.")] = False,
    threads: Annotated[int, typer.Option("--threads", help="Threads of the engine; 0 is all cores.")] = 0,
) -> int:
    """Measure plain, linear and tree decoding over data sets, budgets and batch sizes; write results and a report."""
    from trtllm_v4tree import LLM
    from trtllm_v4tree.bench.grid import Grid, check_fits
    from trtllm_v4tree.bench.report import check_installed
    from trtllm_v4tree.bench.samples import SampleFile

    started = time.monotonic()
    check_installed()
    base = _QUICK if quick else _FULL
    given = {
        "budgets": budgets,
        "batch_sizes": batch_sizes,
        "shapes": shapes,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "policies": policies,
    }
    options = base | {name: value for name, value in given.items() if value is not None}
    llm = LLM(engine_dir, threads=threads)
    if quick and batch_sizes is None:
        options["batch_sizes"] = ",".join(str(b) for b in (1, 4) if b <= llm.manifest.sizes.max_batch_size)
    if policies is None and llm.engine.latency is None:
        options["policies"] = _untimed(str(options["policies"]))
    plan = _plan(dataset, options, others, min_blocks)
    prompts = _prompts(llm, dataset, plan)
    check_fits(llm, plan, prompts)
    file = SampleFile(output_dir, _header(llm, dataset, plan, threads), resume)
    seconds = 60 * minutes if minutes else QUICK_SECONDS if quick else None
    whole = _plan(dataset, _full_for(llm), "", min_blocks) if quick else None
    return _measure(Grid(llm, plan, prompts), file, output_dir, seconds, started, llm, whole)


def _full_for(llm: LLM) -> dict[str, Any]:
    """The options of the full grid as far as this engine goes."""
    sizes = llm.manifest.sizes
    fitting = {
        name: ",".join(v for v in _FULL[name].split(",") if int(v) <= most) or str(most)  # type: ignore[attr-defined]
        for name, most in (("batch_sizes", sizes.max_batch_size), ("budgets", sizes.max_verify_tokens))
    }
    return _FULL | fitting


def _measure(
    grid: Grid,
    file: SampleFile,
    output_dir: Path,
    seconds: float | None,
    started: float,
    llm: LLM,
    whole: GridPlan | None = None,
) -> int:
    """Runs the grid behind a progress bar; whatever ends it, results and report of what there is are written."""
    from trtllm_v4tree.bench.machine import load_average
    from trtllm_v4tree.bench.samples import DiskError

    about = _about(llm, file, grid.plan)
    complete, failure = False, None
    try:
        complete = _run(grid, file, seconds, started, whole)
    except KeyboardInterrupt:
        failure = "interrupted"
    except DiskError as error:
        failure = str(error).partition(":")[0]
    about["load_average"] = [about["load_average"], load_average()]
    about["seconds"] = round(time.monotonic() - started, 1)
    path = _write(file, grid.plan, about, complete, output_dir)
    if failure is not None:
        kept = (
            f"results so far are in {output_dir}" if path else f"{len(file.samples)} samples so far are in {file.path}"
        )
        raise V4TreeError(f"{failure}: {kept}, and --resume goes on from there.")
    return 0


def _run(grid: Grid, file: SampleFile, seconds: float | None, started: float, whole: GridPlan | None) -> bool:
    columns = (
        TextColumn("{task.description:<44.44}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("warming up", total=1.0, left="")
        watch = _Bar(progress, task)
        needed = grid.estimate(file.samples, watch)
        _announce(grid, file, needed, seconds)
        if whole is not None:
            stderr.print(f"The full grid, without --quick, takes about {_duration(grid.estimate_other(whole))}.")
        watch.restart()
        spent = time.monotonic() - started
        return grid.run(file, watch, None if seconds is None else max(1.0, seconds - spent))


class _Bar:
    """A progress bar with the time left from the pace so far; without a terminal, a line now and then."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task
        self.restart()

    def restart(self) -> None:
        self._started = self._said = time.monotonic()

    def __call__(self, tick: Tick) -> None:
        now = time.monotonic()
        left = (now - self._started) * (tick.total - tick.done) / tick.done if tick.done else None
        text = "" if left is None else f"{_duration(left)} left"
        self._progress.update(self._task, description=tick.label, completed=tick.done, total=tick.total, left=text)
        if not stderr.is_terminal and now - self._said > 60:
            self._said = now
            stderr.print(f"{100 * tick.done / tick.total:3.0f} %, {tick.label}, {text}")


def _announce(grid: Grid, file: SampleFile, needed: float, seconds: float | None) -> None:
    plan, missing = grid.plan, grid.missing(file.samples)
    done = "" if not file.samples else f" ({len(file.samples)} samples are there already)"
    stderr.print(
        f"{len(plan.datasets)} data sets x {len(plan.batch_sizes)} batch sizes x {len(plan.speculations())} speculations, "
        f"{plan.num_prompts} prompts of {plan.max_tokens} new tokens: {len(missing)} blocks, about {_duration(needed)}{done}."
    )
    if seconds is not None and needed > seconds:
        stderr.print(f"Stops after {_duration(seconds)}, every cell about equally far.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _write(file: SampleFile, plan: GridPlan, about: dict[str, Any], complete: bool, output_dir: Path) -> Path | None:
    """Results and report; None if nothing was measured or the disk refuses."""
    from trtllm_v4tree.bench.report import write_report
    from trtllm_v4tree.bench.results import summarise, write_results

    results = summarise(file.samples, plan, about, complete)
    if not results.cells:
        return None
    try:
        write_results(results, output_dir)
        path = write_report(results, output_dir)
    except V4TreeError as error:
        stderr.print(printable(str(error)))
        return None
    stderr.print(f"{path}, results.json, results.csv, {len(file.samples)} samples in {file.path.name}")
    return path


def _plan(datasets: list[str], options: dict[str, Any], others: str, min_blocks: int) -> GridPlan:
    from trtllm_v4tree.bench.datasets import DatasetSpec
    from trtllm_v4tree.bench.plan import GridPlan, check_budgets, parse_shape

    names = [DatasetSpec.parse(d).name for d in datasets]
    if len(set(names)) < len(names):
        raise RequestError("two data sets have the same name: give each --dataset its own NAME.")
    shapes = tuple(parse_shape(s) for s in _listed(options["shapes"]))
    budgets = integers("--budgets", options["budgets"], 2)
    check_budgets(shapes, budgets)
    batches = integers("--batch_sizes", options["batch_sizes"], 1)
    policies = [] if options["policies"] == "none" else _listed(options["policies"])
    return GridPlan(
        tuple(names), budgets, batches, shapes, tuple(dict.fromkeys((*policies, *_listed(others)))),
        int(options["num_prompts"]), int(options["max_tokens"]), min_blocks,
    )  # fmt: skip


def _untimed(policies: str) -> str:
    """The policies that an engine without a latency table can follow; says which are left out."""
    from trtllm_v4tree.runtime.policies.names import ADAPTIVE

    measured = [name for name in _listed(policies) if ADAPTIVE[name].measured]
    stderr.print(f"left out, since this engine was built with --no_latency_table: {', '.join(measured)}.")
    return ",".join(name for name in _listed(policies) if name not in measured)


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def integers(option: str, text: str, least: int) -> tuple[int, ...]:
    parts = _listed(text)
    bad = next((p for p in parts if not re.fullmatch(r"[0-9]{1,6}", p) or int(p) < least), None)
    if bad is not None or not parts:
        raise RequestError(f"{option} has {(bad or '')[:20]!r}: give integers from {least}, such as 4,8.")
    return tuple(sorted({int(p) for p in parts}))


def _prompts(llm: LLM, datasets: list[str], plan: GridPlan) -> Prompts:
    """Token ids in the chat format, by data set."""
    from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts
    from trtllm_v4tree.bench.grid import fitting_prompts

    found = {}
    for spec in map(DatasetSpec.parse, datasets):
        encoded = [llm.encode_chat([("user", text)]) for text in load_prompts(spec, 4 * plan.num_prompts)]
        found[spec.name] = fitting_prompts(encoded, spec.name, llm.manifest.sizes.max_seq_len, plan)
    return found


def _header(llm: LLM, datasets: list[str], plan: GridPlan, threads: int) -> dict[str, Any]:
    """What samples of one file have in common; --resume needs the same."""
    from trtllm_v4tree.bench.datasets import DatasetSpec
    from trtllm_v4tree.bench.machine import machine

    engine = hashlib.sha256("".join(sorted(llm.manifest.files.values())).encode()).hexdigest()
    files = {s.name: hashlib.sha256(s.path.read_bytes()).hexdigest() for s in map(DatasetSpec.parse, datasets)}
    return {"engine": engine, "data": files, "threads": threads, "machine": machine()["processor"], **asdict(plan)}


def _about(llm: LLM, file: SampleFile, plan: GridPlan) -> dict[str, Any]:
    """Machine, versions, command, engine and settings, as the report prints them."""
    from trtllm_v4tree.bench.machine import load_average, machine, versions

    manifest = llm.manifest
    return {
        "machine": machine(),
        "versions": versions(),
        "command": ["v4tree", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "data": file.header["data"],
        "engine": {"target": manifest.target, "dtype": manifest.dtype, "sizes": manifest.sizes.to_dict()},
        "settings": asdict(plan),
        "load_average": load_average(),
    }
