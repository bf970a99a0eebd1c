"""Reference bodies of the plugin nodes, so that a network for TensorRT can be evaluated without plugins and without a GPU.

Every plugin node becomes a call of a function of its own signature: activations are widened to float32, the reference operators
compute, and the result is rounded to the type of the node's output, as a kernel with float32 sums does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnxscript._internal import builder as _builder

from trtllm_v4tree.compiler.plugin_ops import NODES
from trtllm_v4tree.network.ops import DOMAIN, OPSET, Op, Rope, V4TreeOps, Value, const, f32, i64

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 16 codes of FP4."""
Body = Callable[[V4TreeOps, Op, ir.Node, Sequence[Value]], Value]


def add_bodies(model: ir.Model, ops: V4TreeOps | None = None) -> None:
    """Replaces plugin nodes by calls of functions of the domain `v4tree`, in place; `ops` gives the bodies (the reference ones)."""
    reference = ops or V4TreeOps()
    known: dict[object, ir.Function] = {}
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        key = (node.op_type, tuple((value.dtype, str(value.shape)) for value in node.inputs if value is not None))
        if key not in known:
            known[key] = _function(reference, node, f"{node.op_type}_{len(known)}")
            model.functions[known[key].identifier()] = known[key]
        call = ir.Node(DOMAIN, known[key].name, node.inputs, num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, call.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
        model.graph.insert_before(node, call)
        for old, new in zip(node.outputs, call.outputs, strict=True):
            for user, index in list(old.uses()):
                user.replace_input_with(index, new)
        model.graph.remove(node, safe=True)


def _function(ops: V4TreeOps, node: ir.Node, name: str) -> ir.Function:
    names, _ = NODES[node.op_type]
    inputs = [
        ir.Value(name=f"in_{name}", type=value.type, shape=value.shape)
        for name, value in zip(names, node.inputs, strict=True)
        if value is not None
    ]
    out = node.outputs[0].dtype or ir.DataType.FLOAT

    def body(op: Op, *values: Value) -> Value:
        wide = [v if v.dtype in (ir.DataType.INT64, ir.DataType.INT8) else op.Cast(v, to=1) for v in values]
        return op.Cast(_BODIES[node.op_type](ops, op, node, wide), to=int(out))

    return _builder.build_function(body, inputs, domain=DOMAIN, name=name, opset_imports={"": OPSET})


def _size(node: ir.Node, name: str, axis: int) -> int:
    """A size of an operand that is known when the engine is built."""
    value = node.inputs[NODES[node.op_type][0].index(name)]
    assert value is not None and value.shape is not None
    return int(str(value.shape[axis]))


def _tree_pool(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    state, slots, raw, table, norm, cos, sin = values
    dim, rope = _size(node, "norm", 0), Rope(cos, sin, op.Neg(sin))
    eps = node.attributes["eps"].as_float()
    return ops.pool(op, state, slots, raw, table, norm, rope, dim, 2 * _size(node, "cos", 2), eps)


def _tree_index_score(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    query, weights, entries, rows, branch, mask = values
    keys = op.Concat(op.Gather(entries, rows, axis=0), branch, axis=1)
    heads = op.Relu(ops.scores(op, op.Reshape(query, i64(op, 0, -1, _size(node, "query", 3))), keys, 1.0))
    shape = op.Concat(op.Shape(weights), op.Shape(keys, start=1, end=2), axis=0)
    heads = op.Reshape(heads, shape, allowzero=1)
    total = op.ReduceSum(op.Mul(heads, op.Unsqueeze(weights, i64(op, -1))), i64(op, 2), keepdims=0)
    return op.Add(total, mask)


def _tree_attention(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    q, window, window_rows, nodes, node_mask, entries, entry_rows, branch, entry_mask, sink, cos, sin = values
    heads, dim = _size(node, "q", 2), _size(node, "q", 3)
    parts = (op.Gather(window, window_rows, axis=0), nodes, op.Gather(entries, entry_rows, axis=0), branch)
    flat, mask = op.Reshape(q, i64(op, 0, 0, heads * dim)), op.Concat(node_mask, entry_mask, axis=2)
    own = op.Reshape(sink, i64(op, 1, 1, heads, 1))
    out = ops.tree_attention(op, flat, op.Concat(*parts, axis=1), mask, own, heads, dim, float(dim**-0.5))
    return op.Reshape(ops.rope(op, out, cos, op.Neg(sin), heads, 2 * _size(node, "cos", 2)), i64(op, 0, 0, heads, dim))


def _moe_align(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    """A pair's place is the first line of its expert and its rank among the expert's pairs."""
    experts, block = (node.attributes[name].as_int() for name in ("experts", "block"))
    ids = op.Reshape(values[0], i64(op, -1))
    pairs, one = op.Shape(ids), i64(op, 1)
    chosen = op.OneHot(ids, i64(op, experts), i64(op, 0, 1), axis=-1)
    counts = op.ReduceSum(chosen, i64(op, 0), keepdims=0)
    ends = op.CumSum(op.Div(op.Add(counts, i64(op, block - 1)), i64(op, block)), const(op, np.array(0, np.int64)))
    first = op.Mul(op.Sub(ends, op.Div(op.Add(counts, i64(op, block - 1)), i64(op, block))), i64(op, block))
    rank = op.ReduceSum(op.Mul(op.CumSum(chosen, const(op, np.array(0, np.int64))), chosen), i64(op, 1), keepdims=0)
    place = op.Sub(op.Add(op.Gather(first, ids, axis=0), rank), one)
    most = op.Mul(op.Min(pairs, i64(op, experts)), i64(op, block - 1))
    lines = op.Div(op.Add(pairs, most), i64(op, block))
    nobody = op.Expand(i64(op, -1), op.Mul(lines, i64(op, block)))
    rows = op.ScatterND(nobody, op.Unsqueeze(place, i64(op, -1)), _count(op, pairs))
    line = op.Unsqueeze(_count(op, lines), i64(op, -1))
    expert = op.ReduceSum(op.Cast(op.GreaterOrEqual(line, ends), to=7), i64(op, 1), keepdims=1)
    expert = op.Where(op.Equal(expert, i64(op, experts)), i64(op, -1), expert)
    return op.Concat(expert, op.Reshape(rows, i64(op, -1, block)), axis=1)


def _count(op: Op, count: Value) -> Value:
    """0, 1, .. up to count [1]."""
    return op.Range(const(op, np.array(0, np.int64)), op.Squeeze(count), const(op, np.array(1, np.int64)))


def _pairs_by_expert(op: Op, hidden: Value, table: Value, row: Value) -> Value:
    """Of products hidden [E, R, O] of all rows with all experts, for every pair its own: row [P] of the expert that table names."""
    pairs = op.Shape(row)
    owner = op.Slice(table, i64(op, 0), i64(op, 1), i64(op, 1))
    named = op.Slice(table, i64(op, 1), i64(op, 1 << 30), i64(op, 1))
    place = op.Where(op.Less(named, i64(op, 0)), pairs, named)
    experts = op.ScatterND(
        op.Expand(i64(op, 0), op.Add(pairs, i64(op, 1))),
        op.Unsqueeze(op.Reshape(place, i64(op, -1)), i64(op, -1)),
        op.Reshape(op.Expand(owner, op.Shape(named)), i64(op, -1)),
    )
    expert = op.Slice(experts, i64(op, 0), pairs, i64(op, 0))
    both = op.Concat(op.Unsqueeze(expert, i64(op, -1)), op.Unsqueeze(row, i64(op, -1)), axis=1)
    return op.GatherND(hidden, both)


def _moe_fc1(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    x, table, weight = values
    topk, limit = node.attributes["topk"].as_int(), node.attributes["limit"].as_float()
    rows = op.Reshape(x, i64(op, 1, -1, _size(node, "x", 2)))
    hidden = op.MatMul(rows, op.Transpose(weight, perm=[0, 2, 1]))
    pairs = _count(op, op.Mul(op.Shape(rows, start=1, end=2), i64(op, topk)))
    own = op.Reshape(_pairs_by_expert(op, hidden, table, op.Div(pairs, i64(op, topk))), i64(op, 0, -1, 2))
    gate, up = (op.Squeeze(half, i64(op, -1)) for half in op.Split(own, num_outputs=2, axis=-1, _outputs=2))
    shape = op.Concat(op.Shape(x, start=0, end=2), i64(op, topk, _size(node, "weight", 1) // 2), axis=0)
    return op.Reshape(ops.swiglu(op, gate, up, limit), shape)


def _moe_fc2(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    act, table, weight = values
    rows = op.Reshape(act, i64(op, 1, -1, _size(node, "act", 3)))
    hidden = op.MatMul(rows, op.Transpose(weight, perm=[0, 2, 1]))
    own = _pairs_by_expert(op, hidden, table, _count(op, op.Shape(rows, start=1, end=2)))
    return op.Reshape(own, op.Concat(op.Shape(act, start=0, end=3), i64(op, _size(node, "weight", 1)), axis=0))


def _fp4(op: Op, packed: Value, scales: Value) -> Value:
    """FP4 weights [E, O, I / 2] with scales [E, O, I / 32] as float32 [E, O, I]."""
    byte = op.Mod(op.Cast(packed, to=6), const(op, np.array(256, np.int32)))
    half = const(op, np.array(16, np.int32))
    codes = (op.Unsqueeze(nibble, i64(op, -1)) for nibble in (op.Mod(byte, half), op.Div(byte, half)))
    blocks = op.Reshape(op.Concat(*codes, axis=-1), i64(op, 0, 0, -1, 32))
    exponent = op.Cast(op.Mod(op.Cast(scales, to=6), const(op, np.array(256, np.int32))), to=1)
    scale = op.Pow(f32(op, 2), op.Sub(exponent, f32(op, 127)))
    values = op.Mul(op.Gather(const(op, E2M1), blocks, axis=0), op.Unsqueeze(scale, i64(op, -1)))
    return op.Reshape(values, i64(op, 0, 0, -1))


def _moe_fc1_fp4(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    return _moe_fc1(ops, op, node, (*values[:2], _fp4(op, *values[2:])))


def _moe_fc2_fp4(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    return _moe_fc2(ops, op, node, (*values[:2], _fp4(op, *values[2:])))


def _moe_combine(ops: V4TreeOps, op: Op, node: ir.Node, values: Sequence[Value]) -> Value:
    parts, weights, base = values
    share = op.Unsqueeze(ops.shares(op, weights), i64(op, -1))
    total = op.ReduceSum(op.Mul(parts, share), i64(op, 2), keepdims=0)
    return op.Add(op.Mul(total, f32(op, node.attributes["scale"].as_float())), base)


_BODIES: dict[str, Body] = {
    "tree_pool": _tree_pool,
    "tree_index_score": _tree_index_score,
    "tree_attention": _tree_attention,
    "moe_align": _moe_align,
    "moe_fc1": _moe_fc1,
    "moe_fc2": _moe_fc2,
    "moe_fc1_fp4": _moe_fc1_fp4,
    "moe_fc2_fp4": _moe_fc2_fp4,
    "moe_combine": _moe_combine,
}
