"""Random token trees for tests. Nodes are in topological order; the root is node 0 with parent -1."""

from collections.abc import Sequence

import numpy as np

SHAPES = ("root", "chain", "star", "comb", "bushy", "random")


def random_tree(
    rng: np.random.Generator, max_nodes: int, vocab: int, shape: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(parents int64 [N], tokens int64 [N]) with 1 <= N <= max_nodes; siblings carry different tokens.

    Shapes: root (one node), chain, star (all nodes below the root), comb (a chain with one leaf beside each link),
    bushy (wide and shallow, depth by depth), random (any earlier node may be the parent: nodes not sorted by depth).
    Without `shape` one is drawn.
    """
    assert max_nodes >= 1 and vocab >= max_nodes, "siblings need distinct tokens"
    shape = shape or str(rng.choice(SHAPES))
    count = 1 if shape == "root" else int(rng.integers(1, max_nodes + 1))
    parents = np.array([-1] + [_parent(rng, shape, node) for node in range(1, count)], dtype=np.int64)
    return parents, _tokens(rng, parents, vocab)


def _parent(rng: np.random.Generator, shape: str, node: int) -> int:
    match shape:
        case "chain":
            return node - 1
        case "star":
            return 0
        case "comb":  # nodes 1 and 2 below 0, nodes 3 and 4 below 1, nodes 5 and 6 below 3, ...
            return 0 if node < 3 else 2 * ((node - 1) // 2) - 1
        case "bushy":  # breadth first, three children at most
            return (node - 1) // 3
        case "random":
            return int(rng.integers(0, node))
    raise ValueError(f"shape {shape!r} is not one of {SHAPES}")


def _tokens(rng: np.random.Generator, parents: np.ndarray, vocab: int) -> np.ndarray:
    tokens = np.empty(len(parents), dtype=np.int64)
    for parent in np.unique(parents):
        siblings = np.flatnonzero(parents == parent)
        tokens[siblings] = rng.choice(vocab, size=len(siblings), replace=False)
    return tokens


def path(parents: Sequence[int] | np.ndarray, node: int) -> list[int]:
    """Node indices from the root to `node`, both included."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(int(node))
        node = int(parents[node])
    return nodes[::-1]


def depths(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [N], root 0."""
    return np.array([len(path(parents, node)) - 1 for node in range(len(parents))], dtype=np.int64)
