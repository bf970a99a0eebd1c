"""Reference bodies of the plugin nodes, so that a network for TensorRT can be evaluated without plugins and without a GPU.

Every plugin node becomes a call of a function of its own signature: activations are widened to float32, the reference operators
compute, and the result is rounded to the type of the node's output, as a kernel with float32 sums does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnxscript._internal import builder as _builder

from trtllm_v4tree.compiler.plugin_ops import NODES
from trtllm_v4tree.network.ops import DOMAIN, OPSET, Op, Rope, V4TreeOps, Value, i64

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
        wide = [op.Cast(v, to=1) if v.dtype != ir.DataType.INT64 else v for v in values]
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


_BODIES: dict[str, Body] = {
    "tree_pool": _tree_pool,
    "tree_index_score": _tree_index_score,
    "tree_attention": _tree_attention,
}
