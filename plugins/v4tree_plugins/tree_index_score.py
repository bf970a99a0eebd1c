"""Tree index score: I[n, s] = sum_h w[n, h] relu(q[n, h] . k[s]) of every node against committed and branch entries (spec 3).

A program loads one block of keys once and scores every node of its group against it; what a node may not see is -inf.
The top-k over the scores is the engine's own.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from v4tree_plugins.dot import default_precision, dot


@triton.jit
def tree_index_score_kernel(
    query, weights, entries, rows, branch, mask, nodes, num_rows, num_branch, out,
    DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (key blocks, node groups, B). query [B, N, HEADS, DIM], rows [B, E] into entries [R, DIM], branch [B, M, DIM]."""
    batch = tl.program_id(2).to(tl.int64)
    keys = num_rows + num_branch
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim, head = tl.arange(0, DIM), tl.arange(0, HEADS)
    paged = key < num_rows
    row = tl.load(rows + batch * num_rows + key, mask=paged, other=0).to(tl.int64)
    own = batch * num_branch + key - num_rows
    address = tl.where(paged, entries + row * DIM, branch + own * DIM)
    k = tl.load(address[:, None] + dim[None, :], mask=(key < keys)[:, None], other=0.0)
    first = tl.program_id(1) * GROUP
    for node in range(first, tl.minimum(first + GROUP, nodes)):
        line = batch * nodes + node
        q = tl.load(query + line * (HEADS * DIM) + head[:, None] * DIM + dim[None, :])
        score = tl.maximum(dot(q, tl.trans(k), PRECISION), 0.0)
        w = tl.load(weights + line * HEADS + head).to(tl.float32)
        seen = tl.load(mask + line * keys + key, mask=key < keys, other=float("-inf"))
        total = tl.sum(score * w[:, None], axis=0)
        total = tl.where(seen == float("-inf"), float("-inf"), total + seen)
        tl.store(out + line * keys + key, total, mask=key < keys)


def tree_index_score(
    query: torch.Tensor, weights: torch.Tensor, entries: torch.Tensor, rows: torch.Tensor, branch: torch.Tensor,
    mask: torch.Tensor, *, group: int = 8, block: int = 64, num_warps: int = 4,
) -> torch.Tensor:  # fmt: skip
    """query [B, N, Hi, di], weights [B, N, Hi], entries [R, di], rows [B, E], branch [B, M, di], mask [B, N, E + M] -> fp32 scores."""
    b, n, heads, dim = query.shape
    keys = rows.shape[1] + branch.shape[1]
    out = torch.empty(b, n, keys, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(keys, block), triton.cdiv(n, group), b)
    if out.numel():
        tree_index_score_kernel[grid](
            query, weights, entries, rows, branch, mask, n, rows.shape[1], branch.shape[1], out,
            DIM=dim, HEADS=heads, GROUP=group, BLOCK=block, PRECISION=default_precision(), num_warps=num_warps,
        )  # fmt: skip
    return out


def naive_tree_index_score(
    query: np.ndarray, weights: np.ndarray, entries: np.ndarray, rows: np.ndarray, branch: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Float64 reference, pair by pair; hidden pairs are never read."""
    b, n, _, _ = query.shape
    out = np.full(mask.shape, -np.inf)
    for i, j in np.ndindex(b, n):
        for k in np.flatnonzero(mask[i, j] > -np.inf):
            key = entries[rows[i, k]] if k < rows.shape[1] else branch[i, k - rows.shape[1]]
            out[i, j, k] = weights[i, j] @ np.maximum(query[i, j] @ key, 0) + mask[i, j, k]
    return out
