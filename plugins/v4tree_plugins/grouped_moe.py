"""Grouped mixture of experts: every expert multiplied with its own tokens alone (spec 5.2); an expert without tokens is not read.

A pair is a token with one of its experts, numbered token * k + j. Four launches:

* `moe_align` sorts the pairs by expert into lines of BLOCK_M, each of one expert, filled up with -1;
* `moe_fc1` multiplies the tokens of a line with gate and up rows of its expert and applies the clamped SwiGLU;
* `moe_fc2` multiplies that with the expert's output rows, in fp32 and per pair;
* `moe_combine` adds the k pairs of a token, weighted, in the order of the router.

Experts are of the activations' dtype, or FP4 as V4 stores them: two e2m1 values a byte, the even input in the low half, and a byte
of scale, 2^(byte - 127), for 32 inputs of a row. They are widened in registers (16-bit activations; fp16 where the chip converts FP8),
exactly for bytes 2 to 252 in bf16 and 104 to 140 in fp16. Beyond, a scale or a weight may be rounded, zero or infinite; byte 255, no
number in the format, is infinite too, so a caller keeps to these.

Nothing is added across programs and no tile depends on what else is in a batch, so a token's result is the same bits beside any others.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from v4tree_plugins.dot import default_precision, dot_add

BLOCK_M = 16
"""Pairs of a line: the least rows of a matrix instruction, since while decoding an expert has one or two tokens."""
CHUNK = 1024
"""Pairs that `moe_align` looks at together."""


@triton.jit
def moe_align_kernel(
    ids, pairs, lines, table, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid (EXPERTS + 1,). ids [pairs] -> table [lines, 1 + BLOCK_M]: an expert and its pairs in order; -1 where there is none.

    A program counts all experts' pairs, which tells it where its own expert's lines begin, and writes these; the last one, the rest.
    """
    expert = tl.program_id(0)
    lane, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        chosen = tl.load(ids + first + lane, mask=first + lane < pairs, other=0).to(tl.int32)
        counts += tl.histogram(chosen, BINS, mask=first + lane < pairs)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < expert, needed, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    end = tl.where(expert == EXPERTS, lines, start + (own + BLOCK_M - 1) // BLOCK_M)
    name = tl.where(expert == EXPERTS, -1, expert).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    for line in range(start, end):
        target = table + line * (BLOCK_M + 1)
        tl.store(target, name)
        tl.store(target + 1 + row, tl.full([BLOCK_M], -1, tl.int64), mask=(line - start) * BLOCK_M + row >= own)
    seen = 0
    for first in range(0, pairs, CHUNK):
        pair = first + lane
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        rank = seen + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        target = (start + rank // BLOCK_M).to(tl.int64) * (BLOCK_M + 1) + 1 + rank % BLOCK_M
        tl.store(table + target, pair.to(tl.int64), mask=mine)
        seen += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def load_tile(pointers, use, first, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns first .. first + BLOCK_K of rows SIZE long that `pointers` [R] point at; zeros behind their end and where not `use` [R]."""
    k = first + tl.arange(0, BLOCK_K)
    inside = use[:, None]
    if SIZE % BLOCK_K != 0:
        inside = inside & (k < SIZE)[None, :]
    return tl.load(pointers[:, None] + k[None, :], mask=inside, other=0.0)


@triton.jit
def add_product(
    value, a, rows, scales, used, first, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):
    """value [M, N] plus a [M, BLOCK_K] times inputs first .. first + BLOCK_K of the weights' rows [N], FP4 where there are scales."""
    if scales is None:
        tile = load_tile(rows, used, first, SIZE, BLOCK_K)
        value = dot_add(a, tl.trans(tile), value, PRECISION)
    else:
        FORMAT: tl.constexpr = "bf16" if a.dtype == tl.bfloat16 else "fp16"
        tile = load_tile(rows, used, first // 2, SIZE // 2, BLOCK_K // 2)
        scale = load_tile(scales, used, first // 32, SIZE // 32, BLOCK_K // 32)
        value = tl.dot_scaled(a, None, FORMAT, tl.trans(tile), scale, "e2m1", value, fast_math=True)
    return value


@triton.jit
def expert_rows(weight, scales, row, SIZE: tl.constexpr):
    """Pointers to rows of SIZE inputs and to their scales."""
    if scales is None:
        rows, scale_rows = weight + row * SIZE, None
    else:
        rows, scale_rows = weight + row * (SIZE // 2), scales + row * (SIZE // 32)
    return rows, scale_rows


@triton.jit
def moe_fc1_kernel(
    x, table, weight, scales, lines, out,
    TOPK: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (lines, tiles of INNER). x [T, HIDDEN], weight [E, 2 INNER, HIDDEN], gate and up rows interleaved -> out [T * TOPK, INNER].

    scales: None, or with FP4 weights [E, 2 INNER, HIDDEN / 2] their bytes [E, 2 INNER, HIDDEN / 32].
    """
    if tl.program_id(0) >= lines:
        return
    line = table + tl.program_id(0) * (BLOCK_M + 1)
    expert = tl.load(line)
    if expert < 0:
        return
    pair = tl.load(line + 1 + tl.arange(0, BLOCK_M))
    real = pair >= 0
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = column < INNER
    tokens = x + tl.where(real, pair, 0) // TOPK * HIDDEN
    row = 2 * (expert * INNER + column)
    gate_rows, gate_scales = expert_rows(weight, scales, row, HIDDEN)
    up_rows, up_scales = expert_rows(weight, scales, row + 1, HIDDEN)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, HIDDEN, BLOCK_K):
        token = load_tile(tokens, real, first, HIDDEN, BLOCK_K)
        gate = add_product(gate, token, gate_rows, gate_scales, used, first, HIDDEN, BLOCK_K, PRECISION)
        up = add_product(up, token, up_rows, up_scales, used, first, HIDDEN, BLOCK_K, PRECISION)
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    value = gate / (1 + tl.exp(-gate)) * up
    target = out + pair[:, None] * INNER + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=real[:, None] & used[None, :])


@triton.jit
def moe_fc2_kernel(
    act, table, weight, scales, lines, out,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (lines, tiles of HIDDEN). act [P, INNER] by pair, weight [E, HIDDEN, INNER] -> fp32 out [P, HIDDEN]; scales as in fc1."""
    if tl.program_id(0) >= lines:
        return
    line = table + tl.program_id(0) * (BLOCK_M + 1)
    expert = tl.load(line)
    if expert < 0:
        return
    pair = tl.load(line + 1 + tl.arange(0, BLOCK_M))
    real = pair >= 0
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = column < HIDDEN
    inner = act + tl.where(real, pair, 0) * INNER
    rows, row_scales = expert_rows(weight, scales, expert * HIDDEN + column, INNER)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INNER, BLOCK_K):
        a = load_tile(inner, real, first, INNER, BLOCK_K)
        value = add_product(value, a, rows, row_scales, used, first, INNER, BLOCK_K, PRECISION)
    target = out + pair[:, None] * HIDDEN + column[None, :]
    tl.store(target, value, mask=real[:, None] & used[None, :])


@triton.jit
def moe_combine_kernel(
    parts, weights, base, tokens, out, TOPK: tl.constexpr, HIDDEN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (T, tiles of HIDDEN). base [T, HIDDEN] plus SCALE times the mean of parts [T, TOPK, HIDDEN] by weights [T, TOPK], in order."""
    if tl.program_id(0) >= tokens:
        return
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    use = column < HIDDEN
    total = 0.0
    value = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        share = tl.load(weights + token * TOPK + j)
        total += share
        value += share * tl.load(parts + (token * TOPK + j) * HIDDEN + column, mask=use, other=0.0)
    value = value / total * SCALE + tl.load(base + token * HIDDEN + column, mask=use, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, value.to(out.dtype.element_ty), mask=use)


def num_lines(pairs: int, experts: int, block: int = BLOCK_M) -> int:
    """Most lines that so many pairs need: every expert that has any may leave one unfilled."""
    return (pairs + min(pairs, experts) * (block - 1)) // block


def align(ids: torch.Tensor, experts: int, block: int = BLOCK_M) -> torch.Tensor:
    """ids [T, k] -> table [lines, 1 + block] of experts and their pairs, int64."""
    lines = num_lines(ids.numel(), experts, block)
    table = torch.empty(lines, 1 + block, dtype=torch.int64, device=ids.device)
    moe_align_kernel[(experts + 1,)](
        ids, ids.numel(), lines, table, EXPERTS=experts, BINS=triton.next_power_of_2(experts), BLOCK_M=block, CHUNK=CHUNK,
    )  # fmt: skip
    return table


def grouped_moe(
    x: torch.Tensor, base: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor,
    *, limit: float, scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), scale: float = 1.0,
    block_n: int = 64, block_k: int = 64, num_warps: int = 4, num_stages: int = 3,
) -> torch.Tensor:  # fmt: skip
    """base plus `scale` times the routed experts of x: x and base [T, D], ids and fp32 weights [T, k], fc1 [E, 2I, D], fc2 [E, D, I]
    -> [T, D]. With `scales` of both ([E, 2I, D / 32] and [E, D, I / 32] bytes) fc1 [E, 2I, D / 2] and fc2 [E, D, I / 2] are FP4."""
    tokens, topk = ids.shape
    experts, hidden, inner = len(fc2), x.shape[1], fc1.shape[1] // 2
    act = torch.empty(tokens * topk, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(tokens * topk, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    if not tokens:
        return out
    table = align(ids, experts)
    lines = len(table)
    options = {"BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": block_k, "PRECISION": default_precision()}
    options |= {"num_warps": num_warps, "num_stages": num_stages, "HIDDEN": hidden, "INNER": inner}
    moe_fc1_kernel[(lines, triton.cdiv(inner, block_n))](
        x, table, fc1, scales[0], lines, act, TOPK=topk, LIMIT=limit, **options
    )  # fmt: skip
    moe_fc2_kernel[(lines, triton.cdiv(hidden, block_n))](act, table, fc2, scales[1], lines, parts, **options)
    moe_combine_kernel[(tokens, triton.cdiv(hidden, 1024))](
        parts, weights, base, tokens, out, TOPK=topk, HIDDEN=hidden, SCALE=scale, BLOCK=1024
    )  # fmt: skip
    return out


def naive_align(ids: np.ndarray, experts: int, block: int = BLOCK_M) -> np.ndarray:
    """Reference of `align`, expert by expert."""
    table = np.full((num_lines(ids.size, experts, block), 1 + block), -1)
    line = 0
    for expert in range(experts):
        pairs = np.flatnonzero(ids.reshape(-1) == expert)
        for first in range(0, len(pairs), block):
            group = pairs[first : first + block]
            table[line, : 1 + len(group)] = [expert, *group]
            line += 1
    return table


def naive_grouped_moe(
    x: np.ndarray,
    base: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    fc1: np.ndarray,
    fc2: np.ndarray,
    limit: float,
) -> np.ndarray:
    """Float64 reference of `grouped_moe`, token by token and expert by expert."""
    out = base.copy()
    for t, j in np.ndindex(*ids.shape):
        expert = ids[t, j]
        gate, up = np.minimum(fc1[expert, 0::2] @ x[t], limit), np.clip(fc1[expert, 1::2] @ x[t], -limit, limit)
        out[t] += weights[t, j] / weights[t].sum() * (fc2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def naive_fp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float64 values [.., I] of FP4 rows [.., I / 2] and their scales [.., I / 32]."""
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
    return values * np.exp2(scales.astype(np.float64) - 127).repeat(32, axis=-1)
