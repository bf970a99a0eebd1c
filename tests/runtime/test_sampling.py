"""Sampling against loops over float64 and chi-square; penalties against a per-node recount."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_v4tree.runtime.accept import draft_paths, walk
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.sampling import (
    apply_penalties,
    choose_tokens,
    needs_logit_edits,
    target_distribution,
    top_logprobs,
    uniform,
)

MASK = 2**64 - 1
NAMES = ("temperature", "top_k", "top_p", "min_p")


def splitmix_reference(seed: int, position: int) -> float:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mix((seed + gamma) & MASK)
    return (mix((start + (position + 1) * gamma) & MASK) >> 11) / 2**53


def distribution_reference(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Sort everything, walk down the ranks: the definition, in Python floats."""
    values = [float(x) for x in logits]
    peak = max(values)
    if temperature == 0:
        return [float(i == values.index(peak)) for i in range(len(values))]
    weights = [math.exp((x - peak) / temperature) for x in values]
    ranks = sorted((i for i, w in enumerate(weights) if w >= min_p), key=lambda i: (-weights[i], i))
    ranks = ranks[:top_k] if top_k else ranks
    kept, mass, total = [], 0.0, sum(weights[i] for i in ranks)
    for i in ranks:
        if top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(values))]


def chi_square_p(tokens: np.ndarray, probs: np.ndarray) -> float:
    stats = pytest.importorskip("scipy.stats")
    counts = np.bincount(tokens, minlength=probs.size)
    assert not counts[probs == 0].any(), "a token outside the support was chosen"
    kept = probs > 0
    return float(stats.chisquare(counts[kept], probs[kept] * tokens.size).pvalue)


rows = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    }
)


def columns(args: list[dict]) -> list[np.ndarray]:
    return [np.array([a[name] for a in args]) for name in NAMES]


def make_logits(seed: int, count: int, vocab: int, ties: bool) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32)
    return np.round(logits) if ties else logits


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_uniform_is_splitmix64_in_the_unit_interval(seed: int, position: int) -> None:
    u = uniform([seed], [position])[0]
    assert u == splitmix_reference(seed, position) and 0 <= u < 1


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_uniform_is_flat_and_uncorrelated(axis: str) -> None:
    n = np.arange(40_000)
    u = uniform(n, np.full_like(n, 7)) if axis == "seed" else uniform(np.full_like(n, 7), n)
    assert chi_square_p((u * 100).astype(np.int64), np.full(100, 0.01)) > 1e-4
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), args=rows, ties=st.booleans(), vocab=st.sampled_from([1, 3, 40, 700]))
def test_distribution_equals_reference(seed: int, args: dict, ties: bool, vocab: int) -> None:
    logits = make_logits(seed, 1, vocab, ties)
    got = target_distribution(logits, *columns([args]))[0]
    want = np.array(distribution_reference(logits[0], **args))
    np.testing.assert_allclose(got, want, rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), args=st.lists(rows, min_size=2, max_size=9), vocab=st.sampled_from([40, 3000]))
def test_a_row_does_not_depend_on_the_batch(seed: int, args: list[dict], vocab: int) -> None:
    logits = make_logits(seed, len(args), vocab, ties=False)
    settings_of_rows = columns(args)
    keys = [np.arange(len(args)) + seed, np.arange(len(args)) * 3]
    together = target_distribution(logits, *settings_of_rows)
    tokens = choose_tokens(logits, *settings_of_rows, *keys)
    for r in range(len(args)):
        one = slice(r, r + 1)
        np.testing.assert_array_equal(
            target_distribution(logits[one], *(c[one] for c in settings_of_rows))[0], together[r]
        )
        assert choose_tokens(logits[one], *(c[one] for c in (*settings_of_rows, *keys)))[0] == tokens[r]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), args=rows, vocab=st.sampled_from([1, 40, 64, 65, 700]))
def test_token_is_the_inverse_cdf_in_id_order(seed: int, args: dict, vocab: int) -> None:
    logits = make_logits(seed, 1, vocab, ties=False)
    arrays = columns([args])
    token = choose_tokens(logits, *arrays, [seed], [5])[0]
    probs = target_distribution(logits, *arrays)[0]
    u = uniform([seed], [5])[0]
    assert probs[token] > 0
    assert math.fsum(probs[:token]) - 1e-12 <= u <= math.fsum(probs[: token + 1]) + 1e-12 or args["temperature"] == 0


