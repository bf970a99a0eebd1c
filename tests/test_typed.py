"""Networks with 16-bit activations: strictly typed ONNX, float32 where the specification asks for it, and values near float32's."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from trtllm_v4tree import contract
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler.plugin_bodies import add_bodies
from trtllm_v4tree.compiler.plugin_ops import NODES, TYPES, PluginOps
from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.compiler.typed import FLOAT32_WEIGHTS, TOKEN_TABLES, retype
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import WEIGHTS_FILE
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import V4TreeOps
from trtllm_v4tree.network.weight import Weight
from trtllm_v4tree.sizes import EngineSizes

from .feeds import Arrays, as_typed, random_draft_feeds, random_feeds
from .oracle.tiny import pack_experts, write_tiny

HALVES = ("float16", "bfloat16")
ACTIVATION = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
GRAPHS = ("target_step", "draft_s3_k2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("typed") / "checkpoint", "w16", seed=1)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts in FP4."""
    return pack_experts(write_tiny(tmp_path_factory.mktemp("typed") / "packed", "w16", seed=1))


def dense(config: ModelConfig) -> ModelConfig:
    """No top-k over entries, where rounding may choose another one of two near equals."""
    return dataclasses.replace(config, index_topk=512)


def sizes(config: ModelConfig) -> EngineSizes:
    return EngineSizes.make(config, max_batch_size=4, max_seq_len=640, max_verify_tokens=16)


