"""The tensorrt-rtx target: refusals, profiles, the lowering's values on ONNX Runtime, and real ahead-of-time builds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.feeds import random_feeds
from trtllm_v4tree import contract
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler import rtx
from trtllm_v4tree.compiler.plan_builder import CompileError, bounds
from trtllm_v4tree.compiler.plugin_bodies import add_bodies
from trtllm_v4tree.compiler.plugin_ops import PluginOps
from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.compiler.typed import retype
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import WEIGHTS_FILE, Manifest
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import V4TreeOps
from trtllm_v4tree.sizes import EngineSizes

NANO = Path(__file__).resolve().parents[2] / "models" / "v4-nano"
BOTH = ("SM89", "SM120")


@pytest.fixture(scope="module")
def nano() -> ModelConfig:
    return ModelConfig.from_pretrained(NANO)


def sizes(config: ModelConfig, max_seq_len: int = 1024, **options: int) -> EngineSizes:
    return EngineSizes.make(config, max_batch_size=4, max_seq_len=max_seq_len, max_verify_tokens=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capabilities", "dtype"), [(("SM90",), "float32"), (("SM75",), "float32"), ((), "float32"), (("SM89",), "float16")]
)
def test_refuses_in_one_sentence(capabilities: tuple[str, ...], dtype: str) -> None:
    with pytest.raises(ConfigError) as error:
        rtx.check_options(capabilities, dtype)
    assert str(error.value).count(".") == 1 and "\n" not in str(error.value)


def test_profiles_are_ordered_and_reach_the_sizes(nano: ModelConfig) -> None:
    s = sizes(nano)
    spec = contract.target_step(nano, s)
    found = rtx.graph_profiles("target_step", s)
    assert [p["N"][2] for p in found] == [1, 16, 128]
    for ranges in found:
        for tensor in spec.inputs:
            least, typical, most = bounds(tensor.shape, ranges)
            assert all(a <= b <= c for a, b, c in zip(least, typical, most, strict=True)), tensor.name
    assert bounds((4, "E+M"), found[1]) == [(4, 0), (4, 260), (4, 272)]


def test_lowering_means_the_same_as_the_reference(nano: ModelConfig, tmp_path: Path) -> None:
    """The graph for TensorRT and the reference bodies give equal outputs on ONNX Runtime, indexer included."""
    config = dataclasses.replace(nano, index_topk=32)
    s, source = sizes(config), Checkpoint.open(NANO, nano, None)
    assert s.sparse
    feeds, results = random_feeds(config, s), []
    for ops in (V4TreeOps(), TensorRtOps()):
        model = graphs.target_step(config, s, ops)
        plan = WeightPlan([model])
        plan.write(tmp_path / WEIGHTS_FILE, source, lambda name, size: None)
        plan.attach(model)
        ir.save(model, tmp_path / "graph.onnx")
        session = ort.InferenceSession(tmp_path / "graph.onnx")
        names = {i.name for i in session.get_inputs()}
        results.append(session.run(None, {k: v for k, v in feeds.items() if k in names}))
    for spec, want, got in zip(contract.target_step(config, s).outputs, *results, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max() + 1e-6, spec.name


def test_failure_names_node_and_graph(nano: ModelConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    s = sizes(nano)
    model = graphs.draft_round(nano, s, V4TreeOps(), 2, 3)
    rtx.weights_as_inputs(model)
    ir.save(model, tmp_path / "bad.onnx")
    spec = contract.draft_round(nano, s, 2, 3)
    with pytest.raises(CompileError, match="graph draft_s2_k3"):
        rtx.RtxBuilder(("SM89",)).compile(tmp_path / "bad.onnx", spec, rtx.graph_profiles(spec.name, s))


@pytest.mark.compile
def test_whole_shipped_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`v4tree build` for SM89 and SM120 in under five minutes of one core; plans, manifest and tokenizer are all that is left.

    Time of the processor, so that neighbours do not count.
    """
    pytest.importorskip("tensorrt_rtx")
    engine, started = tmp_path / "engine", sum(os.times()[:4])
    command = ["build", "--checkpoint_dir", str(NANO), "--output_dir", str(engine), "--target", "tensorrt-rtx"]
    assert status_of(command) == 0
    assert sum(os.times()[:4]) - started < 300
    assert "SM89 SM120" in capfd.readouterr().err
    manifest = Manifest.read(engine)
    manifest.verify(engine)
    stems = ["target_step", "commit", "draft_catchup", "draft_s4_k3", "draft_s5_k1"]
    names = {f"{stem}.plan" for stem in stems} | {"tokenizer.json"}
    assert set(manifest.files) == names
    assert {p.name for p in engine.iterdir()} == names | {"engine.json"}
    assert manifest.compute_capabilities == BOTH


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_typed_networks_hold_a_real_compiler(nano: ModelConfig, tmp_path: Path, dtype: str) -> None:
    """The networks for TensorRT with their plugins' bodies, strongly typed: the drafter's layer builds, the whole target step parses."""
    trt = pytest.importorskip("tensorrt_rtx")
    config = dataclasses.replace(nano, index_topk=32)
    s, ops, builder = sizes(config), PluginOps(90, dtype=dtype), rtx.RtxBuilder(("SM89",))
    for spec, model in (
        (contract.draft_round(config, s, 1, 2), graphs.draft_round(config, s, ops, 1, 2)),
        (contract.target_step(config, s), graphs.target_step(config, s, ops)),
    ):
        spec = contract.typed(spec, dtype)
        retype(model, spec, dtype)
        add_bodies(model, TensorRtOps())
        rtx.weights_as_inputs(model)
        path = tmp_path / f"{spec.name}.onnx"
        ir.save(model, path)
        if spec.name == "target_step":
            network = trt.Builder(builder.logger).create_network(builder.network_flags())
            builder._parse(network, path, spec.name)
            kinds = {network.get_output(i).name: network.get_output(i).dtype for i in range(network.num_outputs)}
            assert kinds["logits"] == trt.float32
            assert kinds["window_scratch"] == {"float16": trt.float16, "bfloat16": trt.bfloat16}[dtype]
        else:
            assert builder.compile(path, spec, rtx.graph_profiles(spec.name, s)).data


