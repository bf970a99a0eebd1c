"""The draft round: window rows of the accepted rows, then N expansion steps of the MTP module with in-graph top-k (spec 6).

One call proposes every candidate of a tree `sN_kK`: level 1 holds K tokens, each further level the K best children of each of the
K best nodes of the level before. An MTP row belongs to an edge: (streams of node n, token of its child) at the position of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig, rope_inv_freq
from trtllm_v4tree.network.attention import make_rope
from trtllm_v4tree.network.blocks import HyperHead
from trtllm_v4tree.network.ops import (
    Candidates,
    DraftLevel,
    Frontier,
    KeySources,
    NodeRows,
    Op,
    Rope,
    V4TreeOps,
    Value,
    const,
    i64,
)
from trtllm_v4tree.network.target import Block, Embedding, TopTokens, TopTokensOf
from trtllm_v4tree.network.weight import TensorSource, Weight, tensor, transposed

FOLD_LIMIT = 1 << 24
"""Up to so many elements [V, D] the token half of the drafter's input is a table, since it depends on the token alone."""


class MtpInput(nn.Module):
    """X[k] = h_proj(hnorm(H[k])) + e_proj(enorm(embed(t))) for every stream k: the input of the block of `mtp.0`."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps) -> None:
        super().__init__("mtp")
        c, d, self.eps, self.ops = config, config.hidden_size, config.rms_norm_eps, ops
        self.hnorm = Weight([d], tensor("mtp.0.hnorm.weight"))
        self.h_proj = Weight([d, d], transposed("mtp.0.h_proj.weight"))
        self.folded = c.vocab_size * d <= FOLD_LIMIT
        if self.folded:
            self.table = Weight([c.vocab_size, d], self._load_table)
        else:
            self.enorm = Weight([d], tensor("mtp.0.enorm.weight"))
            self.e_proj = Weight([d, d], transposed("mtp.0.e_proj.weight"))

    def _load_table(self, source: TensorSource) -> np.ndarray:
        """In place and by blocks of tokens: the embedding may be the largest tensor of the checkpoint."""
        table, norm = source.get("embed.weight"), source.get("mtp.0.enorm.weight")
        e_proj = source.get("mtp.0.e_proj.weight").T.astype(np.float64)
        for start in range(0, len(table), 1024):
            x = table[start : start + 1024].astype(np.float64)
            x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + self.eps)
            table[start : start + 1024] = (x * norm) @ e_proj
        return table

    def forward(self, op: Op, streams: Value, token: Value) -> Value:
        """Rows (H_i, t_{i+1}): streams [B, S, m, D], tokens [B, S], or where not `folded` their embeddings, -> [B, S, m, D]."""
        h = self.ops.norm_linear(op, streams, self.hnorm, self.eps, self.h_proj)
        return op.Add(h, op.Unsqueeze(self._token(op, token), i64(op, 2)))

    def _token(self, op: Op, token: Value) -> Value:
        if self.folded:
            return op.Gather(self.table, token, axis=0)
        return self.ops.norm_linear(op, token, self.enorm, self.eps, self.e_proj)


class MtpHead(nn.Module):
    """norm(hc_head(Y)): the vector that the shared head reads."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps) -> None:
        super().__init__("mtp")
        self.hc_head = HyperHead(config, ops, "mtp.0.hc_head", "mtp.0.norm.weight")

    def forward(self, op: Op, streams: Value) -> Value:
        return self.hc_head(op, streams)


class DraftRound(nn.Module):
    """Catch-up over accepted rows and `steps` levels of at most `topk` frontier nodes; `steps` 0 only catches up.

    Catching up needs the window rows alone; what else the block computes of them is not used, and the tracer drops it.
    `vocab` are the tokens that may be proposed, ascending; None is all of them.
    """

    def __init__(
        self, config: ModelConfig, ops: V4TreeOps, steps: int, topk: int, vocab: Sequence[int] | None = None
    ) -> None:
        super().__init__("")
        self.config, self.ops, self.steps, self.topk = config, ops, steps, topk
        self.embed, self.mtp_in = Embedding(config), MtpInput(config, ops)
        self.block = Block(config, ops, "mtp.0", "swa", hashed=False, sparse=False)
        self.head_in = MtpHead(config, ops)
        self.head = TopTokens(config, ops, topk) if vocab is None else TopTokensOf(config, ops, topk, vocab)

    def rows_of(self, op: Op, streams: Value, token_ids: Value) -> Value:
        """Input of the block; the embedding is the trunk's, and keeps its name so that an engine stores it once."""
        return self.mtp_in(op, streams, token_ids if self.mtp_in.folded else self.embed(op, token_ids))

    def forward(self, op: Op, feeds: dict[str, Value]) -> dict[str, Value]:
        """feeds: the inputs of the contract `draft_round`; returns its outputs by name."""
        streams = op.Gather(feeds["streams"], feeds["stream_rows"], axis=0)
        streams = op.Reshape(streams, i64(op, 0, 0, self.config.hc_mult, -1))

        def visible(op: Op, rows: NodeRows) -> KeySources:
            return KeySources(feeds["mtp_window_kv"], feeds["mtp_window_rows"], rows.kv, feeds["catchup_mask"])

        x = self.rows_of(op, streams, feeds["next_tokens"])
        rope = make_rope(op, self.ops, feeds["positions"], rope_inv_freq(self.config, compressed=False))
        mixed = self.block.hc_attn(op, x)
        _, rows = self.block(op, x, feeds["next_tokens"], rope, None, visible, mixed)
        outputs = {"mtp_scratch": rows.kv}
        if self.steps:
            outputs.update(_Expansion(op, self, feeds, rows.kv).run(x, mixed))
        return outputs


