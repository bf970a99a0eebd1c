"""The commit of a TensorRT engine: kernels outside the plans, compiled ahead of time for the engine's chip into `commit.json`."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import FoldKind, KernelCode, fold_kinds
from trtllm_v4tree.sizes import EngineSizes

NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SCATTER_BLOCK, FOLD_BLOCK, FOLD_WIDTH = 512, 4, 128
"""Columns that one program scatters, rows that a fold reads at once, channels of one fold program."""


def compile_kernels(config: ModelConfig, sizes: EngineSizes, dtype: str, capability: str) -> dict[str, KernelCode]:
    """Code of the row scatter and of the fold of every kind of compressor, by name. Needs triton, no GPU."""
    from v4tree_plugins import aot

    made = {}
    for name, variant in _variants(config, sizes, NAMES[dtype]):
        compiled = aot.compile_variant(variant, int(capability.removeprefix("SM")))
        made[name] = KernelCode(compiled.entry, 32 * compiled.num_warps, compiled.shared, compiled.cubin)
    return made


def _variants(config: ModelConfig, sizes: EngineSizes, dtype: str) -> Iterator[tuple[str, object]]:
    from v4tree_plugins.aot import Variant
    from v4tree_plugins.commit import fold_kernel, scatter_rows_kernel

    rows = {"scratch": f"*{dtype}", "source": "*i64", "pool": f"*{dtype}", "target": "*i64"}
    rows |= dict.fromkeys(("scratch_rows", "pool_rows_per_layer", "width"), "i32")
    yield "scatter_rows", Variant("scatter_rows", scatter_rows_kernel, rows, {"BLOCK": SCATTER_BLOCK})
    table = {"state": "*fp32", "slots": "*i64", "raw": f"*{dtype}", "table": "*i64"}
    table |= dict.fromkeys(("raw_rows", "slots_per_layer", "S"), "i32")
    for kind in fold_kinds(config, sizes):
        yield f"fold_{kind.name}", Variant(f"fold_{kind.name}", fold_kernel, table, _fold_constants(kind))


def _fold_constants(kind: FoldKind) -> dict[str, int]:
    return {"DIM": kind.dim, "STATES": kind.states, "BLOCK": FOLD_BLOCK, "WIDTH": min(FOLD_WIDTH, kind.dim)}
