"""The oracle against itself: checkpoints fit, rows are causal, chains start from true rows."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from .reference import Oracle
from .tiny import CONFIGS, write_tiny
from .trees import SHAPES, depths, path, random_tree

ROOT = Path(__file__).resolve().parents[2]
NANO = next((p for p in (ROOT.parent / "shared/models/v4-nano", ROOT / "models/v4-nano") if p.is_dir()), None)
TOLERANCE = 5e-5


@cache
def _ids(vocab: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, vocab, length).tolist())


@pytest.fixture(scope="module", params=[*CONFIGS, "nano"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, tuple[int, ...]]:
    """An oracle and a prompt that is longer than its HCA window."""
    if request.param != "nano":
        length = 300 if request.param == "w128" else 101
        return Oracle(write_tiny(tmp_path_factory.mktemp("tiny"), request.param, seed=0)), _ids(211, length)
    if NANO is None:
        pytest.skip("v4-nano is neither in shared/models nor in models")
    return Oracle(NANO), _ids(4096, 300)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 16, 33, 64, 100])
def test_a_prefix_gives_the_rows_of_the_full_forward(case: tuple[Oracle, tuple[int, ...]], cut: int) -> None:
    oracle, ids = case
    full, prefix = oracle.forward(ids), oracle.forward(ids[:cut])
    np.testing.assert_allclose(prefix.logits, full.logits[:cut], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(prefix.streams, full.streams[:cut], rtol=0, atol=TOLERANCE)


def test_mtp_rows_are_causal_and_forget_beyond_the_window(case: tuple[Oracle, tuple[int, ...]]) -> None:
    oracle, ids = case
    full = oracle.mtp_logits(ids[:-1], ids[1:])
    np.testing.assert_allclose(oracle.mtp_logits(ids[:40], ids[1:41]), full[:40], rtol=0, atol=TOLERANCE)
    changed = [*ids[1:2], 5 if ids[2] != 5 else 6, *ids[3:]]  # next token of row 1
    reach = np.abs(oracle.mtp_logits(ids[:-1], changed) - full).max(axis=1) > TOLERANCE  # torch rounds by shape
    window = oracle.config.sliding_window
    assert not reach[0] and reach[1] and reach[2] and not reach[1 + window :].any()


def test_a_chain_starts_at_the_last_true_mtp_row(case: tuple[Oracle, tuple[int, ...]]) -> None:
    oracle, ids = case
    chain, true = oracle.mtp_chain(ids[:60], ids[60:64]), oracle.mtp(ids[:59], ids[1:60])
    np.testing.assert_allclose(chain.logits[0], true.logits[-1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(chain.streams[0], true.streams[-1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(oracle.mtp_chain_logits(ids[:60], ids[60:62]), chain.logits[:3], rtol=0, atol=TOLERANCE)
    # Later rows come from Y, not from true streams.
    assert np.abs(chain.logits[1] - oracle.mtp_logits(ids[:60], ids[1:61])[-1]).max() > 1e-2


def test_tree_rows_are_the_last_rows_of_their_paths(case: tuple[Oracle, tuple[int, ...]]) -> None:
    oracle, ids = case
    parents, tokens = random_tree(np.random.default_rng(3), 9, 211, "random")
    rows = oracle.tree(ids[:30], parents, tokens)
    for node in range(len(parents)):
        alone = oracle.forward([*ids[:30], *tokens[path(parents, node)]])
        np.testing.assert_allclose(rows.logits[node], alone.logits[-1], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(rows.streams[node], alone.streams[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_topological_with_distinct_siblings(shape: str) -> None:
    for seed in range(20):
        parents, tokens = random_tree(np.random.default_rng(seed), 12, 13, shape)
        assert 1 <= len(parents) == len(tokens) <= 12
        assert parents[0] == -1 and all(0 <= parents[n] < n for n in range(1, len(parents)))
        assert len({*zip(parents.tolist(), tokens.tolist(), strict=True)}) == len(parents)
        assert path(parents, len(parents) - 1)[0] == 0
        assert (depths(parents)[1:] == depths(parents)[parents[1:]] + 1).all()
