"""Decoder blocks as one node give the same bits as its operators one by one, however many threads share the rows."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.oracle.tiny import write_tiny
from tests.test_function_ops import Arrays, feeds_of, runner, sizes_of
from tests.test_fuse import draft_feeds
from trtllm_v4tree import contract, native
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler import region
from trtllm_v4tree.compiler.fuse import fuse
from trtllm_v4tree.compiler.native_ops import NativeOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network import draft, graphs

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not compiled")

Case = tuple[ModelConfig, Callable[[Arrays], Arrays], Callable[[Arrays], Arrays]]


@pytest.fixture(autouse=True)
def all_threads_again() -> Iterator[None]:
    yield
    native.set_num_threads(0)
    native.set_patience(1000)


def joined(model: ir.Model) -> ir.Model:
    fuse(model)
    region.join(model)
    return model


@pytest.fixture(scope="module", params=["w16", "mixed"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A config, and its target step with fused operators and as a region."""
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint_dir = write_tiny(directory / "checkpoint", request.param, 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    checkpoint = Checkpoint.open(checkpoint_dir, config, None)
    apart, whole = (graphs.target_step(config, sizes_of(config), NativeOps(half=False)) for _ in range(2))
    fuse(apart)
    return (
        config,
        runner(apart, checkpoint, directory / "apart"),
        runner(joined(whole), checkpoint, directory / "whole"),
    )


def of_batch(config: ModelConfig, feeds: Arrays, sequences: list[int]) -> Arrays:
    """Feeds of some of the sequences, each as often as it is named."""
    batched = {t.name for t in contract.target_step(config, sizes_of(config)).inputs if t.shape[0] == "B"}
    return {name: array[sequences] if name in batched else array for name, array in feeds.items()}


def members() -> int:
    """Threads that shared the rows of the last region."""
    return int(ctypes.CDLL(str(native.library())).v4tree_region_members())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sequences", [[1], [0, 1], [0, 1, 1], [0, 1, 0, 1, 1]], ids=len)
@pytest.mark.parametrize("nodes", [1, 2, 9, 16])
def test_same_bits(case: Case, nodes: int, sequences: list[int], threads: int) -> None:
    config, apart, whole = case
    native.set_num_threads(threads)
    for seed in range(4):
        feeds = feeds_of(config, sizes_of(config), np.random.default_rng(seed), nodes)
        feeds = of_batch(config, feeds, sequences)
        wanted, got = apart(feeds), whole(feeds)
        assert wanted.keys() == got.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)


@pytest.mark.parametrize("fold_limit", [draft.FOLD_LIMIT, 0], ids=["table", "embedding between levels"])
@pytest.mark.parametrize("shape", [(0, 1), (3, 2), (4, 1)])
def test_a_draft_round_is_the_same_to_the_bit(
    shape: tuple[int, int], fold_limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "FOLD_LIMIT", fold_limit)
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", "w16", 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    checkpoint = Checkpoint.open(checkpoint_dir, config, None)
    apart, whole = (graphs.draft_round(config, sizes_of(config), NativeOps(half=False), *shape) for _ in range(2))
    fuse(apart)
    assert sum(node.op_type == "Region" for node in joined(whole).graph) == (max(1, shape[0]) if fold_limit == 0 else 1)
    one_by_one, at_once = runner(apart, checkpoint, tmp_path / "apart"), runner(whole, checkpoint, tmp_path / "whole")
    for threads, batch, seed in itertools.product((1, 2, 3), (1, 2, 3, 5), range(3)):
        native.set_num_threads(threads)
        feeds = draft_feeds(apart, np.random.default_rng(seed), batch)
        wanted, got = one_by_one(feeds), at_once(feeds)
        for key, value in wanted.items():
            np.testing.assert_array_equal(got[key], value, err_msg=f"{key}, {threads} threads, {batch} sequences")


def test_threads_share_the_rows(case: Case) -> None:
    config, _, whole = case
    feeds = feeds_of(config, sizes_of(config), np.random.default_rng(0))
    native.set_num_threads(2)
    seen: set[int] = set()
    until = time.monotonic() + 30  # beside other programs a second thread comes late for a while
    while 2 not in seen and time.monotonic() < until:
        seen.add(whole(feeds) and members())
    assert seen <= {1, 2} and 2 in seen, "a second thread never came in time"
    native.set_num_threads(1)
    assert whole(feeds) and members() == 1


def test_threads_that_sleep_are_not_waited_for_without_end(case: Case) -> None:
    config, apart, whole = case
    native.set_num_threads(2)
    native.set_patience(0)
    for seed in range(30):
        feeds = feeds_of(config, sizes_of(config), np.random.default_rng(seed))
        time.sleep(0.002)
        np.testing.assert_array_equal(whole(feeds)["logits"], apart(feeds)["logits"])


@pytest.mark.parametrize("sequences", [[0], [0, 1]], ids=len)
def test_a_failure_in_one_share_is_told_and_the_next_pass_works(case: Case, sequences: list[int]) -> None:
    config, apart, whole = case
    native.set_num_threads(2)
    feeds = of_batch(config, feeds_of(config, sizes_of(config), np.random.default_rng(1)), sequences)
    for name in ("window_rows", "hca_rows", "slots"):
        bad = feeds[name].copy()
        bad[-1] = 10**6
        for _ in range(20):
            with pytest.raises(Exception, match="out of range"):
                whole({**feeds, name: bad})
    np.testing.assert_array_equal(whole(feeds)["logits"], apart(feeds)["logits"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("HyperMix", "HyperMist", 1), "no region can hold"),
        (lambda text: text.replace("streams=", "rivers=", 1), "lacks an attribute"),
        (lambda text: text.replace("; i0 ", "; i9999 ", 1), "fewer inputs"),
        (lambda text: text.replace("; i0 ", "; - ", 1), "lacks an input"),
        (lambda text: text.replace("; i0 ", "; t8 ", 1), "made later"),
        (lambda text: text.replace("; i0 ", "; x0 ", 1), "reads what is nowhere"),
        (lambda text: text.replace("; t0 ", "; t1 ", 1), "made twice"),
        (lambda text: text + text[text.rindex("\noutput") :], "twice an output"),
        (lambda text: text[: text.index("\noutput")], "must be an output"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(change: Callable[[str], str], complaint: str, tmp_path: Path) -> None:
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", "mixed", 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    model = joined(graphs.target_step(config, sizes_of(config), NativeOps(half=False)))
    node = next(node for node in model.graph if node.op_type == "Region")
    text = node.attributes["program"].as_string()
    assert change(text) != text
    node.attributes["program"] = ir.AttrString("program", change(text))
    with pytest.raises(Exception, match=complaint):
        runner(model, Checkpoint.open(checkpoint_dir, config, None), tmp_path / "model")


def test_the_blocks_are_one_node(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(write_tiny(tmp_path / "checkpoint", "mixed", 1))
    model = joined(graphs.target_step(config, sizes_of(config), NativeOps(half=False)))
    left = Counter(node.op_type for node in model.graph)
    assert left["Region"] == 1 and left["HyperHead"] == 1 and left["PackedLinear"] == 1
    assert not any(
        left[name] for name in ("TreePool", "TreeAttention", "HyperPostMix", "MixtureOfExperts", "StackLayers")
    )
    made = next(node for node in model.graph if node.op_type == "Region")
    assert made.attributes["weight_bytes"].as_int() > 0
    assert len(made.attributes["kinds"].as_string()) == len(made.inputs)
