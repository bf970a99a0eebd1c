"""Commit kernels: accepted rows into the pools by row table, and the fold of accepted rows into the open compressor states.

Run outside the engine, in place (law 2). One fold program reads every row of its channels before it writes the first.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from v4tree_plugins.tree_pool import naive_pool_row, naive_rows, pool_rows


@triton.jit
def scatter_rows_kernel(scratch, source, pool, target, scratch_rows, pool_rows_per_layer, width, BLOCK: tl.constexpr):
    """pool[layer, target[a]] = scratch[layer, source[a]]. Grid (A, layers, blocks of width)."""
    layer = tl.program_id(1).to(tl.int64)
    read = layer * scratch_rows + tl.load(source + tl.program_id(0))
    write = layer * pool_rows_per_layer + tl.load(target + tl.program_id(0))
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(scratch + read * width + channel, mask=channel < width)
    tl.store(pool + write * width + channel, row.to(pool.dtype.element_ty), mask=channel < width)


@triton.jit
def fold_row(
    state,
    raw,
    table,
    slot,
    batch,
    raw_rows,
    channel,
    S,
    DIM: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(logsumexp of scores, weighted mean of kv) of a fold line; a single row comes out bit for bit."""
    top, total, value = pool_rows(state, raw, table, slot, batch, raw_rows, channel, S, DIM, STATES, BLOCK, WIDTH)
    return top + tl.log(total), value / total


@triton.jit
def fold_kernel(
    state, slots, raw, table, raw_rows, slots_per_layer, S,
    DIM: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (B, layers, DIM / WIDTH). state [layers * slots, STATES, 2 DIM] in place, raw [layers, B, raw_rows, 2 DIM], table [B, STATES, S]."""
    batch, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = layer * slots_per_layer + tl.load(slots + batch).to(tl.int64)
    line = layer * tl.num_programs(0) + batch
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    fold = table + batch * STATES * S
    target = state + slot * (STATES * 2 * DIM) + channel
    score0, kv0 = fold_row(state, raw, fold, slot, line, raw_rows, channel, S, DIM, STATES, BLOCK, WIDTH)
    if STATES == 3:
        score1, kv1 = fold_row(state, raw, fold + S, slot, line, raw_rows, channel, S, DIM, STATES, BLOCK, WIDTH)
        score2, kv2 = fold_row(state, raw, fold + 2 * S, slot, line, raw_rows, channel, S, DIM, STATES, BLOCK, WIDTH)
        tl.debug_barrier()
        tl.store(target + 2 * DIM, score1)
        tl.store(target + 3 * DIM, kv1)
        tl.store(target + 4 * DIM, score2)
        tl.store(target + 5 * DIM, kv2)
    tl.store(target, score0)
    tl.store(target + DIM, kv0)


def scatter_rows(scratch: torch.Tensor, source: torch.Tensor, pool: torch.Tensor, target: torch.Tensor) -> None:
    """scratch [L, B * N, w], source and target [A], pool [L * rows, w], in place."""
    layers, rows, width = scratch.shape
    block = min(1024, triton.next_power_of_2(width))
    if source.numel():
        scatter_rows_kernel[(source.numel(), layers, triton.cdiv(width, block))](
            scratch, source, pool, target, rows, pool.shape[0] // layers, width, BLOCK=block
        )


def fold(
    state: torch.Tensor,
    slots: torch.Tensor,
    raw: torch.Tensor,
    table: torch.Tensor,
    *,
    block: int = 4,
    width: int = 128,
) -> None:
    """state [L * slots, STATES, 2 dim] fp32 in place, slots [B], raw [L, B, rows, 2 dim], table [B, STATES, S]."""
    layers, b, rows, wide = raw.shape
    dim = wide // 2
    width = min(width, dim)
    fold_kernel[(b, layers, dim // width)](
        state, slots, raw, table, rows, state.shape[0] // layers, table.shape[2],
        DIM=dim, STATES=state.shape[1], BLOCK=block, WIDTH=width,
    )  # fmt: skip


def naive_scatter_rows(scratch: np.ndarray, source: np.ndarray, pool: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Reference of `scatter_rows`; returns the new pool."""
    out = pool.copy()
    stride = len(pool) // len(scratch)
    for layer, rows in enumerate(scratch):
        for read, write in zip(source, target, strict=True):
            out[layer * stride + write] = rows[read]
    return out


def naive_fold(state: np.ndarray, slots: np.ndarray, raw: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Float64 reference of `fold`; returns the new states."""
    out = state.astype(np.float64)
    stride, dim = len(state) // len(raw), raw.shape[-1] // 2
    for layer, b in np.ndindex(*raw.shape[:2]):
        at = layer * stride + slots[b]
        for i, line in enumerate(table[b]):
            out[at, i] = np.concatenate(
                naive_pool_row(naive_rows(state[at].astype(np.float64), raw[layer, b], line), dim)
            )
    return out
