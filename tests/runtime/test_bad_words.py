"""Bad words: what a past bans, against a search; what an engine emits, against a loop over transformers' logits; no mode differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_v4tree import LLM
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.bad_words import BadWords
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.sampling import apply_penalties

from ..harness import Built

MODES = ("none", "s4_k1_d5", "s3_k2_d6", "s3_k3_d8")
few_ids = st.lists(st.integers(0, 3), max_size=6)
words_of_few = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)


@pytest.fixture(scope="module", params=["w16", "mixed"])
def model(request: pytest.FixtureRequest, tiny: Callable[[str], Built]) -> Built:
    return tiny(request.param)


def banned(past: list[int], words: list[list[int]], vocab: int) -> set[int]:
    """Tokens that would complete a word, found by trying each."""
    return {t for t in range(vocab) for w in words if [*past, t][-len(w) :] == w}


def greedy(model: Built, prompt: list[int], words: list[list[int]], count: int) -> list[int]:
    """One token at a time from a fresh forward of everything before it."""
    ids = list(prompt)
    for _ in range(count):
        row = model.oracle.logits(ids)[-1].copy()
        row[list(banned(ids, words, len(row)))] = -np.inf
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


def generated(model: Built, mode: str, asked: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    engine = Engine(model.driver.executor, mode)
    requests = [engine.submit(p, each) for p, each in zip(asked, params, strict=True)]
    while not engine.idle:
        engine.step()
    return [r.output_ids for r in requests]


@given(prompt=few_ids, output=few_ids, path=few_ids, words=words_of_few)
def test_a_past_bans_what_would_complete_a_word(
    prompt: list[int], output: list[int], path: list[int], words: list[list[int]]
) -> None:
    found = BadWords(words).after(prompt, output, path)
    assert set(found) == banned([*prompt, *output, *path], words, 4)


@given(output=few_ids, paths=st.lists(few_ids, min_size=1, max_size=4), words=words_of_few)
def test_every_node_is_banned_by_its_own_path(
    output: list[int], paths: list[list[int]], words: list[list[int]]
) -> None:
    logits = np.zeros((len(paths), 4), np.float32)
    apply_penalties(logits, [1], output, paths, SamplingParams(), bad_words=BadWords(words))
    got = [set(np.flatnonzero(np.isneginf(row)).tolist()) for row in logits]
    assert got == [banned([1, *output, *path], words, 4) for path in paths]


def test_greedy_tokens_are_those_of_a_loop_over_masked_logits(model: Built) -> None:
    """Words taken from the free text, so that each of them would have come: single, double, triple, begun by the prompt."""
    prompt, count = np.random.default_rng(3).integers(2, 200, 20).tolist(), 16
    words: list[list[int]] = []
    for cut in (slice(4, 5), slice(7, 9), slice(9, 12)):
        words.append(greedy(model, prompt, words, count)[cut])
    words.append([*prompt[-2:], greedy(model, prompt, words, 1)[0]])
    want = greedy(model, prompt, words, count)
    assert want != greedy(model, prompt, words[:-1], count) != greedy(model, prompt, [], count)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, bad_words_list=words)
    for mode in MODES:
        assert generated(model, mode, [prompt], [params]) == [want], mode


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.8, 1.5]))
def test_no_word_comes_and_no_mode_differs(model: Built, seed: int, temperature: float) -> None:
    """Words cut out of the free text of the same request, in a batch with a request that has none."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(2, 200, int(n)).tolist() for n in rng.integers(1, 70, 2)]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": seed, "ignore_eos": True}
    free = SamplingParams(**options)
    [text, neighbour] = generated(model, "none", asked, [free, free])
    starts = rng.integers(0, 20, 4)
    words = [text[s : s + n] for s, n in zip(starts, (1, 2, 3, 4), strict=True)]
    params = [SamplingParams(**options, bad_words_list=words), free]
    plain = generated(model, "none", asked, params)
    whole = [*asked[0], *plain[0]]
    assert plain[1] == neighbour and len(plain[0]) == 24
    for end in range(len(asked[0]), len(whole)):
        assert whole[end] not in banned(whole[:end], words, 211)
    for mode in MODES[1:]:
        assert generated(model, mode, asked, params) == plain, mode


def test_min_tokens_and_words_close_the_same_row(model: Built) -> None:
    """With all but two tokens banned and the end closed, one is left; banning it too is refused."""
    vocab = model.driver.executor.config.vocab_size
    eos = set(model.driver.executor.config.eos_token_ids)
    left = next(t for t in range(vocab) if t not in eos)
    words = [[t] for t in range(vocab) if t not in eos and t != left]
    params = SamplingParams(max_tokens=5, min_tokens=5, bad_words_list=words)
    assert generated(model, "s3_k2_d6", [[5, 6]], [params]) == [[left] * 5]
    for more in ([[left]], [[7, left]]):
        with pytest.raises(RequestError, match="every token"):
            BadWords.of(
                SamplingParams(max_tokens=5, min_tokens=5, bad_words_list=words + more), None, vocab, sorted(eos)
            )


def test_a_text_is_banned_at_the_start_and_behind_a_space(nano: Built) -> None:
    """Greedy text, then without two of its words; what is left is another text without either."""
    llm = LLM(nano.engine, threads=1)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    free = llm.generate("Once upon a time", SamplingParams(**options))[0].outputs[0].text
    words = sorted({w for w in free.split() if w.isalpha()}, key=free.index)[:2]
    texts = []
    for mode in ("none", "s3_k2_d6"):
        llm.set_speculation(mode)
        texts.append(llm.generate("Once upon a time", SamplingParams(**options, bad_words=words))[0].outputs[0].text)
    assert texts[0] == texts[1] != free
    assert llm.tokenizer is not None and llm.engine.encode is not None
    bad = BadWords.of(SamplingParams(bad_words=words), llm.engine.encode, 4096)
    for word in words:
        for text in (word, f" {word}"):
            *before, last = llm.tokenizer.encode(text, add_bos=False)
            assert last in bad.after(before)


def test_how_texts_become_sequences() -> None:
    """A made-up tokenizer: one token per letter, and one for a space with the letter behind it."""

    def encode(text: str) -> list[int]:
        marked = text.replace(" a", "A").replace(" b", "B")
        return [" \nabAB-".index(c) for c in marked if c != "?"]

    def sequences(*words: str) -> list[list[int]]:
        found = BadWords.of(SamplingParams(bad_words=words), encode, 100)
        return sorted([[t] for t in found.always] + [list(w) for ws in found._after.values() for w in ws])

    assert sequences("a") == sequences(" a") == [[2], [4]]
    assert sequences("ab", "-") == [[2, 3], [4, 3], [6]]
    assert sequences("-") == [[6]], "a space before it is a token of its own"
    assert sequences(" ") == [[0]] and sequences("\n") == [[1]]
    with pytest.raises(RequestError, match=r"bad_words has '\?'"):
        sequences("?")


def test_what_an_engine_cannot_ban_is_refused() -> None:
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        BadWords.of(SamplingParams(bad_words="a"), None, 100)
    with pytest.raises(RequestError, match=r"bad_words_list has token 100: .* 0 to 99"):
        BadWords.of(SamplingParams(bad_words_list=[[1, 100]]), None, 100)
    with pytest.raises(RequestError, match="every token"):
        BadWords.of(SamplingParams(bad_words_list=[[0], [1], [0, 2]]), None, 3)
