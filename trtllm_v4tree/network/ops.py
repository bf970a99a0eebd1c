"""The v4tree operator set: every operator that a target may replace, with its meaning in standard ONNX.

A method of `V4TreeOps` *is* the reference body. `FunctionOps` wraps each body into an ONNX function of the domain `v4tree`, so a
portable model can be inlined or lowered node by node; a target subclasses `V4TreeOps` and overrides what it does better.
Shapes: B sequences, N tree nodes, H heads, d head dim, K keys, m streams, D hidden, E experts, k experts per token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnxscript._internal import builder as _builder

DOMAIN = "v4tree"
OPSET = 23
Op = _builder.OpBuilder
Value = ir.Value


def const(op: Op, array: np.ndarray) -> Value:
    """A small constant tensor as an initializer, one per content: equal nodes then stay equal, and a target merges them."""
    data = np.ascontiguousarray(array).reshape(array.shape)
    digest = hashlib.sha1(data.tobytes(), usedforsecurity=False).hexdigest()[:12]
    name = "_".join(["const", data.dtype.name, *map(str, data.shape), digest])
    known = op.builder.root.graph.initializers
    return known[name] if name in known else op.builder.initializer(ir.tensor(data), name=name, qualify=False)


def i64(op: Op, *values: int) -> Value:
    return const(op, np.array(values, np.int64))


def f32(op: Op, value: float) -> Value:
    return const(op, np.array(value, np.float32))


class V4TreeOps:
    """Reference bodies in standard ONNX operators (opset 23)."""

    max_grouped_experts = 0
    """Up to so many experts `grouped_moe` takes the place of `moe`."""

    def linear(self, op: Op, x: Value, weight: Value) -> Value:
        """x [..., I] times weight [I, O]."""
        return op.MatMul(x, weight)

    def rope(self, op: Op, x: Value, cos: Value, sin: Value, num_heads: int, rope_dim: int) -> Value:
        """Interleaved RoPE on the leading `rope_dim` of every head: x [B, S, heads * d], cos and sin [B, S, rope_dim / 2]."""
        return op.RotaryEmbedding(x, cos, sin, interleaved=1, num_heads=num_heads, rotary_embedding_dim=rope_dim)

    def sinkhorn(self, op: Op, logits: Value, iterations: int, eps: float) -> Value:
        """Doubly stochastic matrix of logits [B, N, m, m] (spec 5.1): row softmax, then alternating column and row sums."""
        e, rows, cols = f32(op, eps), i64(op, -1), i64(op, -2)
        c = op.Add(op.Softmax(logits, axis=-1), e)
        c = op.Div(c, op.Add(op.ReduceSum(c, cols, keepdims=1), e))
        for _ in range(iterations - 1):
            c = op.Div(c, op.Add(op.ReduceSum(c, rows, keepdims=1), e))
            c = op.Div(c, op.Add(op.ReduceSum(c, cols, keepdims=1), e))
        return c

    def stream_pre_mix(self, op: Op, streams: Value, pre: Value) -> Value:
        """sum_j pre[j] X[j]: streams [B, N, m, D], pre [B, N, 1, m] -> [B, N, D]."""
        return op.Squeeze(op.MatMul(pre, streams), i64(op, 2))

    def stream_post_mix(self, op: Op, streams: Value, out: Value, post: Value, comb: Value) -> Value:
        """X'[k] = post[k] out + sum_j C[j, k] X[j], as one product of the rows of (X, out) with the columns of (C, post).

        streams [B, N, m, D], out [B, N, D], post [B, N, 1, m], comb [B, N, m, m] -> [B, N, m, D].
        """
        rows = op.Concat(streams, op.Unsqueeze(out, i64(op, 2)), axis=2)
        mix = op.Transpose(op.Concat(comb, post, axis=2), perm=[0, 1, 3, 2])
        return op.MatMul(mix, rows)

    def moe(
        self,
        op: Op,
        x: Value,
        expert_ids: Value,
        weights: Value,
        fc1: Value,
        fc2: Value,
        num_experts: int,
        topk: int,
        limit: float,
    ) -> Value:
        """Routed experts (spec 5.2), dense in E: x [B, N, D], ids and weights [B, N, k], fc1 [E, 2I, D] (gate and up rows
        interleaved), fc2 [E, D, I] -> sum_e w_e W2 (silu(min(g, limit)) * clip(u, limit)), weights normalised over k."""
        onehot = op.OneHot(expert_ids, i64(op, num_experts), const(op, np.array([0, 1], np.float32)), axis=-1)
        share = op.ReduceSum(
            op.Mul(onehot, op.Unsqueeze(self.shares(op, weights), i64(op, -1))), i64(op, 2), keepdims=0
        )
        hidden = op.MatMul(op.Unsqueeze(x, i64(op, 1)), op.Transpose(fc1, perm=[0, 2, 1]))
        pairs = op.Reshape(hidden, i64(op, 0, 0, 0, -1, 2))
        gate, up = op.Split(pairs, num_outputs=2, axis=-1, _outputs=2)
        act = self.swiglu(op, op.Squeeze(gate, i64(op, -1)), op.Squeeze(up, i64(op, -1)), limit)
        act = op.Mul(act, op.Unsqueeze(op.Transpose(share, perm=[0, 2, 1]), i64(op, -1)))
        return op.ReduceSum(op.MatMul(act, op.Transpose(fc2, perm=[0, 2, 1])), i64(op, 1), keepdims=0)

    def grouped_moe(
        self,
        op: Op,
        x: Value,
        base: Value,
        expert_ids: Value,
        weights: Value,
        experts: Sequence[tuple[Value, Value]],
        limit: float,
    ) -> Value:
        """The sum of `moe` added to `base`, as one product per expert over its tokens: T tokens in rows, x and base [T, D],
        ids and weights [T, k], experts (fc1 [D, 2I] with gate columns first, fc2 [I, D]) -> [T, D].

        Tokens are sorted by expert; an expert without tokens multiplies zero rows.
        """
        flat_ids = op.Reshape(expert_ids, i64(op, -1))
        _, order = op.TopK(flat_ids, op.Shape(flat_ids), largest=0, axis=0, _outputs=2)
        onehot = op.OneHot(flat_ids, i64(op, len(experts)), i64(op, 0, 1), axis=0)
        counts = op.ReduceSum(onehot, i64(op, 1), keepdims=0)
        token = op.Div(order, op.Shape(expert_ids, start=1))
        hidden = self._per_expert(op, op.Gather(x, token, axis=0), counts, [fc1 for fc1, _ in experts])
        gate, up = op.Split(hidden, num_outputs=2, axis=-1, _outputs=2)
        out = self._per_expert(op, self.swiglu(op, gate, up, limit), counts, [fc2 for _, fc2 in experts])
        share = op.Reshape(self.shares(op, weights), i64(op, -1, 1))
        out = op.Mul(out, op.Gather(share, order, axis=0))
        return op.ScatterND(base, op.Unsqueeze(token, i64(op, -1)), out, reduction="add")

    def shares(self, op: Op, weights: Value) -> Value:
        """Positive weights [.., k] over their sum."""
        return op.Div(weights, op.ReduceSum(weights, i64(op, -1), keepdims=1))

    def _per_expert(self, op: Op, rows: Value, counts: Value, weights: Sequence[Value]) -> Value:
        """rows [P, I] sorted by expert, counts [E] -> [P, O], expert e's rows times weights[e] [I, O]."""
        parts = op.Split(rows, counts, axis=0, _outputs=len(weights))
        return op.Concat(*[self.linear(op, *pair) for pair in zip(parts, weights, strict=True)], axis=0)

    def swiglu(self, op: Op, gate: Value, up: Value, limit: float) -> Value:
        """silu(min(gate, limit)) * clip(up, -limit, limit)."""
        if math.isfinite(limit):
            gate, up = op.Min(gate, f32(op, limit)), op.Clip(up, f32(op, -limit), f32(op, limit))
        return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)

    def pool_rows(self, op: Op, rows: Value, table: Value) -> tuple[Value, Value]:
        """Gathers pseudo-rows: rows [B, R, 2 dim] (score | kv), table [B, M, S] -> score and kv, each [B, M, S, dim]."""
        picked = op.GatherND(rows, op.Unsqueeze(table, i64(op, -1)), batch_dims=1)
        score, kv = op.Split(picked, num_outputs=2, axis=-1, _outputs=2)
        return score, kv

    def tree_pool(
        self,
        op: Op,
        rows: Value,
        table: Value,
        norm: Value,
        cos: Value,
        sin: Value,
        dim: int,
        rope_dim: int,
        eps: float,
    ) -> Value:
        """Compressed entry per boundary node (spec 2.3): per-channel softmax over the rows that `table` names, RMSNorm, RoPE.

        rows [B, R, 2 dim]: committed pseudo-rows and node rows; table [B, M, S]; cos and sin [B, M, rope_dim / 2] -> [B, M, dim].
        """
        score, kv = self.pool_rows(op, rows, table)
        pooled = op.ReduceSum(op.Mul(op.Softmax(score, axis=2), kv), i64(op, 2), keepdims=0)
        return self.rope(op, op.RMSNormalization(pooled, norm, axis=-1, epsilon=eps), cos, sin, 1, rope_dim)

    def tree_index_select(
        self, op: Op, query: Value, weights: Value, keys: Value, mask: Value, num_heads: int, topk: int
    ) -> Value:
        """Lightning indexer (spec 3): additive mask [B, N, K] that keeps the top-k visible entries of every node.

        query [B, N, Hi * di], weights [B, N, Hi], keys [B, K, di], mask [B, N, K] (0 or -inf).
        """
        di_query = op.Reshape(query, op.Concat(i64(op, 0, -1), op.Shape(keys, start=2), axis=0))
        score = op.Relu(self.scores(op, di_query, keys, 1.0))
        shape = op.Concat(op.Shape(weights), op.Shape(keys, start=1, end=2), axis=0)
        score = op.Reshape(score, shape, allowzero=1)
        total = op.ReduceSum(op.Mul(score, op.Unsqueeze(weights, i64(op, -1))), i64(op, 2), keepdims=0)
        visible = op.Add(total, mask)
        k = op.Min(i64(op, topk), op.Shape(visible, start=2))
        _, picked = op.TopK(visible, k, axis=-1, sorted=0, _outputs=2)
        nothing = op.Expand(const(op, np.array(-np.inf, np.float32)), op.Shape(visible))
        zeros = op.Expand(f32(op, 0.0), op.Shape(picked))
        return op.Add(op.ScatterElements(nothing, picked, zeros, axis=-1), mask)

    def scores(self, op: Op, q: Value, keys: Value, scale: float) -> Value:
        """scale * q keys^T: q [B, R, d], keys [B, K, d] -> [B, R, K]."""
        s = op.MatMul(q, op.Transpose(keys, perm=[0, 2, 1]))
        return s if scale == 1.0 else op.Mul(s, f32(op, scale))

    def tree_attention(
        self, op: Op, q: Value, keys: Value, mask: Value, sink: Value, num_heads: int, head_dim: int, scale: float
    ) -> Value:
        """Shared-KV attention of tree nodes with a sink in the denominator (spec 4).

        q [B, N, H * d]; keys = values [B, K, d], key 0 is the zero row that carries the sink; mask [B, N, K] additive;
        sink [1, 1, H, 1]. Returns [B, N, H * d], not yet rotated back. Shapes come from `mask`, which layers of a kind share.
        """
        width = op.Shape(mask, start=2)
        first = op.OneHot(i64(op, 0), width, const(op, np.array([0, 1], np.float32)), axis=-1)
        s = self.scores(op, op.Reshape(q, i64(op, 0, -1, head_dim)), keys, scale)
        s = op.Reshape(s, op.Concat(i64(op, 0, -1, num_heads), width, axis=0))
        s = op.Add(op.Add(s, op.Unsqueeze(mask, i64(op, 2))), op.Mul(sink, first))
        p = op.Reshape(op.Softmax(s, axis=-1), op.Concat(i64(op, 0, -1), width, axis=0))
        return op.Reshape(op.MatMul(p, keys), i64(op, 0, -1, num_heads * head_dim))


