"""The native operators against the reference bodies of `V4TreeOps` and float64 loops, for every instruction set of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript._internal import builder as _builder

from trtllm_v4tree import native
from trtllm_v4tree.compiler.native_ops import NativeOps, pack
from trtllm_v4tree.network.ops import (
    OPSET,
    AttentionDims,
    Experts,
    HyperGains,
    KeySources,
    NodeRows,
    Op,
    Rope,
    V4TreeOps,
    Value,
)
from trtllm_v4tree.network.weight import Weight

if native.library() is None:
    pytest.skip("the native library was not compiled on this machine", allow_module_level=True)

Arrays = dict[str, np.ndarray]
DIMS = AttentionDims(24, 32, 128, 64, 20, 16, 8, 5, 1e-6)
GAINS = HyperGains(4, 20, 1e-6, 1e-6)
INF = np.float32(np.inf)


def run(
    ops: V4TreeOps,
    emit: Callable[[V4TreeOps, Op, dict[str, Value]], Any],
    feeds: Arrays,
    weights: Arrays,
    rewrite: Callable[[ir.Model], object] = lambda model: None,
) -> list[np.ndarray]:
    """Outputs of the operators that `emit` makes, with `weights` as initializers, in a graph that `rewrite` has gone over."""
    graph = ir.Graph([], [], nodes=[], name="test", opset_imports={"": OPSET, "v4tree": 1, "com.microsoft": 1})
    builder = _builder.GraphBuilder(graph)
    types = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64}
    values = {name: builder.input(name, types[a.dtype.name], list(a.shape)) for name, a in feeds.items()}
    for name, array in weights.items():
        weight = Weight(array.shape, lambda source, a=array: a, dtype=types[array.dtype.name])
        weight.name = name
        graph.initializers[name] = weight
        values[name] = weight
    out = emit(ops, builder.op, values)
    for i, value in enumerate(out if isinstance(out, tuple) else (out,)):
        if value is not None:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
            builder.add_output(value, f"out_{i}")
    made = ir.Model(graph, ir_version=10)
    rewrite(made)
    for weight in graph.initializers.values():
        if isinstance(weight, Weight):
            weight.const_value = ir.tensor(np.ascontiguousarray(weight.load(None)), name=weight.name)  # type: ignore[arg-type]
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library()))
    options.log_severity_level = 4
    model = ir.serde.serialize_model(made)
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def both(
    emit: Callable[[V4TreeOps, Op, dict[str, Value]], Any],
    feeds: Arrays,
    weights: Arrays,
    tolerance: float = 2e-5,
    half: bool = False,
) -> None:
    """Native and reference results agree."""
    if half:
        weights = {
            n: a.astype(ml_dtypes.bfloat16).astype(np.float32) if a.dtype == np.float32 else a
            for n, a in weights.items()
        }
    wanted = run(V4TreeOps(), emit, feeds, weights)
    got = run(NativeOps(half), emit, feeds, weights)
    assert len(wanted) == len(got)
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def rope_of(
    feeds: Arrays, rng: np.random.Generator, batch: int, rows: int, prefix: str = ""
) -> Callable[[dict[str, Value]], Rope]:
    angle = rng.uniform(0, 6, (batch, rows, DIMS.rope_dim // 2)).astype(np.float32)
    feeds |= {prefix + "cos": np.cos(angle), prefix + "sin": np.sin(angle), prefix + "neg": -np.sin(angle)}
    return lambda v: Rope(v[prefix + "cos"], v[prefix + "sin"], v[prefix + "neg"])


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 40])
@pytest.mark.parametrize("inputs,outputs", [(32, 16), (31, 100), (1, 1), (96, 64), (64, 211)])
@pytest.mark.parametrize("half", [False, True])
def test_linear_is_the_product(rows: int, inputs: int, outputs: int, half: bool) -> None:
    rng = np.random.default_rng(rows * inputs + outputs)
    x, w = normal(rng, 1, rows, inputs), normal(rng, inputs, outputs)
    if half:
        w = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    [y] = run(NativeOps(half), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert np.abs(y - exact).max() <= 1e-6 * np.abs(x).max() * np.abs(w).sum(axis=0).max()


@pytest.mark.parametrize("half", [False, True])
def test_a_row_has_the_same_bits_whatever_is_beside_it(half: bool) -> None:
    rng = np.random.default_rng(1)
    x, w = normal(rng, 1, 40, 64), normal(rng, 64, 211).astype(ml_dtypes.bfloat16).astype(np.float32)

    def linear(rows: np.ndarray) -> np.ndarray:
        return run(NativeOps(half), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": rows}, {"w": w})[0]

    whole = linear(x)
    for first, count in ((0, 1), (3, 2), (5, 6), (11, 8), (20, 13)):
        part = linear(np.ascontiguousarray(x[:, first : first + count]))
        assert np.array_equal(part, whole[:, first : first + count])


def test_bfloat16_and_float32_storage_give_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    x, w = normal(rng, 1, 9, 63), normal(rng, 63, 50).astype(ml_dtypes.bfloat16).astype(np.float32)
    results = [
        run(NativeOps(h), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})[0]
        for h in (False, True)
    ]
    assert np.array_equal(*results)


def test_values_that_bfloat16_cannot_hold_are_refused() -> None:
    from trtllm_v4tree.errors import CheckpointError

    w = np.full((4, 4), 1 + 2.0**-12, np.float32)
    with pytest.raises(CheckpointError, match="bfloat16 cannot hold"):
        run(
            NativeOps(True),
            lambda ops, op, v: ops.linear(op, v["x"], v["w"]),
            {"x": np.ones((1, 1, 4), np.float32)},
            {"w": w},
        )


def test_packing_keeps_every_value_once() -> None:
    for inputs, outputs, half in ((5, 100, False), (3, 80, True), (16, 15, True)):
        array = np.arange(1, inputs * outputs + 1, dtype=np.float32).reshape(inputs, outputs)
        flat = pack(array, "bfloat16" if half else "float32").astype(np.float32)
        assert sorted(flat[flat != 0]) == sorted(array.ravel())


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_norm_and_grouped_linears(rows: int) -> None:
    rng = np.random.default_rng(rows)
    feeds = {"x": normal(rng, 1, rows, 48)}
    weights = {"w": normal(rng, 48, 33), "norm": normal(rng, 48), "g": normal(rng, 3, 16, 20)}
    both(
        lambda ops, op, v: ops.norm_linear(op, v["x"], v["norm"], 1e-6, v["w"]),
        feeds,
        {k: weights[k] for k in ("w", "norm")},
    )
    both(lambda ops, op, v: ops.grouped_linear(op, v["x"], v["g"]), feeds, {"g": weights["g"]})


@pytest.mark.parametrize("batch,nodes", [(1, 1), (1, 6), (2, 9), (3, 16)])
@pytest.mark.parametrize("streams", [2, 4])
def test_hyper_connections(batch: int, nodes: int, streams: int) -> None:
    rng = np.random.default_rng(nodes)
    dim, gains = 40, HyperGains(streams, 20, 1e-6, 1e-6)
    width = 2 * streams + streams**2
    feeds = {"s": normal(rng, batch, nodes, streams, dim)}
    weights = {"fn": normal(rng, streams * dim, width, scale=0.2), "base": normal(rng, width), "norm": normal(rng, dim)}
    both(lambda ops, op, v: ops.hyper_mix(op, v["s"], v["fn"], v["base"], v["norm"], gains), feeds, weights)
    weights = {"fn": weights["fn"][:, :streams].copy(), "base": weights["base"][:streams], "norm": weights["norm"]}
    both(lambda ops, op, v: ops.hyper_head(op, v["s"], v["fn"], v["base"], v["norm"], gains), feeds, weights)
    feeds |= {
        "o": normal(rng, batch, nodes, dim),
        "p": normal(rng, batch, nodes, 1, streams),
        "c": normal(rng, batch, nodes, streams, streams),
    }
    both(lambda ops, op, v: ops.stream_post_mix(op, v["s"], v["o"], v["p"], v["c"]), feeds, {})


def reference_experts(x: np.ndarray, ids: np.ndarray, w: Arrays, e: Experts, hashed: bool) -> np.ndarray:
    """Float64, one token at a time (spec 5.2)."""

    def swiglu(h: np.ndarray, inner: int) -> np.ndarray:
        gate, up = np.minimum(h[:inner], e.limit), np.clip(h[inner:], -e.limit, e.limit)
        return gate / (1 + np.exp(-gate)) * up

    out = np.zeros(x.shape, np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        scores = np.sqrt(np.log1p(np.exp(row @ w["router"])))
        chosen = w["route"][ids[t]] if hashed else np.argsort(-(scores + w["route"]), kind="stable")[: e.topk]
        out[t] = swiglu(row @ w["shared_in"], e.shared) @ w["shared_out"]
        for expert in chosen:
            hidden = swiglu(row @ w["fc1"][expert], e.width)
            out[t] += e.scale * scores[expert] / scores[chosen].sum() * (hidden @ w["fc2"][expert])
    return out


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_mixture_of_experts(tokens: int, hashed: bool, half: bool) -> None:
    rng = np.random.default_rng(tokens)
    e, dim, vocab = Experts(6, 2, 20, 12, 1.5, 1.5), 32, 11
    weights = {
        "router": normal(rng, dim, e.count),
        "shared_in": normal(rng, dim, 2 * e.shared),
        "shared_out": normal(rng, e.shared, dim),
        "route": np.array([rng.permutation(e.count)[: e.topk] for _ in range(vocab)])
        if hashed
        else normal(rng, e.count),
        "fc1": normal(rng, e.count, dim, 2 * e.width),
        "fc2": normal(rng, e.count, e.width, dim),
    }
    if half:
        weights = {
            n: a.astype(ml_dtypes.bfloat16).astype(np.float32) if n != "route" else a for n, a in weights.items()
        }
    feeds = {"x": normal(rng, 1, tokens, dim), "ids": rng.integers(0, vocab, (1, tokens))}
    names = ("router", "shared_in", "shared_out", "route", "fc1", "fc2")
    [y] = run(
        NativeOps(half), lambda ops, op, v: ops.mixture(op, v["x"], v["ids"], *(v[n] for n in names), e), feeds, weights
    )
    exact = reference_experts(feeds["x"][0], feeds["ids"][0], weights, e, hashed)
    np.testing.assert_allclose(y[0], exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())
    both(lambda ops, op, v: ops.mixture(op, v["x"], v["ids"], *(v[n] for n in names), e), feeds, weights, half=half)


@pytest.mark.parametrize("topk", [1, 4, 50])
def test_top_log_probs_are_sorted_and_prefer_lower_tokens(topk: int) -> None:
    rng = np.random.default_rng(topk)
    x, head = normal(rng, 2, 3, 24), normal(rng, 24, 50)
    head[:, 20:40] = head[:, 0:20]  # equal logits
    values, tokens = run(
        NativeOps(False),
        lambda ops, op, v: _typed(ops.top_log_probs(op, v["x"], v["head"], topk)),
        {"x": x},
        {"head": head},
    )
    logits = x.astype(np.float64) @ head
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    order = np.argsort(-(x @ head), axis=-1, kind="stable")[..., :topk]
    np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=2e-5)
    assert np.all(np.diff(values, axis=-1) <= 0)
    same = np.diff(values, axis=-1) == 0
    assert np.all(np.diff(tokens, axis=-1)[same] > 0)
    np.testing.assert_allclose(np.take_along_axis(exact, tokens, -1), values, atol=2e-5)


def _typed(pair: tuple[Value, Value]) -> tuple[Value, Value]:
    pair[1].type = ir.TensorType(ir.DataType.INT64)
    return pair


@pytest.mark.parametrize("batch,nodes", [(1, 1), (2, 7)])
def test_attention_inputs(batch: int, nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    feeds: Arrays = {"p": normal(rng, batch, nodes, sum(DIMS.in_widths)), "phase": rng.integers(0, 4, (batch, nodes))}
    rope = rope_of(feeds, rng, batch, nodes)
    weights = {"q": normal(rng, 24), "kv": normal(rng, 32), "ape": normal(rng, 4, 128), "idx": normal(rng, 4, 64)}
    both(
        lambda ops, op, v: ops.attention_inputs(
            op, v["p"], (v["q"], v["kv"]), rope(v), v["phase"], (v["ape"], v["idx"]), DIMS
        ),
        feeds,
        weights,
    )


@pytest.mark.parametrize("entries", [0, 1, 5])
def test_pool_of_states_and_rows(entries: int) -> None:
    rng = np.random.default_rng(entries)
    batch, nodes, dim, states = 2, 6, 32, 3
    feeds: Arrays = {
        "state": normal(rng, 5, states, 2 * dim, scale=3),
        "slots": np.array([4, 1]),
        "raw": normal(rng, batch, nodes, 4 * dim, scale=3),
        "table": rng.integers(0, states + 1 + 2 * nodes, (batch, entries, 8)),
    }
    feeds["state"][0] = np.nan
    rope = rope_of(feeds, rng, batch, entries)
    both(
        lambda ops, op, v: ops.pool(op, v["state"], v["slots"], v["raw"], v["table"], v["norm"], rope(v), dim, 8, 1e-6),
        feeds,
        {"norm": normal(rng, dim)},
    )


def key_feeds(rng: np.random.Generator, batch: int, nodes: int, far: int) -> Arrays:
    """Pools whose unnamed rows are NaN, tables, and masks that hide a third of everything; key 0 is the zero row."""
    window, pool = np.full((40, 32), np.nan, np.float32), np.full((60, 32), np.nan, np.float32)
    feeds: Arrays = {
        "window_rows": np.concatenate([np.zeros((batch, 1), np.int64), rng.integers(1, 30, (batch, 11))], axis=1),
        "nodes": normal(rng, batch, nodes, 32),
        "entry_rows": rng.integers(1, 50, (batch, far)),
        "branch": normal(rng, batch, 3, 32),
    }
    window[:30], pool[1:50] = normal(rng, 30, 32), normal(rng, 49, 32)
    window[0] = 0
    for name, keys in (("node_mask", 12 + nodes), ("entry_mask", far + 3)):
        feeds[name] = np.where(rng.random((batch, nodes, keys)) < 0.3, -INF, np.float32(0))
    feeds["node_mask"][:, :, 0] = 0
    return feeds | {"window": window, "entries": pool}


@pytest.mark.parametrize("batch,nodes,far", [(1, 1, 0), (1, 6, 9), (2, 5, 40), (1, 40, 17)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_attention(batch: int, nodes: int, far: int, scale: float) -> None:
    rng = np.random.default_rng(nodes + far)
    feeds = key_feeds(rng, batch, nodes, far) | {"q": normal(rng, batch, nodes, DIMS.query_width + 20 * 16)}
    feeds["nodes"] *= np.float32(scale)
    rope = rope_of(feeds, rng, batch, nodes)
    names = ("window", "window_rows", "nodes", "node_mask") + (
        ("entries", "entry_rows", "branch", "entry_mask") if far else ()
    )
    if not far:
        for name in ("entries", "entry_rows", "branch", "entry_mask"):
            feeds.pop(name)

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Value:
        rows = NodeRows(v["nodes"], None, None, v["q"], None)
        return ops.attend(op, rows, KeySources(*(v[n] for n in names)), v["sink"], rope(v), DIMS)

    # A weight of the softmax carries the rounding of its score, which grows with the score.
    both(emit, feeds, {"sink": normal(rng, 1, 1, 5, 1)}, tolerance=5e-5 * scale)


@pytest.mark.parametrize("batch,nodes,topk", [(1, 1, 4), (2, 7, 8), (1, 3, 100)])
def test_indexer_keeps_the_best(batch: int, nodes: int, topk: int) -> None:
    rng = np.random.default_rng(topk)
    feeds = key_feeds(rng, batch, nodes, 25) | {
        "q": normal(rng, batch, nodes, DIMS.query_width + 20 * 16),
        "w": normal(rng, batch, nodes, 20),
        "idx": np.concatenate([np.full((1, 16), np.nan, np.float32), normal(rng, 49, 16)]),
        "idx_branch": normal(rng, batch, 3, 16),
    }
    rope = rope_of(feeds, rng, batch, nodes)
    feeds = {
        k: v for k, v in feeds.items() if k not in ("window", "window_rows", "nodes", "node_mask", "entries", "branch")
    }

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Value:
        rows = NodeRows(v["q"], None, None, v["q"], v["w"])
        return ops.index_select(
            op, rows, v["idx"], v["entry_rows"], v["idx_branch"], v["entry_mask"], rope(v), topk, DIMS
        )

    both(emit, feeds, {}, tolerance=0)


def test_rope_tables() -> None:
    feeds = {"positions": np.array([[0, 1, 77, 2047, 1_000_000]])}
    weights = {"freq": (10000.0 ** -np.arange(0, 1, 0.25)).astype(np.float32)}

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> tuple[Value, ...]:
        rope = ops.rope_tables(op, v["positions"], v["freq"])
        return rope.cos, rope.sin, rope.neg_sin

    both(emit, feeds, weights, tolerance=1e-6)


@pytest.mark.parametrize(
    "feed,change,message",
    [
        ("x", np.ones((1, 2, 7), np.float32), "does not fit"),
        ("ids", np.array([[0, 99]]), "token id is out of range"),
        ("ids", np.array([[0]]), "one token id per row"),
    ],
)
def test_a_wrong_shape_or_index_is_an_error_not_a_crash(feed: str, change: np.ndarray, message: str) -> None:
    rng = np.random.default_rng(0)
    e = Experts(4, 2, 16, 16, 1e9, 1.0)
    weights = {
        "g": normal(rng, 8, 4), "a": normal(rng, 8, 32), "b": normal(rng, 16, 8), "r": np.tile(np.array([0, 1]), (5, 1)),
        "c": normal(rng, 4, 8, 32), "d": normal(rng, 4, 16, 8),
    }  # fmt: skip
    feeds = {"x": normal(rng, 1, 2, 8), "ids": np.array([[0, 1]])} | {feed: change}
    with pytest.raises(Exception, match=message):
        run(
            NativeOps(False),
            lambda ops, op, v: ops.mixture(op, v["x"], v["ids"], *(v[n] for n in "gabrcd"), e),
            feeds,
            weights,
        )


@pytest.mark.parametrize("instructions", ["base", "avx2", "avx512", "avx512vnni"])
def test_older_instruction_sets(instructions: str) -> None:
    """This file, that of the draft levels, and those of other dtypes, once more in a process that may use no newer instructions."""
    if os.environ.get("V4TREE_CPU"):
        pytest.skip("already in such a process")
    names = ["test_native_int8.py"]
    if instructions != "avx512vnni":  # which has a product of bytes of its own and nothing else
        names += [Path(__file__).name, "test_native_draft.py"]
    if instructions == "avx512":
        names.append("test_bfloat16.py")
    files = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command,
        env=os.environ | {"V4TREE_CPU": instructions},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_threads_do_not_change_a_bit() -> None:
    rng = np.random.default_rng(3)
    x, w = normal(rng, 1, 24, 512), normal(rng, 512, 2048)
    results = []
    for threads in (1, 2, 3, 0):
        native.set_num_threads(threads)
        results += run(NativeOps(False), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    native.set_num_threads(0)
    assert all(np.array_equal(results[0], r) for r in results[1:])


def test_how_long_idle_threads_wait_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    x, w = normal(rng, 1, 24, 512), normal(rng, 512, 2048)
    results = []
    for microseconds in (0, 50, 1000):
        native.set_patience(microseconds)
        for _ in range(3):
            time.sleep(0.002)
            results += run(NativeOps(False), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})
    assert all(np.array_equal(results[0], r) for r in results[1:])


def test_many_python_threads_share_the_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(4)
    inputs: Sequence[np.ndarray] = [normal(rng, 1, 16, 512) for _ in range(16)]
    w = normal(rng, 512, 1024)

    def product(x: np.ndarray) -> np.ndarray:
        return run(NativeOps(False), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})[0]

    alone = [product(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert all(np.array_equal(a, b) for a, b in zip(alone, pool.map(product, inputs), strict=True))


def mixture_case(rng: np.random.Generator, tokens: int) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]:
    """Routed experts as a function of x [1, tokens, 32], and an x."""
    e = Experts(6, 2, 20, 12, 1.5, 1.5)
    weights = {
        "g": normal(rng, 32, e.count), "a": normal(rng, 32, 2 * e.shared), "b": normal(rng, e.shared, 32), "r": normal(rng, e.count),
        "c": normal(rng, e.count, 32, 2 * e.width), "d": normal(rng, e.count, e.width, 32),
    }  # fmt: skip
    ids = np.zeros((1, tokens), np.int64)

    def mixture(x: np.ndarray) -> np.ndarray:
        def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Value:
            return ops.mixture(op, v["x"], v["ids"], *(v[n] for n in "gabrcd"), e)

        return run(NativeOps(False), emit, {"x": x, "ids": ids}, weights)[0]

    return mixture, normal(rng, 1, tokens, 32)


def hyper_case(rng: np.random.Generator, nodes: int) -> tuple[Callable[[np.ndarray], list[np.ndarray]], np.ndarray]:
    """A hyper-connection as a function of streams [1, nodes, 4, 8], and streams."""
    weights = {"fn": normal(rng, 32, 24, scale=0.2), "base": normal(rng, 24), "norm": normal(rng, 8)}

    def mix(streams: np.ndarray) -> list[np.ndarray]:
        def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> tuple[Value, Value, Value]:
            return ops.hyper_mix(op, v["s"], v["fn"], v["base"], v["norm"], GAINS)

        return run(NativeOps(False), emit, {"s": streams}, weights)

    return mix, normal(rng, 1, nodes, 4, 8)


def test_not_a_number_stays_in_its_row_and_is_seen_there() -> None:
    """A clamp or an exponential that drops it would make a plausible number of it."""
    rng = np.random.default_rng(5)
    mixture, x = mixture_case(rng, 20)
    mix, streams = hyper_case(rng, 20)
    for function, values in ((lambda x: [mixture(x)], x), (mix, streams)):
        clean = function(values)
        values = values.copy()
        values[0, 7] = np.nan
        for before, after in zip(clean, function(values), strict=True):
            assert np.isnan(after[0, 7]).all()
            np.testing.assert_array_equal(np.delete(after, 7, axis=1), np.delete(before, 7, axis=1))


def shared_expert(gates: np.ndarray, limit: float) -> np.ndarray:
    """The sum over 16 columns of silu(gate) * 1, for gates [16]; the routed expert adds zero."""
    shared_in = np.concatenate([gates, np.ones(16)])[None].astype(np.float32)
    weights = {
        "g": np.zeros((1, 1), np.float32), "a": shared_in, "b": np.ones((16, 1), np.float32), "r": np.zeros(1, np.float32),
        "c": np.zeros((1, 1, 32), np.float32), "d": np.zeros((1, 16, 1), np.float32),
    }  # fmt: skip
    feeds = {"x": np.ones((1, 1, 1), np.float32), "ids": np.zeros((1, 1), np.int64)}

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Value:
        return ops.mixture(op, v["x"], v["ids"], *(v[n] for n in "gabrcd"), Experts(1, 1, 16, 16, limit, 1.0))

    return run(NativeOps(False), emit, feeds, weights)[0]


def test_gates_at_the_edges_of_float32() -> None:
    """The clamp lets NaN through, where one that compares the other way round gives the limit; silu(-1e38) is 0, not -0.6."""
    assert np.isnan(shared_expert(np.full(16, np.nan, np.float32), limit=1.5)).all()
    large = -np.geomspace(80, 1e38, 16).astype(np.float32)
    np.testing.assert_allclose(shared_expert(large, limit=3e38), 0, atol=1e-30)


def test_no_node_is_no_work() -> None:
    rng = np.random.default_rng(6)
    mixture, x = mixture_case(rng, 0)
    mix, streams = hyper_case(rng, 0)
    assert mixture(x).shape == (1, 0, 32)
    weights = {"w": normal(rng, 32, 5 * 16)}  # a panel and a part of one
    [y] = run(
        NativeOps(False), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": normal(rng, 1, 0, 32)}, weights
    )
    assert y.shape == (1, 0, 80)
    assert [out.shape for out in mix(streams)] == [(1, 0, 8), (1, 0, 1, 4), (1, 0, 4, 4)]


def test_log_probs_of_large_logits() -> None:
    """The largest logit is taken off first: log-probabilities keep their digits however large the logits are."""
    rng = np.random.default_rng(7)
    head = (30000 + normal(rng, 1, 100)).astype(np.float32)
    values, _ = run(
        NativeOps(False),
        lambda ops, op, v: _typed(ops.top_log_probs(op, v["x"], v["head"], 5)),
        {"x": np.ones((1, 1, 1), np.float32)},
        {"head": head},
    )
    logits = head[0].astype(np.float64) - head.max()
    exact = np.sort(logits - np.log(np.exp(logits).sum()))[::-1][:5]
    np.testing.assert_allclose(values[0, 0], exact, atol=1e-5)


def test_entries_that_score_no_number_are_kept_first() -> None:
    """No order is defined by comparing them, and a selection by none may leave its bounds."""
    rng = np.random.default_rng(8)
    entries = normal(rng, 301, 16)
    broken = 1 + rng.permutation(300)[:20]
    entries[broken] = np.nan
    feeds = {
        "q": normal(rng, 1, 2, DIMS.query_width + 20 * 16), "w": normal(rng, 1, 2, 20), "idx": entries,
        "rows": np.arange(1, 301).reshape(1, -1), "branch": normal(rng, 1, 1, 16), "mask": np.zeros((1, 2, 301), np.float32),
    }  # fmt: skip
    rope = rope_of(feeds, rng, 1, 2)

    def emit(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> Value:
        rows = NodeRows(v["q"], None, None, v["q"], v["w"])
        return ops.index_select(op, rows, v["idx"], v["rows"], v["branch"], v["mask"], rope(v), 32, DIMS)

    [mask] = run(NativeOps(False), emit, feeds, {})
    assert ((mask == 0).sum(axis=-1) == 32).all()
    assert (mask[..., broken - 1] == 0).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes() -> None:
    """It has none of its parent's threads, which sleep on a lock that it inherits."""
    import multiprocessing
    import time

    rng = np.random.default_rng(9)
    x, w = normal(rng, 1, 16, 512), normal(rng, 512, 1024)

    def product() -> np.ndarray:
        return run(NativeOps(False), lambda ops, op, v: ops.linear(op, v["x"], v["w"]), {"x": x}, {"w": w})[0]

    native.set_num_threads(4)
    want = product()
    time.sleep(0.05)  # the workers have gone to sleep
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(not all(np.array_equal(product(), want) for _ in range(3)))
    )
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    native.set_num_threads(0)
    assert not alive and child.exitcode == 0


def test_a_library_that_was_cut_off_is_none(tmp_path: Path) -> None:
    whole = Path(str(native.library()))
    copy = tmp_path / whole.name
    for size in (0, 10, 64, 4096, 100_000, whole.stat().st_size - 1):
        copy.write_bytes(whole.read_bytes()[:size])
        assert native._instruction_set(copy) is None
    copy.write_bytes(whole.read_bytes())
    assert native._instruction_set(copy) == native.instruction_set()
