"""The target step: one pure pass over N new tree nodes of B sequences (law 1), `(committed state, tree) -> (logits, scratch)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig, rope_inv_freq
from trtllm_v4tree.network.attention import Attention, Visible, make_rope
from trtllm_v4tree.network.blocks import HyperConnection, HyperHead, MixtureOfExperts
from trtllm_v4tree.network.ops import KeySources, NodeRows, Op, Rope, V4TreeOps, Value, i64
from trtllm_v4tree.network.weight import Weight, tensor, transposed
from trtllm_v4tree.sizes import EngineSizes


class Block(nn.Module):
    """One decoder block: attention and mixture of experts, each inside a hyper-connection site."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, kind: str, hashed: bool, sparse: bool) -> None:
        super().__init__()
        c, self.ops = config, ops
        self.hc_attn = HyperConnection(c, ops, f"{prefix}.hc_attn", f"{prefix}.attn_norm.weight")
        self.attn = Attention(c, ops, f"{prefix}.attn", kind, sparse)
        self.hc_ffn = HyperConnection(c, ops, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm.weight")
        self.ffn = MixtureOfExperts(c, ops, f"{prefix}.ffn", hashed)

    def forward(
        self, op: Op, streams: Value, token_ids: Value, rope: Rope, phase: Value | None, visible: Visible,
        mixed: tuple[Value, Value, Value] | None = None,
    ) -> tuple[Value, NodeRows]:  # fmt: skip
        """streams [B, N, m, D] -> streams and the rows of the nodes; `mixed`: what `hc_attn` makes of the streams, where it is known."""
        x, post, comb = self.hc_attn(op, streams) if mixed is None else mixed
        out, rows = self.attn(op, x, rope, phase, visible)
        streams = self.ops.stream_post_mix(op, streams, out, post, comb)
        x, post, comb = self.hc_ffn(op, streams)
        return self.ops.stream_post_mix(op, streams, self.ffn(op, x, token_ids), post, comb), rows


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


class TopTokens(LmHead):
    """The k largest log-probabilities of the head and their tokens, [B, F, k] each."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, topk: int) -> None:
        super().__init__(config, ops)
        self.topk = topk

    def forward(self, op: Op, x: Value) -> tuple[Value, Value]:  # type: ignore[override]
        return self.ops.top_log_probs(op, x, self.weight, self.topk)


class TopTokensOf(nn.Module):
    """The same of some tokens alone, `vocab` ascending: log-probabilities among these."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, topk: int, vocab: Sequence[int]) -> None:
        super().__init__("draft_head")
        ids = np.array(vocab, np.int64)
        self.weight = Weight([config.hidden_size, len(ids)], lambda s: s.get("head.weight")[ids].T)
        self.token_ids = Weight([len(ids)], lambda s: ids, ir.DataType.INT64)
        self.ops, self.topk = ops, topk

    def forward(self, op: Op, x: Value) -> tuple[Value, Value]:
        log_probs, places = self.ops.top_log_probs(op, x, self.weight, self.topk)
        return log_probs, op.Gather(self.token_ids, places, axis=0)


def layer_tables(op: Op, rows: Value, stride: int, count: int) -> list[Value]:
    """Row indices of every layer of a stacked pool: rows [..] -> `count` tensors [..], layer l shifted by l * stride."""
    if count == 0:
        return []
    tables = []
    for layer in range(count):
        tables.append(op.Add(rows, i64(op, layer * stride)) if layer else rows)
    return tables


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
        self.hc_head = HyperHead(c, ops, "hc_head", "norm.weight")
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
        flat = op.Reshape(streams, i64(op, 0, 0, -1))
        return {"logits": self.head(op, self.hc_head(op, picked)), "streams_scratch": flat, **run.scratch()}


class _TargetPass:
    """Shared tables of one traced pass, and the scratch that its layers leave."""

    def __init__(self, op: Op, model: TargetStep, feeds: dict[str, Value]) -> None:
        self.op, self.model, self.feeds = op, model, feeds
        c, s = model.config, model.sizes
        self.ropes = {
            "swa": make_rope(op, model.ops, feeds["positions"], rope_inv_freq(c, compressed=False)),
        }
        if s.num_csa or s.num_hca:
            self.ropes["csa"] = self.ropes["hca"] = make_rope(
                op, model.ops, feeds["positions"], rope_inv_freq(c, compressed=True)
            )
        self.window_tables = layer_tables(op, feeds["window_rows"], s.window_rows, s.num_layers)
        self.window_nodes: list[Value] = []
        self.kinds: dict[str, _KindPass] = {}
        for kind, count in (("csa", s.num_csa), ("hca", s.num_hca)):
            if count:
                self.kinds[kind] = _KindPass(op, model, feeds, kind, count, self.ropes[kind])
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

        def visible(op: Op, rows: NodeRows) -> KeySources:
            keys = KeySources(self.feeds["window_kv"], window, rows.kv, self.feeds["node_mask"])
            if kind == "swa":
                return keys
            entries = self.kinds[kind].entries(attention, rows, self.seen[kind])
            self.seen[kind] += 1
            return replace(keys, **entries)

        return visible

    def scratch(self) -> dict[str, Value]:
        out = {"window_scratch": self._stack(self.window_nodes)}
        for kind in self.kinds.values():
            out.update({name: self._stack(values) for name, values in kind.scratch.items()})
        return out

    def _stack(self, values: list[Value]) -> Value:
        """[B, N, w] per layer -> [L, B, N, w]."""
        op = self.op
        shape = op.Concat(i64(op, len(values)), op.Shape(values[0]), axis=0)
        return op.Reshape(op.Concat(*values, axis=0) if len(values) > 1 else values[0], shape, allowzero=1)


class _KindPass:
    """Compressed layers of one kind in a pass: row tables, masks, and scratch."""

    def __init__(
        self, op: Op, model: TargetStep, feeds: dict[str, Value], kind: str, count: int, node_rope: Rope
    ) -> None:
        self.op, self.model, self.feeds, self.kind = op, model, feeds, kind
        c, s = model.config, model.sizes
        ratio, stride = (s.csa_ratio, s.csa_rows) if kind == "csa" else (s.hca_ratio, s.hca_rows)
        self.phase = op.Mod(feeds["positions"], i64(op, ratio))
        self.rope = make_rope(op, model.ops, feeds[f"{kind}_entry_positions"], rope_inv_freq(c, compressed=True))
        self.entry_rows = layer_tables(op, feeds[f"{kind}_rows"], stride, count)
        self.slots = layer_tables(op, feeds["slots"], s.num_slots, count)
        self.node_rope = node_rope
        self.index = s.sparse and kind == "csa"
        names = [f"{kind}_raw", f"{kind}_branch"] + (["idx_raw", "idx_branch"] if self.index else [])
        self.scratch: dict[str, list[Value]] = {name: [] for name in names}

    def entries(self, attention: Attention, rows: NodeRows, layer: int) -> dict[str, Value]:
        """The entry fields of `KeySources` for layer number `layer` of this kind."""
        c, op = self.model.config, self.op
        assert attention.compressor is not None and rows.raw is not None
        branch = self._branch(self.kind, rows.raw, attention.compressor.norm, c.head_dim, layer)
        mask = self.feeds[f"{self.kind}_mask"]
        if self.index:
            assert attention.index_compressor is not None and rows.index_raw is not None
            keys = self._branch("idx", rows.index_raw, attention.index_compressor.norm, c.index_head_dim, layer)
            pool, table = self.feeds["idx_entries"], self.entry_rows[layer]
            mask = self.model.ops.index_select(
                op, rows, pool, table, keys, mask, self.node_rope, c.index_topk, attention.dims
            )
        return {
            "entries": self.feeds[f"{self.kind}_entries"],
            "entry_rows": self.entry_rows[layer],
            "branch": branch,
            "entry_mask": mask,
        }

    def _branch(self, prefix: str, raw: Value, norm: Value, dim: int, layer: int) -> Value:
        """Entries of boundary nodes [B, M, dim] of the compressor `prefix` (csa, hca or idx); keeps what a commit needs."""
        c, feeds = self.model.config, self.feeds
        branch = self.model.ops.pool(
            self.op, feeds[f"{prefix}_state"], self.slots[layer], raw, feeds[f"{self.kind}_pool_table"], norm, self.rope,
            dim, c.rope_head_dim, c.rms_norm_eps,
        )  # fmt: skip
        self.scratch[f"{prefix}_raw"].append(raw)
        self.scratch[f"{prefix}_branch"].append(branch)
        return branch
