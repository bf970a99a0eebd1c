"""The v4tree operator set: every operator that a target may replace, with its meaning in standard ONNX.

A method of `V4TreeOps` *is* the reference body. `FunctionOps` wraps each body into an ONNX function of the domain `v4tree`, so a
portable model can be inlined or lowered node by node; a target subclasses `V4TreeOps` and overrides what it does better.
Shapes: B sequences, N tree nodes, H heads, d head dim, K keys, m streams, D hidden, E experts, k experts per token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript._internal import builder as _builder

from trtllm_v4tree.contract import NULL_SCORE

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


@dataclass(frozen=True)
class Rope:
    """Rotation tables of a set of positions: cos, sin and -sin, each [B, S, rope_dim / 2] (fp32)."""

    cos: Value
    sin: Value
    neg_sin: Value


@dataclass(frozen=True)
class KeySources:
    """Where the keys of a layer lie: pools [R, d] with row tables [B, .], rows of this pass [B, ., d], and what nodes see (additive)."""

    window: Value
    window_rows: Value
    nodes: Value
    node_mask: Value
    entries: Value | None = None
    entry_rows: Value | None = None
    branch: Value | None = None
    entry_mask: Value | None = None


@dataclass(frozen=True)
class NodeRows:
    """What every node of a pass contributes (scratch): window row and raw compressor rows; and what the indexer asks with.

    kv [B, N, d]; raw [B, N, halves * 2 * d] and index_raw [B, N, halves * 2 * di], laid out (score | kv) per half with `ape` added;
    queries [B, N, H * d + Hi * di], not yet normed or rotated; index_weights [B, N, Hi].
    """

    kv: Value
    raw: Value | None
    index_raw: Value | None
    queries: Value
    index_weights: Value | None


@dataclass(frozen=True)
class HyperGains:
    """Constants of a hyper-connection site (spec 5.1)."""

    streams: int
    iterations: int
    hc_eps: float
    norm_eps: float


@dataclass(frozen=True)
class AttentionDims:
    """Widths of the fused input projection (q | kv | raw | index raw | index weights; 0 where absent) and constants of a layer."""

    q_width: int
    head_dim: int
    raw_width: int
    index_width: int
    index_heads: int
    index_dim: int
    rope_dim: int
    heads: int
    eps: float

    @property
    def in_widths(self) -> list[int]:
        widths = [self.q_width, self.head_dim, self.raw_width, self.index_width, self.index_heads]
        return [w for w in widths if w]

    @property
    def query_width(self) -> int:
        """Columns of the attention's queries; the indexer's come behind them."""
        return self.heads * self.head_dim

    @property
    def index_scale(self) -> float:
        """Factor of the indexer's head weights (spec 3)."""
        return float((self.index_dim * self.index_heads) ** -0.5) if self.index_heads else 0.0


@dataclass(frozen=True)
class Experts:
    """Constants of a mixture of experts (spec 5.2); `width` and `shared` are inner sizes."""

    count: int
    topk: int
    width: int
    shared: int
    limit: float
    scale: float


@dataclass(frozen=True)
class Candidates:
    """What a draft level proposes, K children of each of F nodes: cumulative log-probabilities, tokens, candidate ids of their parents
    (-1 is the root), [B, F * K] each."""

    scores: Value
    tokens: Value
    parents: Value


@dataclass(frozen=True)
class Frontier:
    """The nodes that a draft level expands: streams [B, F, m, D]; mask [B, F, W + A], what their rows see (additive).

    Of drafted nodes: tokens, cumulative log-probabilities and candidate ids [B, F]. A lowering may keep the last A columns of the mask,
    drafted rows, as `ancestors` [B, F, A].
    """

    streams: Value
    mask: Value
    tokens: Value | None = None
    scores: Value | None = None
    ids: Value | None = None
    ancestors: Value | None = None


