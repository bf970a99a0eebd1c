"""`v4tree build --target tensorrt` up to the compiler, which stand-ins replace here: refusals, files, manifest, whole or not at all;
and what the builder asks of TensorRT, on a module that takes it down.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler import rtx, rtx_jobs, tensorrt_build, tensorrt_plan
from trtllm_v4tree.compiler.build import BuildOptions
from trtllm_v4tree.compiler.plan_builder import CompileError, describe
from trtllm_v4tree.compiler.tensorrt_plan import PlanOptions, TensorRtBuilder
from trtllm_v4tree.engine_dir import COMMIT_KERNELS, MANIFEST, KernelCode, Manifest, kernels_to_json, read_kernels
from trtllm_v4tree.errors import ConfigError

from .oracle.tiny import CONFIGS, pack_experts, write_tiny
from .test_cli import Ran, contents, edit_manifest, refused

Build = Callable[..., Ran]
SMALL = (
    "--target",
    "tensorrt",
    "--max_seq_len",
    "300",
    "--max_batch_size",
    "2",
    "--draft_shapes",
    "s1_k1",
    "--no_latency_table",
)
KERNELS = {"scatter_rows": KernelCode("scatter", 128, 0, b"\x7fELF")}


def compile_here(workers: rtx_jobs.Workers, job: Any) -> rtx_jobs.Done:
    """Takes the place of a compiling process: the plan is the graph's inputs and their types."""
    model = onnx.load(job.path("onnx"))
    assert [i.name for i in model.graph.input] == [t.name for t in job.spec.inputs]
    assert any(node.domain == "v4tree" for node in model.graph.node) or "catchup" in job.stem
    assert not model.functions
    kinds = (f"{i.name}:{onnx.TensorProto.DataType.Name(i.type.tensor_type.elem_type)}" for i in model.graph.input)
    job.path("plan").write_text("\n".join([*job.capabilities, *kinds]))
    return rtx_jobs.Done(job.stem, len(model.graph.node), 0.0)


def stand_in(monkeypatch: pytest.MonkeyPatch, capability: str = "SM90") -> None:
    monkeypatch.setattr(tensorrt_plan, "load_tensorrt", lambda: SimpleNamespace(__version__="11.4"))
    monkeypatch.setattr(tensorrt_plan, "_gpu_capability", lambda: capability)
    monkeypatch.setattr(tensorrt_build, "compile_kernels", lambda *_: KERNELS)
    monkeypatch.setattr(rtx_jobs.Workers, "compile", compile_here)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "checkpoint", "w16", seed=1)


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    capfd.readouterr()
    status = status_of([str(a) for a in arguments])
    return Ran(status, *capfd.readouterr())


@pytest.fixture
def bare(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Build:
    """The command on the tiny checkpoint, nothing replaced."""
    command = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", *SMALL)
    return lambda *options: run(capfd, *command, *options)


@pytest.fixture
def build(bare: Build, monkeypatch: pytest.MonkeyPatch) -> Build:
    stand_in(monkeypatch)
    return bare


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (("--compute_capability", "75"), ("'75'", "80, 90, 100, 120")),
        (("--compute_capability", "hopper"), ("'hopper'", "80, 90, 100, 120")),
        (("--compute_capability", "80,90"), ("one GPU", "not for 2")),
        (("--compute_capability", ","), ("one GPU", "not for 0")),
        (("--dtype", "float8"), ("'float8'", "float32, float16, bfloat16")),
        (("--draft_dtype", "int8"), ("int8", "--dtype")),
        (("--max_verify_tokens", "65"), ("max_verify_tokens=65", "64")),
        (("--compute_capability", "120"), ("120 was asked for", "the GPU here is 90")),
        (("--timing_cache", "/nowhere/at/all"), ("timing_cache", "directory that exists")),
        (("--target", "onnxruntime", "--weight_streaming"), ("weight_streaming", "--target tensorrt")),
        (("--cpu_kernels", "native"), ("cpu_kernels", "--target onnxruntime")),
        (("--target", "tensorrt-rtx", "--timing_cache", "x"), ("timing_cache", "--target tensorrt")),
        (("--target", "onnxruntime", "--compute_capability", "90"), ("compute_capability", "leave it out")),
    ],
)
def test_bad_option(options: tuple[str, ...], fragments: tuple[str, ...], build: Build, tmp_path: Path) -> None:
    refused(build(*options), *fragments)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_without_tensorrt(bare: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with the line that installs it; the other targets never ask for it."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    refused(bare(), "TensorRT", "not all installed", "pip install 'trtllm_v4tree[tensorrt]'")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert bare("--target", "onnxruntime").status == 0


def test_type_stubs_are_no_tensorrt(bare: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    refused(bare(), "not all installed", "no Builder")


def test_without_a_gpu(bare: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_plan, "load_tensorrt", lambda: SimpleNamespace(__version__="11.4"))

    class Device:
        def __init__(self) -> None:
            raise RuntimeError("CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")

    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=Device))  # type: ignore[arg-type]
    refused(bare(), "builds on the GPU it is for", "CUDA_ERROR_NO_DEVICE", "--target tensorrt-rtx")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_gpu_without_kernels(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_plan, "_gpu_capability", lambda: "SM75")
    refused(build(), "'75'", "80, 90, 100, 120")


