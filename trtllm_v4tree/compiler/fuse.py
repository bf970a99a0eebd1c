"""Graph pass for the native operators: neighbours that always follow each other become one node.

ONNX Runtime spends about a microsecond on every node, a tenth of a small model's step. A fused node calls the same kernels in the same
order, so results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtllm_v4tree.network.ops import DOMAIN

PHASE = 6
"""The input of AttentionProject that holds a phase, or a position; behind it is the bias of every phase."""
MAX_PARTS = 8
"""Tensors that the rows of an attention's nodes may lie in."""
OFFSETS = {
    ("TreeAttention", 2): "window_offset",
    ("TreeAttention", 6): "entry_offset",
    ("TreeIndexSelect", 3): "entry_offset",
    ("TreePool", 1): "slot_offset",
}
"""Inputs that hold rows or slots, and the attribute that is added to them: where a layer's part of a pool begins."""


def fuse(model: ir.Model) -> None:
    """Rewrites the graph of `model` in place."""
    graph = model.graph
    for node in list(graph):
        if node.graph is not graph or node.domain != DOMAIN:
            continue
        if node.op_type == "AttentionInputs":
            _fuse_projection(graph, node)
        elif node.op_type == "HyperPost":
            _fuse_post_mix(graph, node)
            _fuse_proposal(graph, node)
        elif node.op_type == "PackedLinear":
            _fuse_linears(graph, node)
            _fuse_entry(graph, node)
        elif node.op_type == "TreeAttention":
            _fuse_parts(graph, node)
    for node in list(graph):
        if node.op_type == "Reshape":
            _fuse_stack(graph, node)
        elif node.op_type == "Add":
            _fuse_offset(node)
        elif node.op_type == "Mod":
            _fuse_phase(node)
        elif node.op_type == "Concat":
            _fuse_embedding(graph, node)
        elif _is(node, "HyperHead"):
            _fuse_picked(node)
    _fuse_rotations(graph)
    graph.sort()
    RemoveUnusedNodesPass()(model)


def _fuse_projection(graph: ir.Graph, node: ir.Node) -> None:
    """Input projection -> AttentionInputs -> query projection; no queries where nobody reads them."""
    projected, query = node.inputs[0], node.outputs[0]
    assert projected is not None
    source, readers = projected.producer(), _readers(query)
    if source is None or not _is_plain(source) or len(_readers(projected)) > 1:
        return
    if len(readers) > 1 or not all(map(_is_plain, readers)):
        return
    inputs = [*source.inputs, *node.inputs[1:], *[None] * (8 - len(node.inputs)), *(r.inputs[1] for r in readers)]
    columns = sum(r.attributes["columns"].as_int() for r in readers)
    attributes = [*node.attributes.values(), ir.AttrInt64("query_columns", columns), source.attributes["rounded"]]
    queries = readers[0].outputs[0] if readers else None
    made = _node("AttentionProject", inputs, attributes, 5)
    _replace(graph, made, [node.outputs[1], queries, *node.outputs[2:]], [source, node, *readers])


def _fuse_post_mix(graph: ir.Graph, node: ir.Node) -> None:
    """HyperPost -> HyperMix of the next site."""
    readers = [reader for reader in _readers(node.outputs[0]) if _is(reader, "HyperMix")]
    if len(readers) != 1:
        return
    mix = readers[0]
    made = _node("HyperPostMix", [*node.inputs, *mix.inputs[1:]], mix.attributes.values(), 4)
    _replace(graph, made, [node.outputs[0], *mix.outputs], [node, mix])


def _fuse_proposal(graph: ir.Graph, node: ir.Node) -> None:
    """HyperPost -> HyperHead -> TopLogProbs (-> Gather of token ids) -> DraftFrontier."""
    head = next((reader for reader in _readers(node.outputs[0]) if _is(reader, "HyperHead")), None)
    top = _only_reader(head.outputs[0]) if head is not None else None
    last = _only_reader(top.outputs[0]) if top is not None else None
    if head is None or top is None or last is None or not _is(last, "DraftFrontier"):
        return
    names = _producer(last.inputs[1])
    ids = names.inputs[0] if names is not None and names.op_type == "Gather" else None
    rest = [*last.inputs[2:6], *[None] * (6 - len(last.inputs))]
    attributes = [a for n in (head, top, last) for a in n.attributes.values()]
    inputs = [*node.inputs, *head.inputs[1:], top.inputs[1], ids, *rest]
    old = [node, head, top, *([names] if ids is not None and names is not None else []), last]
    _replace(graph, _node("DraftProposal", inputs, attributes, len(last.outputs)), last.outputs, old)


