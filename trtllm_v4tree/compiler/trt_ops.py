"""Lowering for the TensorRT family: the reference bodies, but for what its ONNX importer cannot take with unknown sizes."""

from __future__ import annotations

import numpy as np

from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, f32, i64


class TensorRtOps(V4TreeOps):
    """Standard ONNX operators only, all of them importable with unknown batch, node and key counts."""

    def rope(self, op: Op, x: Value, cos: Value, sin: Value, num_heads: int, rope_dim: int) -> Value:
        """Interleaved RoPE in elementary operators: the importer of RotaryEmbedding wants equal static sequence lengths."""
        heads = op.Reshape(x, i64(op, 0, 0, num_heads, -1))
        pairs = op.Slice(heads, i64(op, 0), i64(op, rope_dim), i64(op, 3))
        rest = op.Slice(heads, i64(op, rope_dim), i64(op, 1 << 30), i64(op, 3))
        pairs = op.Reshape(pairs, i64(op, 0, 0, num_heads, rope_dim // 2, 2))
        even, odd = (op.Squeeze(half, i64(op, -1)) for half in op.Split(pairs, num_outputs=2, axis=-1, _outputs=2))
        c, s = op.Unsqueeze(cos, i64(op, 2)), op.Unsqueeze(sin, i64(op, 2))
        first = op.Sub(op.Mul(even, c), op.Mul(odd, s))
        second = op.Add(op.Mul(even, s), op.Mul(odd, c))
        both = op.Concat(op.Unsqueeze(first, i64(op, -1)), op.Unsqueeze(second, i64(op, -1)), axis=-1)
        rotated = op.Reshape(both, i64(op, 0, 0, num_heads, rope_dim))
        return op.Reshape(op.Concat(rotated, rest, axis=3), i64(op, 0, 0, -1))

    def sinkhorn(self, op: Op, logits: Value, iterations: int, eps: float) -> Value:
        """Row and column sums as products with 0/1 matrices on [B, N, m * m].

        As reductions, 20 unrolled iterations are one region that the compiler fuses for minutes; products cut it in small pieces.
        """
        assert logits.shape is not None
        m = int(logits.shape[-1])  # type: ignore[arg-type]
        e = f32(op, eps)
        rows = const(op, np.kron(np.eye(m), np.ones((m, m))).astype(np.float32))
        cols = const(op, np.kron(np.ones((m, m)), np.eye(m)).astype(np.float32))
        c = op.Reshape(op.Add(op.Softmax(logits, axis=-1), e), i64(op, 0, 0, m * m))
        c = op.Div(c, op.Add(op.MatMul(c, cols), e))
        for _ in range(iterations - 1):
            c = op.Div(c, op.Add(op.MatMul(c, rows), e))
            c = op.Div(c, op.Add(op.MatMul(c, cols), e))
        return op.Reshape(c, i64(op, 0, 0, m, m))

    def tree_attention(
        self, op: Op, q: Value, keys: Value, mask: Value, sink: Value, num_heads: int, head_dim: int, scale: float
    ) -> Value:
        """The reference body with the sink's column from a comparison: OneHot wants a depth known when the engine is built."""
        width = op.Shape(mask, start=2)
        key = op.Range(const(op, np.array(0, np.int64)), op.Squeeze(width), const(op, np.array(1, np.int64)))
        bias = op.Add(op.Unsqueeze(mask, i64(op, 2)), op.Mul(sink, op.Cast(op.Equal(key, i64(op, 0)), to=1)))
        s = self.scores(op, op.Reshape(q, i64(op, 0, -1, head_dim)), keys, scale)
        s = op.Add(op.Reshape(s, op.Concat(i64(op, 0, -1, num_heads), width, axis=0)), bias)
        p = op.Reshape(op.Softmax(s, axis=-1), op.Concat(i64(op, 0, -1), width, axis=0))
        return op.Reshape(op.MatMul(p, keys), i64(op, 0, -1, num_heads * head_dim))
