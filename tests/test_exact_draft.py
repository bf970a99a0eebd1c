"""The draft round against the oracle's MTP: tokens, tree and cumulative log-probabilities of every candidate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trtllm_v4tree.runtime.executor import DraftResult
from trtllm_v4tree.runtime.tree import select_nodes

from .harness import Built, Held, Tree, chain_tree, random_path
from .oracle.trees import random_tree

TOLERANCE = 2e-4
SHAPES = [(1, 1), (4, 1), (3, 2), (3, 3)]


def filled(built: Built, rng: np.random.Generator, lengths: list[int], chunks: list[list[int]]) -> list[Held]:
    """Sequences of random tokens, prefilled in the given chunks; the last one is what the drafter has not read."""
    driver = built.driver
    batch = driver.start(rng, len(lengths))
    for b, length in enumerate(lengths):
        ids = rng.integers(0, driver.config.vocab_size, length).tolist()
        batch[b] = driver.prefill(batch[b], ids, chunks[b])
    return batch


class Proposals:
    """Log-probabilities of the oracle's drafter behind a known text, by draft path."""

    def __init__(self, built: Built, ids: list[int]) -> None:
        self.built, self.ids = built, ids
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def after(self, drafted: tuple[int, ...]) -> np.ndarray:
        """[V] behind the draft path `drafted`; one chain gives the rows of all its prefixes."""
        if drafted not in self.known:
            for count, logits in enumerate(self.built.oracle.mtp_chain_logits(self.ids, drafted)):
                logits = logits.astype(np.float64)
                top = logits.max()
                self.known[drafted[:count]] = logits - top - np.log(np.exp(logits - top).sum())
        return self.known[drafted]


def check_candidates(built: Built, ids: list[int], result: DraftResult, b: int, steps: int, topk: int) -> None:
    """By level: the top-k children of each of the k best candidates of the level before, scored along their paths."""
    tokens, parents, scores = result.tokens[b], result.parents[b], result.scores[b]
    assert len(tokens) == len(parents) == len(scores) == topk + (steps - 1) * topk * topk
    drafted: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        drafted.append((*(drafted[parent] if parent >= 0 else ()), token))
    oracle = Proposals(built, ids)
    expanded = sorted(set(parents.tolist()), key=lambda p: -len(drafted[p]) if p >= 0 else 0)
    for parent in expanded:
        path = drafted[parent] if parent >= 0 else ()
        log_probs, children = oracle.after(path), np.flatnonzero(parents == parent)
        where = f"{built.name} s{steps}_k{topk}: {len(ids)} tokens, behind {path}"
        along = sum(oracle.after(path[:i])[token] for i, token in enumerate(path))
        np.testing.assert_allclose(
            scores[children], along + log_probs[tokens[children]], rtol=0, atol=TOLERANCE, err_msg=where
        )
        _check_best(log_probs, tokens[children], where)
    _check_frontiers(parents, scores, steps, topk)


def _check_best(log_probs: np.ndarray, tokens: np.ndarray, where: str) -> None:
    """Tokens are the k best, best first; a near tie may go either way."""
    best = np.argsort(-log_probs, kind="stable")[: len(tokens)]
    gap = np.abs(log_probs[best] - log_probs[tokens])
    assert len(set(tokens.tolist())) == len(tokens) and (gap < TOLERANCE).all(), f"{where}: {tokens} instead of {best}"


def _check_frontiers(parents: np.ndarray, scores: np.ndarray, steps: int, topk: int) -> None:
    """The k best of a level by cumulative score are the parents of the next level, each k times, best first."""
    assert (parents[:topk] == -1).all()
    first, last = 0, topk
    for _ in range(1, steps):
        best = first + np.argsort(-scores[first:last], kind="stable")[:topk]
        first, last = last, last + topk * topk
        np.testing.assert_array_equal(parents[first:last], np.repeat(best, topk))


def proposed_trees(result: DraftResult, roots: list[int], budget: int) -> list[Tree]:
    """The `budget` best candidates of every sequence behind its root."""
    budgets = np.full(len(roots), budget)
    chosen = select_nodes(result.scores, result.parents, result.tokens, budgets, roots)
    return [(np.array(p), np.array(t)) for p, t in zip(chosen.parents, chosen.tokens, strict=True)]


@pytest.mark.parametrize(("steps", "topk"), SHAPES)
def test_rounds_of_drafts(built: Built, steps: int, topk: int) -> None:
    """Draft, verify, commit of a random path: contexts below and above the window, several accepted rows pending."""
    rng, driver = np.random.default_rng(steps * 10 + topk), built.driver
    batch = filled(built, rng, [5, 42, 95, 141], [[5], [1, 9, 32], [64, 31], [64, 12, 63, 2]])
    seen: set[int] = set()
    for _ in range(4):
        seen |= {h.pending for h in batch}
        roots = rng.integers(0, driver.config.vocab_size, len(batch)).tolist()
        driver.poison(batch)
        drafted = driver.draft(batch, roots, steps, topk)
        for b, h in enumerate(batch):
            check_candidates(built, [*h.ids, roots[b]], drafted.result, b, steps, topk)
        trees = proposed_trees(drafted.result, roots, min(8, 1 + drafted.result.tokens.shape[1]))
        done = driver.verify(batch, trees)
        paths = [random_path(rng, parents) for parents, _ in trees]
        batch = driver.commit(done, paths, driver.poison_drafter(drafted))
    assert {2, 5, 31, 32} <= seen, "prefill chunks of several sizes were pending"