@pytest.mark.parametrize("width", [24, 16])
def test_a_model_that_the_kernels_do_not_take(
    width: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    monkeypatch.setitem(CONFIGS, "odd", CONFIGS["w16"] | {"head_dim": width})
    checkpoint = write_tiny(tmp_path / "odd", "odd", seed=1)
    ran = run(capfd, "build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", *SMALL)
    refused(ran, f"head_dim={width}", "power of two from 32", "--target onnxruntime")


@pytest.mark.parametrize("error", [CompileError("TensorRT cannot build graph draft_s1_k1: why."), KeyboardInterrupt()])
def test_a_failing_compiler_changes_nothing(
    error: BaseException, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tmp_path)

    def failing(workers: rtx_jobs.Workers, job: Any) -> rtx_jobs.Done:
        if job.stem == "draft_s1_k1":
            raise error
        return compile_here(workers, job)

    monkeypatch.setattr(rtx_jobs.Workers, "compile", failing)
    refused(build(), status=1)
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_engine_directory(dtype: str, build: Build, tmp_path: Path) -> None:
    ran = build("--dtype", dtype)
    assert ran.status == 0 and "tensorrt SM90" in ran.err
    engine = tmp_path / "engine"
    stems = ["target_step", "draft_catchup", "draft_s1_k1"]
    assert sorted(p.name for p in engine.iterdir()) == sorted([MANIFEST, COMMIT_KERNELS, *(f"{s}.plan" for s in stems)])
    manifest = Manifest.read(engine)
    manifest.verify(engine)
    assert (manifest.target, manifest.dtype, manifest.compute_capabilities) == ("tensorrt", dtype, ("SM90",))
    assert manifest.built_with["tensorrt"] == "11.4" and read_kernels(engine) == KERNELS
    bound = dict(line.split(":") for line in (engine / "target_step.plan").read_text().splitlines()[1:])
    activation = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}[dtype]
    assert (bound["window_kv"], bound["csa_state"], bound["node_mask"]) == (activation, "FLOAT", "FLOAT")
    graphs = {graph["name"]: graph for graph in json.loads((engine / MANIFEST).read_text())["contract"]}
    assert {t["name"]: t["dtype"] for t in graphs["target_step"]["inputs"]}["window_kv"] == dtype


def test_capability_as_one_writes_it(build: Build, tmp_path: Path) -> None:
    assert build("--compute_capability", "9.0").status == 0
    assert Manifest.read(tmp_path / "engine").compute_capabilities == ("SM90",)


def test_kernels_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / COMMIT_KERNELS).write_text(kernels_to_json(KERNELS))
    assert read_kernels(tmp_path) == KERNELS


