"""The walk against one that looks for children by recursion over node sets, on random trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_v4tree.runtime.accept import draft_paths, walk, walk_lazily


def reference(parents: list[int], tokens: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    path: list[int] = []
    at = parents.index(-1) if -1 in parents else None
    while at is not None:
        path.append(at)
        at = min((i for i, p in enumerate(parents) if p == at and tokens[i] == chosen[path[-1]]), default=None)
    return path, [chosen[i] for i in path]


@st.composite
def trees(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random trees of up to N nodes, padded; few token values, so that branches and equal siblings are common."""
    batch, size, values = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    parents = np.full((batch, size), -2)
    for b in range(batch):
        for i in range(draw(st.integers(0, size))):
            parents[b, i] = draw(st.integers(0, i - 1)) if i else -1
    grid = st.lists(st.integers(0, values - 1), min_size=batch * size, max_size=batch * size)
    return parents, *(np.array(draw(grid)).reshape(batch, size) for _ in range(2))


@settings(deadline=None, max_examples=300)
@given(trees())
def test_walk_equals_reference(tree: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    parents, tokens, chosen = tree
    got = walk(parents, tokens, chosen)
    lazy = walk_lazily(parents, tokens, lambda rows, nodes: chosen[rows, nodes])
    for a, b in zip(got, lazy, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype == np.int64
    for b in range(len(parents)):
        path, emitted = reference(parents[b].tolist(), tokens[b].tolist(), chosen[b].tolist())
        padding = [-1] * (parents.shape[1] - len(path))
        assert got.path[b].tolist() == path + padding
        assert got.emitted[b].tolist() == emitted + padding
        assert got.counts[b] == len(path)


@pytest.mark.parametrize(
    ("parents", "path"),
    [
        ([-1], [0]),
        ([-1, 0, 1, 2], [0, 1, 2, 3]),
        ([-1, 0, 0, 0], [0, 1]),
        ([-1, 0, 1, -2], [0, 1, 2]),
        ([-1, 0, 0, 1], [0, 1, 3]),
        ([-2, -2], []),
    ],
    ids=["root only", "chain", "star of equals", "padded chain", "equal siblings", "padding only"],
)
def test_degenerate_shapes(parents: list[int], path: list[int]) -> None:
    same = np.zeros((1, len(parents)), int)
    got = walk(np.array([parents]), same, same)
    assert got.path[0, : got.counts[0]].tolist() == path


def test_sibling_inside_the_path_is_skipped() -> None:
    """Path [0, 2, 3]: node ids, not a prefix of the node list."""
    got = walk(np.array([[-1, 0, 0, 2]]), np.array([[9, 4, 5, 6]]), np.array([[5, 1, 6, 8]]))
    assert got.path.tolist() == [[0, 2, 3, -1]] and got.emitted.tolist() == [[5, 6, 8, -1]]


def test_eos_at_a_rejected_draft_position_is_not_emitted() -> None:
    eos = 1
    got = walk(np.array([[-1, 0, 1]]), np.array([[9, eos, 6]]), np.array([[7, 6, 6]]))
    assert got.emitted[0, : got.counts[0]].tolist() == [7]


def test_draft_paths_are_the_ancestors_tokens() -> None:
    assert draft_paths([-1, 0, 1, 0, 3], [9, 1, 2, 3, 4]) == [[], [1], [1, 2], [3], [3, 4]]
