"""Lowering for the target tensorrt: v4tree operators as nodes that TensorRT's ONNX parser resolves to the quick plugins.

The plugins read keys and pooled rows where they lie, so they take the sources and tables of the contract, not gathered copies.
`NODES` is what `v4tree_plugins.quick` registers; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network.ops import DOMAIN, AttentionDims, Experts, KeySources, NodeRows, Op, Rope, Value, i64

CAPABILITIES = (80, 90, 100, 120)
DTYPES = ("float32", "float16", "bfloat16")
MAX_VERIFY_TOKENS = 64
EXPERT_LINE = 16
"""Pairs of a token and an expert that a program of the experts' products takes together."""
FP4_INPUTS = 32
"""Inputs of a row of FP4 weights that share a scale."""
FP4_SCALES = {"float32": range(2, 253), "float16": range(104, 141), "bfloat16": range(2, 253)}
"""Bytes of FP4 scales, 2^(byte - 127), with which every e2m1 value, 0.5 to 6 times the scale, is exact in the activations' dtype, and no
subnormal but in float16: 2^-125 to 2^125, in float16 2^-23 to 2^13. The kernels round a scale to that dtype; 255, no number, they
read as infinity.
"""

_KEYS = ("window", "window_rows", "nodes", "node_mask", "entries", "entry_rows", "branch", "entry_mask")
NODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tree_pool": (("state", "slots", "raw", "table", "norm", "cos", "sin"), ("eps", "capability")),
    "tree_index_score": (("query", "weights", "entries", "rows", "branch", "mask"), ("capability",)),
    "tree_attention": (("q", *_KEYS, "sink", "cos", "sin"), ("capability",)),
    "tree_attention_split": (("q", *_KEYS, "sink", "cos", "sin"), ("splits", "capability")),
    "tree_attention_combine": (("partial", "part_max", "part_sum", "sink", "cos", "sin", "like"), ("capability",)),
    "moe_align": (("ids",), ("experts", "block", "capability")),
    "moe_fc1": (("x", "table", "weight"), ("topk", "limit", "capability")),
    "moe_fc2": (("act", "table", "weight"), ("capability",)),
    "moe_fc1_fp4": (("x", "table", "weight", "scales"), ("topk", "limit", "capability")),
    "moe_fc2_fp4": (("act", "table", "weight", "scales"), ("capability",)),
    "moe_combine": (("parts", "weights", "base"), ("scale", "capability")),
}
"""Inputs and attributes of every plugin, in order."""
_SOURCES = "AAIAFAIAFFFF"
TYPES: dict[str, tuple[str, str]] = {
    "tree_pool": ("FIAIAFF", "A"),
    "tree_index_score": ("AAAIAF", "F"),
    "tree_attention": (_SOURCES, "A"),
    "tree_attention_split": (_SOURCES, "FFF"),
    "tree_attention_combine": ("FFFFFFA", "A"),
    "moe_align": ("I", "I"),
    "moe_fc1": ("AIA", "A"),
    "moe_fc2": ("AIA", "F"),
    "moe_fc1_fp4": ("AIPP", "A"),
    "moe_fc2_fp4": ("AIPP", "F"),
    "moe_combine": ("FFA", "A"),
}
"""Types of every plugin's inputs and outputs: A activations, F float32, I int64, P packed bytes."""


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


def takes_fp4(config: ModelConfig, capability: int, dtype: str) -> bool:
    """Whether the kernels read experts of these widths in FP4: bfloat16 everywhere, float16 where the chip converts FP8."""
    widths = (config.hidden_size, config.moe_intermediate_size)
    known = dtype == "bfloat16" or (dtype == "float16" and capability >= 90)
    return known and all(width % FP4_INPUTS == 0 for width in widths)


