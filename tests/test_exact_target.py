"""The target step against the oracle: logits of every node equal a fresh full forward of the node's path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .harness import Built, Driver, Held, Tree, random_path
from .oracle.trees import SHAPES, random_tree

TOLERANCE = 2e-4
NODES = 16


def draw_trees(rng: np.random.Generator, driver: Driver, count: int, turn: int = 0, nodes: int = NODES) -> list[Tree]:
    """One tree per sequence; the shapes take turns."""
    vocab = driver.config.vocab_size
    return [random_tree(rng, nodes, vocab, SHAPES[(turn + b) % len(SHAPES)]) for b in range(count)]


def draw_ids(rng: np.random.Generator, driver: Driver, length: int) -> list[int]:
    return rng.integers(0, driver.config.vocab_size, length).tolist()


def filled(built: Built, rng: np.random.Generator, lengths: list[int]) -> list[Held]:
    """Sequences of random tokens, each prefilled in chunks of random sizes."""
    driver = built.driver
    limit = driver.sizes.prefill_chunk
    out = []
    for held, length in zip(driver.start(rng, len(lengths)), lengths, strict=True):
        chunks = [int(rng.integers(1, limit + 1)), limit] if rng.random() < 0.5 else [limit]
        out.append(driver.prefill(held, draw_ids(rng, driver, length), chunks))
    return out


def verify_exactly(built: Built, held: list[Held], trees: list[Tree]):
    """Verifies the batch and compares every node."""
    done = built.driver.verify(held, trees)
    for b, (h, (parents, tokens)) in enumerate(zip(held, trees, strict=True)):
        expected = built.oracle.tree(h.ids, parents, tokens).logits
        where = f"{built.name}: prefix {h.length}, parents {parents.tolist()}"
        np.testing.assert_allclose(done.logits[b, : len(parents)], expected, rtol=0, atol=TOLERANCE, err_msg=where)
    return done


@pytest.mark.parametrize(
    ("name", "starts", "rounds"),
    [
        ("w16", [0, 17, 62, 101], 16),
        ("mixed", [1, 16, 53, 130], 16),
        pytest.param("w128", [128, 160, 192, 224], 32, marks=pytest.mark.slow),
    ],
)
def test_every_phase_of_the_prefix(tiny: Callable[[str], Built], name: str, starts: list[int], rounds: int) -> None:
    """Sequences grow by one token, the first of an accepted path, so every phase mod 4 and mod the HCA ratio is met."""
    built, rng = tiny(name), np.random.default_rng(11)
    held = filled(built, rng, starts)
    met = set()
    for turn in range(rounds):
        met |= {h.length % built.driver.sizes.hca_ratio for h in held}
        trees = draw_trees(rng, built.driver, len(held), turn)
        done = verify_exactly(built, held, trees)
        paths = [random_path(rng, parents) for parents, _ in trees]
        held = built.driver.commit(done, paths, keep=[1] * len(held))
    assert met == set(range(built.driver.sizes.hca_ratio))


@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_commits_of_random_paths(built: Built, seed: int) -> None:
    """Batches of 1 to 4 sequences of mixed lengths; whole and partial paths, and sequences that keep nothing."""
    rng = np.random.default_rng(100 + seed)
    held = filled(built, rng, rng.integers(0, 150, 1 + seed % 4).tolist())
    for turn in range(6):
        trees = draw_trees(rng, built.driver, len(held), turn + seed)
        done = verify_exactly(built, held, trees)
        paths = [random_path(rng, parents) for parents, _ in trees]
        keep = [len(p) if rng.random() < 0.5 else int(rng.integers(0, len(p) + 1)) for p in paths]
        order = rng.permutation(len(held))
        held = built.driver.commit(done, paths, keep=keep)
        held = [held[i] for i in order]


@pytest.mark.parametrize("length", range(5))
def test_before_the_first_entries(built: Built, length: int) -> None:
    """Alone, with no entry committed or completed: nothing to select from."""
    rng = np.random.default_rng(length)
    held = filled(built, rng, [length])
    for shape in SHAPES:
        verify_exactly(built, held, [random_tree(rng, NODES, built.driver.config.vocab_size, shape)])


@pytest.mark.parametrize("length", [243, 250, 508])
def test_trees_across_page_borders(built: Built, length: int) -> None:
    """Paths that leave a page of 256 tokens, with far more entries than the sparse engines select."""
    rng = np.random.default_rng(length)
    held = filled(built, rng, [length])
    for turn in range(2):
        trees = [random_tree(rng, NODES, built.driver.config.vocab_size, ("chain", "random")[turn])]
        trees[0] = trees[0] if turn else _chain_of(rng, built.driver, NODES)
        done = verify_exactly(built, held, trees)
        held = built.driver.commit(done, [random_path(rng, trees[0][0])] if turn else [list(range(NODES))])
    verify_exactly(built, held, draw_trees(rng, built.driver, 1, turn=4))


def _chain_of(rng: np.random.Generator, driver: Driver, length: int) -> Tree:
    return np.arange(-1, length - 1, dtype=np.int64), rng.integers(0, driver.config.vocab_size, length)


def test_the_last_tokens_of_the_context(built: Built) -> None:
    """A tree that ends at `max_seq_len`."""
    rng = np.random.default_rng(5)
    held = filled(built, rng, [built.driver.sizes.max_seq_len - NODES])
    verify_exactly(built, held, [_chain_of(rng, built.driver, NODES)])


def test_a_sequence_does_not_depend_on_its_batch(built: Built) -> None:
    """Alone, or beside three others and padding, a tree gets the same logits up to rounding."""
    rng = np.random.default_rng(8)
    held = filled(built, rng, [90, 3, 41, 140])
    trees = draw_trees(rng, built.driver, 4, turn=2)
    together = built.driver.verify(held, trees).logits
    for b, tree in enumerate(trees):
        alone = built.driver.verify([held[b]], [tree]).logits[0]
        np.testing.assert_allclose(together[b, : len(alone)], alone, rtol=0, atol=TOLERANCE / 4)


def test_nano_over_rounds(nano: Built) -> None:
    rng = np.random.default_rng(2)
    held = filled(nano, rng, [127, 5, 260])
    for turn in range(4):
        trees = draw_trees(rng, nano.driver, len(held), turn)
        done = verify_exactly(nano, held, trees)
        held = nano.driver.commit(done, [random_path(rng, parents) for parents, _ in trees])
