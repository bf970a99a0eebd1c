"""The kernels as ahead-of-time quick plugins of TensorRT: shapes, dtype combinations, tactics, and the compiled code of a chip.

Importing this module registers them with the `tensorrt` that is installed. NVIDIA's front end reads the annotations of the
functions below, so they are real types here and not strings.

Every plugin: activations fp32, fp16 or bf16 together; states, masks, rotations fp32; tables int64. `capability` is 80, 90, ...
"""
# ruff: noqa: UP006, UP035  (the front end compares the spelling typing.Tuple)

import functools
from collections.abc import Callable
from typing import Any, List, Tuple

import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt.plugin import TensorDesc as Desc

from v4tree_plugins import aot

Launch = Tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
Dim = int | trtp.SymInt32
_NAMES = {trt.DataType.FLOAT: "fp32", trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
_IO_NAMES = ("FP32", "FP16", "BF16")
POOL_BLOCKS = (8, 4)


@functools.cache
def _machine_code(
    build: Callable[..., aot.Variant], arguments: tuple[Any, ...], capability: int
) -> tuple[str, bytes, int, int]:
    """Entry name, cubin, threads of a block and bytes of shared memory of a variant; one compilation per process."""
    if capability not in aot.CAPABILITIES:
        raise ValueError(
            f"compute capability {capability} is unknown: choose from {', '.join(map(str, aot.CAPABILITIES))}"
        )
    compiled = aot.compile_variant(build(*arguments), capability)
    if not compiled.fits:
        limit = aot.SHARED_LIMIT[capability]
        raise ValueError(
            f"{compiled.variant} needs {compiled.shared} bytes of shared memory, sm_{capability} has {limit}"
        )
    return compiled.entry, compiled.cubin, 32 * compiled.num_warps, compiled.shared


def _launch(code: tuple[str, bytes, int, int], grid: tuple[Dim, ...], scalars: tuple[Dim, ...]) -> Launch:
    name, cubin, threads, shared = code
    x, y, z = (*grid, 1, 1)[:3]
    params = trtp.KernelLaunchParams(grid_x=x, grid_y=y, grid_z=z, block_x=threads, shared_mem=shared)
    extra = trtp.SymIntExprs(len(scalars))
    for i, value in enumerate(scalars):
        extra[i] = trtp.SymInt32(value)
    return name, cubin, params, extra


def _combinations(pattern: str, tactics: int) -> List[trtp.AutoTuneCombination]:
    """One combination per activation dtype, which stands for each `A` of the pattern. Tactics are numbered from 1."""
    numbers = list(range(1, tactics + 1))
    return [trtp.AutoTuneCombination(pattern.replace("A", name), "LINEAR", numbers) for name in _IO_NAMES]


def _fixed(dim: trtp.ShapeExpr, what: str) -> int:
    if not dim.is_constant:
        raise ValueError(f"{what} must be known when the engine is built")
    return dim.constant_value()


def _tensor(dtype: trt.DataType, *dims: trtp.ShapeExpr | int) -> Desc:
    """Description of an output."""
    shape = trtp.ShapeExprs(len(dims))
    for axis, dim in enumerate(dims):
        shape[axis] = dim
    return trtp.from_shape_expr(shape, dtype)


@trtp.register("v4tree::tree_pool")
def tree_pool(
    state: Desc, slots: Desc, raw: Desc, table: Desc, norm: Desc, cos: Desc, sin: Desc, eps: float, capability: int
) -> Desc:
    """state [slots, 3 or 1, 2 dim], slots [B], raw [B, rows, 2 dim], table [B, M, S] -> entries [B, M, dim]."""
    return _tensor(raw.dtype, table.shape_expr[0], table.shape_expr[1], norm.shape_expr[0])


@trtp.autotune("v4tree::tree_pool")
def tree_pool_autotune(
    state: Desc, slots: Desc, raw: Desc, table: Desc, norm: Desc, cos: Desc, sin: Desc, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _combinations("FP32,INT64,A,INT64,A,FP32,FP32,A", len(POOL_BLOCKS))


@trtp.aot_impl("v4tree::tree_pool")
def tree_pool_aot(
    state: Desc, slots: Desc, raw: Desc, table: Desc, norm: Desc, cos: Desc, sin: Desc,
    eps: float, capability: int, outputs: Tuple[Desc], tactic: int,
) -> Launch:  # fmt: skip
    dim, states = (
        _fixed(norm.shape_expr[0], "the width of an entry"),
        _fixed(state.shape_expr[1], "the number of states"),
    )
    rope = 2 * _fixed(cos.shape_expr[2], "the number of rotated dims")
    block = POOL_BLOCKS[max(tactic, 1) - 1]
    code = _machine_code(aot.pool_variant, (_NAMES[raw.dtype], dim, states, block, rope, eps), capability)
    batch, entries = table.shape_expr[0], table.shape_expr[1]
    return _launch(code, (trtp.max(batch * entries, 1),), (entries, raw.shape_expr[1], table.shape_expr[2]))


@trtp.register("v4tree::tree_index_score")
def tree_index_score(
    query: Desc, weights: Desc, entries: Desc, rows: Desc, branch: Desc, mask: Desc, capability: int
) -> Desc:
    """query [B, N, Hi, di], weights [B, N, Hi], rows [B, E], branch [B, M, di], mask [B, N, E + M] -> fp32 scores [B, N, E + M]."""
    return _tensor(trt.DataType.FLOAT, *mask.shape_expr)


@trtp.autotune("v4tree::tree_index_score")
def tree_index_score_autotune(
    query: Desc, weights: Desc, entries: Desc, rows: Desc, branch: Desc, mask: Desc, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _combinations("A,A,A,INT64,A,FP32,FP32", len(aot.score_blocks("bf16")))


@trtp.aot_impl("v4tree::tree_index_score")
def tree_index_score_aot(
    query: Desc, weights: Desc, entries: Desc, rows: Desc, branch: Desc, mask: Desc, capability: int,
    outputs: Tuple[Desc], tactic: int,
) -> Launch:  # fmt: skip
    heads, dim = (_fixed(query.shape_expr[i], "the shape of the indexer") for i in (2, 3))
    dtype = _NAMES[query.dtype]
    block = aot.score_blocks(dtype)[max(tactic, 1) - 1]
    code = _machine_code(aot.score_variant, (dtype, block, heads, dim), capability)
    batch, nodes, keys = (mask.shape_expr[i] for i in range(3))
    grid = (trtp.max(trtp.cdiv(keys, block), 1), trtp.cdiv(nodes, aot.SCORE_GROUP), batch)
    return _launch(code, grid, (nodes, rows.shape_expr[1], branch.shape_expr[1]))


@trtp.register("v4tree::tree_attention")
def tree_attention(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, capability: int,
) -> Desc:  # fmt: skip
    """q [B, N, H, d] and the four sources of keys -> attention output [B, N, H, d], rotated back, in one launch."""
    return q.like()


@trtp.autotune("v4tree::tree_attention")
def tree_attention_autotune(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, capability: int, outputs: Tuple[Desc],
) -> List[trtp.AutoTuneCombination]:  # fmt: skip
    return _attention_types("A", capability)


def _attention_types(outputs: str, capability: int) -> List[trtp.AutoTuneCombination]:
    """Activations of one dtype, and masks that are both additive (FP32) or both packed (INT64)."""
    found = []
    for name in _IO_NAMES:
        tactics = list(range(1, len(aot.attention_tiles(name.lower(), capability)) + 1))
        for mask in ("FP32", "INT64"):
            pattern = f"A,A,INT64,A,{mask},A,INT64,A,{mask},FP32,FP32,FP32,{outputs}".replace("A", name)
            found.append(trtp.AutoTuneCombination(pattern, "LINEAR", tactics))
    return found


def _attention_launch(
    q: Desc, window_rows: Desc, node_mask: Desc, entry_rows: Desc, branch: Desc, cos: Desc,
    splits: int, capability: int, tactic: int,
) -> Launch:  # fmt: skip
    batch, nodes = q.shape_expr[0], q.shape_expr[1]
    heads, dim = (_fixed(q.shape_expr[i], "the shape of a head") for i in (2, 3))
    rope = 2 * _fixed(cos.shape_expr[2], "the number of rotated dims")
    dtype, packed = _NAMES[q.dtype], node_mask.dtype == trt.DataType.INT64
    tile = aot.attention_tiles(dtype, capability)[max(tactic, 1) - 1]
    code = _machine_code(aot.attention_variant, (dtype, heads, tile, splits, dim, rope, packed), capability)
    grid = (trtp.cdiv(nodes * heads, tile.block_m), splits, batch)
    own = len(entry_rows.shape_expr) == 3
    counts = (nodes, window_rows.shape_expr[1], entry_rows.shape_expr[2 if own else 1], branch.shape_expr[1], int(own))
    return _launch(code, grid, counts)


@trtp.aot_impl("v4tree::tree_attention")
def tree_attention_aot(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, capability: int, outputs: Tuple[Desc], tactic: int,
) -> Launch:  # fmt: skip
    return _attention_launch(q, window_rows, node_mask, entry_rows, branch, cos, 1, capability, tactic)


@trtp.register("v4tree::tree_attention_split")
def tree_attention_split(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, splits: int, capability: int,
) -> Tuple[Desc, Desc, Desc]:  # fmt: skip
    """The same keys in `splits` parts: fp32 sums [B, splits, N * H, d], maxima and weights [B, splits, N * H] for the combine."""
    batch, rows, dim = q.shape_expr[0], q.shape_expr[1] * q.shape_expr[2], q.shape_expr[3]
    sums, one_each = (batch, splits, rows, dim), (batch, splits, rows)
    fp32 = trt.DataType.FLOAT
    return _tensor(fp32, *sums), _tensor(fp32, *one_each), _tensor(fp32, *one_each)


@trtp.autotune("v4tree::tree_attention_split")
def tree_attention_split_autotune(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, capability: int, outputs: Tuple[Desc, Desc, Desc],
) -> List[trtp.AutoTuneCombination]:  # fmt: skip
    return _attention_types("FP32,FP32,FP32", capability)


@trtp.aot_impl("v4tree::tree_attention_split")
def tree_attention_split_aot(
    q: Desc, window: Desc, window_rows: Desc, nodes: Desc, node_mask: Desc, entries: Desc, entry_rows: Desc, branch: Desc,
    entry_mask: Desc, sink: Desc, cos: Desc, sin: Desc, splits: int, capability: int,
    outputs: Tuple[Desc, Desc, Desc], tactic: int,
) -> Launch:  # fmt: skip
    return _attention_launch(q, window_rows, node_mask, entry_rows, branch, cos, splits, capability, tactic)


@trtp.register("v4tree::tree_attention_combine")
def tree_attention_combine(
    partial: Desc, part_max: Desc, part_sum: Desc, sink: Desc, cos: Desc, sin: Desc, like: Desc, capability: int
) -> Desc:
    """Merges the splits; `like` is q [B, N, H, d], which only gives shape and dtype."""
    return like.like()


@trtp.autotune("v4tree::tree_attention_combine")
def tree_attention_combine_autotune(
    partial: Desc, part_max: Desc, part_sum: Desc, sink: Desc, cos: Desc, sin: Desc, like: Desc, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _combinations("FP32,FP32,FP32,FP32,FP32,FP32,A,A", 1)


@trtp.aot_impl("v4tree::tree_attention_combine")
def tree_attention_combine_aot(
    partial: Desc, part_max: Desc, part_sum: Desc, sink: Desc, cos: Desc, sin: Desc, like: Desc, capability: int,
    outputs: Tuple[Desc], tactic: int,
) -> Launch:  # fmt: skip
    heads, dim = (_fixed(like.shape_expr[i], "the shape of a head") for i in (2, 3))
    splits = _fixed(part_max.shape_expr[1], "the number of splits")
    rope = 2 * _fixed(cos.shape_expr[2], "the number of rotated dims")
    code = _machine_code(aot.combine_variant, (_NAMES[like.dtype], heads, splits, dim, rope), capability)
    batch, nodes = like.shape_expr[0], like.shape_expr[1]
    return _launch(code, (trtp.cdiv(nodes * heads, aot.COMBINE_ROWS), batch), (nodes,))


def _num_lines(pairs: trtp.ShapeExpr, experts: int, block: int) -> trtp.ShapeExpr:
    """`grouped_moe.num_lines` of an expression."""
    return (pairs + trtp.min(pairs, experts) * (block - 1)) // block


@trtp.register("v4tree::moe_align")
def moe_align(ids: Desc, experts: int, block: int, capability: int) -> Desc:
    """ids [B, N, k] -> lines [L, 1 + block] of an expert and its pairs."""
    pairs = ids.shape_expr[0] * ids.shape_expr[1] * ids.shape_expr[2]
    return _tensor(trt.DataType.INT64, _num_lines(pairs, experts, block), 1 + block)


@trtp.autotune("v4tree::moe_align")
def moe_align_autotune(ids: Desc, outputs: Tuple[Desc]) -> List[trtp.AutoTuneCombination]:
    return [trtp.AutoTuneCombination("INT64,INT64", "LINEAR", [1])]


@trtp.aot_impl("v4tree::moe_align")
def moe_align_aot(ids: Desc, experts: int, block: int, capability: int, outputs: Tuple[Desc], tactic: int) -> Launch:
    code = _machine_code(aot.moe_align_variant, ("i64", experts, block), capability)
    pairs = ids.shape_expr[0] * ids.shape_expr[1] * ids.shape_expr[2]
    return _launch(code, (experts + 1,), (pairs, _num_lines(pairs, experts, block)))


def _expert_grid(table: Desc, columns: int, tile: aot.ExpertTile) -> tuple[Dim, ...]:
    return (trtp.max(table.shape_expr[0], 1), -(-columns // tile.block_n))


@trtp.register("v4tree::moe_fc1")
def moe_fc1(x: Desc, table: Desc, weight: Desc, topk: int, limit: float, capability: int) -> Desc:
    """x [B, N, D], table [L, 1 + block], weight [E, 2I, D] with gate and up rows interleaved -> [B, N, topk, I]."""
    return _tensor(x.dtype, x.shape_expr[0], x.shape_expr[1], topk, weight.shape_expr[1] // 2)


@trtp.autotune("v4tree::moe_fc1")
def moe_fc1_autotune(x: Desc, table: Desc, weight: Desc, outputs: Tuple[Desc]) -> List[trtp.AutoTuneCombination]:
    return _combinations("A,INT64,A,A", len(aot.expert_tiles("bf16")))


@trtp.aot_impl("v4tree::moe_fc1")
def moe_fc1_aot(
    x: Desc, table: Desc, weight: Desc, topk: int, limit: float, capability: int, outputs: Tuple[Desc], tactic: int
) -> Launch:
    return _fc1_launch(x, table, weight, topk, limit, capability, tactic, False)


def _fc1_launch(
    x: Desc, table: Desc, weight: Desc, topk: int, limit: float, capability: int, tactic: int, fp4: bool
) -> Launch:
    dtype, block = _NAMES[x.dtype], _fixed(table.shape_expr[1], "the length of a line") - 1
    tile = aot.expert_tiles(dtype, fp4)[max(tactic, 1) - 1]
    hidden = _fixed(x.shape_expr[2], "the width of a token")
    inner = _fixed(weight.shape_expr[1], "the width of an expert") // 2
    code = _machine_code(aot.moe_fc1_variant, (dtype, tile, hidden, inner, topk, limit, block, fp4), capability)
    return _launch(code, _expert_grid(table, inner, tile), (table.shape_expr[0],))


@trtp.register("v4tree::moe_fc1_fp4")
def moe_fc1_fp4(x: Desc, table: Desc, weight: Desc, scales: Desc, topk: int, limit: float, capability: int) -> Desc:
    """The same of weights [E, 2I, D / 2] with two e2m1 values a byte, and scales [E, 2I, D / 32]."""
    return _tensor(x.dtype, x.shape_expr[0], x.shape_expr[1], topk, weight.shape_expr[1] // 2)


@trtp.autotune("v4tree::moe_fc1_fp4")
def moe_fc1_fp4_autotune(
    x: Desc, table: Desc, weight: Desc, scales: Desc, capability: int, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _fp4_combinations("A,INT64,INT8,INT8,A", capability)


@trtp.aot_impl("v4tree::moe_fc1_fp4")
def moe_fc1_fp4_aot(
    x: Desc, table: Desc, weight: Desc, scales: Desc, topk: int, limit: float, capability: int,
    outputs: Tuple[Desc], tactic: int,
) -> Launch:  # fmt: skip
    return _fc1_launch(x, table, weight, topk, limit, capability, tactic, True)


def _fp4_combinations(pattern: str, capability: int) -> List[trtp.AutoTuneCombination]:
    """Activations that FP4 weights are widened to on this chip."""
    numbers = list(range(1, len(aot.expert_tiles("bf16", True)) + 1))
    names = [name for name in _IO_NAMES if aot.takes_fp4(name.lower(), capability)]
    return [trtp.AutoTuneCombination(pattern.replace("A", name), "LINEAR", numbers) for name in names]


@trtp.register("v4tree::moe_fc2")
def moe_fc2(act: Desc, table: Desc, weight: Desc, capability: int) -> Desc:
    """act [B, N, k, I], table [L, 1 + block], weight [E, D, I] -> fp32 [B, N, k, D]."""
    return _tensor(trt.DataType.FLOAT, *(act.shape_expr[axis] for axis in range(3)), weight.shape_expr[1])


@trtp.autotune("v4tree::moe_fc2")
def moe_fc2_autotune(act: Desc, table: Desc, weight: Desc, outputs: Tuple[Desc]) -> List[trtp.AutoTuneCombination]:
    return _combinations("A,INT64,A,FP32", len(aot.expert_tiles("bf16")))


@trtp.aot_impl("v4tree::moe_fc2")
def moe_fc2_aot(act: Desc, table: Desc, weight: Desc, capability: int, outputs: Tuple[Desc], tactic: int) -> Launch:
    return _fc2_launch(act, table, weight, capability, tactic, False)


def _fc2_launch(act: Desc, table: Desc, weight: Desc, capability: int, tactic: int, fp4: bool) -> Launch:
    dtype, block = _NAMES[act.dtype], _fixed(table.shape_expr[1], "the length of a line") - 1
    tile = aot.expert_tiles(dtype, fp4)[max(tactic, 1) - 1]
    hidden = _fixed(weight.shape_expr[1], "the width of a token")
    inner = _fixed(act.shape_expr[3], "the width of an expert")
    code = _machine_code(aot.moe_fc2_variant, (dtype, tile, hidden, inner, block, fp4), capability)
    return _launch(code, _expert_grid(table, hidden, tile), (table.shape_expr[0],))


@trtp.register("v4tree::moe_fc2_fp4")
def moe_fc2_fp4(act: Desc, table: Desc, weight: Desc, scales: Desc, capability: int) -> Desc:
    """The same of weights [E, D, I / 2] with two e2m1 values a byte, and scales [E, D, I / 32]."""
    return _tensor(trt.DataType.FLOAT, *(act.shape_expr[axis] for axis in range(3)), weight.shape_expr[1])


@trtp.autotune("v4tree::moe_fc2_fp4")
def moe_fc2_fp4_autotune(
    act: Desc, table: Desc, weight: Desc, scales: Desc, capability: int, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _fp4_combinations("A,INT64,INT8,INT8,FP32", capability)


@trtp.aot_impl("v4tree::moe_fc2_fp4")
def moe_fc2_fp4_aot(
    act: Desc, table: Desc, weight: Desc, scales: Desc, capability: int, outputs: Tuple[Desc], tactic: int
) -> Launch:
    return _fc2_launch(act, table, weight, capability, tactic, True)


@trtp.register("v4tree::moe_combine")
def moe_combine(parts: Desc, weights: Desc, base: Desc, scale: float, capability: int) -> Desc:
    """base [B, N, D] plus `scale` times parts [B, N, k, D] by weights [B, N, k] over their sum."""
    return base.like()


@trtp.autotune("v4tree::moe_combine")
def moe_combine_autotune(
    parts: Desc, weights: Desc, base: Desc, outputs: Tuple[Desc]
) -> List[trtp.AutoTuneCombination]:
    return _combinations("FP32,FP32,A,A", 1)


@trtp.aot_impl("v4tree::moe_combine")
def moe_combine_aot(
    parts: Desc, weights: Desc, base: Desc, scale: float, capability: int, outputs: Tuple[Desc], tactic: int
) -> Launch:
    topk, hidden = (_fixed(parts.shape_expr[axis], "the shape of a token's parts") for axis in (2, 3))
    code = _machine_code(aot.moe_combine_variant, (_NAMES[base.dtype], hidden, topk, scale), capability)
    tokens = base.shape_expr[0] * base.shape_expr[1]
    return _launch(code, (trtp.max(tokens, 1), -(-hidden // aot.MOE_COLUMNS)), (tokens,))
