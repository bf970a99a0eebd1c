"""Lowering for ONNX Runtime on the CPU: v4tree operators as the contrib kernels that pay (measured in benchmarks/)."""

from __future__ import annotations

import math

from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, f32, i64
from trtllm_v4tree.network.weight import INT8_BLOCK, Weight, quantized

MS = "com.microsoft"


class OnnxRuntimeOps(V4TreeOps):
    """Fewer and cheaper nodes than the reference bodies; the same values up to rounding.

    With `int8` every linear rounds weights and activations to 8 bits, in blocks of 32 inputs. That is for drafters: a target that
    rounds turns the 1e-6 by which a tree and a chain differ into 1e-3, and its text would depend on the tree.
    """

    def __init__(self, int8: bool = False) -> None:
        self.int8 = int8
        self.max_grouped_experts = 0 if int8 else 32
        """A grouped expert is two nodes, and its weights are packed once; the MoE kernel packs them in every call of several rows."""
        self._quantized: dict[str, tuple[Weight, Weight]] = {}

    def linear(self, op: Op, x: Value, weight: Value) -> Value:
        """With int8 MatMulNBits: activations are rounded to 8 bits per block too, sums are exact integers."""
        if not self.int8 or not self._divisible(weight, axis=0):
            return super().linear(op, x, weight)
        assert weight.shape is not None
        inputs, outputs = (int(str(dim)) for dim in weight.shape)
        packed, scale = self._parts(op, weight, transpose=True)
        return op.MatMulNBits(
            x, packed, scale, K=inputs, N=outputs, bits=8, block_size=INT8_BLOCK, accuracy_level=4, _domain=MS
        )

    def _divisible(self, weight: Value, axis: int) -> bool:
        """Whether a weight's inputs fill whole blocks; one that does not stays as it is."""
        assert weight.shape is not None
        return int(str(weight.shape[axis])) % INT8_BLOCK == 0

    def _parts(self, op: Op, weight: Value, transpose: bool) -> tuple[Weight, Weight]:
        """The 8-bit form of a weight as initializers of the graph, made once."""
        assert isinstance(weight, Weight) and weight.name is not None
        graph = op.builder.root.graph
        if f"{weight.name}.int8" not in graph.initializers:
            self._quantized[weight.name] = quantized(weight, transpose)
            for part in self._quantized[weight.name]:
                graph.initializers[part.name or ""] = part
        return self._quantized[weight.name]

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
        """The MoE kernels take the choice of experts as scores over a floor that no chosen one reaches."""
        shape = op.Concat(op.Shape(expert_ids, start=0, end=2), i64(op, num_experts), axis=0)
        shares = op.ScatterElements(op.Expand(f32(op, 0.0), shape), expert_ids, self.shares(op, weights), axis=-1)
        router = op.Reshape(shares, i64(op, -1, num_experts))
        attributes = {
            "k": topk, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0,
            **({"swiglu_limit": limit} if math.isfinite(limit) else {}),
        }  # fmt: skip
        if self.int8 and self._divisible(fc1, axis=2) and self._divisible(fc2, axis=2):
            return self._int8_moe(op, x, router, fc1, fc2, attributes)
        scores = op.Log(op.Max(router, f32(op, 1e-30)))
        return op.MoE(x, scores, fc1, None, fc2, _domain=MS, normalize_routing_weights=1, **attributes)

    def _int8_moe(
        self, op: Op, x: Value, router: Value, fc1: Value, fc2: Value, attributes: dict[str, object]
    ) -> Value:
        """router [T, E]: the share of each chosen expert, 0 elsewhere; it chooses and weighs."""
        parts = []
        for weight in (fc1, fc2):
            packed, scale = self._parts(op, weight, transpose=False)
            parts += [op.Reshape(packed, i64(op, 0, 0, -1)), scale, None]
        return op.QMoE(
            x, router, *parts, None, None, None, None, None, None, router, _domain=MS,
            expert_weight_bits=8, block_size=INT8_BLOCK, accuracy_level=4, **attributes,
        )  # fmt: skip

    def shares(self, op: Op, weights: Value) -> Value:
        return op.LpNormalization(weights, axis=-1, p=1)

    def swiglu(self, op: Op, gate: Value, up: Value, limit: float) -> Value:
        if math.isfinite(limit):
            gate, up = op.Min(gate, f32(op, limit)), op.Clip(up, f32(op, -limit), f32(op, limit))
        return op.Mul(op.QuickGelu(gate, alpha=1.0, _domain=MS), up)

    def scores(self, op: Op, q: Value, keys: Value, scale: float) -> Value:
        return op.FusedMatMul(q, keys, transB=1, alpha=scale, _domain=MS)
