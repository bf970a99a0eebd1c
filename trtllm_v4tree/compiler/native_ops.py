"""Lowering for the CPU with the native operators of `trtllm_v4tree.native`: a block is about seven operators, joined by `fuse`, instead of two
hundred, and `region` makes one node of all blocks.

Weights are stored once, packed as the kernels read them (blocks of 16 columns), in bfloat16 where the checkpoint's values are
bfloat16, so nothing is lost; activations and sums are float32. Every sum of a token runs in one order, whatever tokens are computed
beside it, so a linear gives the same bits for one node and for a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtllm_v4tree import native
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import CheckpointError
from trtllm_v4tree.network.ops import (
    DOMAIN,
    AttentionDims,
    Candidates,
    DraftLevel,
    Experts,
    Frontier,
    HyperGains,
    KeySources,
    NodeRows,
    Op,
    Rope,
    V4TreeOps,
    Value,
)
from trtllm_v4tree.network.weight import TensorSource, Weight

LANES, PANEL = 16, 4
"""Columns of a packed block, and blocks of a panel."""
MAX_STREAMS = 8


def why_not(config: ModelConfig) -> str:
    """Why an engine of this model cannot have native operators on this machine; empty if it can."""
    if native.library() is None:
        return "the library was not compiled; install trtllm_v4tree where a C++ compiler is, or use --cpu_kernels onnxruntime"
    for name in ("head_dim", "index_head_dim"):
        if getattr(config, name) % LANES:
            return f"{name} is {getattr(config, name)} and must be a multiple of {LANES}; use --cpu_kernels onnxruntime"
    if config.hc_mult > MAX_STREAMS:
        return f"hc_mult is {config.hc_mult} and may be {MAX_STREAMS} at most; use --cpu_kernels onnxruntime"
    return ""


class NativeOps(V4TreeOps):
    """Emits native operators of the domain v4tree. With `half` linears are stored in bfloat16; the checkpoint must be exact in it.

    `dtype` float32, or what linears round their inputs to: with bfloat16 products of two bfloat16, summed in float32; with int8 both
    factors have 8 bits, a weight a scale for each output, a row of inputs one scale, and sums are whole numbers; so are the mixing
    products of hyper-connections, a fifth of the weights that a pass of a small model reads. Norms, softmax, pools and routing stay in
    float32, with int8 the router too.
    """

    fused_experts = True
    separate_router = True
    factored_output = True

    def __init__(self, half: bool, dtype: str = "float32") -> None:
        assert half or dtype != "bfloat16", "inputs are rounded to bfloat16 for weights in bfloat16 alone"
        self.stored = "bfloat16" if half else "float32"
        self.linears = "int8" if dtype == "int8" else self.stored
        self.mixes = "int8" if dtype == "int8" else "float32"
        self.rounded = dtype == "bfloat16"

    def _pack(self, op: Op, weight: Value, stored: str | None = None, parts: int = 1) -> Value:
        """The packed form of a weight [.., I, O], or of `parts` equal pieces of its columns, as an initializer made once."""
        assert isinstance(weight, Weight) and weight.name is not None
        stored = stored or self.linears
        name, known = f"{weight.name}.{'int8' if stored == 'int8' else 'packed'}", op.builder.root.graph.initializers
        if name not in known:
            known[name] = packed(weight, name, stored, parts)
        return known[name]

    def linear(self, op: Op, x: Value, weight: Value) -> Value:
        return self._linear(op, x, weight, _dims(weight)[-1])

    def _linear(
        self, op: Op, x: Value, weight: Value, columns: int, groups: int = 1, norm: Value | None = None, eps: float = 0.0
    ) -> Value:  # fmt: skip
        inputs = [x, self._pack(op, weight)] + ([] if norm is None else [norm])
        return op.PackedLinear(
            *inputs, columns=columns, groups=groups, then=0, eps=eps, rounded=int(self.rounded), _domain=DOMAIN
        )

    def norm_linear(self, op: Op, x: Value, norm: Value, eps: float, weight: Value) -> Value:
        return self._linear(op, x, weight, _dims(weight)[-1], norm=norm, eps=eps)

    def rope_tables(self, op: Op, positions: Value, inv_freq: Value) -> Rope:
        cos, sin, neg_sin = op.RopeTables(positions, inv_freq, sets=1, _domain=DOMAIN, _outputs=3)
        return Rope(cos, sin, neg_sin)

    def grouped_linear(self, op: Op, x: Value, weight: Value) -> Value:
        groups, _, columns = _dims(weight)
        return self._linear(op, x, weight, groups * columns, groups)

    def top_log_probs(self, op: Op, x: Value, head: Value, topk: int) -> tuple[Value, Value]:
        values, tokens = op.TopLogProbs(
            x, self._pack(op, head), columns=_dims(head)[-1], topk=topk, rounded=int(self.rounded), _domain=DOMAIN, _outputs=2
        )  # fmt: skip
        return values, tokens

    def take_row(self, op: Op, index: Value, values: Sequence[Value]) -> list[Value]:
        return list(op.TakeRow(index, *values, _domain=DOMAIN, _outputs=len(values)))

    def draft_level(
        self, op: Op, log_probs: Value, tokens: Value, at: Frontier, level: DraftLevel
    ) -> tuple[Candidates, Frontier | None]:
        given, last = [log_probs, tokens, at.scores, at.ids], level.next is None
        if not last:
            given += [at.mask, level.masks, at.streams]
        scores, listed, parents, *rest = op.DraftFrontier(
            *given, level=level.next or 0, first=level.first, last=int(last), _domain=DOMAIN, _outputs=3 if last else 8
        )
        found = Candidates(scores, listed, parents)
        if last:
            return found, None
        best, chosen, ids, streams, mask = rest
        return found, Frontier(streams, mask, chosen, best, ids)

    def hyper_mix(
        self, op: Op, streams: Value, fn: Value, base: Value, norm: Value, gains: HyperGains
    ) -> tuple[Value, Value, Value]:
        x, post, comb = op.HyperMix(
            streams, self._pack(op, fn, self.mixes), base, norm, streams=gains.streams, iterations=gains.iterations,
            hc_eps=gains.hc_eps, norm_eps=gains.norm_eps, _domain=DOMAIN, _outputs=3,
        )  # fmt: skip
        return x, post, comb

    def hyper_head(self, op: Op, streams: Value, fn: Value, base: Value, norm: Value, gains: HyperGains) -> Value:
        return op.HyperHead(
            streams, self._pack(op, fn, self.mixes), base, norm, hc_eps=gains.hc_eps, norm_eps=gains.norm_eps, _domain=DOMAIN
        )  # fmt: skip

    def stream_post_mix(self, op: Op, streams: Value, out: Value, post: Value, comb: Value) -> Value:
        return op.HyperPost(streams, out, post, comb, _domain=DOMAIN)

    def mixture(
        self, op: Op, x: Value, token_ids: Value, router: Value, shared_in: Value, shared_out: Value, route: Value,
        fc1: Value, fc2: Value, experts: Experts,
    ) -> Value:  # fmt: skip
        weights = [
            self._pack(op, router, self.stored),
            self._pack(op, shared_in, parts=2),
            self._pack(op, shared_out),
            self._pack(op, fc1, parts=2),
            self._pack(op, fc2),
        ]
        limit = experts.limit if math.isfinite(experts.limit) else float(np.finfo(np.float32).max)
        return op.MixtureOfExperts(
            x, token_ids, *weights[:3], route, *weights[3:], experts=experts.count, topk=experts.topk, width=experts.width,
            shared=experts.shared, limit=limit, scale=experts.scale, rounded=int(self.rounded), _domain=DOMAIN,
        )  # fmt: skip

    def attention_inputs(
        self, op: Op, projected: Value, norms: tuple[Value, Value], rope: Rope, phase: Value | None,
        biases: tuple[Value | None, Value | None], dims: AttentionDims,
    ) -> tuple[Value, Value, Value | None, Value | None, Value | None]:  # fmt: skip
        count = 2 + (biases[0] is not None) + 2 * (biases[1] is not None)
        given: list[Value | None] = [projected, *norms, rope.cos, rope.sin]
        if biases[0] is not None:
            given += [phase, biases[0]]
        if biases[1] is not None:
            given.append(biases[1])
        out = op.AttentionInputs(
            *given, q_width=dims.q_width, head_dim=dims.head_dim, raw_width=dims.raw_width, index_width=dims.index_width,
            index_heads=dims.index_heads, eps=dims.eps, index_scale=dims.index_scale, _domain=DOMAIN, _outputs=count,
        )  # fmt: skip
        q, kv, *rest = out
        raw, index_raw, index_weights = (*rest, None, None, None)[:3]
        return q, kv, raw, index_raw, index_weights

    def pool(
        self, op: Op, state: Value, slots: Value, raw: Value, table: Value, norm: Value, rope: Rope, dim: int, rope_dim: int, eps: float
    ) -> Value:  # fmt: skip
        return op.TreePool(state, slots, raw, table, norm, rope.cos, rope.sin, eps=eps, slot_offset=0, _domain=DOMAIN)

    def index_select(
        self, op: Op, rows: NodeRows, entries: Value, entry_rows: Value, branch: Value, mask: Value, rope: Rope, topk: int,
        dims: AttentionDims,
    ) -> Value:  # fmt: skip
        return op.TreeIndexSelect(
            rows.queries, rows.index_weights, entries, entry_rows, branch, mask, rope.cos, rope.sin,
            heads=dims.index_heads, topk=topk, offset=dims.query_width, entry_offset=0, _domain=DOMAIN,
        )  # fmt: skip

    def attend(
        self, op: Op, rows: NodeRows, keys: KeySources, sink: Value, rope: Rope, dims: AttentionDims
    ) -> Value:  # fmt: skip
        return op.TreeAttention(
            rows.queries, keys.window, keys.window_rows, keys.nodes, keys.node_mask, keys.entries, keys.entry_rows,
            keys.branch, keys.entry_mask, sink, rope.cos, rope.sin,
            heads=dims.heads, scale=float(dims.head_dim**-0.5), eps=dims.eps, window_offset=0, entry_offset=0, _domain=DOMAIN,
        )  # fmt: skip

    def put_rows(self, op: Op, state: Value, scratch: Value, source: Value, target: Value, layers: int) -> Value:
        return op.PutRows(state, scratch, source, target, layers=layers, _domain=DOMAIN)

    def fold_rows(self, op: Op, state: Value, raw: Value, slots: Value, table: Value, layers: int) -> Value:
        return op.FoldRows(state, raw, slots, table, layers=layers, _domain=DOMAIN)


def _dims(weight: Value) -> list[int]:
    assert weight.shape is not None
    return [int(str(dim)) for dim in weight.shape]


_TOGETHER = {"float32": 1, "bfloat16": 2, "int8": 4}
"""Inputs of a column that lie side by side, by what a weight is stored in."""
_TYPES = {"float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16, "int8": ir.DataType.UINT8}


def packed(weight: Weight, name: str, stored: str, parts: int) -> Weight:
    """A weight [.., I, O] as the kernels read it: [.., parts, flat], where flat is the length of what `pack` makes of a piece; `parts`
    pieces of the columns are packed apart."""
    *outer, inputs, outputs = _dims(weight)
    together, columns = _TOGETHER[stored], -(-outputs // parts // LANES) * LANES
    flat = columns * (-(-inputs // together) * together + (4 if stored == "int8" else 0))
    result = Weight([*outer, parts, flat], _packer(weight.load, name, stored, parts), dtype=_TYPES[stored])
    result.name = name
    return result


def _packer(
    load: Callable[[TensorSource], np.ndarray], name: str, stored: str, parts: int
) -> Callable[[TensorSource], np.ndarray]:
    def loader(source: TensorSource) -> np.ndarray:
        array = load(source)
        pieces = np.moveaxis(array.reshape(*array.shape[:-1], parts, -1), -2, -3)
        try:
            return pack(pieces, stored)
        except ValueError as error:
            raise CheckpointError(f"{name} {error}.") from error

    return loader


def pack(array: np.ndarray, stored: str) -> np.ndarray:
    """[.., I, O] -> [.., flat]: panels of 64 columns (the last one narrower), in each [I / g][blocks][16][g], where g is 1 for float32, 2
    for bfloat16 and 4 for int8, in bytes whose zero is 128, behind which is the scale of every column in float32; zeros fill up. One
    panel at a time, so that nothing but the result is held beside the array.

    Raises ValueError, with what to do, for a value that bfloat16 cannot hold, or 8 bits and a scale.
    """
    *outer, inputs, outputs = array.shape
    together, width = _TOGETHER[stored], PANEL * LANES
    padded_inputs, padded_outputs = -(-inputs // together) * together, -(-outputs // LANES) * LANES
    scales = column_scales(array, padded_outputs) if stored == "int8" else np.empty((*outer, 0), np.float32)
    size = padded_inputs * padded_outputs
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.uint8}[stored]
    packed = np.empty((*outer, size + scales.view(np.uint8).shape[-1]), dtype)
    for first in range(0, padded_outputs, width):
        last = min(first + width, padded_outputs)
        panel = np.zeros((*outer, padded_inputs, last - first), packed.dtype)
        part = array[..., first:last]
        held = part if stored != "int8" else _codes(part, scales[..., first : first + part.shape[-1]])
        panel[..., :inputs, : part.shape[-1]] = held
        if stored == "bfloat16" and not np.array_equal(panel[..., :inputs, : part.shape[-1]].astype(np.float32), part):
            raise ValueError("has values that bfloat16 cannot hold: build with --cpu_kernels onnxruntime")
        tiled = np.moveaxis(panel.reshape(*outer, -1, together, (last - first) // LANES, LANES), -3, -1)
        packed[..., first * padded_inputs : last * padded_inputs] = tiled.reshape(*outer, -1)
    packed[..., size:] = scales.view(np.uint8)
    return packed


def column_scales(array: np.ndarray, columns: int) -> np.ndarray:
    """[.., I, O] -> [.., columns]: the largest magnitude of a column over 127; 0 for columns that are not there."""
    largest = np.abs(array).max(axis=-2).astype(np.float32)
    if not np.isfinite(largest).all():
        raise ValueError("has values that are no finite numbers: download the checkpoint again")
    scales = np.zeros((*array.shape[:-2], columns), np.float32)
    scales[..., : array.shape[-1]] = largest / 127
    return scales


def _codes(part: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A part of the columns in whole steps of their scales, from 1 to 255; 128 is 0."""
    steps = np.where(scales > 0, scales, 1)[..., None, :]
    return np.asarray(np.clip(np.rint(part / steps), -127, 127) + 128, np.uint8)
