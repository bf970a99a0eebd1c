"""Graph pass for the native operators: the decoder blocks of a graph become one node, whose threads each do their own rows.

An operator of `native/src/ops_region.cc` takes the others' place and calls them with the same numbers, so results are the same to the bit.
What it gains is thread meetings, one in a block in place of seven, and rows that stay in the caches of their thread; `native/src`
says how. The node's `program` is the list of its operators, one a line.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from trtllm_v4tree.network.ops import DOMAIN

MEMBERS = (
    "PackedLinear", "HyperMix", "HyperPost", "HyperPostMix", "MixtureOfExperts", "AttentionProject", "TreePool", "TreeIndexSelect",
    "TreeAttention", "TakeRow", "DraftEntry", "DraftProposal",
)  # fmt: skip
WHOLE = {("DraftProposal", output) for output in (1, 2, 4, 5)}
"""Outputs of whole numbers; ONNX Runtime has to be told what the outputs of a region hold."""


def join(model: ir.Model) -> None:
    """Rewrites the graph of `model` in place, until no two operators are left that could be one."""
    graph = model.graph
    while len(members := _members(graph)) > 1:
        _replace(graph, members, _Program(members, _kinds(graph)))


def _members(graph: ir.Graph) -> list[ir.Node]:
    """Operators that depend on each other through nothing but each other."""
    members: dict[ir.Node, None] = {}
    behind: set[ir.Value | None] = set()
    for node in graph:
        depends = any(value in behind for value in node.inputs)
        if node.domain == DOMAIN and node.op_type in MEMBERS and not depends:
            members[node] = None
        elif depends or any(value is not None and value.producer() in members for value in node.inputs):
            behind.update(node.outputs)
    return list(members)


def _kinds(graph: ir.Graph) -> dict[ir.Value, str]:
    """Of every value outside of weights and pools: r, a row for each node [B, N, ..], or s, something for each sequence [B, ..]."""
    kinds: dict[ir.Value, str] = {}
    for value in graph.inputs:
        dims = [str(dim) for dim in value.shape or ()]
        if dims[:1] == ["B"]:
            kinds[value] = "r" if dims[1:2] == ["N"] else "s"
    for node in graph:
        for index, value in enumerate(node.outputs):
            given = {kinds[source] for source in _sources(node, index) if source in kinds}
            if given:
                kinds[value] = "r" if "r" in given else "s"
    return kinds


def _sources(node: ir.Node, output: int) -> Sequence[ir.Value | None]:
    """The inputs that an output comes from."""
    if node.domain == DOMAIN and node.op_type == "RopeTables":  # positions and frequencies of a set make three tables
        return node.inputs[output // 3 * 2 : output // 3 * 2 + 2]
    return node.inputs


class _Program:
    """The text of a region, its inputs and its outputs."""

    def __init__(self, members: Sequence[ir.Node], kinds: dict[ir.Value, str]) -> None:
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.stacks: list[ir.Node] = []
        """StackLayers of what the region makes: it writes every layer where it belongs."""
        self._number = {value: i for i, value in enumerate(v for node in members for v in node.outputs)}
        lines = [self._line(node) for node in members]
        self.kinds = "".join(kinds.get(value, "g") for value in self.inputs)
        self.text = "\n".join(lines + self._export(members))
        self.weight_bytes = max(sum(map(_bytes, node.inputs)) for node in members)

    def _line(self, node: ir.Node) -> str:
        attributes = (f"{a.name}={_number(a)}" for a in node.attributes.values())
        given, made = (
            map(self._reference, node.inputs),
            (f"t{self._number[v]}" if v.name else "-" for v in node.outputs),
        )
        return " ".join([node.op_type, *attributes, ";", *given, ";", *made])

    def _reference(self, value: ir.Value | None) -> str:
        if value is None:
            return "-"
        if value in self._number:
            return f"t{self._number[value]}"
        if value not in self.inputs:
            self.inputs.append(value)
        return f"i{self.inputs.index(value)}"

    def _export(self, members: Sequence[ir.Node]) -> list[str]:
        """Lines of the outputs: what others read, stacked where StackLayers alone reads it."""
        lines: list[str] = []
        stacked: set[ir.Value | None] = set()
        for stack in {
            use.node: None for value in self._number for use in value.uses() if use.node.op_type == "StackLayers"
        }:
            if all(value in self._number for value in stack.inputs) and stacked.isdisjoint(stack.inputs):
                stacked.update(stack.inputs)
                self.stacks.append(stack)
                self.outputs.append(stack.outputs[0])
                lines.append(" ".join(["output stack", *map(self._reference, stack.inputs)]))
        gone = {*members, *self.stacks}
        for value in self._number:
            if value.is_graph_output() or any(use.node not in gone for use in value.uses()):
                assert value not in stacked, "a layer is read by itself and stacked"
                self.outputs.append(value)
                lines.append(f"output {self._reference(value)}")
        return lines


def _replace(graph: ir.Graph, members: Sequence[ir.Node], program: _Program) -> None:
    attributes = [
        ir.AttrString("program", program.text),
        ir.AttrString("kinds", program.kinds),
        ir.AttrInt64("weight_bytes", program.weight_bytes),
    ]
    made = ir.Node(DOMAIN, "Region", program.inputs, attributes, num_outputs=len(program.outputs))
    graph.append(made)
    for old, new in zip(program.outputs, made.outputs, strict=True):
        node = old.producer()
        whole = node is not None and (node.op_type, old.index() or 0) in WHOLE
        new.name, new.shape = old.name, old.shape
        new.type = ir.TensorType(ir.DataType.INT64 if whole else ir.DataType.FLOAT)
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([*members, *program.stacks], safe=True)
    graph.sort()


def _bytes(value: ir.Value | None) -> int:
    """Of a weight; other inputs are read once by all threads together."""
    if value is None or not value.is_initializer() or value.shape is None or value.dtype is None:
        return 0
    return int(np.prod([int(str(dim)) for dim in value.shape])) * value.dtype.bitwidth // 8


def _number(attribute: ir.Attr) -> str:
    return (
        repr(float(np.float32(attribute.value)))
        if attribute.type == ir.AttributeType.FLOAT
        else str(attribute.as_int())
    )
