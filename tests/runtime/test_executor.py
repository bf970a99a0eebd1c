"""An executor that writes results to the same arrays again returns what one that makes new ones does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime import executor
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tables import Feeds, Sequences, Tree, every_node, step_tables
from trtllm_v4tree.sizes import EngineSizes

from ..harness import Built

Array = NDArray[Any]


def draw_feeds(rng: np.random.Generator, sizes: EngineSizes) -> Feeds:
    """A pass over one or two chains of up to nine nodes that begin anywhere, so that entries and their ends come and go."""
    batch, nodes = int(rng.integers(1, 3)), int(rng.integers(1, 10))
    lengths = rng.integers(0, 200, batch).tolist()
    pages = np.ones((batch, sizes.pages_per_seq), np.int64)
    tree = Tree.make([list(range(-1, nodes - 1))] * batch, rng.integers(0, 50, (batch, nodes)))
    return step_tables(
        sizes, Sequences(list(range(1, 1 + batch)), lengths, pages), tree, every_node(batch, nodes)
    ).feeds


@pytest.mark.parametrize(("most", "most_bytes"), [(32, 4 << 20), (2, 4 << 20), (32, 0)])
def test_results_do_not_depend_on_reuse(
    tiny: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int
) -> None:
    """All sets of results kept, few of them, none."""
    monkeypatch.setattr(executor, "_MOST_HELD", most)
    monkeypatch.setattr(executor, "_MOST_HELD_BYTES", most_bytes)
    engine = tiny("w16").engine
    fresh, again = (
        OnnxRuntimeExecutor(engine, Manifest.read(engine), threads=1, reuse_results=reuse) for reuse in (False, True)
    )
    rng, seen, reused = np.random.default_rng(0), set[int](), 0
    held = []
    for _ in range(80):
        feeds = draw_feeds(rng, fresh.sizes)
        wanted, got = fresh.target(feeds), again.target(feeds)
        np.testing.assert_array_equal(got.logits, wanted.logits)
        assert set(got.scratch) == set(wanted.scratch)
        for name, array in wanted.scratch.items():
            np.testing.assert_array_equal(got.scratch[name], array)
        reused += id(got.logits) in seen
        seen.add(id(got.logits))
        held.append(got.logits)  # so that no other array gets its id
    assert (reused > 20) == (most > 2 and most_bytes > 0)


@pytest.mark.parametrize(("most", "most_bytes"), [(1024, 32 << 10), (2, 32 << 10), (1024, 0)])
def test_tables_are_read_as_they_are_at_the_call(
    tiny: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int
) -> None:
    """Tables that are written to again between calls, some of them no whole piece of memory, with values remembered, few of them, none."""
    monkeypatch.setattr(executor, "_MOST_VALUES", most)
    monkeypatch.setattr(executor, "_MOST_VALUE_BYTES", most_bytes)
    engine = tiny("w16").engine
    fresh, again = (
        OnnxRuntimeExecutor(engine, Manifest.read(engine), threads=1, reuse_results=reuse) for reuse in (False, True)
    )
    rng, places = np.random.default_rng(1), dict[tuple[str, tuple[int, ...], bool], Array]()
    for _ in range(60):
        feeds = draw_feeds(rng, fresh.sizes)
        wanted = fresh.target(feeds).logits
        again.target(written_again(feeds, places, rng))
        got = again.target(written_again(feeds, places, rng)).logits
        np.testing.assert_array_equal(got, wanted)


def written_again(
    feeds: Feeds, places: dict[tuple[str, tuple[int, ...], bool], Array], rng: np.random.Generator
) -> Feeds:
    """The same tables in arrays of earlier calls: whole ones, and every second element of larger ones."""
    out: Feeds = {}
    for name, array in feeds.items():
        key = (name, array.shape, bool(rng.integers(2)))
        if key not in places:
            wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
            places[key] = wide[..., ::2] if key[2] else np.zeros_like(array)
        places[key][...] = array
        out[name] = places[key]  # type: ignore[assignment]
    return out
