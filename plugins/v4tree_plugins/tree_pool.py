"""Tree pool: the compressed entry of every boundary node, with RMSNorm and RoPE (spec 2.3, design section 2).

A program owns one entry: a running per-channel softmax over the rows that its table line names, straight from where they lie
(committed states by slot, raw rows of the nodes), so no branch ever copies a state. CSA pools 2 r rows, HCA 1 + T.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

NULL_SCORE = -1e30
"""Score of the null row; finite, so that a pool of nothing but null rows is 0 and not NaN."""


@triton.jit
def row_block(
    state,
    raw,
    table,
    slot,
    batch,
    raw_rows,
    first,
    channel,
    S,
    DIM: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores and kv [BLOCK, len(channel)] of rows first .. of a table line: states, then the null row, then raw rows."""
    at = first + tl.arange(0, BLOCK)
    row = tl.load(table + at, mask=at < S, other=STATES).to(tl.int64)
    held, node = (row < STATES)[:, None], (row > STATES)[:, None]
    old = state + (slot * STATES + row)[:, None] * (2 * DIM) + channel[None, :]
    new = raw + (batch * raw_rows + row - STATES - 1)[:, None] * (2 * DIM) + channel[None, :]
    score = tl.where(held, tl.load(old, mask=held, other=0.0).to(tl.float32), -1e30)
    score = tl.where(node, tl.load(new, mask=node, other=0.0).to(tl.float32), score)
    kv = tl.load(old + DIM, mask=held, other=0.0).to(tl.float32)
    kv = tl.where(node, tl.load(new + DIM, mask=node, other=0.0).to(tl.float32), kv)
    return tl.where((at < S)[:, None], score, float("-inf")), kv


@triton.jit
def pool_rows(
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
    """Running softmax over the S rows of a table line: max, sum of exp and weighted sum, each [WIDTH]."""
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    value = tl.zeros([WIDTH], tl.float32)
    for first in range(0, S, BLOCK):
        score, kv = row_block(state, raw, table, slot, batch, raw_rows, first, channel, S, DIM, STATES, BLOCK)
        new_top = tl.maximum(top, tl.max(score, axis=0))
        keep = tl.exp(top - new_top)
        weight = tl.exp(score - new_top[None, :])
        total = total * keep + tl.sum(weight, axis=0)
        value = value * keep + tl.sum(weight * kv, axis=0)
        top = new_top
    return top, total, value


@triton.jit
def tree_pool_kernel(
    state, slots, raw, table, norm, cos, sin, num_entries, raw_rows, S, out,
    DIM: tl.constexpr, ROPE: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid (B * M,). state [slots, STATES, 2 DIM], raw [B, raw_rows, 2 DIM], table [B, M, S], cos, sin [B, M, ROPE / 2]."""
    if num_entries == 0:
        return
    entry = tl.program_id(0).to(tl.int64)
    batch = entry // num_entries
    slot = tl.load(slots + batch).to(tl.int64)
    channel = tl.arange(0, DIM)
    _, total, value = pool_rows(
        state, raw, table + entry * S, slot, batch, raw_rows, channel, S, DIM, STATES, BLOCK, DIM
    )
    pooled = value / total
    scale = tl.rsqrt(tl.sum(pooled * pooled, axis=0) / DIM + EPS)
    normed = pooled * scale * tl.load(norm + channel).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, [DIM // 2, 2]))
    pair = tl.arange(0, DIM // 2)
    c = tl.load(cos + entry * (ROPE // 2) + pair, mask=pair < ROPE // 2, other=1.0).to(tl.float32)
    s = tl.load(sin + entry * (ROPE // 2) + pair, mask=pair < ROPE // 2, other=0.0).to(tl.float32)
    rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [DIM])
    tl.store(out + entry * DIM + channel, rotated.to(out.dtype.element_ty))


def tree_pool(
    state: torch.Tensor, slots: torch.Tensor, raw: torch.Tensor, table: torch.Tensor, norm: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, *, rope_dim: int, eps: float, block: int = 8, num_warps: int = 4,
) -> torch.Tensor:  # fmt: skip
    """state [slots, 3 or 1, 2 dim], slots [B], raw [B, N * halves, 2 dim], table [B, M, S] -> entries [B, M, dim]."""
    b, m, s = table.shape
    dim = norm.shape[0]
    out = torch.empty(b, m, dim, dtype=raw.dtype, device=raw.device)
    if out.numel():
        tree_pool_kernel[(b * m,)](
            state, slots, raw, table, norm, cos, sin, m, raw.shape[1], s, out,
            DIM=dim, ROPE=rope_dim, STATES=state.shape[1], BLOCK=block, EPS=eps, num_warps=num_warps,
        )  # fmt: skip
    return out


def naive_pool_row(rows: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(logsumexp of scores, softmax-weighted kv) per channel of float64 rows [S, 2 dim]."""
    score, kv = rows[:, :dim], rows[:, dim:]
    top = score.max(axis=0)
    weight = np.exp(score - top)
    return top + np.log(weight.sum(axis=0)), (weight * kv).sum(axis=0) / weight.sum(axis=0)


def naive_rows(state: np.ndarray, raw: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rows [S, 2 dim] of one table line from the states [STATES, 2 dim] of a slot and the raw rows of a sequence."""
    states, width = state.shape
    null = np.concatenate([np.full(width // 2, NULL_SCORE), np.zeros(width // 2)])
    return np.stack([state[i] if i < states else null if i == states else raw[i - states - 1] for i in table])


def naive_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Interleaved rotation of the leading 2 * len(cos) dims of x [..., d]."""
    out, width = x.copy(), 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    out[..., 0:width:2], out[..., 1:width:2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def naive_tree_pool(
    state: np.ndarray, slots: np.ndarray, raw: np.ndarray, table: np.ndarray, norm: np.ndarray,
    cos: np.ndarray, sin: np.ndarray, eps: float,
) -> np.ndarray:  # fmt: skip
    """Float64 reference of `tree_pool`, entry by entry."""
    out = np.empty((*table.shape[:2], len(norm)))
    for b, m in np.ndindex(*table.shape[:2]):
        _, pooled = naive_pool_row(naive_rows(state[slots[b]], raw[b], table[b, m]), len(norm))
        normed = pooled / np.sqrt((pooled**2).mean() + eps) * norm
        out[b, m] = naive_rope(normed, cos[b, m], sin[b, m])
    return out
