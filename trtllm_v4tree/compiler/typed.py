"""Strong typing of a traced network: 16-bit activations, float32 where the specification asks for it.

A network is traced in float32. `retype` gives every value a type and puts a Cast wherever a consumer wants another one:

* linears and attention read and write activations, and so do embeddings and everything that only moves them;
* norms, softmax, gates, Sinkhorn, rotations, sums and scores are float32, and so are the products with the weights of
  `FLOAT32_WEIGHTS` (hyper-connections, router, head: spec 5.1 to 5.3);
* a product of a float32 and an activation operand (the mixes of the streams) is computed in float32 and stored as activation.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from trtllm_v4tree.compiler.plugin_ops import TYPES
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.network.ops import DOMAIN
from trtllm_v4tree.network.weight import Weight

F32 = ir.DataType.FLOAT
DATA_TYPES = {
    "float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "int64": ir.DataType.INT64,
}  # fmt: skip
FLOAT32_WEIGHTS = (".fn", ".gate", "head.weight")
"""Endings of the names of weights whose products are computed in float32."""
TOKEN_TABLES = ("embed.weight", "mtp.table")
"""Tables of a row per token, gathered as activations; other gathered weights (position biases) stay float32."""
_MOVES = frozenset(
    ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "GatherND", "GatherElements", "Expand", "Identity")
)  # fmt: skip
"""Their first input is moved, the others say where to."""
_POINTWISE = frozenset(("Add", "Sub", "Mul", "Min", "Max", "Clip", "Neg", "Relu"))
_FLOAT32 = frozenset(
    ("RMSNormalization", "Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Sqrt", "Div", "ReduceSum", "Sin", "Cos", "TopK",
     "OneHot", "Cast", "ScatterElements")
)  # fmt: skip


def retype(model: ir.Model, spec: GraphContract, dtype: str) -> None:
    """Types a float32 network in place for the typed contract `spec` and activations of `dtype`; nothing to do for float32."""
    if dtype != "float32":
        _Typing(model.graph, DATA_TYPES[dtype]).run(spec)


class _Typing:
    """One pass over a graph in its order. `types` are of the floating-point values seen so far."""

    def __init__(self, graph: ir.Graph, activation: ir.DataType) -> None:
        self.graph, self.activation = graph, activation
        self.types: dict[ir.Value, ir.DataType] = {}
        self.moved: dict[ir.Value, Weight] = {}
        self.fixed: dict[Weight, ir.DataType] = {}
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self, spec: GraphContract) -> None:
        for value in self.graph.initializers.values():
            if value.dtype == F32:
                self.types[value] = F32
        for value, tensor in zip(self.graph.inputs, spec.inputs, strict=True):
            if value.dtype == F32:
                self._set(value, DATA_TYPES[tensor.dtype])
        for node in list(self.graph):
            self._visit(node)
        for value, tensor in zip(self.graph.outputs, spec.outputs, strict=True):
            last = value.producer()
            assert last is not None and last.op_type == "Identity"
            if value in self.types:
                self._feed(last, 0, DATA_TYPES[tensor.dtype])
                self._set(value, DATA_TYPES[tensor.dtype])

    def _set(self, value: ir.Value, dtype: ir.DataType) -> None:
        self.types[value], value.type = dtype, ir.TensorType(dtype)

    def _visit(self, node: ir.Node) -> None:
        """Types the outputs of a node and casts its inputs to what it computes in."""
        if node.domain == DOMAIN:
            self._plugin(node)
        elif any(value in self.types for value in node.inputs if value is not None):
            if node.op_type in _MOVES:
                self._move(node)
            elif node.op_type == "Concat":
                kinds = {self.types[value] for value in self._floats(node)}
                self._compute(node, kinds.pop() if len(kinds) == 1 else self.activation)
            elif node.op_type == "MatMul":
                self._product(node)
            elif node.op_type in _POINTWISE:
                kinds = {self.types[value] for value in self._floats(node) if not value.is_initializer()}
                self._compute(node, self.activation if kinds == {self.activation} else F32)
            else:
                assert node.op_type in {*_FLOAT32, "Shape"}, f"no rule types {node.op_type}"
                self._compute(node, F32)
        else:
            self.types.update((out, F32) for out in node.outputs if out.dtype == F32)

    def _floats(self, node: ir.Node) -> Iterable[ir.Value]:
        return [value for value in node.inputs if value is not None and value in self.types]

    def _move(self, node: ir.Node) -> None:
        """What moves a weight belongs to the weight, which the product behind it types."""
        data = node.inputs[0]
        if data not in self.types:
            return
        assert data is not None
        weight = self._weight(data)
        if weight is not None and node.op_type == "Gather":
            kind = self.activation if weight.name in TOKEN_TABLES else F32
            self._type_weight(weight, kind)
        elif weight is not None:
            self.moved.update(dict.fromkeys(node.outputs, weight))
        for out in node.outputs:
            self._set(out, self.types[data])

    def _weight(self, value: ir.Value | None) -> Weight | None:
        """The weight that a value is, or moves."""
        return value if isinstance(value, Weight) else self.moved.get(value) if value is not None else None

    def _type_weight(self, weight: Weight, dtype: ir.DataType) -> None:
        """Retypes a weight and what was moved of it; every use must agree."""
        assert self.fixed.setdefault(weight, dtype) == dtype, f"{weight.name} is wanted in two types"
        for value in (weight, *(moved for moved, of in self.moved.items() if of is weight)):
            self._set(value, dtype)

    def _product(self, node: ir.Node) -> None:
        weights = [weight for weight in map(self._weight, node.inputs) if weight is not None]
        if weights:
            low = not (weights[0].name or "").endswith(FLOAT32_WEIGHTS)
            dtype = self.activation if low else F32
            self._type_weight(weights[0], dtype)
            self._compute(node, dtype)
            return
        kinds = {self.types[value] for value in self._floats(node)}
        self._compute(node, self.activation if kinds == {self.activation} else F32)
        if len(kinds) == 2:
            self._store(node.outputs[0])

    def _store(self, value: ir.Value) -> None:
        """Rounds a float32 result to the activation type for all its consumers."""
        uses = list(value.uses())
        stored = self._cast(value, self.activation)
        for user, index in uses:
            user.replace_input_with(index, stored)

    def _plugin(self, node: ir.Node) -> None:
        letters, outputs = TYPES[node.op_type]
        kinds = {"A": self.activation, "F": F32}
        for index, letter in enumerate(letters):
            if letter in kinds:
                self._feed(node, index, kinds[letter])
        for value, letter in zip(node.outputs, outputs, strict=True):
            if letter in kinds:
                self._set(value, kinds[letter])

    def _compute(self, node: ir.Node, dtype: ir.DataType) -> None:
        """All floating-point inputs and outputs in one type; TopK's second output and Shape's are integers."""
        for index, value in enumerate(node.inputs):
            if value is not None and value in self.types:
                self._feed(node, index, dtype)
        if node.op_type != "Shape":
            for out in node.outputs[:1] if node.op_type == "TopK" else node.outputs:
                self._set(out, dtype)

    def _feed(self, node: ir.Node, index: int, dtype: ir.DataType) -> None:
        value = node.inputs[index]
        assert value is not None
        if isinstance(value, Weight):
            self._type_weight(value, dtype)
        elif self.types[value] != dtype:
            node.replace_input_with(index, self._cast(value, dtype, before=node))

    def _cast(self, value: ir.Value, dtype: ir.DataType, before: ir.Node | None = None) -> ir.Value:
        """The value in another type, made once: a small constant is rounded here, all else gets a Cast behind it."""
        if (value, dtype) not in self.casts:
            made = self._constant(value, dtype) if value.is_initializer() else self._cast_node(value, dtype, before)
            self._set(made, dtype)
            self.casts[value, dtype] = made
        return self.casts[value, dtype]

    def _constant(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        assert value.const_value is not None and value.name is not None
        data = np.asarray(value.const_value.numpy()).astype(dtype.numpy())
        name = f"{value.name}_{dtype.name.lower()}"
        made = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype), const_value=ir.tensor(data, name=name))
        self.graph.register_initializer(made)
        return made

    def _cast_node(self, value: ir.Value, dtype: ir.DataType, before: ir.Node | None) -> ir.Value:
        name = f"{value.name}_{dtype.name.lower()}"
        node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=f"cast_{name}")
        out = node.outputs[0]
        out.name, out.shape = name, value.shape
        producer = value.producer()
        if producer is not None:
            self.graph.insert_after(producer, node)
        else:
            self.graph.insert_before(before or self.graph[0], node)
        return out
