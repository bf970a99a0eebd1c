"""`v4tree build`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trtllm_v4tree.cli.output import printable, stderr
from trtllm_v4tree.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_v4tree.compiler.build import BuildOptions
    from trtllm_v4tree.engine_dir import Manifest

PAGES = "Entry pages of 256 tokens; default: all sequences at full length."
MTP = "Take the drafter's mtp.* tensors from this safetensors file."
DTYPE = "float32; bfloat16, int8 (native operators): linears round to it, the rest is float32; float16: tensorrt alone."
DRAFT = "float32, bfloat16, int8 (8-bit drafter) or auto: changes what is accepted, never the text."
SHAPES = "Draft rounds to compile, e.g. s4_k3,s7_k1; default: s1..s7 x k1..k4 (TensorRT: s4_k3,s5_k1)."
VOCAB = "Tokens that the drafter may propose: N (the N lowest ids) or a JSON file with a list of ids; default: all."
KERNELS = "Operators of target onnxruntime: native (this package's, needs a C++ compiler at installation), onnxruntime or auto."
CAPABILITY = "GPUs that tensorrt-rtx compiles for, of 80, 86, 89, 120, 121; default: 89,120. tensorrt: the GPU here (80, 90, 100, 120)."
STREAMING = "tensorrt: plans that may keep part of their weights in host memory."
CACHE = "tensorrt: file with timed tactics, read if it is there and written; makes the next build faster."


def build(
    checkpoint_dir: Annotated[
        Path, typer.Option("--checkpoint_dir", help="Directory with config.json, *.safetensors.")
    ],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Engine directory; an existing engine is replaced.")],
    target: Annotated[str, typer.Option("--target", help="onnxruntime, tensorrt or tensorrt-rtx.")] = "onnxruntime",
    dtype: Annotated[str, typer.Option("--dtype", help=DTYPE)] = "float32",
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="Sequences decoded together.")] = 16,
    max_seq_len: Annotated[int, typer.Option("--max_seq_len", help="Prompt and output tokens of a sequence.")] = 2048,
    max_verify_tokens: Annotated[int, typer.Option("--max_verify_tokens", help="Nodes of a tree, with its root.")] = 16,
    prefill_chunk: Annotated[int, typer.Option("--prefill_chunk", help="Prompt tokens per pass.")] = 128,
    num_pages: Annotated[int | None, typer.Option("--num_pages", help=PAGES)] = None,
    draft_dtype: Annotated[str, typer.Option("--draft_dtype", help=DRAFT)] = "auto",
    cpu_kernels: Annotated[str, typer.Option("--cpu_kernels", help=KERNELS)] = "auto",
    mtp_weights: Annotated[Path | None, typer.Option("--mtp_weights", help=MTP)] = None,
    draft_shapes: Annotated[str | None, typer.Option("--draft_shapes", help=SHAPES)] = None,
    draft_vocab: Annotated[str | None, typer.Option("--draft_vocab", help=VOCAB)] = None,
    compute_capability: Annotated[str | None, typer.Option("--compute_capability", help=CAPABILITY)] = None,
    weight_streaming: Annotated[bool, typer.Option("--weight_streaming", help=STREAMING)] = False,
    timing_cache: Annotated[Path | None, typer.Option("--timing_cache", help=CACHE)] = None,
    no_latency_table: Annotated[
        bool, typer.Option("--no_latency_table", help="Do not time the engine; speculation auto needs the table.")
    ] = False,
) -> None:
    """Compile a DeepSeek-V4 checkpoint into an engine directory."""
    from trtllm_v4tree.compiler.build import BuildOptions
    from trtllm_v4tree.compiler.rtx import parse_capabilities

    options = BuildOptions(
        target=target,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_verify_tokens=max_verify_tokens,
        prefill_chunk=prefill_chunk,
        num_pages=num_pages,
        draft_dtype=draft_dtype,
        cpu_kernels=cpu_kernels,
        draft_shapes=parse_shapes(draft_shapes),
        draft_vocab=draft_vocab,
        weight_streaming=weight_streaming,
        timing_cache=timing_cache,
        compute_capabilities=None if compute_capability is None else parse_capabilities(compute_capability),
    )
    started = time.monotonic()
    manifest = compile_with_progress(checkpoint_dir, output_dir, options, mtp_weights, not no_latency_table)
    report(output_dir, manifest, time.monotonic() - started)


def compile_with_progress(
    checkpoint_dir: Path, output_dir: Path, options: BuildOptions, mtp_weights: Path | None, timed: bool
) -> Manifest:
    """The build behind a progress bar, where stderr is a terminal."""
    from trtllm_v4tree.compiler import build as compiler
    from trtllm_v4tree.runtime.rehearsal import rehearse_engine

    columns = (
        TextColumn("{task.description:<44.44}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("reading the checkpoint", total=1.0)

        def show(line: str, done: float) -> None:
            progress.update(task, description=line, completed=done)

        def measure(directory: Path, manifest: Manifest) -> str:
            return rehearse_engine(directory, manifest, show)

        return compiler.build(checkpoint_dir, output_dir, options, mtp_weights, show, measure if timed else None)


def report(output_dir: Path, manifest: Manifest, seconds: float) -> None:
    size = sum((output_dir / name).stat().st_size for name in manifest.files) / 1e6
    drafter = f"{len(manifest.draft_shapes)} draft shapes" if manifest.sizes.has_mtp else "no drafter in the checkpoint"
    place, target = printable(str(output_dir)), " ".join((manifest.target, *manifest.compute_capabilities))
    if manifest.cpu_kernels:
        target += f" with {manifest.cpu_kernels} kernels"
    stderr.print(f"built {place}: target {target}, {size:.1f} MB, {drafter}, {seconds:.1f} s", markup=False)


def parse_shapes(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """`s4_k3,s7_k1` -> ((4, 3), (7, 1))."""
    if text is None:
        return None
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"s(\d{1,4})_k(\d{1,4})", part.strip())
        if match is None:
            raise ConfigError(
                f"draft shape {part.strip()!r} is not of the form sN_kK: give for example --draft_shapes s4_k3,s7_k1."
            )
        shapes.append((int(match[1]), int(match[2])))
    return tuple(shapes)
