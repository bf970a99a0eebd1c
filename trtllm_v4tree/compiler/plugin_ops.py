"""Lowering for the target tensorrt: v4tree operators as nodes that TensorRT's ONNX parser resolves to the quick plugins.

The plugins read keys and pooled rows where they lie, so they take the sources and tables of the contract, not gathered copies.
`NODES` is what `v4tree_plugins.quick` registers; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network.ops import DOMAIN, Op, Value, i64

CAPABILITIES = (80, 90, 100, 120)
DTYPES = ("float32", "float16", "bfloat16")
MAX_VERIFY_TOKENS = 64

_KEYS = ("window", "window_rows", "nodes", "node_mask", "entries", "entry_rows", "branch", "entry_mask")
NODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tree_pool": (("state", "slots", "raw", "table", "norm", "cos", "sin"), ("eps", "capability")),
    "tree_index_score": (("query", "weights", "entries", "rows", "branch", "mask"), ("capability",)),
    "tree_attention": (("q", *_KEYS, "sink", "cos", "sin"), ("capability",)),
    "tree_attention_split": (("q", *_KEYS, "sink", "cos", "sin"), ("splits", "capability")),
    "tree_attention_combine": (("partial", "part_max", "part_sum", "sink", "cos", "sin", "like"), ("capability",)),
}
"""Inputs and attributes of every plugin, in order."""


@dataclass(frozen=True)
class KeySources:
    """Where the keys of a layer lie: pools [R, d] with row tables [B, .], rows of this pass [B, ., d], and what nodes see."""

    window: Value
    window_rows: Value
    nodes: Value
    node_mask: Value
    entries: Value
    entry_rows: Value
    branch: Value
    entry_mask: Value


def check_options(capability: int, dtype: str, max_verify_tokens: int) -> None:
    """Raises ConfigError for what the kernels cannot do."""
    if capability not in CAPABILITIES:
        names = ", ".join(f"sm_{c}" for c in CAPABILITIES)
        raise ConfigError(f"compute capability sm_{capability} is unknown to target tensorrt: choose one of {names}.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown to target tensorrt: choose one of {', '.join(DTYPES)}.")
    if max_verify_tokens > MAX_VERIFY_TOKENS:
        raise ConfigError(
            f"max_verify_tokens={max_verify_tokens} is more than the kernels' {MAX_VERIFY_TOKENS}: give a smaller value."
        )


class PluginOps(TensorRtOps):
    """Emits plugin nodes; everything that has no plugin stays as in `TensorRtOps`."""

    def __init__(self, capability: int, splits: int = 1) -> None:
        check_options(capability, "float32", 1)
        self.capability, self.splits = capability, splits

    def _node(self, op: Op, name: str, values: tuple[Value, ...], outputs: int = 1, **attributes: Any) -> Any:
        inputs, names = NODES[name]
        known = {"capability": self.capability} | attributes
        assert len(values) == len(inputs) and set(known) == set(names), name
        plugin = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
        return getattr(op, name)(*values, **known, **plugin, _domain=DOMAIN, _outputs=outputs)

    def pool(
        self, op: Op, state: Value, slots: Value, raw: Value, table: Value, norm: Value, cos: Value, sin: Value, eps: float
    ) -> Value:  # fmt: skip
        """Entries [B, M, dim] straight from the states [slots, 3 or 1, 2 dim] and the raw rows [B, rows, 2 dim]."""
        return self._node(op, "tree_pool", (state, slots, raw, table, norm, cos, sin), eps=eps)

    def index_scores(
        self, op: Op, query: Value, weights: Value, entries: Value, rows: Value, branch: Value, mask: Value, num_heads: int
    ) -> Value:  # fmt: skip
        """Masked scores [B, N, E + M] of query [B, N, Hi * di]; the top-k over them is TensorRT's own."""
        heads = op.Reshape(query, i64(op, 0, 0, num_heads, -1))
        return self._node(op, "tree_index_score", (heads, weights, entries, rows, branch, mask))

    def attend(
        self, op: Op, query: Value, keys: KeySources, sink: Value, cos: Value, sin: Value, num_heads: int
    ) -> Value:  # fmt: skip
        """Attention output [B, N, H * d], rotated back, of query [B, N, H * d]; in `splits` parts and a combine if asked for."""
        q = op.Reshape(query, i64(op, 0, 0, num_heads, -1))
        logits = op.Reshape(sink, i64(op, -1))
        operands = (q, *(getattr(keys, name) for name in _KEYS), logits, cos, sin)
        if self.splits == 1:
            out = self._node(op, "tree_attention", operands)
        else:
            parts = self._node(op, "tree_attention_split", operands, outputs=3, splits=self.splits)
            out = self._node(op, "tree_attention_combine", (*parts, logits, cos, sin, q))
        return op.Reshape(out, i64(op, 0, 0, -1))
