"""Token-local parts of a decoder block: RMSNorm, hyper-connections, the mixture of experts, the head."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.ops import Op, V4TreeOps, Value, const, f32, i64
from trtllm_v4tree.network.weight import TensorSource, Weight, tensor, transposed


class RmsNorm(nn.Module):
    """RMSNorm over the last axis with a learned weight [dim]."""

    def __init__(self, name: str, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = Weight([dim], tensor(name))
        self.eps = eps

    def forward(self, op: Op, x: Value) -> Value:
        return op.RMSNormalization(x, self.weight, axis=-1, epsilon=self.eps)


def _mix_weight(prefix: str, gains: tuple[int, ...]) -> tuple[object, object]:
    """Loaders of `fn` [m * D, sum(gains)] and `base`; the scales (one per group of outputs) are folded into `fn`."""

    def fn(source: TensorSource) -> np.ndarray:
        return source.get(f"{prefix}_fn").T * np.repeat(source.get(f"{prefix}_scale"), gains)

    return fn, tensor(f"{prefix}_base")


class _StreamMixer(nn.Module):
    """mix = (fn z) rsqrt(mean z^2 + eps) scale + base of the flattened streams z (spec 5.1, 5.3)."""

    def __init__(self, config: ModelConfig, prefix: str, gains: tuple[int, ...]) -> None:
        super().__init__()
        fn, base = _mix_weight(prefix, gains)
        self.fn = Weight([config.hc_mult * config.hidden_size, sum(gains)], fn)  # type: ignore[arg-type]
        self.base = Weight([sum(gains)], base)  # type: ignore[arg-type]
        self.width, self.eps = config.hc_mult * config.hidden_size, config.rms_norm_eps

    def forward(self, op: Op, streams: Value) -> Value:
        ones = const(op, np.ones(self.width, np.float32))
        z = op.RMSNormalization(streams, ones, axis=-1, epsilon=self.eps)
        return op.Add(op.MatMul(z, self.fn), self.base)


class HyperConnection(nn.Module):
    """One mHC site (spec 5.1): `pre_mix` reduces the streams to a sublayer's input, `post_mix` spreads its output again."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str) -> None:
        super().__init__()
        m = config.hc_mult
        self.mixer = _StreamMixer(config, prefix, (m, m, m * m))
        self.config, self.ops = config, ops

    def forward(self, op: Op, streams: Value) -> tuple[Value, Value, Value]:
        """streams [B, N, m * D] -> sublayer input [B, N, D], post [B, N, m], comb [B, N, m, m]."""
        c, m = self.config, self.config.hc_mult
        gates, logits = op.Split(self.mixer(op, streams), i64(op, 2 * m, m * m), axis=-1, _outputs=2)
        gain = const(op, np.repeat(np.array([1, 2], np.float32), m))
        floor = const(op, np.repeat(np.array([c.hc_eps, 0], np.float32), m))
        gates = op.Add(op.Mul(op.Sigmoid(gates), gain), floor)
        pre, post = op.Split(gates, num_outputs=2, axis=-1, _outputs=2)
        comb = self.ops.sinkhorn(op, op.Reshape(logits, i64(op, 0, 0, m, m)), c.hc_sinkhorn_iters, c.hc_eps)
        return self.ops.stream_pre_mix(op, streams, pre, m), post, comb


class HyperHead(nn.Module):
    """Reduces the streams to one vector before the final norm (spec 5.3)."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str) -> None:
        super().__init__()
        self.mixer = _StreamMixer(config, prefix, (config.hc_mult,))
        self.config, self.ops = config, ops

    def forward(self, op: Op, streams: Value) -> Value:
        pre = op.Add(op.Sigmoid(self.mixer(op, streams)), f32(op, self.config.hc_eps))
        return self.ops.stream_pre_mix(op, streams, pre, self.config.hc_mult)


def _expert_rows(source: TensorSource, prefix: str, count: int, layout: str, scale: float) -> np.ndarray:
    """fc1 [E, 2I, D] with gate and up rows interleaved, or fc2 [E, D, I] times the routed scaling factor."""
    if layout == "fc2":
        return np.stack([source.get(f"{prefix}.{e}.w2.weight") for e in range(count)]) * np.float32(scale)
    first = source.get(f"{prefix}.0.w1.weight")
    out = np.empty((count, 2 * first.shape[0], first.shape[1]), np.float32)
    for e in range(count):
        out[e, 0::2] = source.get(f"{prefix}.{e}.w1.weight")
        out[e, 1::2] = source.get(f"{prefix}.{e}.w3.weight")
    return out


class MixtureOfExperts(nn.Module):
    """sqrt-softplus routing (hash or biased top-k), clamped SwiGLU experts and the shared expert (spec 5.2)."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        self.ops, self.hashed = ops, hashed
        d, e, i = c.hidden_size, c.num_experts, c.moe_intermediate_size
        experts, shared = f"{prefix}.experts", f"{prefix}.shared_experts"
        self.gate = Weight([d, e], transposed(f"{prefix}.gate.weight"))
        if hashed:
            self.tid2eid = Weight([c.vocab_size, c.num_experts_per_tok], tensor(f"{prefix}.gate.tid2eid"), ir.DataType.INT64)
        else:
            self.bias = Weight([e], tensor(f"{prefix}.gate.bias"))
        self.fc1 = Weight([e, 2 * i, d], lambda s: _expert_rows(s, experts, e, "fc1", 1.0))
        self.fc2 = Weight([e, d, i], lambda s: _expert_rows(s, experts, e, "fc2", c.routed_scaling_factor))
        si = i * c.num_shared_experts
        self.shared_in = Weight(
            [d, 2 * si], lambda s: np.concatenate([s.get(f"{shared}.w1.weight"), s.get(f"{shared}.w3.weight")]).T
        )
        self.shared_out = Weight([si, d], transposed(f"{shared}.w2.weight"))

    def forward(self, op: Op, x: Value, token_ids: Value) -> Value:
        """x [B, N, D], token_ids [B, N] -> [B, N, D]."""
        c = self.config
        scores = op.Sqrt(op.Softplus(op.MatMul(x, self.gate)))
        if self.hashed:
            ids = op.Gather(self.tid2eid, token_ids, axis=0)
        else:
            _, ids = op.TopK(op.Add(scores, self.bias), i64(op, c.num_experts_per_tok), axis=-1, _outputs=2)
        weights = op.GatherElements(scores, ids, axis=-1)
        routed = self.ops.moe(op, x, ids, weights, self.fc1, self.fc2, c.num_experts, c.num_experts_per_tok, c.swiglu_limit)
        return op.Add(routed, self.shared(op, x))

    def shared(self, op: Op, x: Value) -> Value:
        gate, up = op.Split(self.ops.linear(op, x, self.shared_in), num_outputs=2, axis=-1, _outputs=2)
        return self.ops.linear(op, self.ops.swiglu(op, gate, up, self.config.swiglu_limit), self.shared_out)