@dataclass(frozen=True)
class DraftLevel:
    """Constants of a draft level: what each level sees of rows that are not drafted [B, L, W] and zeros [B, 1] (int64); the row of the
    next level in it, or None if this is the last one; the id of the first candidate; how many children a node has."""

    masks: Value | None
    zero: Value
    next: int | None
    first: int
    topk: int


class V4TreeOps:
    """Reference bodies in standard ONNX operators (opset 23)."""

    max_grouped_experts = 0
    """Up to so many experts `grouped_moe` takes the place of `moe`."""
    fused_experts = False
    """Whether `mixture` takes the whole block: router, shared expert and routed experts."""
    fp4_experts = False
    """Whether routed experts stay in FP4, which `add_fp4_experts` then takes."""
    fp4_scales = range(0)
    """Bytes of their scales that it takes, 2^(byte - 127)."""
    separate_router = False
    """Whether the router is a product of its own, which a lowering with 16-bit activations computes in float32 (spec 5.2)."""
    factored_output = False
    """Whether the output projection stays in its two low-rank factors whatever their size."""

    def linear(self, op: Op, x: Value, weight: Value) -> Value:
        """x [..., I] times weight [I, O]."""
        return op.MatMul(x, weight)

    def rope(self, op: Op, x: Value, cos: Value, sin: Value, num_heads: int, rope_dim: int) -> Value:
        """Interleaved RoPE on the leading `rope_dim` of every head: x [B, S, heads * d], cos and sin [B, S, rope_dim / 2]."""
        return op.RotaryEmbedding(x, cos, sin, interleaved=1, num_heads=num_heads, rotary_embedding_dim=rope_dim)

    def norm_linear(self, op: Op, x: Value, norm: Value, eps: float, weight: Value) -> Value:
        """RMSNorm over the last axis, then `linear`."""
        return self.linear(op, op.RMSNormalization(x, norm, axis=-1, epsilon=eps), weight)

    def rope_tables(self, op: Op, positions: Value, inv_freq: Value) -> Rope:
        """Tables for integer positions [B, S] (spec 4: angles are position * inv_freq, in fp32)."""
        angle = op.Mul(op.Unsqueeze(op.Cast(positions, to=1), i64(op, -1)), inv_freq)
        sin = op.Sin(angle)
        return Rope(op.Cos(angle), sin, op.Neg(sin))

    def grouped_linear(self, op: Op, x: Value, weight: Value) -> Value:
        """Group g of the columns of x [B, N, G * I] times weight[g], weight [G, I, R] -> [B, N, G * R]."""
        assert weight.shape is not None
        groups = op.Transpose(op.Reshape(x, i64(op, 0, 0, int(str(weight.shape[0])), -1)), perm=[0, 2, 1, 3])
        return op.Reshape(op.Transpose(op.MatMul(groups, weight), perm=[0, 2, 1, 3]), i64(op, 0, 0, -1))

    def top_log_probs(self, op: Op, x: Value, head: Value, topk: int) -> tuple[Value, Value]:
        """The largest log-probabilities, descending, and their tokens: x [B, F, D], head [D, V] -> [B, F, K] each."""
        log_probs = op.LogSoftmax(self.linear(op, x, head), axis=-1)
        values, tokens = op.TopK(log_probs, i64(op, topk), axis=-1, _outputs=2)
        return values, tokens

    def take_row(self, op: Op, index: Value, values: Sequence[Value]) -> list[Value]:
        """One row of every sequence: index [B, 1], values [B, S, ..] -> [B, 1, ..] each."""
        row = op.Unsqueeze(index, i64(op, -1))
        return [op.GatherND(value, row, batch_dims=1) for value in values]

    def draft_level(
        self, op: Op, log_probs: Value, tokens: Value, at: Frontier, level: DraftLevel
    ) -> tuple[Candidates, Frontier | None]:
        """The children of a frontier, of which log-probabilities and tokens [B, F, K] are given, and the K best of them (of equal ones
        the first), which the next level expands."""
        found = self._children(op, log_probs, tokens, at, level)
        if level.next is None:
            return found, None
        k, scores, tokens, best, streams = level.topk, found.scores, found.tokens, level.zero, at.streams
        if at.ids is None and k > 1:
            best = op.Add(level.zero, const(op, np.arange(k, dtype=np.int64).reshape(1, k)))
            streams = op.Concat(*[streams] * k, axis=1)
        elif k > 1:
            scores, best = op.TopK(found.scores, i64(op, k), axis=-1, _outputs=2)
            tokens = op.GatherElements(found.tokens, best, axis=1)
        ids = op.Add(best, i64(op, level.first)) if level.first else best
        assert level.masks is not None
        base = op.Gather(level.masks, i64(op, *[level.next] * k), axis=1)
        eye = np.where(np.eye(k, dtype=bool), 0, -np.inf).astype(np.float32).reshape(1, k, k)
        ancestors = own = op.Add(const(op, eye), op.Cast(op.Unsqueeze(level.zero, i64(op, -1)), to=1))
        if at.ancestors is not None:
            source = op.Unsqueeze(op.Div(best, i64(op, k)), i64(op, -1)) if k > 1 else None
            streams, ancestors = (
                v if source is None else op.GatherND(v, source, batch_dims=1) for v in (streams, at.ancestors)
            )
            ancestors = op.Concat(ancestors, own, axis=2)
        mask = op.Concat(base, ancestors, axis=2)
        return found, Frontier(streams, mask, tokens, scores, ids, ancestors)

    def _children(self, op: Op, log_probs: Value, tokens: Value, at: Frontier, level: DraftLevel) -> Candidates:
        flat, k = i64(op, 0, -1), level.topk
        if at.scores is None or at.ids is None:
            parents = op.Add(level.zero, const(op, np.full((1, k), -1, np.int64)))
            return Candidates(op.Reshape(log_probs, flat), op.Reshape(tokens, flat), parents)
        if k == 1:
            return Candidates(op.Add(op.Reshape(log_probs, flat), at.scores), op.Reshape(tokens, flat), at.ids)
        scores = op.Reshape(op.Add(log_probs, op.Unsqueeze(at.scores, i64(op, -1))), flat)
        parents = op.Gather(at.ids, const(op, np.repeat(np.arange(k), k)), axis=1)
        return Candidates(scores, op.Reshape(tokens, flat), parents)

    def stream_mixer(self, op: Op, streams: Value, fn: Value, base: Value, eps: float) -> Value:
        """(fn z) rsqrt(mean z^2 + eps) + base of the flattened streams z (spec 5.1, 5.3): [B, N, m, D], [m D, gains] -> [B, N, gains]."""
        assert fn.shape is not None
        ones = const(op, np.ones(int(str(fn.shape[0])), np.float32))
        z = op.RMSNormalization(op.Reshape(streams, i64(op, 0, 0, -1)), ones, axis=-1, epsilon=eps)
        return op.Add(op.MatMul(z, fn), base)

    def hyper_mix(
        self, op: Op, streams: Value, fn: Value, base: Value, norm: Value, gains: HyperGains
    ) -> tuple[Value, Value, Value]:
        """streams [B, N, m, D] -> normed input of the sublayer [B, N, D], post [B, N, 1, m], comb [B, N, m, m] (spec 5.1)."""
        m = gains.streams
        rows = op.Reshape(self.stream_mixer(op, streams, fn, base, gains.norm_eps), i64(op, 0, 0, 2 + m, m))
        gates, logits = op.Split(rows, i64(op, 2, m), axis=2, _outputs=2)
        gain, floor = (np.array(v, np.float32).reshape(2, 1) for v in ((1, 2), (gains.hc_eps, 0)))
        gates = op.Add(op.Mul(op.Sigmoid(gates), const(op, gain)), const(op, floor))
        pre, post = op.Split(gates, num_outputs=2, axis=2, _outputs=2)
        comb = self.sinkhorn(op, logits, gains.iterations, gains.hc_eps)
        x = self.stream_pre_mix(op, streams, pre)
        return op.RMSNormalization(x, norm, axis=-1, epsilon=gains.norm_eps), post, comb

    def hyper_head(self, op: Op, streams: Value, fn: Value, base: Value, norm: Value, gains: HyperGains) -> Value:
        """streams [B, N, m, D] -> the normed vector that the head reads [B, N, D] (spec 5.3)."""
        pre = op.Add(op.Sigmoid(self.stream_mixer(op, streams, fn, base, gains.norm_eps)), f32(op, gains.hc_eps))
        x = self.stream_pre_mix(op, streams, op.Unsqueeze(pre, i64(op, 2)))
        return op.RMSNormalization(x, norm, axis=-1, epsilon=gains.norm_eps)

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

    def add_experts(
        self, op: Op, x: Value, base: Value, expert_ids: Value, weights: Value, fc1: Value, fc2: Value, num_experts: int,
        topk: int, limit: float,
    ) -> Value:  # fmt: skip
        """`moe` plus `base` [B, N, D]."""
        return op.Add(self.moe(op, x, expert_ids, weights, fc1, fc2, num_experts, topk, limit), base)

    def add_fp4_experts(
        self, op: Op, x: Value, base: Value, expert_ids: Value, weights: Value, fc1: tuple[Value, Value],
        fc2: tuple[Value, Value], experts: Experts,
    ) -> Value:  # fmt: skip
        """`add_experts` of weights and scales in FP4: fc1 int8 [E, 2I, D / 2] and [E, 2I, D / 32], fc2 [E, D, I / 2] and [E, D, I / 32],
        without the routed scaling factor."""
        raise NotImplementedError("a lowering with fp4_experts has it as operators of its own")

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

    def mixture(
        self, op: Op, x: Value, token_ids: Value, router: Value, shared_in: Value, shared_out: Value, route: Value,
        fc1: Value, fc2: Value, experts: Experts,
    ) -> Value:  # fmt: skip
        """The whole block, which a lowering with `fused_experts` has as one operator: x [B, N, D], token_ids [B, N] -> [B, N, D].

        router [D, E], shared_in [D, 2 S] (gate | up), shared_out [S, D], route: bias [E] or expert ids by token [V, k],
        fc1 [E, D, 2I] (gate | up), fc2 [E, I, D] without the routed scaling factor.
        """
        e = experts
        logits = self.linear(op, x, router)
        gate, up = self.split(op, self.linear(op, x, shared_in), [e.shared, e.shared])
        base = self.linear(op, self.swiglu(op, gate, up, e.limit), shared_out)
        scores = op.Sqrt(op.Softplus(logits))
        if route.dtype == ir.DataType.INT64:
            ids = op.Gather(route, token_ids, axis=0)
        else:
            _, ids = op.TopK(op.Add(scores, route), i64(op, e.topk), axis=-1, _outputs=2)
        picked = self.shares(op, op.GatherElements(scores, ids, axis=-1))
        onehot = op.OneHot(ids, i64(op, e.count), const(op, np.array([0, e.scale], np.float32)), axis=-1)
        share = op.ReduceSum(op.Mul(onehot, op.Unsqueeze(picked, i64(op, -1))), i64(op, 2), keepdims=0)
        gate, up = self.split(op, op.MatMul(op.Unsqueeze(x, i64(op, 1)), fc1), [e.width, e.width])
        weight = op.Unsqueeze(op.Transpose(share, perm=[0, 2, 1]), i64(op, -1))
        act = op.Mul(self.swiglu(op, gate, up, e.limit), weight)
        return op.Add(base, op.ReduceSum(op.MatMul(act, fc2), i64(op, 1), keepdims=0))

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

    def attention_inputs(
        self, op: Op, projected: Value, norms: tuple[Value, Value], rope: Rope, phase: Value | None,
        biases: tuple[Value | None, Value | None], dims: AttentionDims,
    ) -> tuple[Value, Value, Value | None, Value | None, Value | None]:  # fmt: skip
        """Splits the fused input projection: normed query input, window row (normed, rotated), raw rows, index raw rows, index weights.

        projected [B, N, sum(in_widths)], norms of q and kv, phase = position % ratio [B, N], biases `ape` [ratio, width] of the raw rows.
        """
        parts = list(self.split(op, projected, dims.in_widths))
        q = op.RMSNormalization(parts[0], norms[0], axis=-1, epsilon=dims.eps)
        kv = op.RMSNormalization(parts[1], norms[1], axis=-1, epsilon=dims.eps)
        kv = self.rope(op, kv, rope.cos, rope.sin, 1, dims.rope_dim)
        raw = index_raw = index_weights = None
        if biases[0] is not None:
            raw = op.Add(parts[2], op.Gather(biases[0], phase, axis=0))
        if biases[1] is not None:
            index_raw = op.Add(parts[3], op.Gather(biases[1], phase, axis=0))
            index_weights = op.Mul(parts[4], f32(op, dims.index_scale))
        return q, kv, raw, index_raw, index_weights

    def split(self, op: Op, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        """Pieces along the last axis."""
        if len(widths) == 1:
            return (x,)
        return tuple(op.Split(x, i64(op, *widths), axis=-1, _outputs=len(widths)))

    def null_row(self, op: Op, batch_like: Value, dim: int) -> Value:
        """A pseudo-row of weight zero per sequence: [B, 1, 2 dim] = (score -1e30 | kv 0)."""
        row = np.concatenate([np.full(dim, NULL_SCORE), np.zeros(dim)]).reshape(1, 1, -1).astype(np.float32)
        shape = op.Concat(op.Shape(batch_like, start=0, end=1), i64(op, 1, 2 * dim), axis=0)
        return op.Expand(const(op, row), shape)

    def pool(
        self, op: Op, state: Value, slots: Value, raw: Value, table: Value, norm: Value, rope: Rope, dim: int, rope_dim: int, eps: float
    ) -> Value:  # fmt: skip
        """Entries [B, M, dim] of boundary nodes from states [S, 3 or 1, 2 dim] at slots [B], raw rows [B, N, halves * 2 dim] and the
        table [B, M, T] over (states, a null row, raw rows)."""
        rows = op.Concat(
            op.Gather(state, slots, axis=0),
            self.null_row(op, slots, dim),
            op.Reshape(raw, i64(op, 0, -1, 2 * dim)),
            axis=1,
        )
        return self.tree_pool(op, rows, table, norm, rope.cos, rope.sin, dim, rope_dim, eps)

    def index_select(
        self, op: Op, rows: NodeRows, entries: Value, entry_rows: Value, branch: Value, mask: Value, rope: Rope, topk: int,
        dims: AttentionDims,
    ) -> Value:  # fmt: skip
        """The mask [B, N, E + M] with only the top-k visible entries of every node left, by the indexer's scores."""
        assert rows.index_weights is not None
        query = self.index_query(op, rows, rope, dims)
        keys = op.Concat(op.Gather(entries, entry_rows, axis=0), branch, axis=1)
        return self.tree_index_select(op, query, rows.index_weights, keys, mask, dims.index_heads, topk)

    def index_query(self, op: Op, rows: NodeRows, rope: Rope, dims: AttentionDims) -> Value:
        """The indexer's queries, rotated: [B, N, Hi * di]."""
        _, query = self.split(op, rows.queries, [dims.query_width, dims.index_heads * dims.index_dim])
        return self.rope(op, query, rope.cos, rope.sin, dims.index_heads, dims.rope_dim)

    def attention_query(self, op: Op, rows: NodeRows, rope: Rope, dims: AttentionDims) -> Value:
        """The attention's queries, normed per head and rotated: [B, N, H * d]."""
        query = rows.queries
        if dims.index_heads:
            query, _ = self.split(op, query, [dims.query_width, dims.index_heads * dims.index_dim])
        heads = op.Reshape(query, i64(op, 0, 0, dims.heads, dims.head_dim))
        ones = const(op, np.ones(dims.head_dim, np.float32))
        normed = op.RMSNormalization(heads, ones, axis=-1, epsilon=dims.eps)
        flat = op.Reshape(normed, i64(op, 0, 0, dims.query_width))
        return self.rope(op, flat, rope.cos, rope.sin, dims.heads, dims.rope_dim)

    def attend(
        self, op: Op, rows: NodeRows, keys: KeySources, sink: Value, rope: Rope, dims: AttentionDims
    ) -> Value:  # fmt: skip
        """Attention output [B, N, H * d], rotated back, of queries normed and rotated here; sink [1, 1, H, 1]."""
        query = self.attention_query(op, rows, rope, dims)
        parts, masks = [op.Gather(keys.window, keys.window_rows, axis=0), keys.nodes], [keys.node_mask]
        if keys.entries is not None:
            assert keys.branch is not None and keys.entry_mask is not None
            parts += [op.Gather(keys.entries, keys.entry_rows, axis=0), keys.branch]
            masks.append(keys.entry_mask)
        mask = op.Concat(*masks, axis=2) if len(masks) > 1 else masks[0]
        scale = float(dims.head_dim**-0.5)
        o = self.tree_attention(op, query, op.Concat(*parts, axis=1), mask, sink, dims.heads, dims.head_dim, scale)
        return self.rope(op, o, rope.cos, rope.neg_sin, dims.heads, dims.rope_dim)

    def put_rows(self, op: Op, state: Value, scratch: Value, source: Value, target: Value, layers: int) -> Value:
        """Rows of every layer into its part of a stacked pool: state [layers * R, w], scratch [(layers,) B, N, w], source and target [A]:
        state[layer, target] = scratch[layer, source]."""
        assert state.shape is not None
        rows, width = (int(str(dim)) for dim in state.shape)
        picked = op.Gather(op.Reshape(scratch, i64(op, layers, -1, width)), source, axis=1)
        first = np.arange(layers, dtype=np.int64).reshape(-1, 1, 1) * (rows // layers)
        return op.ScatterND(state, op.Add(const(op, first), op.Unsqueeze(target, i64(op, -1))), picked)

    def fold_rows(self, op: Op, state: Value, raw: Value, slots: Value, table: Value, layers: int) -> Value:
        """New pseudo-rows of the open windows at slots [B]: per channel (logsumexp of scores | softmax-weighted kv) of the rows that table
        [B, S, P] names among (S states, a null row, raw rows). state [layers * slots, S, 2 dim], raw [layers, B, N, halves * 2 dim].

        A fold of one row copies it bit for bit, since exp(0) = 1 and the null rows weigh exactly 0.
        """
        assert state.shape is not None
        rows, width = int(str(state.shape[0])), int(str(state.shape[2]))
        first = np.arange(layers, dtype=np.int64).reshape(-1, 1) * (rows // layers)
        flat = op.Reshape(op.Add(const(op, first), slots), i64(op, -1))
        nodes = op.Reshape(raw, op.Concat(op.Shape(flat), i64(op, -1, width), axis=0))
        pool = op.Concat(op.Gather(state, flat, axis=0), self.null_row(op, flat, width // 2), nodes, axis=1)
        score, kv = self.pool_rows(op, pool, op.Concat(*([table] * layers), axis=0))
        new_score = op.ReduceLogSumExp(score, i64(op, 2), keepdims=0)
        new_kv = op.ReduceSum(op.Mul(op.Softmax(score, axis=2), kv), i64(op, 2), keepdims=0)
        return op.ScatterND(state, op.Unsqueeze(flat, i64(op, -1)), op.Concat(new_score, new_kv, axis=-1))

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
        return self.keep_best(op, op.Add(total, mask), mask, topk)

    def keep_best(self, op: Op, visible: Value, mask: Value, topk: int) -> Value:
        """The additive mask [B, N, K] with only the top-k of the masked scores left."""
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
