"""The target step: one pure pass over N new tree nodes of B sequences (law 1), `(committed state, tree) -> (logits, scratch)`."""

from __future__ import annotations

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig, rope_inv_freq
from trtllm_v4tree.contract import NULL_SCORE
from trtllm_v4tree.network.attention import Attention, NodeRows, Rope, Visible, make_rope
from trtllm_v4tree.network.blocks import HyperConnection, HyperHead, MixtureOfExperts, RmsNorm
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, i64
from trtllm_v4tree.network.weight import Weight, tensor, transposed
from trtllm_v4tree.sizes import EngineSizes


class Block(nn.Module):
    """One decoder block: attention and mixture of experts, each inside a hyper-connection site."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, kind: str, hashed: bool, sparse: bool) -> None:
        super().__init__()
        c, self.ops = config, ops
        self.hc_attn = HyperConnection(c, ops, f"{prefix}.hc_attn")
        self.attn_norm = RmsNorm(f"{prefix}.attn_norm.weight", c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, ops, f"{prefix}.attn", kind, sparse)
        self.hc_ffn = HyperConnection(c, ops, f"{prefix}.hc_ffn")
        self.ffn_norm = RmsNorm(f"{prefix}.ffn_norm.weight", c.hidden_size, c.rms_norm_eps)
        self.ffn = MixtureOfExperts(c, ops, f"{prefix}.ffn", hashed)

    def forward(
        self, op: Op, streams: Value, token_ids: Value, rope: Rope, phase: Value | None, visible: Visible
    ) -> tuple[Value, NodeRows]:
        """streams [B, N, m, D] -> streams and the rows of the nodes."""
        u, post, comb = self.hc_attn(op, streams)
        out, rows = self.attn(op, self.attn_norm(op, u), rope, phase, visible)
        streams = self.ops.stream_post_mix(op, streams, out, post, comb)
        u, post, comb = self.hc_ffn(op, streams)
        out = self.ffn(op, self.ffn_norm(op, u), token_ids)
        return self.ops.stream_post_mix(op, streams, out, post, comb), rows


class Embedding(nn.Module):
    """Token embedding [V, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__("embed")
        self.weight = Weight([config.vocab_size, config.hidden_size], tensor("embed.weight"))

    def forward(self, op: Op, token_ids: Value) -> Value:
        return op.Gather(self.weight, token_ids, axis=0)


class LmHead(nn.Module):
    """Logits [.., V] of normed hidden vectors."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps) -> None:
        super().__init__("head")
        self.weight = Weight([config.hidden_size, config.vocab_size], transposed("head.weight"))
        self.ops = ops

    def forward(self, op: Op, x: Value) -> Value:
        return self.ops.linear(op, x, self.weight)


def layer_tables(op: Op, rows: Value, stride: int, count: int) -> list[Value]:
    """Row indices of every layer of a stacked pool: rows [..] -> `count` tensors [..], layer l shifted by l * stride."""
    if count == 0:
        return []
    tables = []
    for layer in range(count):
        tables.append(op.Add(rows, i64(op, layer * stride)) if layer else rows)
    return tables


def null_row(op: Op, batch_like: Value, dim: int) -> Value:
    """A pseudo-row of weight zero per sequence: [B, 1, 2 dim] = (score -1e30 | kv 0)."""
    row = np.concatenate([np.full(dim, NULL_SCORE), np.zeros(dim, np.float32)]).reshape(1, 1, -1).astype(np.float32)
    shape = op.Concat(op.Shape(batch_like, start=0, end=1), i64(op, 1, 2 * dim), axis=0)
    return op.Expand(const(op, row), shape)


class TargetStep(nn.Module):
    """Trunk of the model over tree nodes."""

    def __init__(self, config: ModelConfig, sizes: EngineSizes, ops: V4TreeOps) -> None:
        super().__init__("")
        c = self.config = config
        self.sizes, self.ops = sizes, ops
        self.embed = Embedding(c)
        self.layers = nn.ModuleList(
            [
                Block(c, ops, f"layers.{i}", c.layer_kind(i), c.is_hash_layer(i), sizes.sparse)
                for i in range(c.num_layers)
            ]
        )
        self.norm = RmsNorm("norm.weight", c.hidden_size, c.rms_norm_eps)
        self.hc_head = HyperHead(c, ops, "hc_head")
        self.head = LmHead(c, ops)

    def forward(self, op: Op, feeds: dict[str, Value]) -> dict[str, Value]:
        """feeds: the inputs of the contract `target_step`; returns its outputs by name."""
        run = _TargetPass(op, self, feeds)
        tokens = feeds["token_ids"]
        embedded = op.Unsqueeze(self.embed(op, tokens), i64(op, 2))
        streams = op.Concat(*([embedded] * self.config.hc_mult), axis=2)
        for i in range(self.config.num_layers):
            streams = run.layer(i, streams)
        picked = op.GatherND(streams, op.Unsqueeze(feeds["logit_nodes"], i64(op, -1)), batch_dims=1)
        hidden = self.norm(op, self.hc_head(op, picked))
        flat = op.Reshape(streams, i64(op, 0, 0, -1))
        return {"logits": self.head(op, hidden), "streams_scratch": flat, **run.scratch()}


class _TargetPass:
    """Shared tables of one traced pass, and the scratch that its layers leave."""

    def __init__(self, op: Op, model: TargetStep, feeds: dict[str, Value]) -> None:
        self.op, self.model, self.feeds = op, model, feeds
        c, s = model.config, model.sizes
        self.ropes = {
            "swa": make_rope(op, feeds["positions"], rope_inv_freq(c, compressed=False)),
        }
        if s.num_csa or s.num_hca:
            self.ropes["csa"] = self.ropes["hca"] = make_rope(op, feeds["positions"], rope_inv_freq(c, compressed=True))
        self.window_tables = layer_tables(op, feeds["window_rows"], s.window_rows, s.num_layers)
        self.window_nodes: list[Value] = []
        self.kinds: dict[str, _KindPass] = {}
        for kind, count in (("csa", s.num_csa), ("hca", s.num_hca)):
            if count:
                self.kinds[kind] = _KindPass(op, model, feeds, kind, count)
        self.seen: dict[str, int] = {"csa": 0, "hca": 0}

    def layer(self, index: int, streams: Value) -> Value:
        model, op = self.model, self.op
        kind = model.config.layer_kind(index)
        visible = self._visible(kind, index)
        phase = self.kinds[kind].phase if kind in self.kinds else None
        streams, rows = model.layers[index](op, streams, self.feeds["token_ids"], self.ropes[kind], phase, visible)
        self.window_nodes.append(rows.kv)
        return streams

    def _visible(self, kind: str, index: int) -> Visible:
        block = self.model.layers[index]
        assert isinstance(block, Block)
        attention = block.attn
        window = self.window_tables[index]

        def visible(op: Op, rows: NodeRows) -> tuple[Value, Value]:
            parts = [op.Gather(self.feeds["window_kv"], window, axis=0), rows.kv]
            if kind == "swa":
                return op.Concat(*parts, axis=1), self.feeds["node_mask"]
            keys, mask = self.kinds[kind].entries(attention, rows, self.seen[kind])
            self.seen[kind] += 1
            return op.Concat(*parts, keys, axis=1), mask

        return visible

    def scratch(self) -> dict[str, Value]:
        out = {"window_scratch": self._stack(self.window_nodes)}
        for kind in self.kinds.values():
            out.update({name: self._stack(values) for name, values in kind.scratch.items()})
        return out

    def _stack(self, values: list[Value]) -> Value:
        """[B, N, w] per layer -> [L, B, N, w]."""
        axis = i64(self.op, 0)
        return self.op.Concat(*[self.op.Unsqueeze(v, axis) for v in values], axis=0)


class _KindPass:
    """Compressed layers of one kind in a pass: row tables, masks, and scratch."""

    def __init__(self, op: Op, model: TargetStep, feeds: dict[str, Value], kind: str, count: int) -> None:
        self.op, self.model, self.feeds, self.kind = op, model, feeds, kind
        c, s = model.config, model.sizes
        ratio, stride = (s.csa_ratio, s.csa_rows) if kind == "csa" else (s.hca_ratio, s.hca_rows)
        self.phase = op.Mod(feeds["positions"], i64(op, ratio))
        self.rope = make_rope(op, feeds[f"{kind}_entry_positions"], rope_inv_freq(c, compressed=True))
        self.entry_rows = layer_tables(op, feeds[f"{kind}_rows"], stride, count)
        self.slots = layer_tables(op, feeds["slots"], s.num_slots, count)
        self.null = null_row(op, feeds["slots"], c.head_dim)
        self.mask = op.Concat(feeds["node_mask"], feeds[f"{kind}_mask"], axis=2)
        self.index = s.sparse and kind == "csa"
        self.index_null = null_row(op, feeds["slots"], c.index_head_dim) if self.index else None
        names = [f"{kind}_raw", f"{kind}_branch"] + (["idx_raw", "idx_branch"] if self.index else [])
        self.scratch: dict[str, list[Value]] = {name: [] for name in names}

    def entries(self, attention: Attention, rows: NodeRows, layer: int) -> tuple[Value, Value]:
        """Keys [B, E + M, d] and the full mask of layer number `layer` of this kind."""
        c = self.model.config
        assert attention.compressor is not None and rows.raw is not None
        keys = self._keys(self.kind, rows.raw, attention.compressor.norm, c.head_dim, self.null, layer)
        if not self.index:
            return keys, self.mask
        assert attention.index_compressor is not None and self.index_null is not None
        assert rows.index_raw is not None and rows.index_query is not None and rows.index_weights is not None
        index_keys = self._keys(
            "idx", rows.index_raw, attention.index_compressor.norm, c.index_head_dim, self.index_null, layer
        )
        mask = self.model.ops.tree_index_select(
            self.op,
            rows.index_query,
            rows.index_weights,
            index_keys,
            self.feeds["csa_mask"],
            c.index_n_heads,
            c.index_topk,
        )
        return keys, self.op.Concat(self.feeds["node_mask"], mask, axis=2)

    def _keys(self, prefix: str, raw: Value, norm: Value, dim: int, null: Value, layer: int) -> Value:
        """[committed entries | entries of boundary nodes]: [B, E + M, dim] of the compressor `prefix` (csa, hca or idx)."""
        op, c = self.op, self.model.config
        state = op.Gather(self.feeds[f"{prefix}_state"], self.slots[layer], axis=0)
        rows = op.Concat(state, null, op.Reshape(raw, i64(op, 0, -1, 2 * dim)), axis=1)
        table = self.feeds[f"{self.kind}_pool_table"]
        branch = self.model.ops.tree_pool(
            op, rows, table, norm, self.rope.cos, self.rope.sin, dim, c.rope_head_dim, c.rms_norm_eps
        )
        self.scratch[f"{prefix}_raw"].append(raw)
        self.scratch[f"{prefix}_branch"].append(branch)
        committed = op.Gather(self.feeds[f"{prefix}_entries"], self.entry_rows[layer], axis=0)
        return op.Concat(committed, branch, axis=1)
