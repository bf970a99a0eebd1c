"""Tree attention: shared-KV attention of all nodes over [window rows | node rows | entries | branch entries] (spec 4).

Row (n, h) of a query tile is node n, head h. All heads and nodes of a tile read each key once, and a key is its own value, so it is
loaded once for both products. Keys come straight from the pools by row table; a key that no row of the tile sees is never read.
Split over keys: every split leaves (sum, max, weights) partials and a combine kernel merges them with the sink. Without a split
the tile finishes by itself: sink in the denominator, inverse RoPE of the output.
Keys are rows of the activations' dtype, or all of them packed rows of bytes (`packed_rows`).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from v4tree_plugins.dot import default_precision, dot, dot_add
from v4tree_plugins.packed_rows import load_packed, load_packed_part

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def additive_bias(mask, line, key, width):
    """Additive mask [M, K] of the lines b * N + n (-1: no such row) and keys of a segment."""
    use = (line >= 0)[:, None] & (key < width)[None, :]
    return tl.load(mask + line[:, None] * width + key[None, :], mask=use, other=float("-inf")).to(tl.float32)


@triton.jit
def packed_bias(packed, line, key, paged_keys, own_keys, column, skipped):
    """The same from packed visibility [B, N, 4]: how many paged keys after the `skipped` first a node sees, and a bit per own key."""
    seen = tl.load(packed + line * 4 + column, mask=line >= 0, other=0)
    bits = tl.load(packed + line * 4 + column + 1, mask=line >= 0, other=0)
    own = tl.minimum(tl.maximum(key - paged_keys, 0), 63).to(tl.int64)
    visible = ((bits[:, None] >> own[None, :]) & 1) != 0
    visible = visible & ((key >= paged_keys) & (key < paged_keys + own_keys))[None, :]
    index = key - skipped
    paged = (index[None, :] < seen[:, None]) & ((index >= 0) & (key < paged_keys))[None, :]
    return tl.where(visible | paged, 0.0, float("-inf"))


@triton.jit
def key_block(
    pool, rows, own, mask, key, paged_keys, own_keys, batch, line, node_lines, row_stride, column, skipped,
    ROW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of a segment [rows of a pool | rows of this pass]: pointers to its keys [K], which of them any row sees [K], and
    the additive mask [M, K].

    line [M] is the mask line of each query row (b * N + n; -1 for a row that does not exist). ROW is the length of a key's row.
    """
    if PACKED:  # noqa: SIM108  (a ternary of two tensors would evaluate both)
        bias = packed_bias(mask, line, key, paged_keys, own_keys, column, skipped)
    else:
        bias = additive_bias(mask, line, key, paged_keys + own_keys)
    wanted = tl.max(bias, axis=0) > float("-inf")
    paged = key < paged_keys
    row = tl.load(rows + node_lines * row_stride + key, mask=wanted & paged, other=0).to(tl.int64)
    address = tl.where(paged, pool + row * ROW, own + (batch * own_keys + key - paged_keys) * ROW)
    return address, wanted, bias


@triton.jit
def load_rows(pointers, use, first: tl.constexpr, WIDTH: tl.constexpr):
    """Columns first .. first + WIDTH of the rows that `pointers` [R] point at, zeros where not `use` [R]."""
    return tl.load(pointers[:, None] + first + tl.arange(0, WIDTH)[None, :], mask=use[:, None], other=0.0)


