"""Token-local parts of a decoder block: RMSNorm, hyper-connections, the mixture of experts, the head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network.ops import Experts, HyperGains, Op, V4TreeOps, Value, i64
from trtllm_v4tree.network.weight import Loader, TensorSource, Weight, held_scales, tensor, transposed


def _mix_weight(prefix: str, gains: tuple[int, ...]) -> tuple[Loader, Loader]:
    """Loaders of `fn` [m * D, sum(gains)] and `base`; the scales (one per group of outputs) are folded into `fn`."""

    def fn(source: TensorSource) -> np.ndarray:
        return source.get(f"{prefix}_fn").T * np.repeat(source.get(f"{prefix}_scale"), gains)

    return fn, tensor(f"{prefix}_base")


class _StreamSite(nn.Module):
    """Weights of a place where the streams are reduced to one vector, with the norm that follows; scales are folded into `fn`."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, norm: str, gains: tuple[int, ...]) -> None:
        super().__init__()
        c = self.config = config
        fn, base = _mix_weight(prefix, gains)
        self.fn = Weight([c.hc_mult * c.hidden_size, sum(gains)], fn)
        self.base = Weight([sum(gains)], base)
        self.norm = Weight([c.hidden_size], tensor(norm))
        self.ops = ops
        self.gains = HyperGains(c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


class HyperConnection(_StreamSite):
    """One mHC site (spec 5.1) with the norm of its sublayer; `stream_post_mix` spreads the sublayer's output again."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, norm: str) -> None:
        m = config.hc_mult
        super().__init__(config, ops, prefix, norm, (m, m, m * m))

    def forward(self, op: Op, streams: Value) -> tuple[Value, Value, Value]:
        """streams [B, N, m, D] -> normed sublayer input [B, N, D], post [B, N, 1, m], comb [B, N, m, m]."""
        return self.ops.hyper_mix(op, streams, self.fn, self.base, self.norm, self.gains)


class HyperHead(_StreamSite):
    """Reduces the streams to the normed vector that the head reads (spec 5.3)."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, norm: str) -> None:
        super().__init__(config, ops, prefix, norm, (config.hc_mult,))

    def forward(self, op: Op, streams: Value) -> Value:
        return self.ops.hyper_head(op, streams, self.fn, self.base, self.norm, self.gains)


def _expert_in(source: TensorSource, prefix: str) -> np.ndarray:
    """Gate and up projection of one SwiGLU: [D, 2I], gate columns first."""
    return np.concatenate([source.get(f"{prefix}.w1.weight"), source.get(f"{prefix}.w3.weight")]).T


def _stacked_in(source: TensorSource, prefix: str, count: int) -> np.ndarray:
    """[E, 2I, D] with gate and up rows interleaved."""
    parts = [_expert_in(source, f"{prefix}.{e}") for e in range(count)]
    return np.stack([p.T.reshape(2, -1, p.shape[0]).transpose(1, 0, 2).reshape(-1, p.shape[0]) for p in parts])


def _fp4_weights(
    prefix: str, names: tuple[str, ...], shape: tuple[int, int, int], held: range
) -> tuple[Weight, Weight]:
    """Bytes int8 [E, O, I / 2] and scales int8 [E, O, I / 32] of experts in FP4, the rows of the `names` interleaved.

    TensorRT's ONNX importer keeps int8 as it is; uint8 it would widen to int32. Scales outside `held` are refused when they are read.
    """
    count, rows, inputs = shape

    def stacked(read: Callable[[str], np.ndarray]) -> np.ndarray:
        experts = ([read(f"{prefix}.{n}.{name}.weight") for name in names] for n in range(count))
        return np.stack([np.stack(parts, axis=1).reshape(rows, -1) for parts in experts]).view(np.int8)

    packed = Weight([count, rows, inputs // 2], lambda s: stacked(s.fp4), ir.DataType.INT8)
    scales = Weight(
        [count, rows, inputs // 32], lambda s: stacked(lambda name: held_scales(s, name, held)), ir.DataType.INT8
    )
    return packed, scales


class Expert(nn.Module):
    """Weights of one routed expert: fc1 [D, 2I] (gate | up) and fc2 [I, D] times the routed scaling factor."""

    def __init__(self, config: ModelConfig, prefix: str) -> None:
        super().__init__()
        d, i, scale = config.hidden_size, config.moe_intermediate_size, np.float32(config.routed_scaling_factor)
        self.fc1 = Weight([d, 2 * i], lambda s: _expert_in(s, prefix))
        self.fc2 = Weight([i, d], lambda s: s.get(f"{prefix}.w2.weight").T * scale)

    def forward(self, op: Op) -> tuple[Value, Value]:
        return self.fc1, self.fc2


class MixtureOfExperts(nn.Module):
    """sqrt-softplus routing (hash or biased top-k), clamped SwiGLU experts and the shared expert (spec 5.2)."""

    def __init__(self, config: ModelConfig, ops: V4TreeOps, prefix: str, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        self.ops, self.hashed = ops, hashed
        d, e, si = c.hidden_size, c.num_experts, c.moe_intermediate_size * c.num_shared_experts
        shared = f"{prefix}.shared_experts"
        self.in_widths = [e, si, si]
        if ops.separate_router:
            self.gate = Weight([d, e], transposed(f"{prefix}.gate.weight"))
            self.in_proj = Weight([d, 2 * si], lambda s: _expert_in(s, shared))
        else:
            self.in_proj = Weight(
                [d, e + 2 * si],
                lambda s: np.concatenate([s.get(f"{prefix}.gate.weight").T, _expert_in(s, shared)], axis=1),
            )
        self.shared_out = Weight([si, d], transposed(f"{shared}.w2.weight"))
        if hashed:
            self.tid2eid = Weight(
                [c.vocab_size, c.num_experts_per_tok], tensor(f"{prefix}.gate.tid2eid"), ir.DataType.INT64
            )
        else:
            self.bias = Weight([e], tensor(f"{prefix}.gate.bias"))
        self._make_experts(f"{prefix}.experts")

    def _make_experts(self, prefix: str) -> None:
        """One weight pair per expert where the target groups tokens by expert, else all experts stacked."""
        c = self.config
        e, d, i, scale = c.num_experts, c.hidden_size, c.moe_intermediate_size, np.float32(c.routed_scaling_factor)
        self.grouped = e <= self.ops.max_grouped_experts
        if self.ops.fused_experts:
            self.fc1 = Weight([e, d, 2 * i], lambda s: np.stack([_expert_in(s, f"{prefix}.{n}") for n in range(e)]))
            self.fc2 = Weight([e, i, d], lambda s: np.stack([s.get(f"{prefix}.{n}.w2.weight").T for n in range(e)]))
        elif self.ops.fp4_experts:
            self.fc1, self.fc1_scale = _fp4_weights(prefix, ("w1", "w3"), (e, 2 * i, d), self.ops.fp4_scales)
            self.fc2, self.fc2_scale = _fp4_weights(prefix, ("w2",), (e, d, i), self.ops.fp4_scales)
        elif self.grouped:
            self.experts = nn.ModuleList([Expert(c, f"{prefix}.{n}") for n in range(e)])
        else:
            self.fc1 = Weight([e, 2 * i, d], lambda s: _stacked_in(s, prefix, e))
            self.fc2 = Weight(
                [e, d, i], lambda s: np.stack([s.get(f"{prefix}.{n}.w2.weight") for n in range(e)]) * scale
            )

    def forward(self, op: Op, x: Value, token_ids: Value) -> Value:
        """x [B, N, D], token_ids [B, N] -> [B, N, D]."""
        c = self.config
        si = c.moe_intermediate_size * c.num_shared_experts
        experts = Experts(
            c.num_experts,
            c.num_experts_per_tok,
            c.moe_intermediate_size,
            si,
            c.swiglu_limit,
            c.routed_scaling_factor,
        )
        if self.ops.fused_experts:
            route = self.tid2eid if self.hashed else self.bias
            stored = self.gate, self.in_proj, self.shared_out, route, self.fc1, self.fc2
            return self.ops.mixture(op, x, token_ids, *stored, experts)
        if self.grouped:
            rows, tokens = op.Reshape(x, i64(op, -1, c.hidden_size)), op.Reshape(token_ids, i64(op, -1))
            ids, weights, shared = self._inputs(op, rows, tokens)
            out = self.ops.grouped_moe(op, rows, shared, ids, weights, [e(op) for e in self.experts], c.swiglu_limit)
            return op.Reshape(out, op.Concat(op.Shape(token_ids), i64(op, c.hidden_size), axis=0))
        ids, weights, shared = self._inputs(op, x, token_ids)
        if self.ops.fp4_experts:
            fc1, fc2 = (self.fc1, self.fc1_scale), (self.fc2, self.fc2_scale)
            return self.ops.add_fp4_experts(op, x, shared, ids, weights, fc1, fc2, experts)
        return self.ops.add_experts(
            op, x, shared, ids, weights, self.fc1, self.fc2, c.num_experts, c.num_experts_per_tok, c.swiglu_limit
        )

    def _inputs(self, op: Op, x: Value, token_ids: Value) -> tuple[Value, Value, Value]:
        """x [.., D] -> expert ids and weights [.., k], shared expert [.., D]; router and shared expert read x in one product, or two."""
        projected, widths = self.ops.linear(op, x, self.in_proj), self.in_widths
        if self.ops.separate_router:
            logits = self.ops.linear(op, x, self.gate)
            gate, up = op.Split(projected, i64(op, *widths[1:]), axis=-1, _outputs=2)
        else:
            logits, gate, up = op.Split(projected, i64(op, *widths), axis=-1, _outputs=3)
        shared = self.ops.linear(op, self.ops.swiglu(op, gate, up, self.config.swiglu_limit), self.shared_out)
        return *self.route(op, logits, token_ids), shared

    def route(self, op: Op, logits: Value, token_ids: Value) -> tuple[Value, Value]:
        """Router logits [.., E] -> expert ids and their weights [.., k], not yet normalised."""
        scores = op.Sqrt(op.Softplus(logits))
        if self.hashed:
            ids = op.Gather(self.tid2eid, token_ids, axis=0)
        else:
            k = i64(op, self.config.num_experts_per_tok)
            _, ids = op.TopK(op.Add(scores, self.bias), k, axis=-1, _outputs=2)
        return ids, op.GatherElements(scores, ids, axis=-1)