@pytest.mark.compile
@pytest.mark.parametrize("capability", rtx.CAPABILITIES)
def test_every_capability_compiles(nano: ModelConfig, tmp_path: Path, capability: str) -> None:
    """The drafter's layer, whose operators are those of the trunk."""
    pytest.importorskip("tensorrt_rtx")
    s = sizes(nano)
    model = graphs.draft_round(nano, s, TensorRtOps(), 1, 2)
    rtx.weights_as_inputs(model)
    ir.save(model, tmp_path / "draft.onnx")
    spec = contract.draft_round(nano, s, 1, 2)
    assert rtx.RtxBuilder((capability,)).compile(tmp_path / "draft.onnx", spec, rtx.graph_profiles(spec.name, s)).data


@pytest.mark.compile
@pytest.mark.parametrize(("ratio", "hashed"), [(0, 1), (4, 0), (128, 0)])
def test_full_width_flash_layer(nano: ModelConfig, tmp_path: Path, ratio: int, hashed: int) -> None:
    """One layer of V4-Flash of each kind with all 256 experts; weights are inputs, so no 25 GB are needed."""
    pytest.importorskip("tensorrt_rtx")
    config = dataclasses.replace(
        nano, vocab_size=129280, hidden_size=4096, num_layers=1, num_heads=64, head_dim=512, rope_head_dim=64, q_lora_rank=1024,
        o_groups=8, o_lora_rank=1024, compress_ratios=(ratio,), index_n_heads=64, index_head_dim=128, index_topk=512,
        num_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048, num_hash_layers=hashed,
    )  # fmt: skip
    s = sizes(config, max_seq_len=8192, has_mtp=False)
    model = graphs.target_step(config, s, TensorRtOps())
    rtx.weights_as_inputs(model)
    ir.save(model, tmp_path / "layer.onnx")
    spec = contract.target_step(config, s)
    plan = rtx.RtxBuilder(BOTH).compile(tmp_path / "layer.onnx", spec, rtx.graph_profiles(spec.name, s))
    assert plan.data and plan.layers > 500


def test_packed_experts_stay_bytes(tmp_path: Path) -> None:
    """The importer that TensorRT shares keeps int8 weights as they are, whatever reads them."""
    trt = pytest.importorskip("tensorrt_rtx")
    nodes = [onnx.helper.make_node("Concat", ["weight", "x"], ["y"], axis=0)]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT8, [n, 4]) for name, n in (("x", 3), ("y", 5)))
    weight = onnx.numpy_helper.from_array(np.full((2, 4), -3, np.int8), "weight")
    graph = onnx.helper.make_graph(nodes, "bytes", [x], [y], [weight])
    path, builder = tmp_path / "bytes.onnx", rtx.RtxBuilder(("SM89",))
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), path)
    network = trt.Builder(builder.logger).create_network(builder.network_flags())
    builder._parse(network, path, "bytes")
    assert [network.get_layer(i).get_output(0).dtype for i in range(network.num_layers)] == [trt.int8] * 2
