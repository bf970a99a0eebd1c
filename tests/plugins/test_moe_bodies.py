"""The experts' plugin nodes, with their reference bodies on ONNX Runtime, against the kernels that take the place of them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxscript._internal import builder as _builder
from v4tree_plugins import grouped_moe as moe

from tests.plugins.test_grouped_moe import routing
from trtllm_v4tree.compiler.plugin_bodies import add_bodies
from trtllm_v4tree.compiler.plugin_ops import PluginOps

B, N, HIDDEN, INNER, LIMIT = 2, 9, 40, 24, 1.5


def network(experts: int, topk: int) -> ir.Model:
    """One layer's experts with unknown B and N; outputs the lines and the sum. Those in FP4 are in `tests/test_typed.py`."""
    graph = ir.Graph([], [], nodes=[], name="experts", opset_imports={"": 23, "v4tree": 1})
    builder = _builder.GraphBuilder(graph)
    f32, i64 = ir.DataType.FLOAT, ir.DataType.INT64
    shapes = {"x": ["B", "N", HIDDEN], "base": ["B", "N", HIDDEN], "ids": ["B", "N", topk], "weights": ["B", "N", topk]}
    shapes |= {"fc1": [experts, 2 * INNER, HIDDEN], "fc2": [experts, HIDDEN, INNER]}
    feeds = [builder.input(name, i64 if name == "ids" else f32, shape) for name, shape in shapes.items()]
    out = PluginOps(90).add_experts(builder.op, *feeds, experts, topk, LIMIT)
    lines = next(node for node in graph if node.op_type == "moe_align").outputs[0]
    builder.add_output(builder.op.Identity(lines), "lines")
    builder.add_output(builder.op.Identity(out), "out")
    model = ir.Model(graph, ir_version=11)
    add_bodies(model)
    return model


@pytest.mark.parametrize("kind", ["any", "same", "even"])
@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (64, 6)])
def test_bodies_mean_what_the_kernels_do(experts: int, topk: int, kind: str) -> None:
    rng = np.random.default_rng(experts)
    ids = routing(kind, B * N, topk, experts, rng)
    x, base, fc1, fc2 = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B * N, HIDDEN), (B * N, HIDDEN), (experts, 2 * INNER, HIDDEN), (experts, HIDDEN, INNER))
    )
    weights = rng.uniform(0.1, 2, (B * N, topk)).astype(np.float32)
    session = ort.InferenceSession(ir.to_proto(network(experts, topk)).SerializeToString())
    rows = {"x": x, "base": base, "ids": ids, "weights": weights}
    feeds = {name: value.reshape(B, N, -1) for name, value in rows.items()} | {"fc1": fc1, "fc2": fc2}
    lines, out = session.run(None, feeds)
    kernel = map(torch.from_numpy, (x, base, ids, weights, fc1, fc2))
    want = moe.grouped_moe(*kernel, limit=LIMIT).numpy()
    assert np.array_equal(lines, moe.naive_align(ids, experts))
    assert np.abs(out.reshape(B * N, HIDDEN) - want).max() <= 1e-5 * np.abs(want).max()
