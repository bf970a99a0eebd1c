"""Attention of the training model (spec sections 2, 3 and 4): whole sequences, no cache, no speculation.

B sequences, T tokens, H heads, d head channels, E compressed entries. A query meets its window (block-local: a block of
`window` queries sees its own and the preceding block of rows), the visible entries, and one sink logit per head.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_v4tree.config import ModelConfig, rope_inv_freq
from trtllm_v4tree.training.streams import rms_norm

NEVER = float("-inf")
IndexMode = Literal["off", "dense", "sparse"]
"""off: attend to all entries, indexer unused; dense: the same, indexer learns; sparse: attend to its choice, it learns."""


class Linear(nn.Module):
    """A product without bias in the data type of its input; `weight` [out, in] is kept in float32."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm with a weight; gives the data type of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight, self.eps).to(x.dtype)


class Rope(nn.Module):
    """Rotates the trailing channels in interleaved pairs, in float32 (spec section 4)."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig, compressed: bool) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.from_numpy(rope_inv_freq(config, compressed)).float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """x [..., P, heads, d] at `positions` [P]; sign -1 turns back."""
        angle = positions[:, None].float() * self.inv_freq
        return _rotate(x, angle.cos()[:, None], sign * angle.sin()[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


class Compressor(nn.Module):
    """Pools windows of `ratio` tokens into one entry each, per channel by softmax (spec section 2)."""

    def __init__(self, config: ModelConfig, ratio: int, entry: int) -> None:
        super().__init__()
        self.ratio, self.entry, self.overlap = ratio, entry, ratio == config.csa_ratio
        rows = entry * (2 if self.overlap else 1)
        self.wkv = Linear(config.hidden_size, rows)
        self.wgate = Linear(config.hidden_size, rows, gain=0.3)
        self.ape = nn.Parameter(0.02 * torch.randn(ratio, rows))
        self.norm = Norm(entry, config.rms_norm_eps)
        self.rope = Rope(config, compressed=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> entries [B, T // ratio, entry] of the complete windows."""
        count = x.shape[1] // self.ratio
        windows = x[:, : count * self.ratio].unflatten(1, (count, self.ratio))
        kv, gate = self.wkv(windows), self.wgate(windows).float() + self.ape
        if self.overlap:
            kv, gate = self._with_previous(kv, 0.0), self._with_previous(gate, NEVER)
        pooled = self.norm((gate.softmax(2) * kv).sum(2).to(x.dtype))
        starts = torch.arange(count, device=x.device) * self.ratio
        return self.rope(pooled[:, :, None], starts)[:, :, 0]

    def _with_previous(self, rows: Tensor, first: float) -> Tensor:
        """[B, count, ratio, 2 entry] -> [B, count, 2 ratio, entry]: A halves of the window before, B halves of its own."""
        before = F.pad(rows[:, :-1, :, : self.entry], (0, 0, 0, 0, 1, 0), value=first)
        return torch.cat([before, rows[..., self.entry :]], 2)


