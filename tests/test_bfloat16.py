"""Linears that round their inputs to bfloat16: products against float64, an engine's logits near float32's, its text free of the tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from trtllm_v4tree import native
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.network.ops import Experts
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor

from .harness import Driver, chain_tree
from .oracle.tiny import write_tiny
from .oracle.trees import random_tree
from .test_commit_law import check_law, draw_batch, draw_trees
from .test_int8 import tokens
from .test_native import normal, reference_experts, run

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not compiled")
OPTIONS = BuildOptions(
    max_batch_size=4, max_seq_len=640, prefill_chunk=64, draft_shapes=((3, 2), (4, 1)), cpu_kernels="native", dtype="bfloat16"
)  # fmt: skip


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with its linears in bfloat16."""
    directory = write_tiny(tmp_path_factory.mktemp("bfloat16") / "checkpoint", "w16", seed=5)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {n: t.bfloat16() if t.ndim == 2 and n.endswith(".weight") else t for n, t in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (31, 100), (1, 1), (96, 64), (64, 211), (35, 48)])
def test_linear_is_the_product_of_rounded_inputs(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(rows * inputs + outputs)
    x, w = normal(rng, 1, rows, inputs), rounded(normal(rng, inputs, outputs))
    [y] = run(NativeOps(True, "bfloat16"), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    exact = rounded(x).astype(np.float64) @ w.astype(np.float64)
    assert np.abs(y - exact).max() <= 1e-6 * np.abs(x).max() * np.abs(w).sum(axis=0).max()
    for first, count in ((0, 1), (rows // 2, rows - rows // 2)):
        part = np.ascontiguousarray(x[:, first : first + count])
        [same] = run(
            NativeOps(True, "bfloat16"), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": part}, {"w": w}
        )
        np.testing.assert_array_equal(same, y[:, first : first + count])


def test_grouped_linear_rounds_each_group() -> None:
    rng = np.random.default_rng(2)
    x, w = normal(rng, 1, 5, 48), rounded(normal(rng, 3, 16, 20))
    [y] = run(
        NativeOps(True, "bfloat16"), lambda ops, op, v: ops.grouped_linear(op, v["x"], v["w"]), {"x": x}, {"w": w}
    )
    exact = np.einsum("rgi,gio->rgo", rounded(x).reshape(5, 3, 16).astype(np.float64), w).reshape(1, 5, 60)
    np.testing.assert_allclose(y, exact, atol=1e-5)


def test_what_is_no_number_is_seen() -> None:
    x, w = np.ones((1, 3, 32), np.float32), np.ones((32, 16), np.float32)
    x[0, 0, 3], x[0, 1, 4] = np.nan, np.inf
    [y] = run(NativeOps(True, "bfloat16"), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    assert np.isnan(y[0, 0]).all() and np.isposinf(y[0, 1]).all() and (y[0, 2] == 32).all()


@pytest.mark.parametrize("count", [1, 7, 40])
def test_experts_err_by_no_more_than_rounding(count: int) -> None:
    """Against float64 without rounding: 2^-9 of each input of three products, and of the experts' weights through the router's."""
    rng = np.random.default_rng(count)
    e, dim = Experts(6, 2, 20, 12, 1.5, 1.5), 32
    weights = {
        "router": rounded(normal(rng, dim, e.count, scale=0.3)),
        "shared_in": rounded(normal(rng, dim, 2 * e.shared, scale=0.3)),
        "shared_out": rounded(normal(rng, e.shared, dim)),
        "route": np.array([rng.permutation(e.count)[: e.topk] for _ in range(11)]),
        "fc1": rounded(normal(rng, e.count, dim, 2 * e.width, scale=0.3)),
        "fc2": rounded(normal(rng, e.count, e.width, dim)),
    }
    feeds = {"x": normal(rng, 1, count, dim), "ids": rng.integers(0, 11, (1, count))}
    [y] = run(
        NativeOps(True, "bfloat16"),
        lambda ops, op, v: ops.mixture(op, v["x"], v["ids"], *(v[n] for n in weights), e),
        feeds,
        weights,
    )
    exact = reference_experts(feeds["x"][0], feeds["ids"][0], weights, e, hashed=True)
    error = np.abs(y[0] - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 2e-2


def test_the_law_holds_to_the_bit(checkpoint: Path, tmp_path: Path) -> None:
    """Rounding inputs makes small differences large: none may be left between a tree and single steps."""
    manifest = build(checkpoint, tmp_path / "engine", OPTIONS)
    assert (manifest.dtype, manifest.draft_dtype) == ("bfloat16", "bfloat16")
    driver, rng = Driver(OnnxRuntimeExecutor(tmp_path / "engine", manifest, threads=1)), np.random.default_rng(3)
    batch = draw_batch(driver, rng, [21, 64, 3])
    check_law(driver, batch, draw_trees(rng, driver, 3, turn=1))


def test_logits_are_near_those_of_float32(checkpoint: Path, tmp_path: Path) -> None:
    logits = []
    for dtype in ("float32", "bfloat16"):
        manifest = build(checkpoint, tmp_path / dtype, dataclasses.replace(OPTIONS, dtype=dtype))
        driver, rng = Driver(OnnxRuntimeExecutor(tmp_path / dtype, manifest, threads=1)), np.random.default_rng(4)
        [held] = driver.start(rng, 1)
        held = driver.prefill(held, rng.integers(0, 211, 90).tolist(), [64], poisoned=False)
        logits.append(driver.verify([held], [random_tree(rng, 9, 211), chain_tree([4])][:1]).logits)
    error = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 1e-5 < error < 3e-2


def test_text_depends_neither_on_the_tree_nor_on_the_drafters_dtype(checkpoint: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "a", OPTIONS)
    build(checkpoint, tmp_path / "b", dataclasses.replace(OPTIONS, draft_dtype="float32"))
    expected = tokens(tmp_path / "a", "none")
    for engine in ("a", "b"):
        for mode in ("s3_k2_d6", "s4_k1_d5"):
            assert tokens(tmp_path / engine, mode) == expected


@pytest.mark.parametrize("name", ["dtype", "draft_dtype"])
def test_weights_that_bfloat16_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    """So are operators of ONNX Runtime; auto falls back to float32."""
    plain = write_tiny(tmp_path / "checkpoint", "w16", seed=5)
    float32 = dataclasses.replace(OPTIONS, dtype="float32", draft_dtype="float32")
    for kernels in ("native", "onnxruntime"):
        options = dataclasses.replace(float32, cpu_kernels=kernels)
        with pytest.raises(ConfigError, match="build with float32"):
            build(plain, tmp_path / "engine", dataclasses.replace(options, **{name: "bfloat16"}))
    assert not (tmp_path / "engine").exists()
    manifest = build(plain, tmp_path / "engine", dataclasses.replace(float32, draft_dtype="auto"))
    assert manifest.draft_dtype == "float32"