_FUNCTIONS = (
    "sinkhorn",
    "stream_pre_mix",
    "stream_post_mix",
    "moe",
    "tree_pool",
    "tree_index_select",
    "tree_attention",
)


class FunctionOps(V4TreeOps):
    """Emits each replaceable operator as a call of an ONNX function whose body is the reference."""

    def __init__(self) -> None:
        self._functions: dict[tuple[object, ...], ir.Function] = {}

    def _call(self, name: str, op: Op, values: Sequence[Value], attributes: tuple[object, ...]) -> Value:
        key = (name, attributes)
        if key not in self._functions:
            self._functions[key] = self._build(name, values, attributes)
        return op.call(self._functions[key], *values)

    def _build(self, name: str, values: Sequence[Value], attributes: tuple[object, ...]) -> ir.Function:
        body: Callable[..., Value] = getattr(V4TreeOps, name)
        reference = V4TreeOps()
        inputs = [ir.Value(name=f"in_{i}", type=v.type, shape=v.shape) for i, v in enumerate(values)]
        suffix = "_".join(str(a).replace(".", "p").replace("-", "m").replace("+", "") for a in attributes)
        title = "".join(part.capitalize() for part in name.split("_"))
        return _builder.build_function(
            lambda op, *args: body(reference, op, *args, *attributes),
            inputs,
            domain=DOMAIN,
            name=f"{title}_{suffix}" if suffix else title,
            opset_imports={"": OPSET},
        )


def _as_function(name: str) -> Callable[..., Value]:
    def emit(self: FunctionOps, op: Op, *args: object) -> Value:
        values = [a for a in args if isinstance(a, ir.Value)]
        return self._call(name, op, values, tuple(a for a in args if not isinstance(a, ir.Value)))

    emit.__doc__ = getattr(V4TreeOps, name).__doc__
    return emit


for _name in _FUNCTIONS:
    setattr(FunctionOps, _name, _as_function(_name))
