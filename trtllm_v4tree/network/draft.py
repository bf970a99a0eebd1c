"""The draft round: the MTP module over the accepted rows, then N - 1 expansion steps unrolled with in-graph top-k (spec 6).

One call proposes every candidate of a tree `sN_kK`: level 1 holds K tokens, each further level the K best children of each of the
K best nodes of the level before. An MTP row belongs to an edge: (streams of node n, token of its child) at the position of n.
"""

from __future__ import annotations

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig, rope_inv_freq
from trtllm_v4tree.network.attention import NodeRows, Visible, make_rope
from trtllm_v4tree.network.blocks import HyperHead, RmsNorm
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, i64
from trtllm_v4tree.network.target import Block, Embedding, LmHead
from trtllm_v4tree.network.weight import Weight, transposed


class MtpModule(nn.Module):
    """The module `mtp.0`: a window-only block between the shared embedding and the shared head."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps) -> None:
        super().__init__("mtp")
        c, d, eps = config, config.hidden_size, config.rms_norm_eps
        self.config, self.ops = config, ops
        self.enorm, self.hnorm = RmsNorm("mtp.0.enorm.weight", d, eps), RmsNorm("mtp.0.hnorm.weight", d, eps)
        self.e_proj = Weight([d, d], transposed("mtp.0.e_proj.weight"))
        self.h_proj = Weight([d, d], transposed("mtp.0.h_proj.weight"))
        self.block = Block(c, ops, "mtp.0", "swa", hashed=False, sparse=False)
        self.norm = RmsNorm("mtp.0.norm.weight", d, eps)
        self.hc_head = HyperHead(c, ops, "mtp.0.hc_head")

    def forward(
        self, op: Op, streams: Value, embedded: Value, token_ids: Value, positions: Value, visible: Visible
    ) -> tuple[Value, NodeRows]:
        """Rows (H_i, t_{i+1}) at position i: streams [B, S, m * D], embedded [B, S, D] -> Y [B, S, m * D] and window rows."""
        rope = make_rope(op, positions, rope_inv_freq(self.config, compressed=False))
        return self.block(op, self._mix(op, streams, embedded), token_ids, rope, None, visible)

    def _mix(self, op: Op, streams: Value, embedded: Value) -> Value:
        """X[k] = h_proj(hnorm(H[k])) + e_proj(enorm(embed(t))) for every stream k: [B, S, m * D]."""
        h = op.MatMul(self.hnorm(op, op.Reshape(streams, i64(op, 0, 0, self.config.hc_mult, -1))), self.h_proj)
        e = op.MatMul(self.enorm(op, embedded), self.e_proj)
        return op.Reshape(op.Add(h, op.Unsqueeze(e, i64(op, 2))), i64(op, 0, 0, -1))


class _MtpHead(nn.Module):
    """norm(hc_head(Y)): the vector that the shared head reads."""

    def __init__(self, mtp: MtpModule) -> None:
        super().__init__("mtp")
        self.hc_head, self.norm = mtp.hc_head, mtp.norm

    def forward(self, op: Op, streams: Value) -> Value:
        return self.norm(op, self.hc_head(op, streams))


class DraftRound(nn.Module):
    """Catch-up over accepted rows and `steps` levels of at most `topk` frontier nodes; `steps` 0 only catches up."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, steps: int, topk: int) -> None:
        super().__init__("")
        self.config, self.ops, self.steps, self.topk = config, ops, steps, topk
        self.embed = Embedding(config)
        self.mtp = MtpModule(config, ops)
        self.head_in = _MtpHead(self.mtp)
        self.head = LmHead(config, ops)

    def forward(self, op: Op, feeds: dict[str, Value]) -> dict[str, Value]:
        """feeds: the inputs of the contract `draft_round`; returns its outputs by name."""
        streams = op.Gather(feeds["streams"], feeds["stream_rows"], axis=0)
        window = op.Gather(feeds["mtp_window_kv"], feeds["mtp_window_rows"], axis=0)

        def visible(op: Op, rows: NodeRows) -> tuple[Value, Value]:
            return op.Concat(window, rows.kv, axis=1), feeds["catchup_mask"]

        tokens = feeds["next_tokens"]
        y, rows = self.mtp(op, streams, self.embed(op, tokens), tokens, feeds["positions"], visible)
        outputs = {"mtp_scratch": rows.kv}
        if self.steps:
            last = op.GatherND(y, op.Unsqueeze(feeds["last_row"], i64(op, -1)), batch_dims=1)
            keys = op.Concat(window, rows.kv, axis=1)
            outputs.update(_Expansion(op, self, feeds, keys).run(last))
        return outputs