def test_long_commits_between_drafts(built: Built) -> None:
    """Chains of 16 committed whole: as many rows pending as a window of 16 holds."""
    rng, driver = np.random.default_rng(77), built.driver
    batch = filled(built, rng, [33, 150], [[33], [64]])
    for steps, topk in ((4, 1), (3, 2), (3, 3)):
        trees = [chain_tree(rng.integers(0, driver.config.vocab_size, n)) for n in (16, 11)]
        batch = driver.advance(batch, trees, [list(range(len(tokens))) for _, tokens in trees], poisoned=True)
        roots = rng.integers(0, driver.config.vocab_size, 2).tolist()
        drafted = driver.draft(batch, roots, steps, topk)
        for b, h in enumerate(batch):
            assert h.pending == (16, 11)[b]
            check_candidates(built, [*h.ids, roots[b]], drafted.result, b, steps, topk)


def test_commits_that_the_drafter_did_not_follow(built: Built) -> None:
    """Streams of several commits wait in line until the drafter reads them all at once."""
    rng, driver = np.random.default_rng(88), built.driver
    batch = filled(built, rng, [29, 140, 0], [[29], [35], [1]])
    for turn in range(3):
        trees = [random_tree(rng, 6, driver.config.vocab_size, ("chain", "bushy", "comb")[turn]) for _ in batch]
        driver.poison(batch)
        paths = [random_path(rng, parents) for parents, _ in trees]
        done = driver.poison_scratch(driver.verify(batch, trees), paths, [len(p) for p in paths])
        batch = driver.commit(done, paths, behind=True)
    assert batch[0].pending > 29 and batch[1].pending > 35 and batch[2].pending == batch[2].length
    driver.poison(batch)
    roots = rng.integers(0, driver.config.vocab_size, 3).tolist()
    drafted = driver.draft(batch, roots, 3, 2)
    for b, h in enumerate(batch):
        check_candidates(built, [*h.ids, roots[b]], drafted.result, b, 3, 2)


def test_a_draft_needs_two_known_tokens_only(built: Built) -> None:
    """The shortest context: one committed token and the root."""
    rng, driver = np.random.default_rng(3), built.driver
    batch = filled(built, rng, [1, 2], [[1], [1]])
    drafted = driver.draft(batch, [9, 17], 3, 3)
    for b, h in enumerate(batch):
        check_candidates(built, [*h.ids, (9, 17)[b]], drafted.result, b, 3, 3)


def test_the_chunking_of_a_prefill_does_not_reach_the_draft(built: Built) -> None:
    """The same text in other chunks, hence other pending rows: the same proposals up to rounding."""
    driver, results = built.driver, []
    ids = np.random.default_rng(2).integers(0, driver.config.vocab_size, 103).tolist()
    for chunks in ([64], [1], [7, 50, 3, 40]):
        [held] = driver.start(np.random.default_rng(1), 1)
        held = driver.prefill(held, ids, chunks, poisoned=True)
        results.append(driver.draft([held], [50], 3, 3).result)
    for other in results[1:]:
        np.testing.assert_array_equal(other.tokens, results[0].tokens)
        np.testing.assert_array_equal(other.parents, results[0].parents)
        np.testing.assert_allclose(other.scores, results[0].scores, rtol=0, atol=TOLERANCE / 4)


def test_drafting_does_not_write(tiny: Callable[[str], Built]) -> None:
    built = tiny("w16")
    rng, driver = np.random.default_rng(4), built.driver
    batch = filled(built, rng, [40, 7], [[40], [3]])
    before = driver.save()
    driver.draft(batch, [1, 2], 3, 2)
    for name, pool in driver.save().items():
        np.testing.assert_array_equal(pool, before[name], err_msg=name)


def test_nano_drafts(nano: Built) -> None:
    rng, driver = np.random.default_rng(6), nano.driver
    batch = filled(nano, rng, [200, 20], [[64, 63, 64, 9], [20]])
    for steps, topk in ((3, 3), (4, 1)):
        roots = rng.integers(0, driver.config.vocab_size, 2).tolist()
        drafted = driver.draft(batch, roots, steps, topk)
        for b, h in enumerate(batch):
            check_candidates(nano, [*h.ids, roots[b]], drafted.result, b, steps, topk)
        trees = [random_tree(rng, 8, driver.config.vocab_size, "comb") for _ in batch]
        trees = [(parents, np.r_[root, tokens[1:]]) for (parents, tokens), root in zip(trees, roots, strict=True)]
        done = driver.verify(batch, trees)
        batch = driver.commit(done, [random_path(rng, parents) for parents, _ in trees], drafted)
