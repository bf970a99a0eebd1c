"""Attention of one layer: fused input projection, query and window rows, compressor rows, indexer, grouped output projection.

Everything here is local to a node; what a node may see (keys and mask) is handed in by the graph that owns the state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.ops import AttentionDims, KeySources, NodeRows, Op, Rope, V4TreeOps, Value, const
from trtllm_v4tree.network.weight import TensorSource, Weight, rope_first, tensor


def make_rope(op: Op, ops: V4TreeOps, positions: Value, inv_freq: np.ndarray) -> Rope:
    """Tables for integer positions [B, S]."""
    return ops.rope_tables(op, positions, const(op, inv_freq.astype(np.float32)))


Visible = Callable[[Op, NodeRows], KeySources]
"""Keys of the nodes whose rows are given, and what of them each node sees."""


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

    def forward(self, op: Op) -> Value:
        """The position bias [ratio, width]."""
        return self.ape


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
        self.dims = AttentionDims(
            q_width=c.q_lora_rank,
            head_dim=c.head_dim,
            raw_width=self.compressor.width if self.compressor is not None else 0,
            index_width=self.index_compressor.width if self.index_compressor is not None else 0,
            index_heads=c.index_n_heads if self.sparse else 0,
            index_dim=c.index_head_dim,
            rope_dim=c.rope_head_dim,
            heads=c.num_heads,
            eps=c.rms_norm_eps,
        )
        self.in_proj = Weight([c.hidden_size, sum(self.dims.in_widths)], self._load_in)
        self.q_norm = Weight([c.q_lora_rank], tensor(f"{p}.q_norm.weight"))
        index_width = c.index_n_heads * c.index_head_dim if self.sparse else 0
        self.q_proj = Weight([c.q_lora_rank, self.hd + index_width], self._load_q)
        self.kv_norm = Weight(
            [c.head_dim], lambda s: rope_first(s.get(f"{p}.kv_norm.weight"), 1, c.head_dim, c.rope_head_dim)
        )
        self.sink = Weight([1, 1, c.num_heads, 1], lambda s: s.get(f"{p}.attn_sink").reshape(1, 1, -1, 1))
        group_in, rank = self.hd // c.o_groups, c.o_lora_rank
        factored = c.o_groups * rank * (group_in + c.hidden_size)
        self.fused_out = self.hd * c.hidden_size <= 2 * factored and not self.ops.factored_output
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
            parts += [self.index_compressor.columns(source), source.get(f"{p}.indexer.weights_proj.weight").T]
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
        rows = self.project(op, x, rope, phase)
        return self.output(op, self.ops.attend(op, rows, visible(op, rows), self.sink, rope, self.dims)), rows

    def project(self, op: Op, x: Value, rope: Rope, phase: Value | None) -> NodeRows:
        biases = (
            self.compressor(op) if self.compressor is not None else None,
            self.index_compressor(op) if self.index_compressor is not None else None,
        )
        q, kv, raw, index_raw, index_weights = self.ops.attention_inputs(
            op, self.ops.linear(op, x, self.in_proj), (self.q_norm, self.kv_norm), rope, phase, biases, self.dims
        )
        return NodeRows(kv, raw, index_raw, self.ops.linear(op, q, self.q_proj), index_weights)

    def output(self, op: Op, o: Value) -> Value:
        """Grouped low-rank output projection; one fused product where that is at most twice the weights."""
        if self.fused_out:
            return self.ops.linear(op, o, self.out_proj)
        return self.ops.linear(op, self.ops.grouped_linear(op, o, self.out_a), self.out_b)
