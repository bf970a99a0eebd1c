"""Fused nodes give the same bits as the nodes they stand for, and none of those is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.oracle.tiny import write_tiny
from tests.test_function_ops import Arrays, feeds_of, run, sizes_of
from trtllm_v4tree import native
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler.fuse import fuse
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network import graphs

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
