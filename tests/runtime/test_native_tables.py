"""The library's tables are those of `tables.py`, array for array, for batches of trees of any place, engine and width."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import pytest

from trtllm_v4tree import native
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.runtime import tables
from trtllm_v4tree.runtime.native_tables import NativeTables, PythonTables, make_tables
from trtllm_v4tree.runtime.tree import PAD
from trtllm_v4tree.sizes import EngineSizes

from ..oracle.tiny import CONFIGS

SIZES = EngineSizes.make(
    ModelConfig.from_dict(CONFIGS["w16"]), max_batch_size=4, max_seq_len=1024, max_verify_tokens=64, prefill_chunk=128
)
needs_library = pytest.mark.skipif(native.library() is None, reason="the native library is not compiled")


def same(got: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        one, other = np.asarray(got[name]), np.asarray(value)
        assert one.dtype == other.dtype and one.flags["C_CONTIGUOUS"], name
        np.testing.assert_array_equal(one, other, err_msg=name)


def engines() -> list[EngineSizes]:
    """Windows shorter and longer than a tree, layers of one kind alone, with a drafter and without."""
    rng = random.Random(1)
    kinds = [(2, 2), (0, 2), (2, 0), (0, 0)]
    return [
        dataclasses.replace(
            SIZES, window=window, csa_ratio=rng.choice([2, 4]), hca_ratio=rng.choice([8, 16, 128]), num_csa=csa,
            num_hca=hca, has_mtp=rng.random() < 0.7,
        )
        for window in (4, 16, 128)
        for csa, hca in kinds
    ]  # fmt: skip


def draw_seqs(rng: random.Random, sizes: EngineSizes, batch: int, longest: int) -> tables.Sequences:
    lengths = [rng.choice([0, 1, 3, rng.randint(0, longest)]) for _ in range(batch)]
    pages = [[rng.randrange(1, sizes.num_pages) for _ in range(sizes.pages_per_seq)] for _ in range(batch)]
    return tables.Sequences(rng.sample(range(sizes.num_slots), batch), lengths, np.array(pages))


def draw_tree(rng: random.Random, batch: int, nodes: int, chains: bool = False) -> tables.Tree:
    """Trees of up to so many nodes, one of them as wide as all."""
    counts = [nodes, *(rng.randint(1, nodes) for _ in range(batch - 1))]
    parents = [
        [-1, *(n - 1 if chains else rng.randrange(n) for n in range(1, count)), *[PAD] * (nodes - count)]
        for count in rng.sample(counts, batch)
    ]
    return tables.Tree.make(parents, [[rng.randrange(1000) for _ in range(nodes)] for _ in range(batch)])


def draw_paths(rng: random.Random, tree: tables.Tree) -> tuple[list[list[int]], list[int]]:
    """A path of each tree, from the root on, and how much of it is kept."""
    paths = []
    for shape in tree.shapes:
        node = rng.choice([n for n, up in enumerate(shape.parents) if up != PAD])
        paths.append(tables.climb(shape.parents, node, len(shape)))
    return paths, [rng.randint(min(1, len(path)), len(path)) for path in paths]


@needs_library
@pytest.mark.parametrize("sizes", engines(), ids=lambda s: f"w{s.window}-csa{s.num_csa}-hca{s.num_hca}")
@pytest.mark.parametrize("most", [12, 64])
def test_every_array_is_that_of_the_python_tables(sizes: EngineSizes, most: int) -> None:
    rng, python, fast = random.Random(most), PythonTables(sizes), make_tables(sizes)
    assert isinstance(fast, NativeTables)
    for _ in range(60):
        batch, nodes = rng.randint(1, 4), rng.randint(1, most)
        seqs = draw_seqs(rng, sizes, batch, sizes.max_seq_len - most - 1)
        tree = draw_tree(rng, batch, nodes, chains=rng.random() < 0.3)
        every = tables.every_node(batch, nodes)
        wanted, got = python.step(seqs, tree, every), fast.step(seqs, tree, every)
        same(got.feeds, wanted.feeds)
        np.testing.assert_array_equal(got.positions, wanted.positions)
        paths, kept = draw_paths(rng, tree)
        same(fast.commit(got, paths, kept), python.commit(wanted, paths, kept))
        if not sizes.has_mtp:
            continue
        pending = [rng.randint(1, min(9, sizes.max_commit)) for _ in range(batch)]
        behind = seqs._replace(lengths=[max(*both) for both in zip(seqs.lengths, pending, strict=True)])
        following = [[rng.randrange(1000) for _ in range(count + rng.randint(0, 2))] for count in pending]
        steps = rng.randint(0, 7)
        for one, other in zip(
            fast.draft(behind, pending, following, steps), python.draft(behind, pending, following, steps), strict=True
        ):
            same(one, other)


@needs_library
def test_buffers_grow_with_what_is_asked_of_them() -> None:
    """Many sequences far on, whose masks are larger than the first buffer; then small ones again in the same buffer."""
    sizes = dataclasses.replace(
        SIZES, max_batch_size=64, max_seq_len=65536, num_pages=1 + 64 * 256, page_tokens=256, num_csa=2, csa_ratio=4
    )
    rng, python, fast = random.Random(0), PythonTables(sizes), make_tables(sizes)
    for batch, longest in ((1, 100), (64, 60000), (2, 100), (64, 60000)):
        seqs, tree = draw_seqs(rng, sizes, batch, longest), draw_tree(rng, batch, 8)
        every = tables.every_node(batch, 8)
        same(fast.step(seqs, tree, every).feeds, python.step(seqs, tree, every).feeds)


@needs_library
def test_chunks_wider_than_a_tree_are_made_in_python() -> None:
    rng, python, fast = random.Random(0), PythonTables(SIZES), make_tables(SIZES)
    seqs, tree = draw_seqs(rng, SIZES, 2, 500), draw_tree(rng, 2, 100, chains=True)
    last = np.zeros((2, 1), np.int64)
    wanted, got = python.step(seqs, tree, last), fast.step(seqs, tree, last)
    same(got.feeds, wanted.feeds)
    paths = [list(range(100 - shape.parents.count(PAD))) for shape in tree.shapes]
    same(fast.commit(got, paths, [len(p) for p in paths]), python.commit(wanted, paths, [len(p) for p in paths]))


@needs_library
def test_what_is_no_path_is_refused() -> None:
    fast = make_tables(SIZES)
    seqs = tables.Sequences([1], [SIZES.csa_ratio - 2], np.ones((1, SIZES.pages_per_seq), np.int64))
    step = fast.step(seqs, tables.Tree.make([[-1, 0, 0, 1]], [[5, 6, 7, 8]]), tables.every_node(1, 4))
    fast.commit(step, [[0, 2]], [2])
    with pytest.raises(AssertionError, match="no path of the tree"):
        fast.commit(step, [[0, 3]], [2])


def test_without_the_library_the_tables_are_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "tables", lambda: None)
    assert isinstance(make_tables(SIZES), PythonTables)