def test_generate_says_what_to_install(
    build: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build().status == 0
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    ran = run(capfd, "generate", "--engine_dir", tmp_path / "engine", "--prompt_token_ids", "1,2")
    refused(ran, "target tensorrt (SM90)", "pip install tensorrt-cu13")


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda d: d.update(format_version=99), ("format 99", "update trtllm_v4tree")),
        (lambda d: d.update(dtype="bfloat16"), ("damaged", "contract")),
        (lambda d: d["files"].pop(COMMIT_KERNELS), ("damaged", COMMIT_KERNELS)),
        (lambda d: d.update(target="tensorrt-rtx"), ("damaged", "commit.plan")),
        (lambda d: d.update(compute_capabilities=[]), ("damaged", "compute_capabilities")),
    ],
)
def test_bad_engine(
    change: Callable[[dict[str, Any]], object], fragments: tuple[str, ...], build: Build, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert build().status == 0
    edit_manifest(change)(tmp_path / "engine")
    refused(run(capfd, "inspect", "--engine_dir", tmp_path / "engine", "--json"), *fragments)


# ---------------------------------------------------------------- what the builder asks of TensorRT


class Recorder:
    """A module `tensorrt` that takes down what it is asked; `fail` makes the parser or the builder refuse."""

    def __init__(self, fail: str = "") -> None:
        self.__name__ = f"recorder_{id(self)}"
        self.asked: list[tuple[str, Any]] = []
        self.fail, recorder = fail, self
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1, PREFER_AOT_PYTHON_PLUGINS=3)
        self.BuilderFlag = SimpleNamespace(TF32="TF32", WEIGHT_STREAMING="WEIGHT_STREAMING")

        class ILogger:
            Severity = SimpleNamespace(ERROR=1)

        class Profile:
            def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
                recorder.asked.append((f"shape {name}", shapes))

        class Config:
            def clear_flag(self, flag: str) -> None:
                recorder.asked.append(("clear", flag))

            def set_flag(self, flag: str) -> None:
                recorder.asked.append(("set", flag))

            def create_timing_cache(self, known: bytes) -> bytes:
                recorder.asked.append(("cache", known))
                return known

            def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> None: ...

            def get_timing_cache(self) -> Any:
                return SimpleNamespace(serialize=lambda: b"timed")

            def add_optimization_profile(self, profile: Profile) -> None:
                recorder.asked.append(("profile", None))

        class Builder:
            def __init__(self, logger: Any) -> None:
                self.logger = logger

            def create_network(self, flags: int) -> Any:
                recorder.asked.append(("flags", flags))
                return SimpleNamespace(num_layers=7)

            def create_builder_config(self) -> Config:
                return Config()

            def create_optimization_profile(self) -> Profile:
                return Profile()

            def build_serialized_network(self, network: Any, config: Config) -> bytes | None:
                if recorder.fail == "build":
                    self.logger.log(1, "4: [network] Error Code 4: in/attention: no tactic\nmore")
                return None if recorder.fail == "build" else b"plan"

        class OnnxParser:
            def __init__(self, network: Any, logger: Any) -> None: ...

            def parse_from_file(self, path: str) -> bool:
                return recorder.fail != "parse"

            def get_error(self, index: int) -> Any:
                return SimpleNamespace(
                    node_name=lambda: "in/attention",
                    node_operator=lambda: "tree_attention",
                    desc=lambda: "x\nno plugin",
                )

        self.ILogger, self.Builder, self.OnnxParser = ILogger, Builder, OnnxParser


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A file with one node whose operands have shapes."""
    q = onnx.helper.make_tensor_value_info("q", onnx.TensorProto.BFLOAT16, ["B", "N", 64, 512])
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.BFLOAT16, None)
    node = onnx.helper.make_node("tree_attention", ["q"], ["out"], name="in/attention", domain="v4tree")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [q], [out])), tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


def builder(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, cache: Path, streaming: bool = False
) -> TensorRtBuilder:
    monkeypatch.setattr(tensorrt_plan, "load_tensorrt", lambda: recorder)
    return TensorRtBuilder(PlanOptions(cache, streaming))


def spec_and_ranges() -> tuple[Any, list[dict[str, rtx.Range]]]:
    from trtllm_v4tree.contract import GraphContract, TensorSpec

    spec = GraphContract("g", (TensorSpec("q", "bfloat16", ("B", "N", 64, 512), "table", ""),), ())
    return spec, [{"B": (1, 2, 4), "N": (1, 1, 1)}, {"B": (1, 2, 4), "N": (1, 8, 16)}]


def test_flags_profiles_and_cache(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, cache = Recorder(), tmp_path / "cache"
    cache.write_bytes(b"old")
    plan = builder(recorder, monkeypatch, cache, streaming=True).compile(graph, *spec_and_ranges())
    assert (plan.data, plan.layers) == (b"plan", 7)
    asked = recorder.asked
    assert ("flags", 1 << 1 | 1 << 3) in asked and ("clear", "TF32") in asked and ("set", "WEIGHT_STREAMING") in asked
    assert ("cache", b"old") in asked and cache.read_bytes() == b"timed"
    assert [shapes for name, shapes in asked if name == "shape q"] == [
        ((1, 1, 64, 512), (2, 1, 64, 512), (4, 1, 64, 512)),
        ((1, 1, 64, 512), (2, 8, 64, 512), (4, 16, 64, 512)),
    ]
    assert sum(name == "profile" for name, _ in asked) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "g.onnx"]


@pytest.mark.parametrize(("fail", "words"), [("parse", "cannot read node"), ("build", "cannot build graph g")])
def test_a_refusal_names_node_and_shape(
    fail: str, words: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError) as error:
        builder(Recorder(fail), monkeypatch, tmp_path / "cache").compile(graph, *spec_and_ranges())
    assert words in str(error.value)
    assert "in/attention (tree_attention of q [B, N, 64, 512] bfloat16)" in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_no_node_of_that_name(graph: Path) -> None:
    assert describe(graph, "another") == "" and describe(graph, "") == ""


def test_options_of_the_target() -> None:
    assert BuildOptions(target="tensorrt", dtype="bfloat16", compute_capabilities=("SM90",)).capabilities == ("SM90",)
    assert BuildOptions(target="tensorrt").capabilities == ()
    with pytest.raises(ConfigError, match="choose one of"):
        tensorrt_plan.check_options(None, "float8", "auto", 8)


# ---------------------------------------------------------------- experts in FP4


@pytest.mark.parametrize(
    ("dtype", "capability", "kept"),
    [("bfloat16", "SM80", True), ("float16", "SM90", True), ("float16", "SM80", False), ("float32", "SM100", False)],
)
def test_experts_in_fp4_stay_so_where_the_kernels_take_them(
    dtype: str, capability: str, kept: bool, checkpoint: Path, bare: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, capability)
    seen = watch_experts(monkeypatch)
    pack_experts(checkpoint)
    assert bare("--dtype", dtype).status == 0
    assert seen["target_step"] == seen["draft_s1_k1"] == kept


def watch_experts(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the experts of each compiled graph that has any are in FP4, nodes and weights alike."""
    seen: dict[str, bool] = {}

    def look(workers: rtx_jobs.Workers, job: Any) -> rtx_jobs.Done:
        graph = onnx.load(job.path("onnx")).graph
        nodes = {node.op_type for node in graph.node if node.op_type.startswith("moe_fc")}
        kinds = {w.data_type for w in graph.initializer if w.name.endswith((".fc1", ".fc2", ".fc1_scale"))}
        if nodes:
            seen[job.spec.name] = kinds == {onnx.TensorProto.INT8}
            suffix = "_fp4" if seen[job.spec.name] else ""
            assert nodes == {f"moe_fc1{suffix}", f"moe_fc2{suffix}"} and len(kinds) == 1
        return compile_here(workers, job)

    monkeypatch.setattr(rtx_jobs.Workers, "compile", look)
    return seen


