"""Lowering for ONNX Runtime on the CPU: v4tree operators as the contrib kernels that pay (measured in benchmarks/)."""

from __future__ import annotations

import math
from typing import Literal

from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, f32, i64
from trtllm_v4tree.network.weight import INT8_BLOCK, Weight, quantized

MS = "com.microsoft"


class OnnxRuntimeOps(V4TreeOps):
    """Fewer and cheaper nodes than the reference bodies; the same values up to rounding.

    `int8` names what computes with 8-bit weights and activations (blocks of 32 inputs): nothing, the routed experts, or all linears.
    """

    def __init__(self, int8: Literal["none", "experts", "all"] = "none") -> None:
        self.int8 = int8
        self._quantized: dict[str, tuple[Weight, Weight]] = {}

    max_grouped_experts = 32
    """A grouped expert is two nodes, and its weights are packed once; the MoE kernel packs them in every call of several rows."""

    def linear(self, op: Op, x: Value, weight: Value) -> Value:
        return self._int8_linear(op, x, weight) if self.int8 == "all" else super().linear(op, x, weight)

    def expert_linear(self, op: Op, x: Value, weight: Value) -> Value:
        return super().linear(op, x, weight) if self.int8 == "none" else self._int8_linear(op, x, weight)

    def _int8_linear(self, op: Op, x: Value, weight: Value) -> Value:
        """MatMulNBits: activations are rounded to 8 bits per block too, sums are exact integers."""
        assert isinstance(weight, Weight) and weight.shape is not None and weight.name is not None
        inputs, outputs = (int(str(dim)) for dim in weight.shape)
        if inputs % INT8_BLOCK:
            return super().linear(op, x, weight)
        graph = op.builder.root.graph
        if f"{weight.name}.int8" not in graph.initializers:
            self._quantized[weight.name] = quantized(weight)
            for part in self._quantized[weight.name]:
                graph.initializers[part.name or ""] = part
        packed, scale = self._quantized[weight.name]
        return op.MatMulNBits(
            x, packed, scale, K=inputs, N=outputs, bits=8, block_size=INT8_BLOCK, accuracy_level=4, _domain=MS
        )

    def sinkhorn(self, op: Op, logits: Value, iterations: int, eps: float) -> Value:
        """Each half step after the first is one LpNormalization node.

        It lacks the eps under the fraction. Near the fixed point a sum is 1, so what every dropped eps leaves is undone by the next
        half step, and the last one makes column sums of 1 / (1 + eps).
        """
        e = f32(op, eps)
        c = op.Add(op.Softmax(logits, axis=-1), e)
        c = op.Div(c, op.Add(op.ReduceSum(c, i64(op, -2), keepdims=1), e))
        for _ in range(iterations - 1):
            c = op.LpNormalization(op.LpNormalization(c, axis=-1, p=1), axis=-2, p=1)
        return op.Mul(c, f32(op, 1 / (1 + eps)))

    def stream_post_mix(self, op: Op, streams: Value, out: Value, post: Value, comb: Value) -> Value:
        rows = op.Concat(streams, op.Unsqueeze(out, i64(op, 2)), axis=2)
        return op.FusedMatMul(op.Concat(comb, post, axis=2), rows, transA=1, _domain=MS)

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
        """The MoE kernel softmaxes its router input and renormalises over the top k: log-weights of the chosen experts over a
        floor that no chosen one reaches give exactly the weights wanted."""
        chosen = op.Log(op.Max(weights, f32(op, 1e-30)))
        shape = op.Concat(op.Shape(expert_ids, start=0, end=2), i64(op, num_experts), axis=0)
        floor = op.Expand(f32(op, -1e4), shape)
        router = op.Reshape(op.ScatterElements(floor, expert_ids, chosen, axis=-1), i64(op, -1, num_experts))
        attributes = {"swiglu_limit": limit} if math.isfinite(limit) else {}
        return op.MoE(
            x, router, fc1, None, fc2, _domain=MS, k=topk, activation_type="swiglu", swiglu_fusion=1,
            activation_alpha=1.0, activation_beta=0.0, normalize_routing_weights=1, **attributes,
        )  # fmt: skip

    def shares(self, op: Op, weights: Value) -> Value:
        return op.LpNormalization(weights, axis=-1, p=1)

    def swiglu(self, op: Op, gate: Value, up: Value, limit: float) -> Value:
        if math.isfinite(limit):
            gate, up = op.Min(gate, f32(op, limit)), op.Clip(up, f32(op, -limit), f32(op, limit))
        return op.Mul(op.QuickGelu(gate, alpha=1.0, _domain=MS), up)

    def scores(self, op: Op, q: Value, keys: Value, scale: float) -> Value:
        return op.FusedMatMul(q, keys, transB=1, alpha=scale, _domain=MS)