class _Expansion:
    """Levels of a traced draft round. All candidates of all levels are outputs; the host picks the D - 1 best."""

    def __init__(self, op: Op, model: DraftRound, feeds: dict[str, Value], keys: Value) -> None:
        self.op, self.model, self.feeds, self.keys = op, model, feeds, keys
        self.tokens: list[Value] = []
        self.parents: list[Value] = []
        self.scores: list[Value] = []

    def run(self, last: Value) -> dict[str, Value]:
        """last [B, 1, m * D]: Y of the newest accepted row."""
        op, k = self.op, self.model.topk
        log_probs, tokens = self._propose(last)
        cumulative = op.Squeeze(log_probs, i64(op, 1))
        self._keep(op.Squeeze(tokens, i64(op, 1)), const(op, np.full((1, k), -1, np.int64)), cumulative)
        frontier = const(op, np.arange(k, dtype=np.int64).reshape(1, k))
        streams = op.Concat(*([last] * k), axis=1)
        ancestors: Value | None = None
        for level in range(2, self.model.steps + 1):
            streams, ancestors = self._expand(level, streams, ancestors, frontier)
            log_probs, tokens = self._propose(streams)
            flat_scores = op.Reshape(op.Add(log_probs, op.Unsqueeze(cumulative, i64(op, -1))), i64(op, 0, -1))
            flat_tokens = op.Reshape(tokens, i64(op, 0, -1))
            first = k + (level - 2) * k * k
            parents = self._parents(first, level, frontier)
            self._keep(flat_tokens, parents, flat_scores)
            if level == self.model.steps:
                break
            cumulative, best = op.TopK(flat_scores, i64(op, k), axis=-1, _outputs=2)
            source = op.Div(best, i64(op, k))
            streams = self._take(streams, source)
            ancestors = self._take(ancestors, source)
            self.frontier_tokens = op.GatherElements(flat_tokens, best, axis=1)
            frontier = op.Add(best, i64(op, first))
        return self._outputs()

    def _keep(self, tokens: Value, parents: Value, scores: Value) -> None:
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.scores.append(scores)
        if len(self.tokens) == 1:
            self.frontier_tokens = tokens

    def _parents(self, first: int, level: int, frontier: Value) -> Value:
        """Candidate index of the parent of each of the K * K candidates of a level: [B or 1, K * K]."""
        op, k = self.op, self.model.topk
        spread = op.Unsqueeze(frontier, i64(op, -1))
        return op.Reshape(op.Concat(*([spread] * k), axis=-1), i64(op, 0, -1))

    def _take(self, rows: Value, index: Value) -> Value:
        return self.op.GatherND(rows, self.op.Unsqueeze(index, i64(self.op, -1)), batch_dims=1)

    def _propose(self, streams: Value) -> tuple[Value, Value]:
        """Top-k log-probabilities and tokens of every row: streams [B, F, m * D] -> [B, F, K] each."""
        op, model = self.op, self.model
        logits = model.head(op, model.head_in(op, streams))
        best, tokens = op.TopK(logits, i64(op, model.topk), axis=-1, _outputs=2)
        return op.Sub(best, op.ReduceLogSumExp(logits, i64(op, -1), keepdims=1)), tokens

    def _expand(self, level: int, streams: Value, ancestors: Value | None, frontier: Value) -> tuple[Value, Value]:
        """One MTP row per frontier node; it sees the window, the accepted rows, and the rows of its own ancestors and itself."""
        op, model, k = self.op, self.model, self.model.topk
        own = const(op, np.where(np.eye(k, dtype=bool), 0, -np.inf).astype(np.float32).reshape(1, k, k))
        own = op.Expand(own, op.Concat(op.Shape(streams, start=0, end=1), i64(op, k, k), axis=0))
        ancestors = own if ancestors is None else op.Concat(ancestors, own, axis=2)
        base = op.Slice(self.feeds["level_mask"], i64(op, level - 2), i64(op, level - 1), i64(op, 1))
        width = op.Concat(op.Shape(base, start=0, end=1), i64(op, k), op.Shape(base, start=2), axis=0)
        mask = op.Concat(op.Expand(base, width), ancestors, axis=2)

        def visible(op: Op, rows: NodeRows) -> tuple[Value, Value]:
            self.keys = op.Concat(self.keys, rows.kv, axis=1)
            return self.keys, mask

        tokens = self.frontier_tokens
        ones = op.Expand(i64(op, 1), op.Shape(tokens))
        positions = op.Mul(ones, op.Add(self.feeds["root_position"], i64(op, level - 2)))
        y, _ = model.mtp(op, streams, model.embed(op, tokens), tokens, positions, visible)
        return y, ancestors

    def _outputs(self) -> dict[str, Value]:
        op = self.op
        parents = [op.Expand(p, op.Shape(t)) for p, t in zip(self.parents, self.tokens, strict=True)]
        return {
            "draft_tokens": op.Concat(*self.tokens, axis=1),
            "draft_parents": op.Concat(*parents, axis=1),
            "draft_scores": op.Concat(*self.scores, axis=1),
        }
