"""Traces the modules into ONNX models whose inputs and outputs are exactly those of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript._internal import builder as _builder

from trtllm_v4tree import contract
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.network.commit import Commit
from trtllm_v4tree.network.draft import DraftRound
from trtllm_v4tree.network.ops import OPSET, Op, V4TreeOps, Value
from trtllm_v4tree.network.target import TargetStep
from trtllm_v4tree.sizes import EngineSizes

_DTYPES = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64}
_IR_VERSION = 10


def trace(spec: GraphContract, forward: Callable[[Op, dict[str, Value]], dict[str, Value]]) -> ir.Model:
    """Runs `forward` on the inputs of `spec`, declares its outputs in order and drops what none of them needs."""
    graph = ir.Graph([], [], nodes=[], name=spec.name, opset_imports={"": OPSET})
    builder = _builder.GraphBuilder(graph)
    feeds = {t.name: builder.input(t.name, _DTYPES[t.dtype], list(t.shape)) for t in spec.inputs}
    produced = forward(builder.op, feeds)
    for t in spec.outputs:
        value = builder.op.Identity(produced[t.name])
        value.type, value.shape = ir.TensorType(_DTYPES[t.dtype]), ir.Shape(list(t.shape))
        builder.add_output(value, _output_name(t.name, feeds))
    for domain in sorted({node.domain for node in graph} - {""}):
        graph.opset_imports.setdefault(domain, 1)
    model = ir.Model(
        graph, ir_version=_IR_VERSION, producer_name="trtllm_v4tree", functions=list(builder.functions.values())
    )
    RemoveUnusedNodesPass()(model)
    return model


def _output_name(name: str, feeds: dict[str, Value]) -> str:
    """A state that is also an input leaves under the name `new_<state>`."""
    return f"new_{name}" if name in feeds else name


def target_step(config: ModelConfig, sizes: EngineSizes, ops: V4TreeOps) -> ir.Model:
    module = TargetStep(config, sizes, ops)
    return trace(contract.target_step(config, sizes), lambda op, feeds: module(op, feeds))


def draft_round(
    config: ModelConfig,
    sizes: EngineSizes,
    ops: V4TreeOps,
    steps: int,
    topk: int,
    vocab: Sequence[int] | None = None,
) -> ir.Model:
    """`vocab`: the tokens that may be proposed, ascending; None is all of them."""
    module = DraftRound(config, ops, steps, topk, vocab)
    return trace(contract.draft_round(config, sizes, steps, topk), lambda op, feeds: module(op, feeds))


def commit(config: ModelConfig, sizes: EngineSizes, ops: V4TreeOps) -> ir.Model:
    module = Commit(config, sizes, ops)
    return trace(contract.commit(config, sizes), lambda op, feeds: module(op, feeds))
