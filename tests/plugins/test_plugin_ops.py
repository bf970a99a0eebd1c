"""The lowering emits nodes with the plugins' inputs and attributes, and refuses what the kernels cannot do."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnxscript._internal import builder as _builder

from tests.plugins.quick_report import CASES, ir_type
from trtllm_v4tree.compiler import plugin_ops
from trtllm_v4tree.compiler.plugin_ops import KeySources, PluginOps
from trtllm_v4tree.errors import ConfigError


def emitted(splits: int) -> list[ir.Node]:
    """Nodes of one attention over the operands of the plugin's own case."""
    graph = ir.Graph([], [], nodes=[], name="g", opset_imports={"": 23})
    builder = _builder.GraphBuilder(graph)
    names, _ = plugin_ops.NODES["tree_attention"]
    feeds = {
        name: builder.input(name, ir_type(dtype), list(shape))
        for name, (dtype, shape) in zip(names, CASES["tree_attention"][0], strict=True)
    }
    flat = builder.input("flat", ir_type("BF16"), [2, 6, 64 * 512])
    keys = KeySources(**{name: feeds[name] for name in KeySources.__dataclass_fields__})
    ops = PluginOps(90, splits)
    ops.attend(builder.op, flat, keys, feeds["sink"], feeds["cos"], feeds["sin"], 64)
    return [node for node in graph if node.domain == "v4tree"]


@pytest.mark.parametrize("splits", [1, 4])
def test_nodes_match_the_plugins(splits: int) -> None:
    nodes = emitted(splits)
    assert len(nodes) == (1 if splits == 1 else 2)
    for node in nodes:
        inputs, attributes = plugin_ops.NODES[node.op_type]
        assert len(node.inputs) == len(inputs)
        assert set(node.attributes) == {*attributes, "plugin_namespace", "plugin_version"}


@pytest.mark.parametrize("options", [(75, "float32", 8), (90, "int8", 8), (90, "bfloat16", 65)])
def test_refuses_in_one_sentence(options: tuple[int, str, int]) -> None:
    with pytest.raises(ConfigError) as error:
        plugin_ops.check_options(*options)
    assert str(error.value).count(".") == 1
