"""The GPU executor on a device made of NumPy, beside the CPU's: same text in every mode, honest padding, fixed buffers, counted copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_v4tree.bench.lockstep import Comparison, Lockstep, Place
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler import tensorrt_build, tensorrt_commit
from trtllm_v4tree.compiler.plugin_bodies import add_bodies
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.engine_dir import COMMIT_KERNELS, WEIGHTS_FILE, KernelCode, Manifest, fold_kinds, kernels_to_json
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime import buckets
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.executor import Executor, OnnxRuntimeExecutor
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.tensorrt_executor import TensorRtExecutor

from ..fake_device import FakeDevice
from ..harness import Built, zero_rows

MODES = ("none", "s4_k1_d5", "s3_k2_d6")
SHAPES = ((3, 2), (4, 1))


def kernels(manifest: Manifest) -> dict[str, KernelCode]:
    """What the fake device takes for machine code: entry names and constants."""
    dtype, block, width = manifest.dtype, tensorrt_commit.SCATTER_BLOCK, tensorrt_commit.FOLD_WIDTH
    found = {"scatter_rows": KernelCode("scatter_rows", 1, 0, json.dumps({"BLOCK": block, "dtype": dtype}).encode())}
    for kind in fold_kinds(manifest.config, manifest.sizes):
        constants = {"DIM": kind.dim, "STATES": kind.states, "WIDTH": min(width, kind.dim), "dtype": dtype}
        found[f"fold_{kind.name}"] = KernelCode("fold", 1, 0, json.dumps(constants).encode())
    return found


def write_engine(built: Built, folder: Path, dtype: str) -> Manifest:
    """An engine for the fake device: the networks that TensorRT would compile, with the plugins' bodies."""
    folder.mkdir()
    config, sizes = built.driver.config, built.driver.sizes
    manifest = Manifest("tensorrt", dtype, "float32", config, sizes, SHAPES, {}, {}, ("SM90",), "")
    traced = list(tensorrt_build.trace_all(config, sizes, SHAPES, dtype, "SM90"))
    for _, model in traced:
        add_bodies(model)
    plan = WeightPlan(model for _, model in traced)
    plan.write(folder / WEIGHTS_FILE, Checkpoint.open(built.checkpoint, config, None), lambda name, size: None)
    files = {}
    for spec, model in traced:
        plan.attach(model)
        ir.save(model, folder / f"{spec.name}.onnx")
        files[f"{spec.name}.plan"] = ""
    (folder / COMMIT_KERNELS).write_text(kernels_to_json(kernels(manifest)))
    return Manifest("tensorrt", dtype, "float32", config, sizes, SHAPES, files, {}, ("SM90",), "")


@pytest.fixture(scope="module")
def engine_dir(
    tiny: Callable[[str], Built], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Built, Path, Manifest]]:
    @cache
    def make(name: str, dtype: str) -> tuple[Built, Path, Manifest]:
        built, folder = tiny(name), tmp_path_factory.mktemp(name) / dtype
        return built, folder, write_engine(built, folder, dtype)

    return make


def poison(executor: TensorRtExecutor) -> None:
    """NaN in every pool but the zero rows, then empty slots."""
    for name in executor._pools:
        values = np.full_like(executor.state(name), np.nan)
        values[zero_rows(executor.sizes, name)] = 0
        executor.load_state(name, values)
    for slot in range(1, executor.sizes.num_slots):
        executor.reset(slot)


def make(folder: Path, manifest: Manifest) -> tuple[TensorRtExecutor, FakeDevice]:
    device = FakeDevice()
    executor = TensorRtExecutor(folder, manifest, device)
    poison(executor)
    return executor, device


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(4, 200, n).tolist() for n in (37, 5, 130)]


