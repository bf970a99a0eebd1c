"""The native operators of the commit against the reference bodies and against copies, bit for bit where a row is copied."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.contract import NULL_SCORE
from trtllm_v4tree.network.ops import V4TreeOps

from .test_native import Arrays, normal, run

LAYERS, SLOTS, BATCH, NODES, DIM = 3, 5, 3, 7, 32


def put(ops: V4TreeOps, feeds: Arrays, layers: int) -> np.ndarray:
    """The state with the rows of `feeds`, whose order is that of the operator."""
    return run(ops, lambda o, op, v: o.put_rows(op, *v.values(), layers), feeds, {})[0]


def fold(ops: V4TreeOps, feeds: Arrays) -> np.ndarray:
    return run(ops, lambda o, op, v: o.fold_rows(op, *v.values(), LAYERS), feeds, {})[0]


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_put_rows_copies_named_rows_of_every_layer(layers: int, count: int) -> None:
    rng = np.random.default_rng(count)
    state = normal(rng, layers * 11, DIM)
    scratch = normal(rng, *([layers] if layers > 1 else []), BATCH, NODES, DIM)
    source = rng.integers(0, BATCH * NODES, count)
    target = rng.permutation(11)[:count]
    want = state.reshape(layers, 11, DIM).copy()
    want[:, target] = scratch.reshape(layers, -1, DIM)[:, source]
    feeds = {"state": state, "scratch": scratch, "source": source, "target": target}
    for ops in (V4TreeOps(), NativeOps(half=False)):
        np.testing.assert_array_equal(put(ops, feeds, layers).reshape(want.shape), want)


def fold_case(states: int, seed: int, terms: int) -> Arrays:
    """States with rows of weight zero among them, scores of any magnitude, and a table that names every sort of row."""
    rng = np.random.default_rng(seed)
    halves = 2 if states == 3 else 1
    state = normal(rng, LAYERS * SLOTS, states, 2 * DIM, scale=20.0)
    state[:, 0, :DIM], state[:, 0, DIM:] = NULL_SCORE, 0
    raw = normal(rng, LAYERS, BATCH, NODES, halves * 2 * DIM, scale=20.0)
    slots = 1 + rng.permutation(SLOTS - 1)[:BATCH]
    table = rng.integers(0, states + 1 + halves * NODES, (BATCH, states, terms))
    return {"state": state, "raw": raw, "slots": slots, "table": table}


@pytest.mark.parametrize("states", [1, 3])
@pytest.mark.parametrize("terms", [1, 2, 5, 17])
def test_fold_rows_is_the_reference(states: int, terms: int) -> None:
    for seed in range(4):
        feeds = fold_case(states, seed, terms)
        want, got = fold(V4TreeOps(), feeds), fold(NativeOps(half=False), feeds)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        other = np.setdiff1d(np.arange(SLOTS), feeds["slots"])
        untouched = np.add.outer(np.arange(LAYERS) * SLOTS, other).ravel()
        np.testing.assert_array_equal(got[untouched], feeds["state"][untouched])


def test_a_fold_of_one_row_copies_it_and_of_none_is_null() -> None:
    feeds = fold_case(3, 0, 4)
    null, first = 3, 4
    feeds["table"][:] = null
    feeds["table"][:, 1, 2] = 0  # a state of weight zero
    feeds["table"][:, 2] = [null, first + 5, null, null]
    got = fold(NativeOps(half=False), feeds).reshape(LAYERS, SLOTS, 3, 2 * DIM)[:, feeds["slots"]]
    want = np.concatenate([np.full(DIM, NULL_SCORE, np.float32), np.zeros(DIM, np.float32)])
    assert (got[:, :, :2] == want).all()
    np.testing.assert_array_equal(got[:, :, 2], feeds["raw"].reshape(LAYERS, BATCH, 2 * NODES, 2 * DIM)[:, :, 5])


def test_rows_out_of_range_are_refused() -> None:
    feeds = fold_case(3, 0, 4)
    feeds["table"][0, 0, 0] = 3 + 1 + 2 * NODES
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="a folded row is out of range"):
        fold(NativeOps(half=False), feeds)


def test_a_fold_of_no_sequence_is_no_work() -> None:
    feeds = fold_case(3, 0, 4)
    feeds |= {name: feeds[name][:0] for name in ("slots", "table")} | {"raw": feeds["raw"][:, :0]}
    np.testing.assert_array_equal(fold(NativeOps(half=False), feeds), feeds["state"])
