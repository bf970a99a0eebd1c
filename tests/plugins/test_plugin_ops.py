"""The lowering emits nodes with the plugins' inputs and attributes, and refuses what the kernels cannot do."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from onnxscript._internal import builder as _builder
from v4tree_plugins import grouped_moe

from tests.plugins.quick_report import CASES, ir_type
from trtllm_v4tree.compiler import plugin_ops
from trtllm_v4tree.compiler.plugin_ops import PluginOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import AttentionDims, KeySources, NodeRows, Rope
from trtllm_v4tree.sizes import EngineSizes

NANO = Path(__file__).resolve().parents[2] / "models" / "v4-nano"
DIMS = AttentionDims(1024, 512, 0, 0, 0, 128, 64, 64, 1e-6)


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
    rope = Rope(feeds["cos"], feeds["sin"], feeds["sin"])
    rows = NodeRows(feeds["nodes"], None, None, flat, None)
    PluginOps(90, splits).attend(builder.op, rows, keys, feeds["sink"], rope, DIMS)
    return [node for node in graph if node.domain == "v4tree"]


@pytest.mark.parametrize("splits", [1, 4])
def test_nodes_match_the_plugins(splits: int) -> None:
    nodes = emitted(splits)
    assert len(nodes) == (1 if splits == 1 else 2)
    for node in nodes:
        inputs, attributes = plugin_ops.NODES[node.op_type]
        assert len(node.inputs) == len(inputs)
        assert set(node.attributes) == {*attributes, "plugin_namespace", "plugin_version"}


def test_the_whole_target_step_uses_the_plugins() -> None:
    """Every layer's attention and experts, every compressor's pool and every indexer are plugin nodes (v4-nano, sparse)."""
    config = ModelConfig.from_pretrained(NANO)
    sizes = EngineSizes.make(config, max_batch_size=2, max_seq_len=4096, max_verify_tokens=8, prefill_chunk=64)
    model = graphs.target_step(config, sizes, PluginOps(90))
    kinds = [node.op_type for node in model.graph if node.domain == "v4tree"]
    assert kinds.count("tree_attention") == config.num_layers
    assert kinds.count("tree_pool") == 2 * sizes.num_csa + sizes.num_hca
    assert kinds.count("tree_index_score") == sizes.num_csa
    for kind in ("moe_align", "moe_fc1", "moe_fc2", "moe_combine"):
        assert kinds.count(kind) == config.num_layers
    experts = {name for name in model.graph.initializers if name.endswith((".fc1", ".fc2"))}
    products = [node for node in model.graph if node.domain == "v4tree" and node.op_type in ("moe_fc1", "moe_fc2")]
    assert {node.inputs[2].name for node in products if node.inputs[2]} == experts and len(experts) == len(products)


def test_lines_of_experts_are_as_long_as_the_kernels() -> None:
    assert plugin_ops.EXPERT_LINE == grouped_moe.BLOCK_M


@pytest.mark.parametrize("options", [(75, "float32", 8), (90, "int8", 8), (90, "bfloat16", 65)])
def test_refuses_in_one_sentence(options: tuple[int, str, int]) -> None:
    with pytest.raises(ConfigError) as error:
        plugin_ops.check_options(*options)
    assert str(error.value).count(".") == 1