@pytest.mark.parametrize("drafter", [False, True])
def test_trunk_and_drafter_stay_in_fp4_each_for_itself(
    drafter: bool, checkpoint: Path, bare: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file of MTP weights in FP4 beside a float32 trunk, or the other way round."""
    stand_in(monkeypatch)
    seen = watch_experts(monkeypatch)
    packed = pack_experts(write_tiny(tmp_path / "packed", "w16", seed=1))
    trunk, mtp = (checkpoint, packed) if drafter else (packed, checkpoint)
    tensors = load_file(mtp / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name.startswith("mtp.")}, tmp_path / "mtp.safetensors")
    if not drafter:
        shutil.copy(trunk / "model.safetensors", checkpoint)
    assert bare("--dtype", "bfloat16", "--mtp_weights", tmp_path / "mtp.safetensors").status == 0
    assert seen["target_step"] != drafter and seen["draft_s1_k1"] == drafter


@pytest.mark.parametrize(
    ("dtype", "byte", "zeros", "held"),
    [
        ("bfloat16", 2, False, True), ("bfloat16", 252, False, True), ("bfloat16", 1, False, False),
        ("bfloat16", 0, True, True), ("bfloat16", 253, False, False), ("bfloat16", 255, True, False),
        ("float16", 104, False, True), ("float16", 140, False, True), ("float16", 103, False, False),
        ("float16", 0, True, True), ("float16", 141, False, False), ("float32", 0, False, True),
    ],
)  # fmt: skip
def test_scales_that_the_kernels_cannot_hold_are_refused(
    dtype: str, byte: int, zeros: bool, held: bool, checkpoint: Path, build: Build
) -> None:
    """One scale of an expert; too small a one does no harm to zeros. In float32 experts are widened."""
    path = pack_experts(checkpoint) / "model.safetensors"
    tensors, name = load_file(path), "layers.0.ffn.experts.1.w3"
    tensors[f"{name}.scale"].view(torch.uint8)[2, 1] = byte
    if zeros:
        tensors[f"{name}.weight"][2, 16:32] = torch.tensor([0, -128, 8, -120], dtype=torch.int8).repeat(4)
    save_file(tensors, path)
    ran = build("--dtype", dtype)
    if held:
        assert ran.status == 0
    else:
        refused(ran, f"{name}.weight", f"bytes {byte} to {byte}", "--dtype float32", "bfloat16")
