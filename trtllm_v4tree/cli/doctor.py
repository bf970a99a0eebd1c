"""`v4tree doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata

from rich.console import Console
from rich.table import Table

from trtllm_v4tree import native

SUPPORT = (
    ("target onnxruntime (CPU; float32, bfloat16, int8)", "supported", ""),
    ("target tensorrt-rtx (RTX GPUs, float32)", "build only", "plans ahead of time; no executor runs them yet"),
    ("target tensorrt (NVIDIA GPUs)", "not seen on hardware", "builds where TensorRT and a GPU are"),
    ("speculation none, sN_kK_dD, auto and other policies", "supported", "text is the same as without"),
    ("native CPU operators, weights in bfloat16 where exact", "supported", "--cpu_kernels, the text is the same"),
    ("8-bit linears, native CPU operators", "supported", "--dtype int8, the text is free of the tree"),
    ("8-bit drafter", "supported", "--draft_dtype int8, the text is the same"),
    ("Triton gRPC and HTTP, OpenAI endpoint", "supported", "v4tree serve, CPU engine"),
    ("greedy, temperature, top_k, top_p, min_p, seed", "supported", "keyed by (seed, position)"),
    ("repetition, presence, frequency penalty, min_tokens", "supported", "per path of the tree"),
    ("stop strings, stop token ids, ignore_eos", "supported", "before the commit"),
    ("bad_words, bad_words_list", "supported", "token sequences, per path of the tree, before sampling"),
    ("logprobs", "supported", "top 20, by node"),
    ("checkpoint bf16, fp16, fp32, FP8 blocks, FP4 experts", "supported", "decoded to float32"),
    ("DSpark / 0731 mtp tensors", "refused", "a different drafter"),
    ("FP8/FP4 activation simulation", "bypassed", "computed in float32"),
    ("logit bias, beam search, tools, grammars, LoRA", "refused", "by name, in requests too"),
)


def doctor() -> None:
    """Show what this machine has and what this version supports, refuses or bypasses."""
    console = Console()
    machine = Table(title="this machine", show_header=False, title_justify="left")
    machine.add_row("python", platform.python_version())
    machine.add_row("cpu", f"{platform.machine()}, {os.cpu_count()} cores")
    machine.add_row(
        "native operators", native.instruction_set() or "not compiled: slower engines from ONNX Runtime's operators"
    )
    for name in ("numpy", "onnxruntime", "onnxscript", "onnx", "tokenizers", "safetensors"):
        machine.add_row(name, _version(name))
    for name in (
        "torch",
        "transformers",
        "tensorrt",
        "tensorrt-rtx",
        "triton",
        "nvidia-pytriton",
        "tritonclient",
        "starlette",
        "uvicorn",
    ):
        machine.add_row(f"{name} (optional)", _version(name))
    for tool in ("nvidia-smi", "nsys", "tritonserver"):
        machine.add_row(f"{tool} (optional)", shutil.which(tool) or "not found")
    console.print(machine)
    matrix = Table(title="support matrix", title_justify="left")
    for column in ("feature", "status", "note"):
        matrix.add_column(column)
    for row in SUPPORT:
        matrix.add_row(*row)
    console.print(matrix)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
