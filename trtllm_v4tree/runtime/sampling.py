"""The target's own token at every tree node: logit edits, distribution, keyed random choice, logprobs.

Arrays in, arrays out: no clock, no generator state, nothing read from a batch or a step. A row's result depends on
that row's arguments alone, so plain, linear and tree decoding choose the same token for the same (seed, position) and
logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtllm_v4tree.runtime.bad_words import BadWords
from trtllm_v4tree.runtime.params import SamplingParams

Floats = NDArray[np.floating]
Float64s = NDArray[np.float64]
Ints = NDArray[np.int64]
UInts = NDArray[np.uint64]

LOGIT_MARGIN = 1e-3  # logits of different passes over the same tokens were seen to differ by up to 2e-5
CDF_MARGIN = 5e-5
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_TOP_P_WIDTH = 256
_CDF_BLOCK = 64


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities under the raw logits of one row."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first, ties by lower id


def uniform(seed: ArrayLike, position: ArrayLike) -> Float64s:
    """u[R] in [0, 1), multiples of 2**-53, a pure function of (seed, position).

    SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: the output with number `position` of the stream
    that starts at mix(seed + gamma). The first mix keeps the streams of neighbouring seeds apart.
    """
    s = np.atleast_1d(np.asarray(seed)).astype(np.uint64)
    p = np.atleast_1d(np.asarray(position)).astype(np.uint64)
    z = _mix(_mix(s + _GAMMA) + (p + np.uint64(1)) * _GAMMA)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose_tokens(
    logits: Floats,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    seed: ArrayLike,
    position: ArrayLike,
) -> Ints:
    """The token of each row of logits[R, V]; every other argument is [R]. Returns int64[R].

    `position` is that of the token to be emitted, i.e. one more than that of the node whose logits these are.
    Rows with temperature 0 take the argmax (lowest id on ties), others the inverse CDF of `target_distribution` in
    token-id order at `uniform(seed, position)`.
    """
    t = np.asarray(temperature, np.float64)
    chosen = logits.argmax(axis=1)
    if not t.any():
        return chosen
    rows = np.flatnonzero(t)
    probs = target_distribution(
        logits[rows], t[rows], np.asarray(top_k)[rows], np.asarray(top_p)[rows], np.asarray(min_p)[rows]
    )
    chosen[rows] = _inverse_cdf(probs, uniform(np.asarray(seed)[rows], np.asarray(position)[rows]))
    return chosen


def is_certain(
    logits: Floats,
    chosen: Ints,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    seed: ArrayLike,
    position: ArrayLike,
) -> NDArray[np.bool_]:
    """Whether rounding of the logits could not have changed `chosen`; arguments as of `choose_tokens`. Returns bool[R].

    Greedy rows: the best logit leads by LOGIT_MARGIN. Sampled rows: the draw lies CDF_MARGIN inside the chosen token's interval.
    """
    t = np.asarray(temperature, np.float64)
    rivals = np.array(logits, np.float64)
    rows = np.arange(len(chosen))
    rivals[rows, chosen] = -np.inf
    certain = logits[rows, chosen] - rivals.max(axis=1) >= LOGIT_MARGIN
    rows = np.flatnonzero(t)
    if rows.size:
        limits = (np.asarray(x)[rows] for x in (top_k, top_p, min_p))
        cdf = np.cumsum(target_distribution(logits[rows], t[rows], *limits), axis=1)
        u = uniform(np.asarray(seed)[rows], np.asarray(position)[rows])
        at = np.arange(rows.size)
        low = np.where(chosen[rows] > 0, cdf[at, chosen[rows] - 1], -1.0)
        high = np.where(cdf[at, chosen[rows]] < 1.0 - CDF_MARGIN, cdf[at, chosen[rows]], 2.0)
        certain[rows] = (u - low >= CDF_MARGIN) & (high - u >= CDF_MARGIN)
    return certain


def target_distribution(
    logits: Floats, temperature: ArrayLike, top_k: ArrayLike, top_p: ArrayLike, min_p: ArrayLike
) -> Float64s:
    """The distribution that `choose_tokens` samples: logits[R, V], arguments [R] -> probabilities float64[R, V].

    In vLLM's order: temperature, min_p (relative to the most likely token), top_k, then top_p over what is left,
    renormalised. Ranks are by (probability, lower id), so exactly top_k tokens stay and top_k=1 is the argmax.
    top_p keeps the smallest set of first ranks whose mass reaches top_p. Temperature 0 gives the one-hot argmax.
    """
    t = np.asarray(temperature, np.float64)
    weights = logits.astype(np.float64, order="C")
    peak = weights.max(axis=1, keepdims=True)
    assert np.isfinite(peak).all(), "the engine returned a row of logits with NaN, +inf or nothing but -inf"
    weights -= peak
    weights /= np.where(t > 0.0, t, 1.0)[:, None]
    np.exp(weights, out=weights)
    _truncate(weights, np.asarray(top_k, np.int64), np.asarray(top_p, np.float64), np.asarray(min_p, np.float64))
    for row in np.flatnonzero(t == 0.0):
        weights[row] = 0.0
        weights[row, logits[row].argmax()] = 1.0
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def apply_penalties(
    logits: Floats,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    path_tokens: Sequence[Sequence[int]],
    params: SamplingParams,
    eos_ids: Sequence[int] = (),
    bad_words: BadWords | None = None,
) -> None:
    """Edit logits[N, V] of one request's N tree nodes in place, each for its own path.

    prompt_ids, output_ids: the prompt and every token emitted so far. path_tokens[n]: the draft tokens from below the
    root down to node n, n included; empty for the root, whose token is the last of prompt or output (see
    `accept.draft_paths`), so no token is counted twice. As in vLLM: repetition divides positive and multiplies negative
    logits of tokens in prompt, output or path; then frequency x count and presence are subtracted over output and path.
    EOS and stop_token_ids are set to -inf at nodes whose path has emitted fewer than min_tokens, and so is at each node
    what `bad_words` ban after prompt, output and path.
    """
    assert len(path_tokens) == logits.shape[0], "one path per row"
    output = np.asarray(output_ids, np.int64)
    if params.has_penalties:
        _penalise(logits, np.asarray(prompt_ids, np.int64), output, path_tokens, params)
    if output.size < params.min_tokens:
        early = [n for n, path in enumerate(path_tokens) if output.size + len(path) < params.min_tokens]
        ends = [i for i in {*eos_ids, *params.stop_token_ids} if i < logits.shape[1]]
        logits[np.ix_(early, ends)] = -np.inf
    if bad_words is not None:
        for row, path in zip(logits, path_tokens, strict=True):
            row[bad_words.after(prompt_ids, output_ids, path)] = -np.inf


def needs_logit_edits(params: SamplingParams, emitted: int) -> bool:
    """Whether `apply_penalties` would change anything after `emitted` output tokens."""
    return params.has_penalties or params.has_bad_words or emitted < params.min_tokens


def top_logprobs(logits_row: Floats, chosen: int, n: int) -> TokenLogprobs:
    """Logprob of `chosen` and the n most likely tokens from the raw (unedited) logits_row[V], in float64."""
    x = logits_row.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    n = min(n, x.size)
    if n == 0:
        return TokenLogprobs(float(x[chosen]), [])
    floor = np.partition(x, x.size - n)[x.size - n]
    ids = np.flatnonzero(x >= floor)
    ids = ids[np.argsort(-x[ids], kind="stable")][:n]
    return TokenLogprobs(float(x[chosen]), list(zip(ids.tolist(), x[ids].tolist(), strict=True)))


def _mix(z: UInts) -> UInts:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _inverse_cdf(probs: Float64s, u: Float64s) -> Ints:
    """First id whose cumulative mass exceeds u x total; an id of mass 0 is never chosen.

    The sum runs over blocks of ids first and then inside the block that is hit: a plain cumsum is bound by the latency
    of one addition per id.
    """
    rows, starts = np.arange(u.size), np.arange(0, probs.shape[1], _CDF_BLOCK)
    upto = np.cumsum(np.add.reduceat(probs, starts, axis=1), axis=1)
    target = u * upto[:, -1]
    block = np.count_nonzero(upto <= target[:, None], axis=1)
    rest = target - np.where(block > 0, upto[rows, block - 1], 0.0)
    ids = starts[block][:, None] + np.arange(_CDF_BLOCK)
    inside = ids < probs.shape[1]
    mass = np.cumsum(np.where(inside, probs[rows[:, None], np.where(inside, ids, 0)], 0.0), axis=1)
    last = np.count_nonzero(mass < mass[:, -1:], axis=1)  # the two sums of a block may differ in the last bit
    return starts[block] + np.minimum(np.count_nonzero(mass <= rest[:, None], axis=1), last)


def _truncate(weights: Float64s, top_k: Ints, top_p: Float64s, min_p: Float64s) -> None:
    """Zero what min_p, top_k and top_p leave out of weights[R, V], whose largest is 1 in every row."""
    limited = (top_k > 0) & (top_k < weights.shape[1])
    by_k = np.flatnonzero(limited)
    if by_k.size:
        weights[by_k] = _keep_top_k(weights[by_k], top_k[by_k], top_p[by_k], min_p[by_k])
    by_p = np.flatnonzero(~limited & (top_p < 1.0))
    if by_p.size:
        weights[by_p] = _keep_top_p(weights[by_p], top_p[by_p], min_p[by_p])
    by_floor = np.flatnonzero(~limited & (top_p >= 1.0) & (min_p > 0.0))
    if by_floor.size:
        weights[by_floor] *= weights[by_floor] >= min_p[by_floor, None]


def _keep_top_k(weights: Float64s, k: Ints, p: Float64s, floor: Float64s) -> Float64s:
    ranked = _largest(weights, int(k.max()))
    k = np.minimum(k, np.count_nonzero(ranked >= floor[:, None], axis=1))
    mass = np.cumsum(ranked, axis=1)
    total = mass[np.arange(k.size), k - 1]
    nucleus = np.count_nonzero(mass < (p * total)[:, None], axis=1) + 1
    return _keep_first(weights, ranked, np.where(p < 1.0, np.minimum(nucleus, k), k))


def _keep_top_p(weights: Float64s, p: Float64s, floor: Float64s) -> Float64s:
    """Sorts only as many of the largest weights as the mass p needs; the result is that of a full sort."""
    vocab = weights.shape[1]
    above = weights >= floor[:, None]
    wanted = p * (weights * above).sum(axis=1)
    width = min(_FIRST_TOP_P_WIDTH, vocab)
    while True:
        ranked = _largest(weights, width)
        mass = np.cumsum(ranked, axis=1)
        if width == vocab or (mass[:, -1] >= wanted).all():
            break
        width = min(8 * width, vocab)
    nucleus = np.count_nonzero(mass < wanted[:, None], axis=1) + 1
    return _keep_first(weights, ranked, np.minimum(nucleus, np.count_nonzero(above, axis=1)))


def _largest(weights: Float64s, width: int) -> Float64s:
    """The `width` largest of each row, in falling order.

    Of 4 x width groups of ids, `width` have a maximum of at least `bound`, so no more than the ids that reach `bound`
    need be sorted.
    """
    groups = 4 * width
    size = weights.shape[1] // groups
    if size < 4:
        return np.sort(weights, axis=1)[:, ::-1][:, :width]
    maxima = weights[:, : groups * size].reshape(-1, size, groups).max(axis=1)
    bound = np.partition(maxima, groups - width, axis=1)[:, groups - width]
    return np.stack([np.sort(row[row >= least])[::-1][:width] for row, least in zip(weights, bound, strict=True)])


def _keep_first(weights: Float64s, ranked: Float64s, keep: Ints) -> Float64s:
    """Keep the first keep[R] ranks of each row (ties: lower id first), zero the rest."""
    least = ranked[np.arange(keep.size), keep - 1]
    kept = weights >= least[:, None]
    surplus = np.count_nonzero(kept, axis=1) - keep
    weights *= kept
    for row in np.flatnonzero((surplus > 0) & (least > 0.0)):
        tied = np.flatnonzero(weights[row] == least[row])
        weights[row, tied[-surplus[row] :]] = 0.0
    return weights


def _penalise(
    logits: Floats, prompt: Ints, output: Ints, path_tokens: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    vocab = logits.shape[1]
    drafted = np.array([t for path in path_tokens for t in path], np.int64)
    node = np.repeat(np.arange(len(path_tokens)), [len(path) for path in path_tokens])
    emitted = np.bincount(output, minlength=vocab)
    touched = emitted > 0
    touched[prompt] = True
    seen_by_all = touched.copy()
    touched[drafted] = True
    ids = np.flatnonzero(touched)  # [C]
    counts = np.repeat(emitted[ids][None], len(path_tokens), axis=0)  # [N, C]
    np.add.at(counts, (node, np.searchsorted(ids, drafted)), 1)
    seen = seen_by_all[ids][None] | (counts > 0)
    edited = logits[:, ids]
    scale = np.where(edited > 0, 1.0 / params.repetition_penalty, params.repetition_penalty).astype(logits.dtype)
    edited = np.where(seen, edited * scale, edited)
    edited -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits[:, ids] = edited
