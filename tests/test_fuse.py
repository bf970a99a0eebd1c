"""Fused nodes give the same bits as the nodes they stand for, and none of those is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.oracle.tiny import write_tiny
from tests.test_function_ops import Arrays, feeds_of, run, sizes_of
from tests.test_native import run as run_ops
from trtllm_v4tree import native
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler.fuse import fuse
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import HyperGains, Op, V4TreeOps, Value, i64

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not compiled")


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("name", ["w16", "mixed"])
def test_the_target_step_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", name, 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    checkpoint, sizes = Checkpoint.open(checkpoint_dir, config, None), sizes_of(config)
    feeds = feeds_of(config, sizes, np.random.default_rng(3))
    plain, fused = (graphs.target_step(config, sizes, NativeOps(half=False)) for _ in range(2))
    fuse(fused)
    layers = config.num_layers
    assert counts(fused)["AttentionProject"] == layers
    assert counts(fused)["HyperPostMix"] == 2 * layers - 1
    assert not counts(fused)["AttentionInputs"] and counts(fused)["PackedLinear"] == layers + 1
    assert counts(plain)["Add"] and not counts(fused)["Add"], "a layer adds where its rows begin by itself"
    assert counts(plain)["Mod"] and not counts(fused)["Mod"], "a layer finds the phase of a position by itself"
    assert counts(fused)["RopeTables"] == counts(fused)["EmbedStreams"] == 1
    assert not any(counts(fused)[name] for name in ("Gather", "GatherND", "Unsqueeze", "Concat"))
    assert counts(fused).total() < 0.7 * counts(plain).total()
    wanted, got = run(plain, checkpoint, tmp_path / "plain", feeds), run(fused, checkpoint, tmp_path / "fused", feeds)
    assert wanted.keys() == got.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def draft_feeds(model: ir.Model, rng: np.random.Generator, batch: int) -> Arrays:
    """Random inputs of a draft round: three catch-up rows and seven of the window."""
    known, feeds = {"B": batch, "S": 3, "W": 7, "W+S": 10}, {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.name is not None
        dims = [d if isinstance(d, int) else known[str(d)] for d in value.shape]
        integer = value.dtype == ir.DataType.INT64
        draw = rng.integers(0, 3, dims) if integer else np.tanh(rng.standard_normal(dims)).astype(np.float32)
        feeds[value.name] = draw
    return feeds


@pytest.mark.parametrize("shape", [(0, 1), (3, 2), (4, 1)])
def test_a_draft_round_is_the_same_to_the_bit(shape: tuple[int, int], tmp_path: Path) -> None:
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", "w16", 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    checkpoint, sizes = Checkpoint.open(checkpoint_dir, config, None), sizes_of(config)
    plain, fused = (graphs.draft_round(config, sizes, NativeOps(half=False), *shape) for _ in range(2))
    fuse(fused)
    left = counts(fused)
    assert left["DraftEntry"] == max(1, shape[0]) and left["DraftProposal"] == shape[0]
    assert not any(left[name] for name in ("HyperMix", "HyperHead", "HyperPost", "TopLogProbs", "DraftFrontier"))
    assert left["Concat"] == (3 if shape[0] else 0), "candidates of all levels are joined, and nothing else"
    feeds = draft_feeds(plain, np.random.default_rng(5), batch=2)
    wanted, got = run(plain, checkpoint, tmp_path / "plain", feeds), run(fused, checkpoint, tmp_path / "fused", feeds)
    for key, value in wanted.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def ends_of_a_step(ops: V4TreeOps, op: Op, v: dict[str, Value]) -> tuple[Value, ...]:
    """What stands before and behind the blocks of a target step."""
    row = op.Unsqueeze(op.Gather(v["table"], v["tokens"], axis=0), i64(op, 2))
    streams = op.Concat(row, row, row, axis=2)
    picked = op.GatherND(streams, op.Unsqueeze(v["nodes"], i64(op, -1)), batch_dims=1)
    head = ops.hyper_head(op, picked, v["fn"], v["base"], v["norm"], HyperGains(3, 1, 1e-3, 1e-6))
    near, far = (ops.rope_tables(op, v[name], v[freq]) for name, freq in (("near", "slow"), ("far", "fast")))
    made = streams, head, near.cos, near.sin, near.neg_sin, far.cos, far.sin, far.neg_sin
    return tuple(map(op.Identity, made))


def ends_case(rng: np.random.Generator, nodes: list[list[int]]) -> tuple[Arrays, Arrays]:
    feeds = {
        "tokens": rng.integers(0, 9, (2, 4)),
        "nodes": np.array(nodes),
        "near": np.array([[5, 6, 6, 7], [0, 1, 1, 1]]),
        "far": np.array([[9000], [3]]),
    }
    weights = {"table": (9, 8), "fn": (24, 3), "base": (3,), "norm": (8,), "slow": (4,), "fast": (2,)}
    return feeds, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}


@pytest.mark.parametrize(
    "nodes", [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 3], [3, 2, 1, 0]], [[2], [0]], [[1, 1, 3, 0, 2]] * 2, [[], []]]
)
def test_the_ends_of_a_step_are_the_same_to_the_bit(nodes: list[list[int]]) -> None:
    feeds, weights = ends_case(np.random.default_rng(0), nodes)
    feeds["nodes"] = feeds["nodes"].astype(np.int64).reshape(2, -1)
    seen: list[Counter[str]] = []

    def fused(model: ir.Model) -> None:
        fuse(model)
        seen.append(counts(model))

    wanted = run_ops(NativeOps(half=False), ends_of_a_step, feeds, weights)
    got = run_ops(NativeOps(half=False), ends_of_a_step, feeds, weights, fused)
    assert {"EmbedStreams": 1, "HyperHead": 1, "RopeTables": 1}.items() <= seen[0].items()
    assert not any(seen[0][name] for name in ("Gather", "GatherND", "Unsqueeze", "Concat"))
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(b, a)


@pytest.mark.parametrize(
    ("feed", "values", "message"),
    [
        ("tokens", [[0, 9, 0, 0]] * 2, "a token id is out of range"),
        ("tokens", [[0, -1, 0, 0]] * 2, "a token id is out of range"),
        ("nodes", [[0, 4]] * 2, "a node is out of range"),
        ("nodes", [[0, -1]] * 2, "a node is out of range"),
        ("nodes", [[0, 1]], "not as many rows of nodes as sequences"),
    ],
)
def test_what_lies_outside_is_an_error(feed: str, values: list[list[int]], message: str) -> None:
    feeds, weights = ends_case(np.random.default_rng(0), [[0, 1]] * 2)
    feeds[feed] = np.array(values)
    with pytest.raises(Exception, match=message):
        run_ops(NativeOps(half=False), ends_of_a_step, feeds, weights, fuse)