@pytest.mark.parametrize(
    "args",
    [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.3, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_sampled_tokens_follow_the_exact_distribution(args: dict) -> None:
    count, logits = 20_000, make_logits(3, 1, 12, ties=False) / 3
    tokens = choose_tokens(
        np.repeat(logits, count, axis=0), *columns([args] * count), np.arange(count), np.full(count, 9)
    )
    assert chi_square_p(tokens, np.array(distribution_reference(logits[0], **args))) > 1e-4


def test_pairs_from_a_tree_follow_the_exact_joint_distribution() -> None:
    """Two tokens accepted or not: whatever was drafted, (first, second) has the target's joint distribution."""
    count, vocab = 30_000, 4
    table = make_logits(5, vocab + 1, vocab, ties=False)  # last row: the root's logits
    probs = target_distribution(table, *(np.full(vocab + 1, v) for v in (1.0, 0, 1.0, 0.0)))
    parents = np.tile([-1, 0, 0], (count, 1))
    tokens = np.tile([0, 1, 2], (count, 1))  # tokens 1 and 2 drafted, 0 and 3 never

    def choose(logits: np.ndarray, seeds: np.ndarray, position: int) -> np.ndarray:
        n = len(seeds)
        return choose_tokens(logits, *(np.full(n, v) for v in (1.0, 0, 1.0, 0.0)), seeds, np.full(n, position))

    seeds = np.arange(count)
    chosen = np.stack([choose(table[np.full(count, row)], seeds, p) for row, p in ((vocab, 1), (1, 2), (2, 2))], axis=1)
    first, second = walk(parents.tolist(), tokens.tolist(), chosen.tolist()).emitted[:, :2].T
    later = choose(table[first], seeds, 2)  # what the next round emits where the walk ended at the root
    second = np.where(second >= 0, second, later)
    assert (second == later).all()
    joint = probs[vocab][:, None] * probs[:vocab]
    assert chi_square_p(first * vocab + second, joint.ravel()) > 1e-4


def test_greedy_and_top_1_take_the_lowest_id_of_a_tie() -> None:
    logits = np.array([[0, 5, 5, 1], [5, 0, 0, 5]], np.float32)
    greedy = choose_tokens(logits, [0, 0], [0, 0], [1, 1], [0, 0], [1, 2], [3, 4])
    top_1 = choose_tokens(logits, [1.5, 1.5], [1, 1], [1, 1], [0, 0], [1, 2], [3, 4])
    assert greedy.tolist() == top_1.tolist() == [1, 0] and greedy.dtype == np.int64


def test_masked_tokens_and_extreme_temperatures() -> None:
    logits = np.full((200, 5), -np.inf, np.float32)
    logits[:, [1, 3]] = [2.0, 1.0]
    for temperature in (1e-300, 1.0, 1e300):
        tokens = choose_tokens(
            logits, *(np.full(200, v) for v in (temperature, 0, 1.0, 0.0)), np.arange(200), [0] * 200
        )
        assert set(tokens) == ({1} if temperature < 1 else {1, 3})


def test_broken_logits_are_noticed() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        choose_tokens(np.array([[0, np.nan]], np.float32), [1.0], [0], [1.0], [0.0], [0], [0])


def penalties_reference(row: Any, prompt: list, output: list, path: list, p: SamplingParams, eos: list) -> list[float]:
    counts, result = Counter([*output, *path]), [float(x) for x in row]
    for token in {*prompt, *output, *path}:
        x = result[token]
        x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        result[token] = x - p.frequency_penalty * counts[token] - p.presence_penalty * (counts[token] > 0)
    if len(output) + len(path) < p.min_tokens:
        for token in {*eos, *p.stop_token_ids}:
            result[token] = -math.inf
    return result


ids = st.lists(st.integers(0, 15), max_size=12)


@settings(deadline=None)
@given(prompt=ids, output=ids, paths=st.lists(ids, min_size=1, max_size=6), seed=st.integers(0, 99), data=st.data())
def test_penalties_equal_a_recount_on_every_path(prompt: list, output: list, paths: list, seed: int, data: Any) -> None:
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, -0.5, 1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
        min_tokens=data.draw(st.integers(0, 30)),
        stop_token_ids=[7],
    )
    logits = make_logits(seed, len(paths), 16, ties=False)
    want = [
        penalties_reference(row, prompt, output, path, params, [1]) for row, path in zip(logits, paths, strict=True)
    ]
    before = logits.copy()
    apply_penalties(logits, prompt, output, paths, params, eos_ids=[1])
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    assert needs_logit_edits(params, len(output)) or np.array_equal(before, logits)


def test_root_token_is_counted_once_and_siblings_not_at_all() -> None:
    """Output ends with the root's token 3; nodes 1 and 2 are siblings with tokens 3 and 4, node 3 follows node 1."""
    paths = draft_paths([-1, 0, 0, 1, -2], [3, 3, 4, 5, 0])
    assert paths == [[], [3], [4], [3, 5], []]
    logits = np.zeros((5, 8), np.float32)
    apply_penalties(logits, [1], [2, 3], paths, SamplingParams(frequency_penalty=1.0))
    assert logits[:, 2:6].tolist() == [[-1, -1, 0, 0], [-1, -2, 0, 0], [-1, -1, -1, 0], [-1, -2, 0, -1], [-1, -1, 0, 0]]


def test_min_tokens_counts_every_emitted_token() -> None:
    """One emitted, three wanted: EOS is open again two tokens down the path, not two rounds later."""
    logits = np.zeros((3, 8), np.float32)
    apply_penalties(logits, [], [2], [[], [4], [4, 5]], SamplingParams(min_tokens=3, stop_token_ids=[6, 999]), [1])
    assert np.isneginf(logits[:, 1]).tolist() == np.isneginf(logits[:, 6]).tolist() == [True, True, False]
    assert np.isneginf(logits).sum() == 4


@given(seed=st.integers(0, 999), n=st.integers(0, 20), ties=st.booleans(), vocab=st.sampled_from([4, 50]))
def test_top_logprobs_are_log_softmax(seed: int, n: int, ties: bool, vocab: int) -> None:
    row = make_logits(seed, 1, vocab, ties)[0] * 30
    lse = math.log(math.fsum(math.exp(float(x) - float(row.max())) for x in row)) + float(row.max())
    order = sorted(range(vocab), key=lambda i: (-float(row[i]), i))[:n]
    got = top_logprobs(row, seed % vocab, n)
    assert got.chosen == pytest.approx(float(row[seed % vocab]) - lse, rel=1e-9, abs=1e-9)
    assert [i for i, _ in got.top] == order
    assert [p for _, p in got.top] == pytest.approx([float(row[i]) - lse for i in order], rel=1e-9, abs=1e-9)