def _fuse_entry(graph: ir.Graph, node: ir.Node) -> None:
    """A normed linear of every stream, to which a row of the node is added (of a table, perhaps) -> HyperMix."""
    add = _only_reader(node.outputs[0])
    if len(node.inputs) != 3 or add is None or add.op_type != "Add":
        return
    mixes = [reader for reader in _readers(add.outputs[0]) if _is(reader, "HyperMix")]
    row = _producer(add.inputs[1])
    if len(mixes) != 1 or row is None or row.op_type != "Unsqueeze":
        return
    source = _producer(row.inputs[0])
    table = source.inputs[:2] if source is not None and source.op_type == "Gather" else [row.inputs[0], None]
    inputs = [*node.inputs, *table, *mixes[0].inputs[1:]]
    attributes = [node.attributes["eps"], node.attributes["rounded"], *mixes[0].attributes.values()]
    _replace(
        graph, _node("DraftEntry", inputs, attributes, 4), [add.outputs[0], *mixes[0].outputs], [node, add, mixes[0]]
    )


def _fuse_parts(graph: ir.Graph, node: ir.Node) -> None:
    """Attention reads the rows of its nodes where they are, rather than a concatenation of them."""
    parts = _parts(node.inputs[3])
    if 1 < len(parts) <= MAX_PARTS:
        inputs = [*node.inputs[:3], parts[0], *node.inputs[4:], *parts[1:]]
        _replace(graph, _node("TreeAttention", inputs, node.attributes.values(), 1), node.outputs, [node])


def _parts(value: ir.Value | None) -> list[ir.Value | None]:
    joined = _producer(value)
    if joined is None or joined.op_type != "Concat" or joined.attributes["axis"].as_int() != 1:
        return [value]
    return [part for source in joined.inputs for part in _parts(source)]


def _fuse_linears(graph: ir.Graph, node: ir.Node) -> None:
    """A linear that another alone reads."""
    readers = _readers(node.outputs[0])
    if len(readers) != 1 or not _is_plain(readers[0]) or node.attributes["then"].as_int():
        return
    last = readers[0]
    attributes = [a for a in node.attributes.values() if a.name != "then"]
    then = ir.AttrInt64("then", last.attributes["columns"].as_int())
    inputs = [*node.inputs, *[None] * (3 - len(node.inputs)), last.inputs[1]]
    _replace(graph, _node("PackedLinear", inputs, [*attributes, then], 1), [last.outputs[0]], [node, last])


def _fuse_stack(graph: ir.Graph, node: ir.Node) -> None:
    """Reshape(Concat(layers, axis 0), [L | shape of a layer])."""
    whole, shape = node.inputs[0], node.inputs[1]
    assert whole is not None and shape is not None
    joined, sized = whole.producer(), shape.producer()
    if not (joined and sized and joined.op_type == "Concat" == sized.op_type) or joined.attributes["axis"].as_int():
        return
    last = sized.inputs[-1]
    like = last.producer() if last is not None else None
    if like is None or like.op_type != "Shape" or like.inputs[0] is not joined.inputs[0] or len(_readers(whole)) > 1:
        return
    layers = [ir.AttrInt64("layers", len(joined.inputs))]
    _replace(graph, _node("StackLayers", joined.inputs, layers, 1), [node.outputs[0]], [joined, node])


def _fuse_offset(node: ir.Node) -> None:
    """A constant added to rows that only operators with an offset read."""
    rows, constant = node.inputs
    offset = constant.const_value if constant is not None else None
    uses = list(node.outputs[0].uses())
    if rows is None or offset is None or offset.size != 1 or node.outputs[0].is_graph_output():
        return
    if not all(use.node.domain == DOMAIN and (use.node.op_type, use.idx) in OFFSETS for use in uses):
        return
    for user, index in uses:
        name = OFFSETS[user.op_type, index]
        before = user.attributes[name].as_int()
        user.attributes[name] = ir.AttrInt64(name, before + int(offset.numpy().item()))
        user.replace_input_with(index, rows)


