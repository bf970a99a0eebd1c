"""`v4tree build`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trtllm_v4tree.cli.output import stderr
from trtllm_v4tree.errors import ConfigError


def build(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="Directory with config.json and safetensors.")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Engine directory to write; an existing engine is replaced.")],
    target: Annotated[str, typer.Option("--target", help="onnxruntime, tensorrt or tensorrt-rtx.")] = "onnxruntime",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = "float32",
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="Sequences decoded together.")] = 16,
    max_seq_len: Annotated[int, typer.Option("--max_seq_len", help="Prompt and output tokens of one sequence.")] = 2048,
    max_verify_tokens: Annotated[int, typer.Option("--max_verify_tokens", help="Nodes of a verified tree, root included.")] = 16,
    prefill_chunk: Annotated[int, typer.Option("--prefill_chunk", help="Prompt tokens per pass.")] = 128,
    num_pages: Annotated[int | None, typer.Option("--num_pages", help="Entry pages of 256 tokens; default: all sequences at full length.")] = None,
    mtp_weights: Annotated[Path | None, typer.Option("--mtp_weights", help="Take the drafter's mtp.* tensors from this safetensors file.")] = None,
    draft_shapes: Annotated[str | None, typer.Option("--draft_shapes", help="Draft rounds to compile, e.g. s4_k3,s7_k1; default: s1..s7 x k1..k4.")] = None,
) -> None:
    """Compile a DeepSeek-V4 checkpoint into an engine directory."""
    from trtllm_v4tree.compiler.build import BuildOptions
    from trtllm_v4tree.compiler.build import build as compile_engine

    options = BuildOptions(
        target, dtype, max_batch_size, max_seq_len, max_verify_tokens, prefill_chunk, num_pages, parse_shapes(draft_shapes)
    )
    started = time.monotonic()
    columns = (TextColumn("{task.description:<44.44}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("reading the checkpoint", total=1.0)
        manifest = compile_engine(
            checkpoint_dir,
            output_dir,
            options,
            mtp_weights,
            lambda line, done: progress.update(task, description=line, completed=done),
        )
    size = sum((output_dir / name).stat().st_size for name in manifest.files) / 1e6
    drafter = f"{len(manifest.draft_shapes)} draft shapes" if manifest.sizes.has_mtp else "no drafter in the checkpoint"
    stderr.print(f"built {output_dir}: target {target}, {size:.1f} MB, {drafter}, {time.monotonic() - started:.1f} s")


def parse_shapes(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """`s4_k3,s7_k1` -> ((4, 3), (7, 1))."""
    if text is None:
        return None
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"s(\d+)_k(\d+)", part.strip())
        if match is None:
            raise ConfigError(f"draft shape {part.strip()!r} is not of the form sN_kK: give for example --draft_shapes s4_k3,s7_k1.")
        shapes.append((int(match[1]), int(match[2])))
    return tuple(dict.fromkeys(shapes))