class Indexer(nn.Module):
    """Scores the entries of a CSA layer for every query (spec section 3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, config.csa_ratio, self.dim)
        self.rope = Rope(config, compressed=True)

    def forward(self, x: Tensor, q_rank: Tensor) -> Tensor:
        """x [B, T, D], q_rank [B, T, q_lora_rank] -> scores float32 [B, T, E], invisible entries included."""
        batch, length, _ = x.shape
        q = self.wq_b(q_rank).unflatten(-1, (self.heads, self.dim))
        q = self.rope(q, torch.arange(length, device=x.device))
        keys = self.compressor(x)
        dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(batch, length, self.heads, -1)
        weights = self.weights_proj(x) * (self.dim * self.heads) ** -0.5
        return torch.matmul(weights[:, :, None], dots.relu())[:, :, 0].float()


class Attention(nn.Module):
    """One attention layer; `ratio` 0 has the window only, 4 selects entries with an indexer, others see all entries."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.config, self.ratio = config, ratio
        self.heads, self.dim, self.window = config.num_heads, config.head_dim, config.sliding_window
        hidden, eps, groups = config.hidden_size, config.rms_norm_eps, config.o_groups
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.wq_a = Linear(hidden, config.q_lora_rank)
        self.q_norm = Norm(config.q_lora_rank, eps)
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim)
        self.wkv = Linear(hidden, self.dim)
        self.kv_norm = Norm(self.dim, eps)
        self.wo_a = Linear(self.heads * self.dim // groups, groups * config.o_lora_rank)
        self.wo_b = Linear(groups * config.o_lora_rank, hidden, gain=(2 * config.num_layers) ** -0.5)
        self.rope = Rope(config, compressed=ratio > 0)
        if ratio:
            self.compressor = Compressor(config, ratio, self.dim)
        if ratio == config.csa_ratio:
            self.indexer = Indexer(config)

    def queries(self, q_rank: Tensor, positions: Tensor) -> Tensor:
        """[B, P, q_lora_rank] -> [B, P, H, d], normed per head without a weight, then roped."""
        q = self.wq_b(q_rank).unflatten(-1, (self.heads, self.dim))
        return self.rope(rms_norm(q.float(), None, self.config.rms_norm_eps).to(q.dtype), positions)

    def rows(self, x: Tensor, positions: Tensor) -> Tensor:
        """Window rows [B, P, d], key and value in one."""
        return self.rope(self.kv_norm(self.wkv(x))[:, :, None], positions)[:, :, 0]

    def output(self, o: Tensor, positions: Tensor) -> Tensor:
        """Attended values [B, P, H, d] -> [B, P, D] through the grouped low-rank output projection."""
        groups = self.config.o_groups
        o = self.rope(o, positions, sign=-1).flatten(-2).unflatten(-1, (groups, -1))
        down = self.wo_a.weight.to(o.dtype).view(groups, self.config.o_lora_rank, -1)
        return self.wo_b(torch.einsum("bpgi,gri->bpgr", o, down).flatten(-2))

    def forward(self, x: Tensor, index: IndexMode = "off") -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, T, D] -> (output [B, T, D], window rows [B, T, d], indexer loss or None)."""
        positions = torch.arange(x.shape[1], device=x.device)
        q_rank = self.q_norm(self.wq_a(x))
        q, rows = self.queries(q_rank, positions), self.rows(x, positions)
        entries = self.compressor(x) if self.ratio else rows[:, :0]
        allowed = _entry_mask(x.shape[1], entries.shape[1], self.ratio)
        scores = None
        if index != "off" and self.ratio == self.config.csa_ratio:
            scores = self.indexer(x.detach(), q_rank.detach()) + allowed
            allowed = _select(scores.detach(), self.config.index_topk) if index == "sparse" else allowed[None]
        o, mass = attend(q, rows, entries, allowed, self.attn_sink, self.window)
        loss = None if scores is None else _index_loss(scores, allowed, mass)
        return self.output(o, positions), rows, loss


def attend(
    q: Tensor, rows: Tensor, entries: Tensor, entry_mask: Tensor, sink: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Softmax over window rows, entries and sink.

    q [B, T, H, d], rows [B, T, d], entries [B, E, d], entry_mask additive [T, E] or [B, T, E].
    Returns values [B, T, H, d] and the heads' mean probability of each entry, float32 [B, T, E].
    """
    batch, length, heads, dim = q.shape
    blocks = -(-length // window)
    pad = blocks * window - length
    q_blocks = F.pad(q, (0, 0, 0, 0, 0, pad)).view(batch * blocks, window * heads, dim)
    keys = _own_and_previous(F.pad(rows, (0, 0, 0, pad)).view(batch, blocks, window, dim))
    near = torch.bmm(q_blocks, keys.transpose(1, 2)).view(batch, blocks, window, heads, -1)
    near = near.float() * dim**-0.5 + _window_mask(blocks, window)[:, :, None]
    far = torch.bmm(q.flatten(1, 2), entries.transpose(1, 2)).view(batch, length, heads, entries.shape[1])
    far = far.float() * dim**-0.5 + entry_mask[..., None, :]
    near = near.view(batch, -1, heads, near.shape[-1])[:, :length]
    near, far = sink_softmax(near, far, sink)
    mixed = F.pad(near.to(q.dtype), (0, 0, 0, 0, 0, pad)).view(batch * blocks, window * heads, -1)
    values = torch.bmm(mixed, keys).view(batch, -1, heads, dim)[:, :length]
    values = values + torch.bmm(far.to(q.dtype).flatten(1, 2), entries).view_as(values)
    return values, far.mean(2)


def sink_softmax(near: Tensor, far: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axes of both parts together, with one more logit per head that takes its share and is dropped."""
    logits = torch.cat([near, far, sink.view(-1, 1).expand(*near.shape[:-1], 1)], -1)
    share = logits.softmax(-1)
    return share[..., : near.shape[-1]], share[..., near.shape[-1] : -1]


def _own_and_previous(blocks: Tensor) -> Tensor:
    """[B, n, window, d] -> [B n, 2 window, d]: the block before each block (zeros before the first), then the block."""
    before = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat([before, blocks], 2).flatten(0, 1)


@cache
def _window_mask(blocks: int, window: int) -> Tensor:
    """Additive [blocks, window, 2 window]: the row itself and the window - 1 before it, none before position 0."""
    back = torch.arange(window)[:, None] + window - torch.arange(2 * window)[None]
    allowed = ((back >= 0) & (back < window)).repeat(blocks, 1, 1)
    allowed[0, :, :window] = False
    return torch.zeros(allowed.shape).masked_fill(~allowed, NEVER)


@cache
def _entry_mask(length: int, entries: int, ratio: int) -> Tensor:
    """Additive [T, E]: entry w is visible from position w * ratio + ratio - 1 on."""
    visible = (torch.arange(length) + 1)[:, None] // max(ratio, 1) > torch.arange(entries)[None]
    return torch.zeros(visible.shape).masked_fill(~visible, NEVER)


def _select(scores: Tensor, topk: int) -> Tensor:
    """Additive mask [B, T, E] of the `topk` best visible entries (-inf scores are invisible)."""
    if scores.shape[-1] <= topk:
        return torch.zeros_like(scores).masked_fill(scores == NEVER, NEVER)
    best = scores.topk(topk, -1)
    chosen = torch.zeros_like(best.values).masked_fill(best.values == NEVER, NEVER)
    return torch.full_like(scores, NEVER).scatter(-1, best.indices, chosen)


def _index_loss(scores: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """Mean KL from the heads' mean attention over the allowed entries to the indexer's softmax over the same.

    scores, allowed, mass [B, T, E]; queries that see no entry do not count.
    """
    if not scores.shape[-1]:
        return scores.sum()
    seen = (allowed.amax(-1) == 0).expand(scores.shape[:-1])
    log_share = (scores + allowed)[seen].log_softmax(-1)
    target = mass.detach()[seen]
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    return F.kl_div(log_share.clamp_min(-1e4), target, reduction="batchmean")
