"""An executor that writes results to the same arrays again returns what one that makes new ones does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime import executor
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tables import Feeds, Sequences, Tree, every_node, step_tables
from trtllm_v4tree.sizes import EngineSizes

from ..harness import Built


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