@triton.jit
def load_keys(
    pointers, use, first: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The same of keys, which are packed where a row is not DIM long."""
    if ROW == DIM:
        keys = load_rows(pointers, use, first, WIDTH)
    elif WIDTH == DIM:
        keys = load_packed(pointers, use, DIM, ROPE, DTYPE)
    else:
        keys = load_packed_part(pointers, use, first, WIDTH, DIM, ROPE, DTYPE)
    return keys


@triton.jit
def unrotate(value, cos, sin, line, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Inverse interleaved RoPE of the leading ROPE dims of value [BLOCK_M, DIM] at the rotation of each row's node."""
    even, odd = tl.split(tl.reshape(value, [BLOCK_M, DIM // 2, 2]))
    pair = tl.arange(0, DIM // 2)
    at = line[:, None] * (ROPE // 2) + pair[None, :]
    use = (line >= 0)[:, None] & (pair < ROPE // 2)[None, :]
    c = tl.load(cos + at, mask=use, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=use, other=0.0).to(tl.float32)
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [BLOCK_M, DIM])


@triton.jit
def unrotate_stored(target, cos, sin, line, ROPE: tl.constexpr):
    """The same in place on rows that this program has stored: target [BLOCK_M] points at the rows.

    Pairs of a tile in registers lie across warps; through memory their rotation costs no registers and no shared memory.
    """
    tl.debug_barrier()
    pair = tl.arange(0, ROPE // 2)
    use = (line >= 0)[:, None] & (pair >= 0)[None, :]
    c = tl.load(cos + line[:, None] * (ROPE // 2) + pair[None, :], mask=use, other=1.0).to(tl.float32)
    s = tl.load(sin + line[:, None] * (ROPE // 2) + pair[None, :], mask=use, other=0.0).to(tl.float32)
    at = target[:, None] + 2 * pair[None, :]
    even, odd = tl.load(at, mask=use, other=0.0).to(tl.float32), tl.load(at + 1, mask=use, other=0.0).to(tl.float32)
    tl.store(at, (even * c + odd * s).to(target.dtype.element_ty), mask=use)
    tl.store(at + 1, (odd * c - even * s).to(target.dtype.element_ty), mask=use)


@triton.jit
def tree_attention_kernel(
    q, window, window_rows, nodes, node_mask, entries, entry_rows, branch, entry_mask, sink, cos, sin,
    num_nodes, num_window, num_entries, num_branch, entry_stride, out, out_max, out_sum,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N * HEADS rows, SPLITS, B). Key 0 of the window rows stands for the sink and is left out here.

    entry_stride is 0 when all nodes share entry_rows [B, E]; E when every node has its own [B, N, E] (then BLOCK_M divides HEADS).
    PACKED: both masks are the table [B, N, 4] of `pack_masks`, for at most 64 nodes.
    ROW: length of the keys' rows, DIM or the bytes of a packed row.
    CHUNK < DIM computes scores in slices of the head dim: for fp32, whose query tile does not fit the registers.
    SPLITS 1: out [B, N, HEADS, DIM] is finished. More: out [B, SPLITS, N * HEADS, DIM], out_max and out_sum [B, SPLITS, N * HEADS].
    """
    batch = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    item = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = item < num_nodes * HEADS
    line = tl.where(real, batch * num_nodes + item // HEADS, -1)
    tile_node = batch * num_nodes + tl.program_id(0) * BLOCK_M // HEADS
    dim = tl.arange(0, DIM)
    query = q + (batch * num_nodes * HEADS + item) * DIM
    if CHUNK == DIM:
        x = load_rows(query, real, 0, DIM)
    local_keys, far_keys = num_window + num_nodes, num_entries + num_branch
    local_blocks = tl.cdiv(local_keys, BLOCK_K)
    blocks = local_blocks + tl.cdiv(far_keys, BLOCK_K)
    share = tl.cdiv(blocks, SPLITS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    value = tl.zeros([BLOCK_M, DIM], tl.float32)
    for block in range(split * share, tl.minimum(split * share + share, blocks)):
        local = block < local_blocks
        first = tl.where(local, block, block - local_blocks) * BLOCK_K
        key = first + tl.arange(0, BLOCK_K)
        address, wanted, bias = key_block(
            tl.where(local, window, entries), tl.where(local, window_rows, entry_rows), tl.where(local, nodes, branch),
            tl.where(local, node_mask, entry_mask), key, tl.where(local, num_window, num_entries),
            tl.where(local, num_nodes, num_branch), batch, line,
            tl.where(local | (entry_stride == 0), batch, tile_node), tl.where(local, num_window, num_entries),
            tl.where(local, 0, 2), tl.where(local, 1, 0), ROW, PACKED,
        )  # fmt: skip
        if CHUNK == DIM:
            k = load_keys(address, wanted, 0, DIM, DIM, ROPE, ROW, q.dtype.element_ty)
            score = dot(x, tl.trans(k), PRECISION) * SCALE
        else:
            score = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
            for part in tl.static_range(DIM // CHUNK):
                part_x = load_rows(query, real, part * CHUNK, CHUNK)
                part_k = load_keys(address, wanted, part * CHUNK, CHUNK, DIM, ROPE, ROW, q.dtype.element_ty)
                score = dot_add(part_x, tl.trans(part_k), score, PRECISION)
            score = score * SCALE
            k = load_keys(address, wanted, 0, DIM, DIM, ROPE, ROW, q.dtype.element_ty)
        hidden = (bias == float("-inf")) | (local & (key == 0))[None, :]
        score = tl.where(hidden, float("-inf"), (score + bias) * LOG2E)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, axis=1)
        value = dot_add(weight.to(k.dtype), k, value * keep[:, None], PRECISION)
        top = new_top
    if SPLITS == 1:
        logit = tl.load(sink + item % HEADS).to(tl.float32) * LOG2E
        highest = tl.maximum(top, logit)
        keep = tl.exp2(top - highest)
        value = value * (keep / (total * keep + tl.exp2(logit - highest)))[:, None]
        target = out + (batch * num_nodes * HEADS + item) * DIM
        tl.store(target[:, None] + dim[None, :], value.to(out.dtype.element_ty), mask=real[:, None])
        unrotate_stored(target, cos, sin, line, ROPE)
    else:
        slot = (batch * SPLITS + split) * num_nodes * HEADS + item
        tl.store(out + slot[:, None] * DIM + dim[None, :], value, mask=real[:, None])
        tl.store(out_max + slot, top, mask=real)
        tl.store(out_sum + slot, total, mask=real)


@triton.jit
def combine_kernel(
    partial, part_max, part_sum, sink, cos, sin, like, num_nodes, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges the splits of BLOCK_M query rows with the sink, and rotates back. Grid (tiles of N * HEADS rows, B).

    `like` is never read: a plugin's launch passes all its inputs, and this one gives the output's shape and dtype.
    """
    batch = tl.program_id(1).to(tl.int64)
    rows = num_nodes * HEADS
    item = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = item < rows
    logit = tl.load(sink + item % HEADS).to(tl.float32) * LOG2E
    top = logit
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    value = tl.zeros([BLOCK_M, DIM], tl.float32)
    for split in range(SPLITS):
        slot = (batch * SPLITS + split) * rows + item
        part = tl.load(part_max + slot, mask=real, other=float("-inf"))
        new_top = tl.maximum(top, part)
        keep, gain = tl.exp2(top - new_top), tl.exp2(part - new_top)
        added = tl.load(partial + slot[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)
        value = value * keep[:, None] + added * gain[:, None]
        total = total * keep + gain * tl.load(part_sum + slot, mask=real, other=0.0)
        top = new_top
    line = tl.where(real, batch * num_nodes + item // HEADS, -1)
    value = unrotate(value / total[:, None], cos, sin, line, DIM, ROPE, BLOCK_M)
    target = out + (batch * rows + item)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=real[:, None])


def tree_attention(
    q: torch.Tensor, window: torch.Tensor, window_rows: torch.Tensor, nodes: torch.Tensor, node_mask: torch.Tensor,
    entries: torch.Tensor, entry_rows: torch.Tensor, branch: torch.Tensor, entry_mask: torch.Tensor,
    sink: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, scale: float, splits: int = 1,
    block_m: int = 16, block_k: int = 32, num_warps: int = 4, num_stages: int = 2,
) -> torch.Tensor:  # fmt: skip
    """Rotated-back attention output [B, N, H, d] of q [B, N, H, d].

    window [R, d], window_rows [B, W], nodes [B, N, d], node_mask [B, N, W + N]; entries [R, d], entry_rows [B, E] or [B, N, E],
    branch [B, M, d], entry_mask [B, N, E + M]; sink [H]; cos, sin [B, N, rope / 2]. Both masks may be the table of `pack_masks`; window,
    nodes, entries and branch may be packed rows, uint8 with their bytes in place of d.
    """
    b, n, heads, dim = q.shape
    own_rows = entry_rows.dim() == 3
    assert not own_rows or heads % block_m == 0, "rows per node need tiles of one node"
    partial = torch.empty(b, splits, n * heads, dim, dtype=torch.float32, device=q.device) if splits > 1 else q
    top, total = (torch.empty(b, splits, n * heads, dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty_like(q)
    tiles = triton.cdiv(n * heads, block_m)
    tree_attention_kernel[(tiles, splits, b)](
        q, window, window_rows, nodes, node_mask, entries, entry_rows, branch, entry_mask, sink, cos, sin,
        n, window_rows.shape[1], entry_rows.shape[-1], branch.shape[1], int(own_rows),
        partial if splits > 1 else out, top, total,
        SCALE=scale, HEADS=heads, DIM=dim, ROPE=2 * cos.shape[-1], SPLITS=splits, BLOCK_M=block_m, BLOCK_K=block_k,
        CHUNK=dim if q.dtype.itemsize == 2 else min(dim, 32), PRECISION=default_precision(),
        PACKED=node_mask.dtype == torch.int64, ROW=window.shape[-1], num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(triton.cdiv(n * heads, 4), b)](
            partial, top, total, sink, cos, sin, q, n, out,
            HEADS=heads, DIM=dim, ROPE=2 * cos.shape[-1], SPLITS=splits, BLOCK_M=4,
        )  # fmt: skip
    return out


def pack_masks(node_mask: np.ndarray, entry_mask: np.ndarray, window: int, entries: int) -> np.ndarray:
    """Packed visibility [B, N, 4] of additive masks [B, N, W + N] and [B, N, E + M], W and E being `window` and `entries`.

    Per node: newest window rows seen (the sink's row not counted), ancestors as bits, committed entries seen, branch entries as
    bits. Raises ValueError for more than 64 nodes and for masks that are no such thing.
    """
    parts = []
    for mask, paged, skipped in ((node_mask, window, 1), (entry_mask, entries, 0)):
        visible = mask == 0
        listed, own = visible[:, :, skipped:paged], visible[:, :, paged:]
        seen = listed.sum(axis=2, dtype=np.int64)
        if own.shape[2] > 64 or (listed != (np.arange(listed.shape[2]) < seen[:, :, None])).any():
            raise ValueError("only prefixes of the rows and at most 64 nodes can be packed: use additive masks")
        bits = (own.astype(np.uint64) << np.arange(own.shape[2], dtype=np.uint64)).sum(axis=2, dtype=np.uint64)
        parts += [seen, bits.view(np.int64)]
    return np.stack(parts, axis=2)


def naive_keys(
    visible: np.ndarray, pool: np.ndarray, rows: np.ndarray, own: np.ndarray, skip_first: bool
) -> np.ndarray:
    """Keys [K, d] that one node sees of [rows of a pool | rows of the pass]; hidden ones are never read."""
    seen = [k for k in np.flatnonzero(visible) if k or not skip_first]
    picked = [pool[rows[k]] if k < len(rows) else own[k - len(rows)] for k in seen]
    return np.array(picked).reshape(len(seen), own.shape[-1])


def naive_tree_attention(
    q: np.ndarray, window: np.ndarray, window_rows: np.ndarray, nodes: np.ndarray, node_mask: np.ndarray,
    entries: np.ndarray, entry_rows: np.ndarray, branch: np.ndarray, entry_mask: np.ndarray,
    sink: np.ndarray, cos: np.ndarray, sin: np.ndarray, scale: float,
) -> np.ndarray:  # fmt: skip
    """Float64 reference, node by node and head by head, for masks of 0 and -inf."""
    from v4tree_plugins.tree_pool import naive_rope

    out = np.empty(q.shape)
    for b, n in np.ndindex(*q.shape[:2]):
        near = naive_keys(node_mask[b, n] == 0, window, window_rows[b], nodes[b], skip_first=True)
        line = entry_rows[b, n] if entry_rows.ndim == 3 else entry_rows[b]
        keys = np.concatenate([near, naive_keys(entry_mask[b, n] == 0, entries, line, branch[b], skip_first=False)])
        for h in range(q.shape[2]):
            logits = np.append(keys @ q[b, n, h] * scale, sink[h])
            weight = np.exp(logits - logits.max())
            out[b, n, h] = naive_rope((weight[:-1] / weight.sum()) @ keys, cos[b, n], -sin[b, n])
    return out
