"""Ahead-of-time compilation of the kernels: a launch variant of a kernel in, PTX, cubin and ptxas figures out. Needs no GPU.

`python -m v4tree_plugins.kernel_table` prints the figures of every kernel, dtype and compute capability.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from v4tree_plugins import grouped_moe as moe
from v4tree_plugins.commit import fold_kernel, scatter_rows_kernel
from v4tree_plugins.packed_rows import pack_rows_kernel, row_bytes
from v4tree_plugins.tree_attention import combine_kernel, tree_attention_kernel
from v4tree_plugins.tree_index_score import tree_index_score_kernel
from v4tree_plugins.tree_pool import tree_pool_kernel

CAPABILITIES = (80, 90, 100, 120)
FP8_CAPABILITIES = (90, 100, 120)
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Most shared memory of one block in bytes (CUDA programming guide, maximum per thread block)."""
DTYPES = ("fp32", "fp16", "bf16")
SCORE_GROUP, COMBINE_ROWS = 8, 4
"""Nodes that one program of the index score handles, and query rows of one of the combine."""
MOE_COLUMNS = 1024
"""Columns of a token that one program of the experts' combine adds."""


@dataclass(frozen=True)
class Variant:
    """A kernel with fixed types and sizes: `signature` maps arguments to Triton types, `constants` the constexpr ones."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2


@dataclass
class Compiled:
    """What came out of the compiler for one compute capability. Bytes; registers per thread."""

    variant: str
    capability: int
    num_warps: int
    shared: int
    registers: int
    spill_bytes: int
    entry: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT[self.capability]


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compiles for `sm_<capability>`; raises what Triton or ptxas raises."""
    order = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in order}
    aligned = {
        (order.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # it names the folders of this machine
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, meta = without_hidden_parameters(built.asm["ptx"]), built.metadata
    report, cubin = assemble(ptx)
    registers, spills = ptxas_figures(report)
    return Compiled(variant.name, capability, meta.num_warps, meta.shared, registers, spills, meta.name, ptx, cubin)


def ptxas_figures(report: str) -> tuple[int, int]:
    """(registers per thread, bytes of spill stores and loads) in a report of `ptxas -v`."""
    registers = max(map(int, re.findall(r"Used (\d+) registers", report)))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    return registers, spills


def assemble(ptx: str) -> tuple[str, bytes]:
    """The report of `ptxas -v` and the cubin, for the chip that the PTX names."""
    binary = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    match = re.search(r"\.target (sm_\w+)", ptx)
    assert match is not None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [str(binary), "-v", f"--gpu-name={match[1]}", str(source), "-o", str(target)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return report, target.read_bytes()


def without_hidden_parameters(ptx: str) -> str:
    """PTX whose entry takes only the declared arguments.

    Triton appends two pointers (global and profile scratch) that nothing reads when both are of size 0; a launcher that knows only
    the declared arguments, as TensorRT's, would leave them undefined.
    """
    head, params, body = re.split(r"(\.entry \w+\(.*?\n\))", ptx, maxsplit=1, flags=re.S)
    names = re.findall(r"(\w+_param_\d+)", params)
    for name in names[-2:]:
        assert not re.search(rf"\b{name}\b", body), f"{name} is read: the kernel needs scratch memory"
    lines = [line for line in params.splitlines() if not any(re.search(rf"\b{name}\b", line) for name in names[-2:])]
    lines[-2] = lines[-2].rstrip(",")
    return head + "\n".join(lines) + body


def pool_variant(dtype: str, dim: int, states: int, block: int = 8, rope: int = 64, eps: float = 1e-6) -> Variant:
    """Tree pool for CSA (3 states) or HCA (1): fp32 states, raw rows and entries of `dtype`."""
    signature = {"state": "*fp32", "slots": "*i64", "raw": f"*{dtype}", "table": "*i64", "norm": f"*{dtype}"}
    signature |= {
        "cos": "*fp32",
        "sin": "*fp32",
        "num_entries": "i32",
        "raw_rows": "i32",
        "S": "i32",
        "out": f"*{dtype}",
    }
    constants = {"DIM": dim, "ROPE": rope, "STATES": states, "BLOCK": block, "EPS": eps}
    return Variant(f"tree_pool_{'csa' if states == 3 else 'hca'}_{dim}_{dtype}", tree_pool_kernel, signature, constants)


def score_blocks(dtype: str) -> tuple[int, ...]:
    """Keys of a block of the index score, the first one the default."""
    return (16, 32) if dtype == "fp32" else (64, 32)


def score_variant(dtype: str, block: int, heads: int = 64, dim: int = 128) -> Variant:
    """Indexer scores; 8 warps for fp32, whose products would spill with 4."""
    activations = dict.fromkeys(("query", "weights", "entries", "branch"), f"*{dtype}")
    counts = dict.fromkeys(("nodes", "num_rows", "num_branch"), "i32")
    signature = activations | counts | {"rows": "*i64", "mask": "*fp32", "out": "*fp32"}
    constants = {"DIM": dim, "HEADS": heads, "GROUP": SCORE_GROUP, "BLOCK": block, "PRECISION": "tf32x3"}
    warps = 8 if dtype == "fp32" else 4
    return Variant(f"tree_index_score_{dtype}", tree_index_score_kernel, signature, constants, warps)


@dataclass(frozen=True)
class Tile:
    """Tile of an attention launch."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def attention_tiles(dtype: str, capability: int) -> tuple[Tile, ...]:
    """Tiles that fit, the first one the default."""
    if dtype == "fp32":
        return (Tile(16, 16, 8, 1),)
    if capability == 120:
        return (Tile(32, 16, 8, 1), Tile(16, 32, 4, 1))
    return (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2))


def attention_variant(
    dtype: str,
    heads: int,
    tile: Tile,
    splits: int,
    dim: int = 512,
    rope: int = 64,
    packed: bool = False,
    fp8: bool = False,
) -> Variant:
    """Tree attention; splits 1 finishes in the kernel. With `packed` both masks are tables of `pack_masks`, with `fp8` keys packed rows."""
    pool = {"q": f"*{dtype}"}
    pool |= dict.fromkeys(("window", "nodes", "entries", "branch"), "*u8" if fp8 else f"*{dtype}")
    tables = dict.fromkeys(("window_rows", "entry_rows"), "*i64")
    masks = dict.fromkeys(("node_mask", "entry_mask"), "*i64" if packed else "*fp32")
    floats = dict.fromkeys(("sink", "cos", "sin", "out_max", "out_sum"), "*fp32")
    counts = dict.fromkeys(("num_nodes", "num_window", "num_entries", "num_branch", "entry_stride"), "i32")
    signature = pool | tables | masks | floats | counts | {"out": "*fp32" if splits > 1 else f"*{dtype}"}
    constants: dict[str, Any] = {"SCALE": dim**-0.5, "HEADS": heads, "DIM": dim, "ROPE": rope, "SPLITS": splits}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "CHUNK": min(dim, 32) if dtype == "fp32" else dim}
    constants |= {"PRECISION": "tf32x3", "PACKED": packed, "ROW": row_bytes(dim, rope) if fp8 else dim}
    if splits == 1:
        constants |= {name: None for name in ("out_max", "out_sum") if signature.pop(name)}
    name = f"tree_attention_h{heads}_s{splits}{'_packed' if packed else ''}{'_fp8' if fp8 else ''}_{dtype}"
    return Variant(name, tree_attention_kernel, signature, constants, tile.num_warps, tile.num_stages)


def combine_variant(dtype: str, heads: int, splits: int = 16, dim: int = 512, rope: int = 64) -> Variant:
    signature = dict.fromkeys(("partial", "part_max", "part_sum", "sink", "cos", "sin"), "*fp32")
    signature |= {"like": f"*{dtype}", "num_nodes": "i32", "out": f"*{dtype}"}
    constants = {"HEADS": heads, "DIM": dim, "ROPE": rope, "SPLITS": splits, "BLOCK_M": COMBINE_ROWS}
    return Variant(f"combine_h{heads}_s{splits}_{dtype}", combine_kernel, signature, constants)


def commit_variants(dtype: str) -> list[Variant]:
    """Row scatter and the folds of both ratios."""
    rows = {"scratch": f"*{dtype}", "source": "*i64", "pool": f"*{dtype}", "target": "*i64"}
    rows |= dict.fromkeys(("scratch_rows", "pool_rows_per_layer", "width"), "i32")
    out = [Variant(f"scatter_rows_{dtype}", scatter_rows_kernel, rows, {"BLOCK": 512})]
    table = {"state": "*fp32", "slots": "*i64", "raw": f"*{dtype}", "table": "*i64"}
    table |= dict.fromkeys(("raw_rows", "slots_per_layer", "S"), "i32")
    for states, kind in ((3, "csa"), (1, "hca")):
        constants = {"DIM": 512, "STATES": states, "BLOCK": 4, "WIDTH": 128}
        out.append(Variant(f"fold_{kind}_{dtype}", fold_kernel, table, constants))
    return out


@dataclass(frozen=True)
class ExpertTile:
    """Columns of a program of the experts' products, and how many inputs it multiplies at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def expert_tiles(dtype: str, fp4: bool = False) -> tuple[ExpertTile, ...]:
    """Tiles that fit, the first one the default; narrow ones give a single token's few lines more programs."""
    if fp4:
        return (ExpertTile(32, 128, 4, 4), ExpertTile(64, 128, 4, 4))
    if dtype == "fp32":
        return (ExpertTile(32, 32, 4, 3), ExpertTile(64, 32, 4, 2))
    return (ExpertTile(32, 128, 4, 4), ExpertTile(64, 64, 4, 4))


def moe_align_variant(dtype: str, experts: int = 256, block: int = moe.BLOCK_M) -> Variant:
    """The sort of pairs by expert, of the same types in every dtype."""
    signature = {"ids": "*i64", "pairs": "i32", "lines": "i32", "table": "*i64"}
    bins = triton.next_power_of_2(experts)
    constants = {"EXPERTS": experts, "BINS": bins, "BLOCK_M": block, "CHUNK": moe.CHUNK}
    return Variant(f"moe_align_{dtype}", moe.moe_align_kernel, signature, constants)


def moe_fc1_variant(
    dtype: str,
    tile: ExpertTile,
    hidden: int = 4096,
    inner: int = 2048,
    topk: int = 6,
    limit: float = 10.0,
    block: int = moe.BLOCK_M,
    fp4: bool = False,
) -> Variant:
    """Gate and up rows of a line's expert, and the clamped SwiGLU."""
    signature, constants = _expert_product("x", dtype, tile, hidden, inner, block, fp4)
    signature, constants = signature | {"out": f"*{dtype}"}, constants | {"TOPK": topk, "LIMIT": limit}
    name = f"moe_fc1{'_fp4' if fp4 else ''}_{dtype}"
    return Variant(name, moe.moe_fc1_kernel, signature, constants, tile.num_warps, tile.num_stages)


def moe_fc2_variant(
    dtype: str,
    tile: ExpertTile,
    hidden: int = 4096,
    inner: int = 2048,
    block: int = moe.BLOCK_M,
    fp4: bool = False,
) -> Variant:
    """Output rows of a line's expert."""
    signature, constants = _expert_product("act", dtype, tile, hidden, inner, block, fp4)
    name = f"moe_fc2{'_fp4' if fp4 else ''}_{dtype}"
    return Variant(name, moe.moe_fc2_kernel, signature | {"out": "*fp32"}, constants, tile.num_warps, tile.num_stages)


def _expert_product(
    rows: str, dtype: str, tile: ExpertTile, hidden: int, inner: int, block: int, fp4: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """What the products have in common; weights of the activations' dtype have no scales."""
    signature = {rows: f"*{dtype}", "table": "*i64", "weight": "*u8" if fp4 else f"*{dtype}", "lines": "i32"}
    constants: dict[str, Any] = {"HIDDEN": hidden, "INNER": inner, "PRECISION": "tf32x3"}
    constants |= {"BLOCK_M": block, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    return (signature | {"scales": "*u8"}, constants) if fp4 else (signature, constants | {"scales": None})


def moe_combine_variant(dtype: str, hidden: int = 4096, topk: int = 6, scale: float = 1.0) -> Variant:
    signature = {"parts": "*fp32", "weights": "*fp32", "base": f"*{dtype}", "tokens": "i32", "out": f"*{dtype}"}
    constants = {"TOPK": topk, "HIDDEN": hidden, "SCALE": scale, "BLOCK": MOE_COLUMNS}
    return Variant(f"moe_combine_{dtype}", moe.moe_combine_kernel, signature, constants)


def takes_fp4(dtype: str, capability: int) -> bool:
    """Whether experts in FP4 are widened to a dtype: bf16 everywhere, fp16 where the chip converts FP8."""
    return dtype == "bf16" or (dtype == "fp16" and capability in FP8_CAPABILITIES)


def moe_variants(dtype: str, capability: int) -> list[Variant]:
    """The experts of V4-Flash."""
    out = [moe_align_variant(dtype), moe_combine_variant(dtype)]
    for fp4 in (False, True)[: 1 + takes_fp4(dtype, capability)]:
        tile = expert_tiles(dtype, fp4)[0]
        out += [moe_fc1_variant(dtype, tile, fp4=fp4), moe_fc2_variant(dtype, tile, fp4=fp4)]
    return out


FP8_TILE = Tile(16, 32, 8, 1)
"""Of the attention over packed rows, which are decoded in registers: 32 query rows spill."""


def fp8_variants(dtype: str) -> list[Variant]:
    """Packing, attention over packed rows, and the commit of their bytes, for activations of 16 bits."""
    rows = {"rows": f"*{dtype}", "out": "*u8"}
    out = [Variant(f"pack_rows_{dtype}", pack_rows_kernel, rows, {"DIM": 512, "ROPE": 64, "ROW": row_bytes(512, 64)})]
    out.append(replace(commit_variants("u8")[0], name=f"scatter_rows_fp8_{dtype}"))
    for heads in (64, 128):
        out += [attention_variant(dtype, heads, FP8_TILE, splits, packed=True, fp8=True) for splits in (1, 16)]
    return out


def variants(dtype: str, capability: int) -> list[Variant]:
    """Everything that must compile for one dtype and chip; packed rows where the chip converts FP8."""
    tile = attention_tiles(dtype, capability)[0]
    out = [pool_variant(dtype, dim, states) for dim, states in ((512, 3), (128, 3), (512, 1))]
    out += [score_variant(dtype, score_blocks(dtype)[0]), *commit_variants(dtype)]
    for heads in (64, 128):
        for packed in (False, True):
            out += [attention_variant(dtype, heads, tile, splits, packed=packed) for splits in (1, 16)]
        out.append(combine_variant(dtype, heads))
    out += moe_variants(dtype, capability)
    return out + (fp8_variants(dtype) if capability in FP8_CAPABILITIES and dtype != "fp32" else [])
