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
    got = walk(parents.tolist(), tokens.tolist(), chosen.tolist())
    for b in range(len(parents)):
        path, emitted = reference(parents[b].tolist(), tokens[b].tolist(), chosen[b].tolist())
        assert (got.paths[b], got.runs[b]) == (path, emitted)
        padding = [-1] * (parents.shape[1] - len(path))
        assert got.path[b].tolist() == path + padding
        assert got.emitted[b].tolist() == emitted + padding
        assert got.counts[b] == len(path)


def test_a_choice_that_does_not_stand_ends_its_walk_without_a_token() -> None:
    """The other walk goes on; nodes and tokens of the first are those before that choice, and the node where it was made."""
    tree, carried, asked = [-1, 0, 1, 2], [7, 1, 2, 3], []

    def choose(rows: list[int], nodes: list[int]) -> list[int | None]:
        asked.append((rows, nodes))
        return [None if (b, n) == (0, 1) else carried[n + 1] if n < 3 else 9 for b, n in zip(rows, nodes, strict=True)]

    got = walk_lazily([tree, tree], [carried, carried], choose)
    assert got.paths == [[0, 1], [0, 1, 2, 3]] and got.runs == [[1], [1, 2, 3, 9]]
    assert asked == [([0, 1], [0, 0]), ([0, 1], [1, 1]), ([1], [2]), ([1], [3])]


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
    same = [[0] * len(parents)]
    assert walk([parents], same, same).paths == [path]


def test_sibling_inside_the_path_is_skipped() -> None:
    """Path [0, 2, 3]: node ids, not a prefix of the node list."""
    got = walk([[-1, 0, 0, 2]], [[9, 4, 5, 6]], [[5, 1, 6, 8]])
    assert (got.paths, got.runs) == ([[0, 2, 3]], [[5, 6, 8]])


def test_eos_at_a_rejected_draft_position_is_not_emitted() -> None:
    eos = 1
    assert walk([[-1, 0, 1]], [[9, eos, 6]], [[7, 6, 6]]).runs == [[7]]


def test_draft_paths_are_the_ancestors_tokens() -> None:
    assert draft_paths([-1, 0, 1, 0, 3], [9, 1, 2, 3, 4]) == [[], [1], [1, 2], [3], [3, 4]]