def traced(config: ModelConfig, graph: str, dtype: str, ops: V4TreeOps | None = None) -> tuple[ir.Model, GraphContract]:
    """A typed network and its contract."""
    s, lowering = sizes(config), ops or PluginOps(90, dtype=dtype)
    if graph == "target_step":
        spec, model = contract.target_step(config, s), graphs.target_step(config, s, lowering)
    else:
        spec, model = contract.draft_round(config, s, 3, 2), graphs.draft_round(config, s, lowering, 3, 2)
    spec = contract.typed(spec, dtype)
    retype(model, spec, dtype)
    return model, spec


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Weights as inputs."""
    for name, value in list(model.graph.initializers.items()):
        if isinstance(value, Weight):
            del model.graph.initializers[name]
            model.graph.inputs.append(value)
    return ir.to_proto(model)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("bodies", [False, True])
def test_strictly_typed(config: ModelConfig, graph: str, dtype: str, bodies: bool, fp4: bool) -> None:
    """With plugin nodes and with their bodies in the place of them."""
    model, spec = traced(config, graph, dtype, PluginOps(90, dtype=dtype, fp4_experts=fp4))
    if bodies:
        add_bodies(model)
    proto = without_weights(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    for tensors, values in ((spec.inputs, proto.graph.input), (spec.outputs, proto.graph.output)):
        for tensor, value in zip(tensors, values, strict=False):
            assert onnx.helper.tensor_dtype_to_string(value.type.tensor_type.elem_type) == NAMES[tensor.dtype]


NAMES = {
    "float32": "TensorProto.FLOAT", "float16": "TensorProto.FLOAT16", "bfloat16": "TensorProto.BFLOAT16", "int64": "TensorProto.INT64",
}  # fmt: skip


def test_the_check_sees_a_wrong_type(config: ModelConfig) -> None:
    """A Cast that is left out is found."""
    model, _ = traced(config, "target_step", "bfloat16")
    node = next(node for node in model.graph if node.op_type == "Cast" and node.outputs[0].dtype == ir.DataType.FLOAT)
    user, index = next(iter(node.outputs[0].uses()))
    user.replace_input_with(index, node.inputs[0])
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.shape_inference.infer_shapes(without_weights(model), check_type=True, strict_mode=True)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_float32(config: ModelConfig, graph: str, dtype: str) -> None:
    model, _ = traced(config, graph, dtype)
    exact = {"RMSNormalization", "Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Div", "Sin", "Cos", "ReduceSum"}
    products = []
    for node in model.graph:
        kinds = {value.dtype for value in node.inputs if value is not None and value.dtype != ir.DataType.INT64}
        if node.op_type in exact and kinds:
            assert kinds == {ir.DataType.FLOAT}, node.name
        if node.domain == "v4tree":
            wanted = {"A": ACTIVATION[dtype], "F": ir.DataType.FLOAT, "I": ir.DataType.INT64, "P": ir.DataType.INT8}
            assert [value.dtype for value in node.inputs if value is not None] == [
                wanted[letter] for letter in TYPES[node.op_type][0]
            ]
        if node.op_type == "MatMul" and isinstance(node.inputs[1], Weight):
            products.append((node.inputs[1].name or "", node.inputs[1].dtype))
    for name, kind in products:
        assert kind == (ir.DataType.FLOAT if name.endswith(FLOAT32_WEIGHTS) else ACTIVATION[dtype]), name
    assert all(any(name.endswith(ending) for name, _ in products) for ending in FLOAT32_WEIGHTS)
    tables = {name: value.dtype for name, value in model.graph.initializers.items() if name in TOKEN_TABLES}
    assert tables and set(tables.values()) == {ACTIVATION[dtype]}


def test_contract_of_activations(config: ModelConfig) -> None:
    s = sizes(config)
    for graph in (contract.target_step(config, s), contract.commit(config, s), contract.draft_round(config, s, 3, 2)):
        assert contract.typed(graph, "float32") == graph
        typed = contract.typed(graph, "bfloat16")
        for tensor in typed.inputs + typed.outputs:
            held = tensor.name.endswith(("_kv", "_entries", "_scratch", "_raw", "_branch")) or tensor.name == "streams"
            assert (tensor.dtype == "bfloat16") == held, tensor.name


def test_types_list_every_plugin() -> None:
    assert {name: len(inputs) for name, (inputs, _) in NODES.items()} == {n: len(t[0]) for n, t in TYPES.items()}


# ---------------------------------------------------------------- values


class Decided:
    """A checkpoint whose routers always choose the same experts, where rounding may choose another one of two near equals."""

    def __init__(self, checkpoint: Path, config: ModelConfig) -> None:
        self.source = Checkpoint.open(checkpoint, config, None)

    def fp4(self, name: str) -> np.ndarray:
        return self.source.fp4(name)

    def fp4_scales(self, name: str) -> np.ndarray:
        return self.source.fp4_scales(name)

    def get(self, name: str) -> np.ndarray:
        value = self.source.get(name)
        return 10 * np.arange(len(value), dtype=np.float32) if name.endswith("gate.bias") else value


class GatherElements(OpRun):
    """In the place of the evaluator's own, which takes no negative axis."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (np.take_along_axis(data, indices, axis),)


