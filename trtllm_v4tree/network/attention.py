"""Attention of one layer: fused input projection, query and window rows, compressor rows, indexer, grouped output projection.

Everything here is local to a node; what a node may see (keys and mask) is handed in by the graph that owns the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.blocks import RmsNorm
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, i64
from trtllm_v4tree.network.weight import TensorSource, Weight, rope_first


@dataclass(frozen=True)
class Rope:
    """Rotation tables of a set of positions: cos, sin and -sin, each [B, S, rope_dim / 2] (fp32)."""

    cos: Value
    sin: Value
    neg_sin: Value


def make_rope(op: Op, positions: Value, inv_freq: np.ndarray) -> Rope:
    """Tables for integer positions [B, S] (spec 4: angles are position * inv_freq, in fp32)."""
    angle = op.Mul(op.Unsqueeze(op.Cast(positions, to=1), i64(op, -1)), const(op, inv_freq.astype(np.float32)))
    sin = op.Sin(angle)
    return Rope(op.Cos(angle), sin, op.Neg(sin))


@dataclass(frozen=True)
class NodeRows:
    """What every node of a pass contributes (scratch): window row and raw compressor rows.

    kv [B, N, d]; raw [B, N, halves * 2 * d] and index_raw [B, N, halves * 2 * di], laid out (score | kv) per half with `ape` added.
    """

    kv: Value
    raw: Value | None
    index_raw: Value | None
    index_query: Value | None
    index_weights: Value | None


Visible = Callable[[Op, NodeRows], tuple[Value, Value]]
"""Keys [B, K, d] and additive mask [B, N, K] for the nodes whose rows are given."""


class CompressorRows(nn.Module):
    """Raw rows of a compressor (spec 2.2) as columns of the fused input projection, and their position bias."""

    def __init__(self, config: ModelConfig, prefix: str, ratio: int, dim: int) -> None:
        super().__init__()
        self.halves = 2 if ratio == config.csa_ratio else 1
        self.prefix, self.ratio, self.dim, self.rope_dim = prefix, ratio, dim, config.rope_head_dim
        self.width = self.halves * 2 * dim
        self.ape = Weight([ratio, self.width], self._load_ape)
        self.norm = Weight([dim], lambda s: rope_first(s.get(f"{prefix}.norm.weight"), 1, dim, self.rope_dim))

    def _interleave(self, score: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """Rows [halves * dim, ...] of score and kv -> [(score | kv) per half, ...], rope dims first."""
        parts = []
        for half in range(self.halves):
            cut = slice(half * self.dim, (half + 1) * self.dim)
            parts += [rope_first(a[cut], 1, self.dim, self.rope_dim) for a in (score, kv)]
        return np.concatenate(parts)

    def _load_ape(self, source: TensorSource) -> np.ndarray:
        ape = source.get(f"{self.prefix}.ape").T
        return self._interleave(ape, np.zeros_like(ape)).T

    def columns(self, source: TensorSource) -> np.ndarray:
        """Columns [D, width] of the fused input projection."""
        score, kv = source.get(f"{self.prefix}.wgate.weight"), source.get(f"{self.prefix}.wkv.weight")
        return self._interleave(score, kv).T

    def forward(self, op: Op, projected: Value, phase: Value) -> Value:
        """projected [B, N, width], phase = position % ratio [B, N] -> raw rows with the position bias of the gate."""
        return op.Add(projected, op.Gather(self.ape, phase, axis=0))


class Attention(nn.Module):
    """One attention layer of any kind (spec 4); `kind` is swa, csa or hca. With `sparse`, CSA layers carry the indexer."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, kind: str, sparse: bool) -> None:
        super().__init__()
        c = self.config = config
        self.ops, self.prefix, self.kind = ops, prefix, kind
        self.sparse = sparse and kind == "csa"
        self.hd = c.num_heads * c.head_dim
        self.compressor = self.index_compressor = None
        if kind != "swa":
            ratio = c.csa_ratio if kind == "csa" else c.hca_ratio
            self.compressor = CompressorRows(c, f"{prefix}.compressor", ratio, c.head_dim)
        if self.sparse:
            self.index_compressor = CompressorRows(c, f"{prefix}.indexer.compressor", c.csa_ratio, c.index_head_dim)
        self._make_weights()

    def _make_weights(self) -> None:
        c, p = self.config, self.prefix
        self.in_widths = [c.q_lora_rank, c.head_dim]
        if self.compressor is not None:
            self.in_widths.append(self.compressor.width)
        if self.index_compressor is not None:
            self.in_widths += [self.index_compressor.width, c.index_n_heads]
        self.in_proj = Weight([c.hidden_size, sum(self.in_widths)], self._load_in)
        self.q_norm = RmsNorm(f"{p}.q_norm.weight", c.q_lora_rank, c.rms_norm_eps)
        self.q_widths = [self.hd] + ([c.index_n_heads * c.index_head_dim] if self.sparse else [])
        self.q_proj = Weight([c.q_lora_rank, sum(self.q_widths)], self._load_q)
        self.kv_norm = Weight(
            [c.head_dim], lambda s: rope_first(s.get(f"{p}.kv_norm.weight"), 1, c.head_dim, c.rope_head_dim)
        )
        self.sink = Weight([1, 1, c.num_heads, 1], lambda s: s.get(f"{p}.attn_sink").reshape(1, 1, -1, 1))
        group_in, rank = self.hd // c.o_groups, c.o_lora_rank
        factored = c.o_groups * rank * (group_in + c.hidden_size)
        self.fused_out = self.hd * c.hidden_size <= 2 * factored
        if self.fused_out:
            self.out_proj = Weight([self.hd, c.hidden_size], self._load_fused_out)
        else:
            self.out_a = Weight(
                [c.o_groups, group_in, rank], lambda s: np.ascontiguousarray(self._wo_a(s).transpose(0, 2, 1))
            )
            self.out_b = Weight([c.o_groups * rank, c.hidden_size], lambda s: s.get(f"{p}.wo_b.weight").T)

    def _load_in(self, source: TensorSource) -> np.ndarray:
        c, p = self.config, self.prefix
        kv = rope_first(source.get(f"{p}.wkv.weight"), 1, c.head_dim, c.rope_head_dim)
        parts = [source.get(f"{p}.wq_a.weight").T, kv.T]
        if self.compressor is not None:
            parts.append(self.compressor.columns(source))
        if self.index_compressor is not None:
            scale = np.float32((c.index_head_dim * c.index_n_heads) ** -0.5)
            parts += [self.index_compressor.columns(source), source.get(f"{p}.indexer.weights_proj.weight").T * scale]
        return np.concatenate(parts, axis=1)

    def _load_q(self, source: TensorSource) -> np.ndarray:
        c, p = self.config, self.prefix
        parts = [rope_first(source.get(f"{p}.wq_b.weight"), c.num_heads, c.head_dim, c.rope_head_dim)]
        if self.sparse:
            index = source.get(f"{p}.indexer.wq_b.weight")
            parts.append(rope_first(index, c.index_n_heads, c.index_head_dim, c.rope_head_dim))
        return np.concatenate(parts).T

    def _wo_a(self, source: TensorSource) -> np.ndarray:
        """[G, R, H d / G] with rope dims first in every head."""
        c = self.config
        wo_a = source.get(f"{self.prefix}.wo_a.weight").reshape(c.o_groups, c.o_lora_rank, -1)
        return rope_first(wo_a, c.num_heads // c.o_groups, c.head_dim, c.rope_head_dim, axis=2)

    def _load_fused_out(self, source: TensorSource) -> np.ndarray:
        wo_a, groups = self._wo_a(source), self.config.o_groups
        wo_b = source.get(f"{self.prefix}.wo_b.weight").reshape(-1, groups, self.config.o_lora_rank)
        return np.concatenate([wo_a[g].T @ wo_b[:, g].T for g in range(groups)])

    def forward(self, op: Op, x: Value, rope: Rope, phase: Value | None, visible: Visible) -> tuple[Value, NodeRows]:
        """x [B, N, D] -> output [B, N, D] and the rows of the nodes."""
        query, rows = self.project(op, x, rope, phase)
        keys, mask = visible(op, rows)
        c = self.config
        o = self.ops.tree_attention(op, query, keys, mask, self.sink, c.num_heads, c.head_dim, c.head_dim**-0.5)
        o = self.ops.rope(op, o, rope.cos, rope.neg_sin, c.num_heads, c.rope_head_dim)
        return self.output(op, o), rows

    def project(self, op: Op, x: Value, rope: Rope, phase: Value | None) -> tuple[Value, NodeRows]:
        c = self.config
        parts = list(
            op.Split(
                self.ops.linear(op, x, self.in_proj), i64(op, *self.in_widths), axis=-1, _outputs=len(self.in_widths)
            )
        )
        queries = self.ops.linear(op, self.q_norm(op, parts[0]), self.q_proj)
        index_query = index_weights = raw = index_raw = None
        if self.sparse:
            queries, index_query = op.Split(queries, i64(op, *self.q_widths), axis=-1, _outputs=2)
            index_query = self.ops.rope(op, index_query, rope.cos, rope.sin, c.index_n_heads, c.rope_head_dim)
            index_raw, index_weights = self.index_compressor(op, parts[3], phase), parts[4]  # type: ignore[misc]
        if self.compressor is not None:
            raw = self.compressor(op, parts[2], phase)
        kv = op.RMSNormalization(parts[1], self.kv_norm, axis=-1, epsilon=c.rms_norm_eps)
        kv = self.ops.rope(op, kv, rope.cos, rope.sin, 1, c.rope_head_dim)
        return self.query(op, queries, rope), NodeRows(kv, raw, index_raw, index_query, index_weights)

    def query(self, op: Op, queries: Value, rope: Rope) -> Value:
        """Unweighted RMS norm per head, then RoPE: [B, N, H * d] -> [B, N, H * d]."""
        c = self.config
        heads = op.Reshape(queries, i64(op, 0, 0, c.num_heads, c.head_dim))
        ones = const(op, np.ones(c.head_dim, np.float32))
        normed = op.RMSNormalization(heads, ones, axis=-1, epsilon=c.rms_norm_eps)
        return self.ops.rope(
            op, op.Reshape(normed, i64(op, 0, 0, self.hd)), rope.cos, rope.sin, c.num_heads, c.rope_head_dim
        )

    def output(self, op: Op, o: Value) -> Value:
        """Grouped low-rank output projection; one fused product where that is at most twice the weights."""
        if self.fused_out:
            return self.ops.linear(op, o, self.out_proj)
        c = self.config
        groups = op.Transpose(op.Reshape(o, i64(op, 0, 0, c.o_groups, -1)), perm=[0, 2, 1, 3])
        low = op.Transpose(op.MatMul(groups, self.out_a), perm=[0, 2, 1, 3])
        return self.ops.linear(op, op.Reshape(low, i64(op, 0, 0, -1)), self.out_b)