def texts(executor: Executor, mode: str, tokens: int = 24) -> list[list[int]]:
    engine = Engine(
        executor, mode, max_num_tokens=32
    )  # else the chunks of a prefill depend on time, and so do the buckets
    params = [SamplingParams(max_tokens=tokens, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    requests = [engine.submit(ids, each) for ids, each in zip(prompts(), params, strict=True)]
    while not engine.idle:
        engine.step()
    return [request.output_ids for request in requests]


Make = Callable[[str, str], tuple[Built, Path, Manifest]]


@pytest.mark.parametrize("name", ["w16", "mixed"])
def test_same_text_as_the_cpu_executor_in_every_mode(name: str, engine_dir: Make) -> None:
    """Greedy and sampled, three sequences of different lengths, pools NaN where nobody owns them."""
    built, folder, manifest = engine_dir(name, "float32")
    want = texts(built.driver.executor, "none")
    for mode in MODES:
        executor, _ = make(folder, manifest)
        assert texts(executor, mode) == want, mode


@pytest.mark.parametrize("gpu_decodes", [True, False])
def test_every_output_and_every_committed_row_equals_the_cpus(gpu_decodes: bool, engine_dir: Make) -> None:
    """Both executors on the same calls, each with the other's scratch at the commit."""
    built, folder, manifest = engine_dir("w16", "float32")
    executor, _ = make(folder, manifest)
    cpu = OnnxRuntimeExecutor(built.engine, Manifest.read(built.engine), threads=1)
    for name in cpu.states:
        cpu.load_state(name, np.zeros_like(cpu.state(name)))
        executor.load_state(name, np.zeros_like(cpu.state(name)))
    for slot in range(cpu.sizes.num_slots):
        cpu.reset(slot)
        executor.reset(slot)
    comparison = Comparison(cpu.config)
    pair: tuple[Executor, Executor] = (executor, cpu) if gpu_decodes else (cpu, executor)
    both = Lockstep(*pair, comparison)
    texts(both, "s3_k2_d6")
    worst = max(found.max_rel for found in comparison.found.values())
    assert comparison.agrees(1e-4), worst
    assert {place.graph for place in comparison.found} == {"target_step", "draft_catchup", "draft_s3_k2", "commit"}


def test_half_precision_stays_near(engine_dir: Make) -> None:
    """float16 states, scratch and commit beside the CPU's float32 on the same inputs and states, over a prefill and 24 rounds.

    A rounding may choose other experts or entries for a node, which then differs at will: the median of rows must be near.
    """
    built, folder, manifest = engine_dir("w16", "float16")
    executor, _ = make(folder, manifest)
    seen: dict[str, list[float]] = {}

    def watch(place: Place, want: np.ndarray, got: np.ndarray) -> None:
        if want.size and want.dtype == np.float32 and place.graph in ("target_step", "commit"):
            rows = np.abs(got - want).reshape(-1, want.shape[-1]).max(axis=1) / np.abs(want[np.isfinite(want)]).max()
            seen.setdefault(f"{place.graph} {place.output}", []).extend(rows.tolist())

    cpu = OnnxRuntimeExecutor(built.engine, Manifest.read(built.engine), threads=1)
    for name in cpu.states:
        cpu.load_state(name, np.zeros_like(cpu.state(name)))
        executor.load_state(name, np.zeros_like(cpu.state(name)))
    texts(Lockstep(cpu, executor, Comparison(cpu.config, watch)), "s3_k2_d6")
    assert len(seen) > 10
    for name, errors in seen.items():
        assert 0 < np.median(errors) <= 1.5 * 2.0**-11 * np.sqrt(10 * cpu.config.num_layers), name


# ---------------------------------------------------------------- resources


def test_buffers_are_allocated_once_and_graphs_captured_once_per_bucket(engine_dir: Make) -> None:
    """Over two runs, whose prefill chunks may differ since their width follows from the time that rounds take."""
    _, folder, manifest = engine_dir("w16", "float32")
    executor, device = make(folder, manifest)
    for steps, topk in ((0, 1), *SHAPES):
        executor.prepare_draft(steps, topk)
    before = device.counts.copy()
    for _ in range(2):
        replayed = device.counts["replay"]
        texts(executor, "s3_k2_d6")
        buckets_seen = sum(len(stage._ready) for stage in (executor._target, *executor._drafts.values()))
        assert device.counts["capture"] == device.counts["context"] == buckets_seen > 3
        assert device.counts["replay"] > replayed
    assert all(device.counts[what] == before[what] for what in ("allocate", "pinned"))


def test_one_copy_in_per_call_and_one_out_per_result(engine_dir: Make) -> None:
    """A plain round copies out once (logits); a draft round once more (candidates), which the host needs to lay out the tree;
    catching up and committing copy nothing out."""
    _, folder, manifest = engine_dir("w16", "float32")
    executor, device = make(folder, manifest)
    engine = Engine(executor, "s3_k2_d6")
    engine.submit(prompts()[0], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    engine.step()
    for _ in range(4):
        before = device.counts.copy()
        engine.step()
        assert (device.counts - before)["download"] == 2
        assert (device.counts - before)["upload"] == 3
    plain = Engine(executor, "none")
    plain.submit(prompts()[1], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    plain.step()
    for _ in range(4):
        before = device.counts.copy()
        plain.step()
        assert (device.counts - before)["download"] == 1
        assert (device.counts - before)["upload"] == 2


def test_reset_empties_a_slot(engine_dir: Make) -> None:
    built, folder, manifest = engine_dir("w16", "float32")
    executor, _ = make(folder, manifest)
    executor.load_state("csa_state", np.ones_like(executor.state("csa_state")))
    executor.reset(2)
    cpu = OnnxRuntimeExecutor(built.engine, Manifest.read(built.engine), threads=1)
    slots = executor.sizes.num_slots
    got = executor.state("csa_state").reshape(-1, slots, *executor.state("csa_state").shape[1:])
    want = cpu.state("csa_state").reshape(got.shape)
    assert (got[:, 2] == want[:, 2]).all() and (got[:, 1] == 1).all()


# ---------------------------------------------------------------- buckets


def test_every_pass_fits_its_bucket_and_the_widest_bucket(engine_dir: Make) -> None:
    """No size of a pass is over its bucket's, and no bucket over the buffers."""
    built, folder, manifest = engine_dir("w16", "float32")
    executor, _ = make(folder, manifest)
    s, stage = built.driver.sizes, executor._target
    seen = set()
    for batch in range(1, s.max_batch_size + 1):
        for nodes in (*range(1, s.max_verify_tokens + 1), 17, 33, 64):
            if nodes > s.max_verify_tokens and batch * nodes > s.max_commit:
                continue
            for held in (0, 3, 255, 256, 639):
                logits = nodes if nodes <= s.max_verify_tokens else 1
                actual = {"B": batch, "N": nodes, "R": logits, "E": held // s.csa_ratio, "F": held // s.hca_ratio}
                bucket = buckets.target_bucket(s, actual)
                assert all(bucket.symbols[name] >= size for name, size in actual.items())
                found = stage.layouts(bucket)
                assert found.table_bytes <= stage.table_bytes and found.output_bytes <= stage.output_bytes
                seen.add(bucket)
    assert len(seen) < 100


def test_profiles_take_their_buckets(engine_dir: Make) -> None:
    """Every symbol of a bucket is inside the optimisation profile that the executor chooses for it."""
    from trtllm_v4tree.compiler import rtx

    built, folder, manifest = engine_dir("w16", "float32")
    executor, s = make(folder, manifest)[0], built.driver.sizes
    ranges = rtx.graph_profiles("target_step", s)
    for bucket in buckets.widest_targets(s):
        chosen = ranges[executor._profile(bucket)]
        for name, size in bucket.sizes:
            assert chosen[name][0] <= size <= chosen[name][2], (name, bucket)
    draft = rtx.graph_profiles("draft_s3_k2", s)[0]
    for name, size in buckets.widest_draft(s, 0).sizes:
        assert name == "C" or draft[name][0] <= size <= draft[name][2]


def test_padding_keeps_the_parts_of_a_split_axis_apart(engine_dir: Make) -> None:
    spec = next(t for t in engine_dir("w16", "float32")[2].contracts()[0].inputs if t.name == "node_mask")
    values = np.arange(2 * 1 * 5, dtype=np.float32).reshape(1, 2, 5)
    out = np.full((2, 4, 7 + 4), np.nan, np.float32)
    buckets.pad(spec, values, {"B": 1, "N": 2, "W": 3}, out, {"B": 2, "N": 4, "W": 7})
    assert (out[0, :2, :3] == values[0, :, :3]).all() and (out[0, :2, 7:9] == values[0, :, 3:]).all()
    assert (out[1, :, 0] == 0).all() and (out[0, 2:, 0] == 0).all()
    rest = np.ones_like(out, bool)
    rest[0, :2, :3] = rest[0, :2, 7:9] = False
    rest[..., 0] = False
    assert np.isneginf(out[rest]).all()


@pytest.mark.parametrize(("count", "most", "want"), [(1, 16, 1), (3, 16, 4), (5, 6, 6), (16, 16, 16), (9, 12, 12)])
def test_rounding(count: int, most: int, want: int) -> None:
    assert buckets.rounded(count, most) == want


# ---------------------------------------------------------------- refusals


def test_another_chip(engine_dir: Make) -> None:
    _, folder, manifest = engine_dir("w16", "float32")
    with pytest.raises(EngineFormatError, match=r"SM90 and the GPU here is SM120"):
        TensorRtExecutor(folder, manifest, FakeDevice("SM120"))


def test_a_plan_of_another_dtype(engine_dir: Make) -> None:
    _, folder, _ = engine_dir("w16", "float32")
    _, _, manifest = engine_dir("w16", "float16")
    with pytest.raises(EngineFormatError, match=r"not the plan that engine\.json describes"):
        TensorRtExecutor(folder, manifest, FakeDevice())


def test_a_draft_round_that_was_not_built(engine_dir: Make) -> None:
    _, folder, manifest = engine_dir("w16", "float32")
    executor, _ = make(folder, manifest)
    with pytest.raises(EngineFormatError, match=r"draft_s7_k1\.plan"):
        executor.prepare_draft(7, 1)


@pytest.mark.parametrize("content", ["", "[]", '{"scatter_rows": {}}', "{}"])
def test_damaged_commit_kernels(content: str, engine_dir: Make, tmp_path: Path) -> None:
    _, folder, manifest = engine_dir("w16", "float32")
    (tmp_path / COMMIT_KERNELS).write_text(content)
    (tmp_path / "target_step.onnx").symlink_to(folder / "target_step.onnx")
    with pytest.raises(EngineFormatError, match="build the engine again"):
        TensorRtExecutor(tmp_path, manifest, FakeDevice())