def evaluated(
    checkpoint: Path, config: ModelConfig, graph: str, dtype: str, feeds: Arrays, folder: Path, ops: V4TreeOps | None = None
) -> dict[str, Any]:  # fmt: skip
    """Results of a typed network with the plugins' bodies; ONNX Runtime has no bfloat16 products, the reference evaluator has."""
    model, spec = traced(config, graph, dtype, ops)
    add_bodies(model)
    folder = Path(tempfile.mkdtemp(dir=folder))  # a session maps its weights: no other writes over them
    plan = WeightPlan([model])
    plan.write(folder / WEIGHTS_FILE, Decided(checkpoint, config), lambda name, size: None)
    plan.attach(model)
    ir.save(model, folder / "graph.onnx")
    inputs = as_typed(feeds, spec)
    if dtype == "bfloat16":
        values = ReferenceEvaluator(str(folder / "graph.onnx"), new_ops=[GatherElements]).run(None, inputs)
    else:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(folder / "graph.onnx", options)
        known = {i.name for i in session.get_inputs()}
        values = session.run(None, {name: array for name, array in inputs.items() if name in known})
    return {t.name: np.asarray(value) for t, value in zip(spec.outputs, values, strict=True)}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest magnitude; NaN counts as infinite."""
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / np.abs(want).max()
    return float(error) if np.isfinite(error) else math.inf


def test_bodies_mean_the_same_as_the_portable_network(checkpoint: Path, config: ModelConfig, tmp_path: Path) -> None:
    """The network with plugins, sparse selection included, against the one without, in float32."""
    feeds = random_feeds(config, sizes(config))
    assert sizes(config).sparse
    plugins = evaluated(checkpoint, config, "target_step", "float32", feeds, tmp_path)
    portable = evaluated(checkpoint, config, "target_step", "float32", feeds, tmp_path, TensorRtOps())
    for name, want in portable.items():
        assert relative(plugins[name], want) <= 1e-5, name


def test_experts_in_fp4_mean_the_same_as_decoded(packed: Path, config: ModelConfig, tmp_path: Path) -> None:
    """In float32, which the bodies know and the kernels do not."""
    feeds, ops = random_feeds(config, sizes(config)), PluginOps(90, fp4_experts=True)
    got = evaluated(packed, config, "target_step", "float32", feeds, tmp_path, ops)
    for name, want in evaluated(packed, config, "target_step", "float32", feeds, tmp_path, TensorRtOps()).items():
        assert relative(got[name], want) <= 1e-5, name


@pytest.mark.parametrize("dtype", HALVES)
def test_experts_in_fp4_are_near_float32(packed: Path, config: ModelConfig, dtype: str, tmp_path: Path) -> None:
    """Within the same bound as below: FP4 is exact in both."""
    config = dense(config)
    feeds, ops = random_feeds(config, sizes(config)), PluginOps(90, dtype=dtype, fp4_experts=True)
    got = evaluated(packed, config, "target_step", dtype, feeds, tmp_path, ops)
    for name, want in evaluated(packed, config, "target_step", "float32", feeds, tmp_path).items():
        limit = 1.5 * UNIT_ROUNDOFF[dtype] * math.sqrt(10 * config.num_layers)
        assert UNIT_ROUNDOFF[dtype] / 8 <= relative(got[name], want) <= limit, name


@pytest.mark.parametrize("dtype", HALVES)
def test_target_step_is_near_float32(checkpoint: Path, config: ModelConfig, dtype: str, tmp_path: Path) -> None:
    """A layer rounds about ten times in a row (inputs, queries, keys, outputs and streams of two sites). Roundings add up as a
    random walk of steps of at most u / 2, so their sum stays within u * sqrt(10 L) but for one value in twenty, and 1.5 times
    that is allowed for the worst of all values. A rounding that went missing would show too: less than u / 8 is no 16-bit result.
    """
    config = dense(config)
    feeds = random_feeds(config, sizes(config))
    want = evaluated(checkpoint, config, "target_step", "float32", feeds, tmp_path)
    got = evaluated(checkpoint, config, "target_step", dtype, feeds, tmp_path)
    unit = UNIT_ROUNDOFF[dtype]
    for name in want:
        assert unit / 8 <= relative(got[name], want[name]) <= 1.5 * unit * math.sqrt(10 * config.num_layers), name


@pytest.mark.parametrize("dtype", HALVES)
def test_draft_round_is_near_float32(checkpoint: Path, config: ModelConfig, dtype: str, tmp_path: Path) -> None:
    """The first level's scores, of one layer and the head, and the drafter's rows."""
    feeds = random_draft_feeds(config, sizes(config), 3)
    want = evaluated(checkpoint, config, "draft_s3_k2", "float32", feeds, tmp_path)
    got = evaluated(checkpoint, config, "draft_s3_k2", dtype, feeds, tmp_path)
    limit = 1.5 * UNIT_ROUNDOFF[dtype] * math.sqrt(10)
    assert relative(got["mtp_scratch"], want["mtp_scratch"]) <= limit
    assert (got["draft_tokens"][:, :2] == want["draft_tokens"][:, :2]).all()
    assert relative(got["draft_scores"][:, :2], want["draft_scores"][:, :2]) <= limit