def _fuse_phase(node: ir.Node) -> None:
    """Positions modulo a ratio, which operators that have the bias of every phase find by themselves."""
    for user, index in list(node.outputs[0].uses()):
        bias = user.inputs[PHASE + 1] if _is(user, "AttentionProject") and index == PHASE else None
        ratio = node.inputs[1].const_value if node.inputs[1] is not None else None
        if bias is None or bias.shape is None or ratio is None or bias.shape[0] != int(ratio.numpy().item()):
            continue
        user.replace_input_with(index, node.inputs[0])


def _fuse_embedding(graph: ir.Graph, node: ir.Node) -> None:
    """Concat(Unsqueeze(Gather(table, token ids))) of as many as there are streams."""
    row = _producer(node.inputs[0])
    found = _producer(row.inputs[0]) if row is not None and row.op_type == "Unsqueeze" else None
    if found is None or row is None or found.op_type != "Gather" or set(node.inputs) != {row.outputs[0]}:
        return
    table, axis = found.inputs[0], node.attributes["axis"].as_int()
    if axis != 2 or table is None or table.dtype != ir.DataType.FLOAT or not table.is_initializer():
        return
    made = _node("EmbedStreams", found.inputs, [ir.AttrInt64("streams", len(node.inputs))], 1)
    _replace(graph, made, node.outputs, [node])


def _fuse_picked(node: ir.Node) -> None:
    """GatherND(streams, Unsqueeze(nodes)), by sequence, of which the head reads the nodes."""
    pick = _producer(node.inputs[0])
    last = _producer(pick.inputs[1]) if pick is not None and pick.op_type == "GatherND" else None
    if pick is None or last is None or last.op_type != "Unsqueeze" or pick.attributes["batch_dims"].as_int() != 1:
        return
    node.resize_inputs(5)
    node.replace_input_with(4, last.inputs[0])
    node.replace_input_with(0, pick.inputs[0])


def _fuse_rotations(graph: ir.Graph) -> None:
    """Rotations of positions that the graph is given, all at once."""
    nodes = [n for n in graph if _is(n, "RopeTables") and n.inputs[0] is not None and n.inputs[0].is_graph_input()]
    if len(nodes) < 2:
        return
    inputs, outputs = [v for n in nodes for v in n.inputs], [v for n in nodes for v in n.outputs]
    made = _node("RopeTables", inputs, [ir.AttrInt64("sets", len(nodes))], len(outputs))
    graph.insert_before(nodes[0], made)
    for new, value in zip(made.outputs, outputs, strict=True):
        new.type, new.shape, new.name = value.type, value.shape, value.name
        value.name = f"{value.name}.old"
        value.replace_all_uses_with(new)
    graph.remove(nodes, safe=True)


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.domain == DOMAIN and node.op_type == op_type


def _is_plain(node: ir.Node) -> bool:
    """A linear of one group, without norm or second product."""
    return _is(node, "PackedLinear") and len(node.inputs) == 2 and node.attributes["groups"].as_int() == 1


def _readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]


def _only_reader(value: ir.Value) -> ir.Node | None:
    readers = _readers(value)
    return readers[0] if len(readers) == 1 else None


def _producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None else None


def _node(op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr], outputs: int) -> ir.Node:
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    return ir.Node(DOMAIN, op_type, given, list(attributes), num_outputs=outputs)


def _replace(graph: ir.Graph, made: ir.Node, kept: Sequence[ir.Value | None], old: Sequence[ir.Node]) -> None:
    """Puts `made` in the place of the last of the `old` nodes and its outputs in that of the `kept` ones."""
    graph.insert_after(old[-1], made)
    for new, value in zip(made.outputs, kept, strict=False):
        if value is not None:
            new.type, new.shape, new.name = value.type, value.shape, value.name
            value.name = f"{value.name}.old"
            value.replace_all_uses_with(new)
    graph.remove(list(reversed(old)), safe=True)
