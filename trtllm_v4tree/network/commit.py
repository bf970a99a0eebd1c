"""The commit: the only writer of state (law 2). It takes accepted rows of scratch by node ids; every destination is a row table.

One policy per kind of state: window ring (row by position), compressor states (fold of accepted rows), entry pools (append at the
boundary), accepted streams (for the drafter), MTP window. States are inputs and outputs; a target binds both to one buffer.
"""

from __future__ import annotations

import numpy as np
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, i64
from trtllm_v4tree.network.target import null_row
from trtllm_v4tree.sizes import EngineSizes


class Commit(nn.Module):
    """Writes the accepted path of every sequence. Lists over accepted rows are flat: A rows, E entries, M drafter rows."""

    def __init__(self, config: ModelConfig, sizes: EngineSizes, ops: V4TreeOps) -> None:
        super().__init__("")
        self.config, self.sizes, self.ops = config, sizes, ops

    def forward(self, op: Op, feeds: dict[str, Value]) -> dict[str, Value]:
        """feeds: the inputs of the contract `commit`; returns the new states by name."""
        c, s = self.config, self.sizes
        out = {
            "window_kv": self._append(
                op, feeds, "window_kv", "window_scratch", "accepted", "window_dst", s.num_layers, s.window_rows
            )
        }
        if s.has_mtp:
            out["streams"] = self._rows(
                op, feeds["streams"], feeds["streams_scratch"], feeds["accepted"], feeds["stream_dst"]
            )
            out["mtp_window_kv"] = self._rows(
                op, feeds["mtp_window_kv"], feeds["mtp_scratch"], feeds["mtp_accepted"], feeds["mtp_dst"]
            )
        for kind, prefixes, count, stride in self._kinds():
            for prefix in prefixes:
                dim = c.index_head_dim if prefix == "idx" else c.head_dim
                out[f"{prefix}_state"] = self._fold(op, feeds, prefix, kind, dim, count)
                out[f"{prefix}_entries"] = self._append(
                    op, feeds, f"{prefix}_entries", f"{prefix}_branch", f"{kind}_emitted", f"{kind}_dst", count, stride
                )
        return out

    def _kinds(self) -> list[tuple[str, tuple[str, ...], int, int]]:
        s = self.sizes
        kinds: list[tuple[str, tuple[str, ...], int, int]] = []
        if s.num_csa:
            kinds.append(("csa", ("csa", "idx") if s.sparse else ("csa",), s.num_csa, s.csa_rows))
        if s.num_hca:
            kinds.append(("hca", ("hca",), s.num_hca, s.hca_rows))
        return kinds

    def _rows(self, op: Op, state: Value, scratch: Value, source: Value, target: Value) -> Value:
        """state [R, w], scratch [B, N, w], source and target [A]: state[target] = scratch[source]."""
        picked = op.Gather(self._flat(op, scratch), source, axis=0)
        return op.ScatterND(state, op.Unsqueeze(target, i64(op, -1)), picked)

    def _flat(self, op: Op, scratch: Value) -> Value:
        width = op.Shape(scratch, start=2)
        return op.Reshape(scratch, op.Concat(i64(op, -1), width, axis=0))

    def _append(
        self,
        op: Op,
        feeds: dict[str, Value],
        state: str,
        scratch: str,
        source: str,
        target: str,
        layers: int,
        stride: int,
    ) -> Value:
        """The same rows of every layer: scratch [L, B, N, w] into the stacked pool [L * stride, w]."""
        flat = op.Reshape(feeds[scratch], op.Concat(i64(op, layers, -1), op.Shape(feeds[scratch], start=3), axis=0))
        picked = op.Gather(flat, feeds[source], axis=1)
        rows = op.Unsqueeze(self._per_layer(op, feeds[target], layers, stride), i64(op, -1))
        return op.ScatterND(feeds[state], rows, picked)

    def _per_layer(self, op: Op, rows: Value, layers: int, stride: int) -> Value:
        """[A] -> [L, A], shifted by the layer's first row."""
        return op.Add(
            const(op, np.arange(layers, dtype=np.int64).reshape(-1, 1) * stride), op.Unsqueeze(rows, i64(op, 0))
        )

    def _fold(self, op: Op, feeds: dict[str, Value], prefix: str, kind: str, dim: int, layers: int) -> Value:
        """New pseudo-rows of the open window: per channel (logsumexp of scores | softmax-weighted kv) of the rows of the fold table.

        A fold of one row copies it bit for bit, since exp(0) = 1 and the null rows weigh exactly 0.
        """
        state, raw, table = feeds[f"{prefix}_state"], feeds[f"{prefix}_raw"], feeds[f"{kind}_fold_table"]
        slots = self._per_layer(op, feeds["slots"], layers, self.sizes.num_slots)
        flat_slots = op.Reshape(slots, i64(op, -1))
        old = op.Gather(state, flat_slots, axis=0)
        batch = op.Shape(flat_slots)
        nodes = op.Reshape(raw, op.Concat(batch, i64(op, -1, 2 * dim), axis=0))
        rows = op.Concat(old, null_row(op, flat_slots, dim), nodes, axis=1)
        tiled = op.Concat(*([table] * layers), axis=0)
        score, kv = self.ops.pool_rows(op, rows, tiled)
        new_score = op.ReduceLogSumExp(score, i64(op, 2), keepdims=0)
        new_kv = op.ReduceSum(op.Mul(op.Softmax(score, axis=2), kv), i64(op, 2), keepdims=0)
        folded = op.Concat(new_score, new_kv, axis=-1)
        return op.ScatterND(state, op.Unsqueeze(flat_slots, i64(op, -1)), folded)