class PluginOps(TensorRtOps):
    """Emits plugin nodes; everything that has no plugin stays as in `TensorRtOps`.

    Traced in float32 whatever the activations are; with 16-bit ones the router is a product of its own. With `fp4_experts` the
    routed experts stay in FP4, as the checkpoint has them, with scales of `FP4_SCALES` alone.
    """

    def __init__(self, capability: int, splits: int = 1, dtype: str = "float32", fp4_experts: bool = False) -> None:
        check_options(capability, dtype, 1)
        self.fp4_experts, self.fp4_scales = fp4_experts, FP4_SCALES[dtype]
        self.capability, self.splits, self.separate_router = capability, splits, dtype != "float32"

    def _node(self, op: Op, name: str, values: tuple[Value, ...], outputs: int = 1, **attributes: Any) -> Any:
        inputs, names = NODES[name]
        known = {"capability": self.capability} | attributes
        assert len(values) == len(inputs) and set(known) == set(names), name
        known = {attribute: known[attribute] for attribute in names}  # the front end hands them on by position
        plugin = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
        made = getattr(op, name)(*values, **known, **plugin, _domain=DOMAIN, _outputs=outputs)
        if outputs == 1:
            kind = ir.DataType.INT64 if TYPES[name][1] == "I" else ir.DataType.FLOAT
            shape = _shape(name, dict(zip(inputs, values, strict=True)), attributes)
            made.type, made.shape = ir.TensorType(kind), shape
        return made

    def pool(
        self, op: Op, state: Value, slots: Value, raw: Value, table: Value, norm: Value, rope: Rope, dim: int, rope_dim: int, eps: float
    ) -> Value:  # fmt: skip
        """Entries [B, M, dim] straight from the states and the raw rows, each half of a node a row."""
        rows = op.Reshape(raw, i64(op, 0, -1, 2 * dim))
        return self._node(op, "tree_pool", (state, slots, rows, table, norm, rope.cos, rope.sin), eps=eps)

    def index_select(
        self, op: Op, rows: NodeRows, entries: Value, entry_rows: Value, branch: Value, mask: Value, rope: Rope, topk: int,
        dims: AttentionDims,
    ) -> Value:  # fmt: skip
        """Scores from the plugin; the top-k over them is TensorRT's own."""
        assert rows.index_weights is not None
        heads = op.Reshape(self.index_query(op, rows, rope, dims), i64(op, 0, 0, dims.index_heads, -1))
        scores = self._node(op, "tree_index_score", (heads, rows.index_weights, entries, entry_rows, branch, mask))
        return self.keep_best(op, scores, mask, topk)

    def attend(
        self, op: Op, rows: NodeRows, keys: KeySources, sink: Value, rope: Rope, dims: AttentionDims
    ) -> Value:  # fmt: skip
        """In `splits` parts and a combine if asked for."""
        q = op.Reshape(self.attention_query(op, rows, rope, dims), i64(op, 0, 0, dims.heads, -1))
        logits = op.Reshape(sink, i64(op, -1))
        sources = keys if keys.entries is not None else _without_entries(op, keys)
        operands = (q, *(getattr(sources, name) for name in _KEYS), logits, rope.cos, rope.sin)
        if self.splits == 1:
            out = self._node(op, "tree_attention", operands)
        else:
            parts = self._node(op, "tree_attention_split", operands, outputs=3, splits=self.splits)
            out = self._node(op, "tree_attention_combine", (*parts, logits, rope.cos, rope.sin, q))
        flat = op.Reshape(out, i64(op, 0, 0, dims.query_width))
        flat.type, flat.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, None, dims.query_width])
        return flat

    def add_experts(
        self, op: Op, x: Value, base: Value, expert_ids: Value, weights: Value, fc1: Value, fc2: Value, num_experts: int,
        topk: int, limit: float,
    ) -> Value:  # fmt: skip
        """Every expert with its own tokens, those of a few experts among 256 while decoding; the weights as they are stored."""
        table = self._lines(op, expert_ids, num_experts)
        act = self._node(op, "moe_fc1", (x, table, fc1), topk=topk, limit=_finite(limit))
        parts = self._node(op, "moe_fc2", (act, table, fc2))
        return self._node(op, "moe_combine", (parts, weights, base), scale=1.0)

    def add_fp4_experts(
        self, op: Op, x: Value, base: Value, expert_ids: Value, weights: Value, fc1: tuple[Value, Value],
        fc2: tuple[Value, Value], experts: Experts,
    ) -> Value:  # fmt: skip
        """The same, widened in registers."""
        table = self._lines(op, expert_ids, experts.count)
        act = self._node(op, "moe_fc1_fp4", (x, table, *fc1), topk=experts.topk, limit=_finite(experts.limit))
        parts = self._node(op, "moe_fc2_fp4", (act, table, *fc2))
        return self._node(op, "moe_combine", (parts, weights, base), scale=experts.scale)

    def _lines(self, op: Op, expert_ids: Value, num_experts: int) -> Value:
        """Pairs of a token and an expert, sorted by expert."""
        return self._node(op, "moe_align", (expert_ids,), experts=num_experts, block=EXPERT_LINE)


def _finite(limit: float) -> float:
    """The limit of a clamp, the largest float for none."""
    return min(limit, float(np.finfo(np.float32).max))


Dims = list[Any]
_SHAPES: dict[str, Callable[[dict[str, Dims], dict[str, Any]], Dims]] = {
    "tree_pool": lambda of, _: [*of["table"][:2], of["norm"][0]],
    "tree_index_score": lambda of, _: of["mask"],
    "tree_attention": lambda of, _: of["q"],
    "tree_attention_combine": lambda of, _: of["like"],
    "moe_align": lambda _, given: [None, 1 + given["block"]],
    "moe_fc1": lambda of, given: _fc1_shape(of, given),
    "moe_fc1_fp4": lambda of, given: _fc1_shape(of, given),
    "moe_fc2": lambda of, _: [*of["act"][:3], of["weight"][1]],
    "moe_fc2_fp4": lambda of, _: [*of["act"][:3], of["weight"][1]],
    "moe_combine": lambda of, _: of["base"],
}
"""Shape of a plugin's output from those of its operands and its attributes, as the plugin derives it."""


def _fc1_shape(of: dict[str, Dims], given: dict[str, Any]) -> Dims:
    return [*of["x"][:2], given["topk"], int(str(of["weight"][1])) // 2]


def _shape(name: str, operands: dict[str, Value], attributes: dict[str, Any]) -> ir.Shape | None:
    """None where the shape of an operand is unknown."""
    known = {operand: list(value.shape) for operand, value in operands.items() if value.shape is not None}
    return ir.Shape(_SHAPES[name](known, attributes)) if len(known) == len(operands) else None


def _without_entries(op: Op, keys: KeySources) -> KeySources:
    """Zero entries for a window layer, since a plugin's inputs cannot be left out."""
    starts, ends = i64(op, 0), i64(op, 0)
    rows = op.Slice(keys.window_rows, starts, ends, i64(op, 1))
    branch = op.Slice(keys.nodes, starts, ends, i64(op, 1))
    mask = op.Slice(keys.node_mask, starts, ends, i64(op, 2))
    return replace(keys, entries=keys.window, entry_rows=rows, branch=branch, entry_mask=mask)
