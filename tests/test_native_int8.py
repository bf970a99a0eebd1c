"""Native linears in 8 bits: products against float64, the same bits for a token beside any others, an engine's text free of the tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree import native
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.compiler.native_ops import LANES, PANEL, NativeOps, pack
from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import CheckpointError, ConfigError
from trtllm_v4tree.network.ops import Experts, HyperGains, Op, V4TreeOps, Value
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor

from .harness import Driver
from .oracle.tiny import write_tiny
from .oracle.trees import random_tree
from .test_commit_law import check_law, draw_batch, draw_trees
from .test_int8 import tokens
from .test_native import normal, reference_experts, run

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not compiled")
OPTIONS = BuildOptions(
    max_batch_size=4, max_seq_len=640, prefill_chunk=64, draft_shapes=((3, 2), (4, 1)), cpu_kernels="native", dtype="int8"
)  # fmt: skip
OPS = NativeOps(False, "int8")
SHAPES = [(32, 16), (31, 100), (1, 1), (96, 64), (64, 211), (35, 48), (3, 20)]


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return run(OPS, lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})[0]


def error_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Half a step of every weight, a column sharing one, and of every input, a row sharing one, and a little for float32."""
    w_half = np.abs(w).max(axis=-2, keepdims=True) / 254 * np.ones_like(w)
    x_half = np.abs(x).max(axis=-1, keepdims=True) / 254 * np.ones_like(x)
    return 1.001 * (np.abs(x) @ w_half + x_half @ (np.abs(w) + w_half)) + 1e-6


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 40])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_linear_errs_by_no_more_than_its_rounding(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(rows * inputs + outputs)
    x, w = normal(rng, 1, rows, inputs), normal(rng, inputs, outputs)
    y = linear(x, w)
    error = np.abs(y - x.astype(np.float64) @ w)
    assert (error <= error_bound(x, w)).all()
    assert inputs < 30 or error.max() > 1e-4  # it does round
    for first, count in ((0, 1), (rows // 2, rows - rows // 2)):
        part = np.ascontiguousarray(x[:, first : first + count])
        np.testing.assert_array_equal(linear(part, w), y[:, first : first + count])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_whole_numbers_of_steps_are_exact(inputs: int, outputs: int) -> None:
    """Inputs and weights that are from -127 to 127 steps of a power of two, the largest 127: nothing is rounded but the result."""
    rng = np.random.default_rng(inputs + outputs)
    x, w = (rng.integers(-127, 128, shape).astype(np.float64) for shape in ((1, 9, inputs), (inputs, outputs)))
    x[..., rng.integers(inputs)], w[rng.integers(inputs)] = 127, -127
    x *= 2.0 ** rng.integers(-20, 20, (9, 1))
    w *= 2.0 ** rng.integers(-20, 20, outputs)
    np.testing.assert_allclose(linear(x.astype(np.float32), w.astype(np.float32)), x @ w, rtol=3e-7)


def test_groups_and_norms_are_rounded_each_for_itself() -> None:
    rng = np.random.default_rng(2)
    x, w = normal(rng, 1, 5, 51), normal(rng, 3, 17, 20)
    x[..., :17] *= 1000  # a scale of the whole row would leave nothing of the other groups
    [y] = run(OPS, lambda ops, op, v: ops.grouped_linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    for group in range(3):
        own = x[0, :, 17 * group : 17 * group + 17]
        exact = own.astype(np.float64) @ w[group]
        assert (np.abs(y[0, :, 20 * group : 20 * group + 20] - exact) <= error_bound(own, w[group])).all()
    weights = {"n": normal(rng, 51), "w": normal(rng, 51, 30)}
    [y] = run(OPS, lambda ops, op, v: ops.norm_linear(op, v["x"], v["n"], 1e-6, v["w"]), {"x": x}, weights)
    normed = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * weights["n"]
    assert (np.abs(y - normed @ weights["w"]) <= error_bound(normed, weights["w"])).all()


@pytest.mark.parametrize("nodes", [1, 6, 17])
def test_mixing_of_streams_rounds_once(nodes: int) -> None:
    """Streams and weights that are whole steps, the largest 127, are mixed as in float32; others err, but by little."""
    rng = np.random.default_rng(nodes)
    m, dim, gains = 4, 40, HyperGains(4, 20, 1e-6, 1e-6)
    codes, steps = rng.integers(-127, 128, (1, nodes, m * dim)), rng.integers(-60, 61, (m * dim, 2 * m + m * m))
    codes[..., 5], steps[7] = 127, 127
    weights = {"fn": (steps / 8192).astype(np.float32), "base": normal(rng, 24), "norm": normal(rng, dim)}
    streams = (codes * 2.0 ** rng.integers(-8, -4, (1, nodes, 1))).astype(np.float32).reshape(1, nodes, m, dim)

    def difference(streams: np.ndarray) -> float:
        def mix(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Any:
            return ops.hyper_mix(op, v["s"], v["fn"], v["base"], v["norm"], gains)

        got, wanted = (run(ops, mix, {"s": streams}, weights) for ops in (OPS, V4TreeOps()))
        first = run(OPS, mix, {"s": np.ascontiguousarray(streams[:, :1])}, weights)
        for one, all_of_them in zip(first, got, strict=True):
            np.testing.assert_array_equal(one[:, 0], all_of_them[:, 0])
        return max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))

    assert difference(streams) < 2e-5
    assert 2e-5 < difference(normal(rng, 1, nodes, m, dim)) < 0.1


def test_what_is_no_number_is_seen_and_zeros_are_zero() -> None:
    x, w = np.ones((1, 5, 37), np.float32), np.ones((37, 16), np.float32)
    x[0, 0, 3], x[0, 1, 36], x[0, 3], x[0, 4] = np.nan, -np.inf, 0, 1e-42
    w[:, 5] = 0
    y = linear(x, w)
    assert np.isnan(y[0, :2]).all()
    np.testing.assert_allclose(y[0, 2], np.where(np.arange(16) == 5, 0, 37), rtol=1e-6)
    assert (y[0, 3] == 0).all() and (np.abs(y[0, 4]) < 1e-39).all()


@pytest.mark.parametrize("count", [1, 7, 40])
def test_experts_err_by_no_more_than_rounding(count: int) -> None:
    """Against float64 without rounding: about a percent of the largest, and the router not at all, so the same experts."""
    rng = np.random.default_rng(count)
    e, dim = Experts(6, 2, 20, 12, 1.5, 1.5), 32
    weights = {
        "router": normal(rng, dim, e.count, scale=0.3),
        "shared_in": normal(rng, dim, 2 * e.shared, scale=0.3),
        "shared_out": normal(rng, e.shared, dim),
        "route": normal(rng, e.count),
        "fc1": normal(rng, e.count, dim, 2 * e.width, scale=0.3),
        "fc2": normal(rng, e.count, e.width, dim),
    }
    feeds = {"x": normal(rng, 1, count, dim), "ids": rng.integers(0, 11, (1, count))}

    def experts(given: dict[str, np.ndarray]) -> np.ndarray:
        return run(
            OPS, lambda ops, op, v: ops.mixture(op, v["x"], v["ids"], *(v[n] for n in weights), e), given, weights
        )[0]

    y = experts(feeds)
    exact = reference_experts(feeds["x"][0], feeds["ids"][0], weights, e, hashed=False)
    error = np.abs(y[0] - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 3e-2
    for n in range(0, count, 5):
        alone = {name: np.ascontiguousarray(value[:, n : n + 1]) for name, value in feeds.items()}
        np.testing.assert_array_equal(experts(alone)[0, 0], y[0, n])


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 83), (64, 16), (8, 200)])
def test_layout(inputs: int, outputs: int) -> None:
    """[panel][inputs / 4][blocks][16][4] of bytes with zero 128, then a scale for each column, against a loop."""
    w = normal(np.random.default_rng(0), inputs, outputs)
    flat = pack(w[None], "int8")[0]
    blocks, fours = -(-outputs // LANES), -(-inputs // 4)
    size = blocks * LANES * fours * 4
    codes, scales = flat[:size].astype(np.int64) - 128, flat[size:].view(np.float32)
    assert len(scales) == blocks * LANES and (scales[outputs:] == 0).all()
    at = 0
    for first in range(0, blocks, PANEL):
        wide = min(PANEL, blocks - first)
        for i in range(fours):
            for column in range(first * LANES, (first + wide) * LANES):
                for row in range(4 * i, 4 * i + 4):
                    if row < inputs and column < outputs:
                        assert abs(codes[at] * scales[column] - w[row, column]) <= 0.5001 * scales[column]
                    at += 1
    assert at == size


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("int8") / "checkpoint", "w16", seed=5)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    manifest = build(checkpoint, checkpoint.parent / "engine", OPTIONS)
    assert (manifest.dtype, manifest.draft_dtype) == ("int8", "int8")
    return checkpoint.parent / "engine"


def driver_of(engine: Path) -> Driver:
    return Driver(OnnxRuntimeExecutor(engine, Manifest.read(engine), threads=1))


def test_the_law_holds_to_the_bit(engine: Path) -> None:
    """Rounding makes small differences large: none may be left between a tree and single steps."""
    driver, rng = driver_of(engine), np.random.default_rng(3)
    check_law(driver, draw_batch(driver, rng, [21, 64, 3]), draw_trees(rng, driver, 3, turn=1))


def test_logits_are_near_those_of_float32(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "float32", dataclasses.replace(OPTIONS, dtype="float32"))
    logits = []
    for directory in (tmp_path / "float32", engine):
        driver, rng = driver_of(directory), np.random.default_rng(4)
        [held] = driver.start(rng, 1)
        held = driver.prefill(held, rng.integers(0, 211, 90).tolist(), [64], poisoned=False)
        logits.append(driver.verify([held], [random_tree(rng, 9, 211)]).logits)
    error = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 1e-4 < error < 1e-1


def test_text_depends_neither_on_the_tree_nor_on_the_drafters_dtype(
    engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    build(checkpoint, tmp_path / "other", dataclasses.replace(OPTIONS, draft_dtype="float32"))
    expected = tokens(engine, "none")
    for directory in (engine, tmp_path / "other"):
        for mode in ("s3_k2_d6", "s4_k1_d5"):
            assert tokens(directory, mode) == expected


def test_what_cannot_be_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype int8 needs native operators"):
        build(checkpoint, tmp_path / "engine", dataclasses.replace(OPTIONS, cpu_kernels="onnxruntime"))
    for target in ("tensorrt", "tensorrt-rtx"):
        with pytest.raises(ConfigError, match="int8"):
            BuildOptions(target=target, dtype="int8")
    w = np.ones((8, 16), np.float32)
    w[3, 4] = np.inf
    with pytest.raises(CheckpointError, match="no finite numbers: download the checkpoint again"):
        linear(np.ones((1, 1, 8), np.float32), w)
    assert not (tmp_path / "engine").exists()
