"""The commit: the only writer of state (law 2). It takes accepted rows of scratch by node ids; every destination is a row table.

One policy per kind of state: window ring (row by position), compressor states (fold of accepted rows), entry pools (append at the
boundary), accepted streams (for the drafter), MTP window. States are inputs and outputs; a target binds both to one buffer.
"""

from __future__ import annotations

from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value
from trtllm_v4tree.sizes import EngineSizes


class Commit(nn.Module):
    """Writes the accepted path of every sequence. Lists over accepted rows are flat: A rows, E entries, M drafter rows."""

    def __init__(self, config: ModelConfig, sizes: EngineSizes, ops: V4TreeOps) -> None:
        super().__init__("")
        self.config, self.sizes, self.ops = config, sizes, ops

    def forward(self, op: Op, feeds: dict[str, Value]) -> dict[str, Value]:
        """feeds: the inputs of the contract `commit`; returns the new states by name."""

        def put(state: str, scratch: str, source: str, target: str, layers: int = 1) -> Value:
            return self.ops.put_rows(op, feeds[state], feeds[scratch], feeds[source], feeds[target], layers)

        out = {"window_kv": put("window_kv", "window_scratch", "accepted", "window_dst", self.sizes.num_layers)}
        if self.sizes.has_mtp:
            out["streams"] = put("streams", "streams_scratch", "accepted", "stream_dst")
            out["mtp_window_kv"] = put("mtp_window_kv", "mtp_scratch", "mtp_accepted", "mtp_dst")
        for kind, prefix, layers in self._compressors():
            state, raw, table = feeds[f"{prefix}_state"], feeds[f"{prefix}_raw"], feeds[f"{kind}_fold_table"]
            out[f"{prefix}_state"] = self.ops.fold_rows(op, state, raw, feeds["slots"], table, layers)
            out[f"{prefix}_entries"] = put(
                f"{prefix}_entries", f"{prefix}_branch", f"{kind}_emitted", f"{kind}_dst", layers
            )
        return out

    def _compressors(self) -> list[tuple[str, str, int]]:
        """Kind (whose tables), prefix (whose states) and layers of every compressor."""
        s = self.sizes
        found = [("csa", "csa", s.num_csa), ("csa", "idx", s.num_csa if s.sparse else 0), ("hca", "hca", s.num_hca)]
        return [compressor for compressor in found if compressor[2]]