class _Expansion:
    """Levels of a traced draft round. All candidates of all levels are outputs; the host picks the D - 1 best."""

    def __init__(self, op: Op, model: DraftRound, feeds: dict[str, Value], accepted: Value) -> None:
        self.op, self.model, self.feeds = op, model, feeds
        self.rows = accepted
        """Window rows [B, S + .., d] of the accepted rows, then of the levels so far."""
        self.zero = op.Sub(feeds["root_position"], feeds["root_position"])
        self.ropes = self._make_ropes()

    def _make_ropes(self) -> list[Rope]:
        """Rotations of every level: the newest accepted row, then `topk` rows at each further position."""
        op, k, steps = self.op, self.model.topk, self.model.steps
        offsets = np.repeat(np.arange(-1, steps - 1), [1] + [k] * (steps - 1)).reshape(1, -1)
        positions = op.Add(self.feeds["root_position"], const(op, offsets.astype(np.int64)))
        rope = make_rope(op, self.model.ops, positions, rope_inv_freq(self.model.config, compressed=False))
        parts = [self._split(table, [1] + [k] * (steps - 1)) for table in (rope.cos, rope.sin, rope.neg_sin)]
        return [Rope(*level) for level in zip(*parts, strict=True)]

    def _split(self, value: Value, widths: list[int]) -> list[Value]:
        """Pieces along axis 1."""
        if len(widths) == 1:
            return [value]
        return list(self.op.Split(value, i64(self.op, *widths), axis=1, _outputs=len(widths)))

    def run(self, x: Value, mixed: tuple[Value, Value, Value]) -> dict[str, Value]:
        """Block inputs of the accepted rows [B, S, m, D], and what the first site makes of them; the newest one proposes level 1."""
        steps, found = self.model.steps, []
        frontier: Frontier | None = self._first(x, mixed)
        for level in range(steps):
            assert frontier is not None
            at = self._expand(level, frontier) if level else frontier
            candidates, frontier = self._propose(level, at)
            found.append(candidates)
        return {
            "draft_tokens": self._join([c.tokens for c in found]),
            "draft_parents": self._join([c.parents for c in found]),
            "draft_scores": self._join([c.scores for c in found]),
        }

    def _join(self, values: list[Value]) -> Value:
        return self.op.Concat(*values, axis=1) if len(values) > 1 else values[0]

    def _propose(self, level: int, at: Frontier) -> tuple[Candidates, Frontier | None]:
        """The children of every node of the frontier, whose streams the block has gone over, and the next frontier."""
        op, model, k = self.op, self.model, self.model.topk
        log_probs, tokens = model.head(op, model.head_in(op, at.streams))
        last, first = level == model.steps - 1, k + (level - 1) * k * k if level else 0
        constants = DraftLevel(self.feeds.get("level_mask"), self.zero, None if last else level, first, k)
        return model.ops.draft_level(op, log_probs, tokens, at, constants)

    def _first(self, x: Value, mixed: tuple[Value, Value, Value]) -> Frontier:
        """Y [B, 1, m, D] of the newest accepted row; it sees the window and the accepted rows."""
        op, last = self.op, self.feeds["last_row"]
        mask, own, *site = self.model.ops.take_row(op, last, [self.feeds["catchup_mask"], x, *mixed])
        token = op.GatherElements(self.feeds["next_tokens"], last, axis=1)
        known = (site[0], site[1], site[2])
        y, _ = self.model.block(op, own, token, self.ropes[0], None, lambda op, rows: self._keys(mask), known)
        return Frontier(y, mask)

    def _keys(self, mask: Value) -> KeySources:
        return KeySources(self.feeds["mtp_window_kv"], self.feeds["mtp_window_rows"], self.rows, mask)

    def _expand(self, level: int, at: Frontier) -> Frontier:
        """One MTP row per frontier node; it sees the window, the accepted rows, and the rows of its own ancestors and itself."""
        op, model = self.op, self.model

        def visible(op: Op, rows: NodeRows) -> KeySources:
            self.rows = op.Concat(self.rows, rows.kv, axis=1)
            return self._keys(at.mask)

        assert at.tokens is not None
        x = model.rows_of(op, at.streams, at.tokens)
        streams, _ = model.block(op, x, at.tokens, self.ropes[level], None, visible)
        return replace(at, streams=streams)
