"""TensorRT engines built here and run here, beside the CPU engine of the same checkpoint: text, every output, states, graphs, command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.bench.lockstep import Comparison, Lockstep, Place
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler.build import build
from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.executors import make_executor
from trtllm_v4tree.runtime.tensorrt_executor import TensorRtExecutor

from ..conftest import OPTIONS
from ..harness import Built
from ..runtime.test_tensorrt_executor import MODES, poison, texts

pytestmark = [pytest.mark.tensorrt, pytest.mark.slow]
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
FLOAT32_RTOL = 1e-3
"""Products of three TF32 parts and other orders of sums, through all layers."""
Make = Callable[[str, str], tuple[Built, Path]]


@pytest.fixture(scope="session")
def engines(capability: str, tiny: Callable[[str], Built], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The CPU engine and a TensorRT engine of a tiny checkpoint in a dtype, of the same limits."""
    cache_file = tmp_path_factory.mktemp("timing") / "cache"

    @cache
    def make(name: str, dtype: str) -> tuple[Built, Path]:
        built, folder = tiny(name), tmp_path_factory.mktemp(f"{name}_{dtype}") / "engine"
        options = dataclasses.replace(
            OPTIONS, target="tensorrt", dtype=dtype, draft_dtype="auto", timing_cache=cache_file, cpu_kernels="auto"
        )
        build(built.checkpoint, folder, options)
        return built, folder

    return make


def on_gpu(folder: Path) -> TensorRtExecutor:
    executor = make_executor(folder, Manifest.read(folder))
    assert isinstance(executor, TensorRtExecutor)
    poison(executor)
    return executor


def empty_pair(built: Built, folder: Path) -> tuple[OnnxRuntimeExecutor, TensorRtExecutor]:
    """Both executors with the same empty state."""
    cpu, gpu = OnnxRuntimeExecutor(built.engine, Manifest.read(built.engine), threads=1), on_gpu(folder)
    for name in cpu.states:
        cpu.load_state(name, np.zeros_like(cpu.state(name)))
        gpu.load_state(name, np.zeros_like(cpu.state(name)))
    for slot in range(cpu.sizes.num_slots):
        cpu.reset(slot)
        gpu.reset(slot)
    return cpu, gpu


@pytest.mark.parametrize("name", ["w16", "w128"])
def test_same_text_as_the_cpu_engine_in_every_mode(name: str, engines: Make) -> None:
    """float32, greedy and sampled, pools NaN where nobody owns them."""
    built, folder = engines(name, "float32")
    want, gpu = texts(built.driver.executor, "none"), on_gpu(folder)
    for mode in MODES:
        poison(gpu)
        assert texts(gpu, mode) == want, mode


@pytest.mark.parametrize("gpu_decodes", [True, False])
def test_every_output_and_every_committed_row(gpu_decodes: bool, engines: Make) -> None:
    """float32, layer by layer, each executor also with the other's scratch at the commit."""
    cpu, gpu = empty_pair(*engines("w16", "float32"))
    comparison = Comparison(cpu.config)
    texts(Lockstep(*((gpu, cpu) if gpu_decodes else (cpu, gpu)), comparison), "s3_k2_d6")
    far = {place: found.max_rel for place, found in comparison.found.items() if not found.agrees(FLOAT32_RTOL)}
    assert not far


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near(dtype: str, engines: Make) -> None:
    """The median row of every output: a rounding may choose other experts or entries for some nodes."""
    cpu, gpu = empty_pair(*engines("w16", dtype))
    seen: dict[str, list[float]] = {}

    def watch(place: Place, want: np.ndarray, got: np.ndarray) -> None:
        if want.size and want.dtype == np.float32 and place.graph in ("target_step", "commit"):
            rows = np.abs(got - want).reshape(-1, want.shape[-1]).max(axis=1) / np.abs(want[np.isfinite(want)]).max()
            seen.setdefault(f"{place.graph} {place.output}", []).extend(rows.tolist())

    texts(Lockstep(cpu, gpu, Comparison(cpu.config, watch)), "s3_k2_d6")
    limit = 1.5 * UNIT_ROUNDOFF[dtype] * np.sqrt(10 * cpu.config.num_layers)
    assert len(seen) > 10
    assert {name: np.median(errors) for name, errors in seen.items() if not np.median(errors) <= limit} == {}


def test_buffers_and_graphs_stay(engines: Make) -> None:
    """A second run over the same buckets allocates nothing and captures nothing."""
    _, folder = engines("w16", "float32")
    gpu = on_gpu(folder)
    texts(gpu, "s3_k2_d6")
    device: Any = gpu.device
    held, ready = len(device._held), [len(stage._ready) for stage in (gpu._target, *gpu._drafts.values())]
    texts(gpu, "s3_k2_d6")
    assert len(device._held) == held
    assert [len(stage._ready) for stage in (gpu._target, *gpu._drafts.values())] == ready


def test_weights_may_be_streamed(engines: Make, tmp_path: Path) -> None:
    built, folder = engines("w16", "float32")
    options = dataclasses.replace(
        OPTIONS, target="tensorrt", draft_dtype="auto", cpu_kernels="auto", weight_streaming=True
    )
    build(built.checkpoint, tmp_path / "engine", options)
    assert texts(on_gpu(tmp_path / "engine"), "none") == texts(on_gpu(folder), "none")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shipped_model(
    dtype: str, capability: str, nano_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Build, generate in two modes and compare, by the command line; in float32 the text is the CPU engine's."""
    limits = ("--max_batch_size", "4", "--max_seq_len", "1024", "--checkpoint_dir", str(nano_dir))
    for target, folder in (("onnxruntime", "cpu"), ("tensorrt", "gpu")):
        kind = dtype if target == "tensorrt" else "float32"
        assert (
            status_of(["build", *limits, "--target", target, "--dtype", kind, "--output_dir", str(tmp_path / folder)])
            == 0
        )
    prompt, params = "Once upon a time", SamplingParams(max_tokens=48, temperature=0.0)
    plain, tree = (LLM(tmp_path / "gpu", mode).generate(prompt, params)[0].outputs[0] for mode in ("none", "s4_k3_d6"))
    assert plain.token_ids == tree.token_ids
    if dtype == "float32":
        assert LLM(tmp_path / "cpu").generate(prompt, params)[0].outputs[0].token_ids == plain.token_ids
        command = ["compare", "--engine_dir", str(tmp_path / "cpu"), "--other_engine_dir", str(tmp_path / "gpu")]
        assert status_of([*command, "--prompt", prompt, "--rtol", str(FLOAT32_RTOL)]) == 0
    capfd.readouterr()
