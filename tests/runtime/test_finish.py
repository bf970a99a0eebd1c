"""Finish rules against a loop that adds one token at a time, for every way of grouping tokens into runs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.finish import Cut, FinishRules, decide, safe_text_length
from trtllm_v4tree.runtime.params import SamplingParams

EOS = 1
ALPHABET = {2: "a", 3: "b", 4: "ab", 5: "", 6: "ba", 7: "c", 8: "aab", EOS: ""}


def rules(prompt: int = 4, max_seq_len: int = 1000, **params: Any) -> FinishRules:
    return FinishRules.of(SamplingParams(**params), [EOS], prompt, max_seq_len)


def cut(rule: FinishRules, tokens: list[int], emitted: int = 0, text: str = "", pieces: dict = ALPHABET) -> Cut:
    return decide(rule, tokens, emitted, text, [pieces[t] for t in tokens])


def generate(rule: FinishRules, tokens: list[int], runs: list[int]) -> tuple[list[int], str, Any, Any, str]:
    """Feed tokens in runs of the given sizes (last one repeated); checks that nothing unsafe was ever shown."""
    kept: list[int] = []
    text = shown = ""
    while True:
        size = runs[0] if len(runs) == 1 else runs.pop(0)
        run = tokens[len(kept) : len(kept) + size]
        got = cut(rule, run, len(kept), text)
        kept += run[: got.n_kept]
        text = (text + "".join(ALPHABET[t] for t in run[: got.n_text]))[: got.text_length]
        shown += text[len(shown) : None if got.finish_reason else max(len(shown), rule.safe_text_length(text))]
        assert text.startswith(shown)
        if got.finish_reason or len(kept) == len(tokens):
            return kept, text, got.finish_reason, got.stop_reason, shown


def reference(p: SamplingParams, tokens: list[int], limit: int) -> tuple[list[int], str, Any, Any]:
    """One token at a time, one character at a time, the rules written out."""
    text = ""
    for i, token in enumerate(tokens):
        kept = tokens[: i + 1]
        counts = i + 1 > p.min_tokens
        if counts and token == EOS and not p.ignore_eos:
            return kept, text, "stop", None
        if counts and token in p.stop_token_ids:
            return kept, text + (ALPHABET[token] if p.include_stop_str_in_output else ""), "stop", token
        for char in ALPHABET[token]:
            text += char
            ends = sorted((s for s in p.stop if text.endswith(s)), key=len)
            if counts and ends:
                stop = ends[-1]
                return kept, text if p.include_stop_str_in_output else text[: -len(stop)], "stop", stop
        if i + 1 == limit:
            return kept, text, "length", None
    return tokens, text, None, None


@settings(deadline=None, max_examples=400)
@given(
    tokens=st.lists(st.sampled_from([2, 2, 3, 3, 4, 5, 6, 7, 8, EOS]), min_size=1, max_size=14),
    runs=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
    stop_ids=st.sampled_from([[], [], [7], [EOS, 5]]),
    lengths=st.tuples(st.integers(1, 16), st.integers(0, 6), st.integers(1, 16)),
    include=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_result_is_that_of_one_token_at_a_time(
    tokens: list, runs: list, stop: list, stop_ids: list, lengths: tuple, include: bool, ignore_eos: bool
) -> None:
    params = SamplingParams(
        max_tokens=lengths[0],
        min_tokens=min(lengths[:2]),
        stop=stop,
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include,
    )
    rule = FinishRules.of(params, [EOS], 3, 3 + lengths[2])
    want = reference(params, tokens, min(lengths[0], lengths[2]))
    *got, shown = generate(rule, tokens, list(runs))
    assert tuple(got) == want
    assert shown == want[1] or want[2] is None


def test_stop_string_early_in_a_long_run() -> None:
    pieces = {i: f"{i} " for i in range(10, 40)} | {9: "END"}
    got = cut(rules(stop="END"), [10, 9, *range(11, 40)], pieces=pieces)
    assert got == Cut(2, "stop", "END", 2, 3)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_nothing_after_the_first_eos(position: int) -> None:
    run = [2, 3, 4, 7]
    run[position] = EOS
    assert cut(rules(), [*run, EOS]) == Cut(position + 1, "stop", None, position, None)


def test_stop_string_across_runs_cuts_older_text() -> None:
    got = cut(rules(stop="abba"), [6, 7], emitted=2, text="cab")
    assert got == Cut(1, "stop", "abba", 1, 1)


@pytest.mark.parametrize("first_run", range(1, 6))
@pytest.mark.parametrize("stop", ["ab", "abb", "abba", "cabba"])
def test_stop_string_split_anywhere(stop: str, first_run: int) -> None:
    tokens = [7, 2, 3, 3, 2, 7]  # c a b b a c
    kept, text, reason, matched, _ = generate(rules(stop=stop), tokens, [first_run, 6])
    end = "cabbac".index(stop) + len(stop)
    assert (kept, text, reason, matched) == (tokens[:end], "cabbac"[: end - len(stop)], "stop", stop)


def test_of_several_stops_the_one_completed_first_wins() -> None:
    assert cut(rules(stop=["ba", "bab", "ab"]), [7, 2, 3, 6]).stop_reason == "ab"
    assert cut(rules(stop=["c", "bc", "abc"]), [4, 7]) == Cut(2, "stop", "abc", 2, 0)


def test_stop_string_inside_a_piece_keeps_the_token_but_not_the_rest_of_its_text() -> None:
    assert cut(rules(stop="a"), [7, 8, 3]) == Cut(2, "stop", "a", 2, 1)
    assert cut(rules(stop="a", include_stop_str_in_output=True), [7, 8, 3]) == Cut(2, "stop", "a", 2, 2)


def test_stop_token_is_kept_in_ids_and_its_text_dropped() -> None:
    assert cut(rules(stop_token_ids=[7]), [2, 7, 3]) == Cut(2, "stop", 7, 1, None)
    assert cut(rules(stop_token_ids=[7], include_stop_str_in_output=True), [2, 7, 3]) == Cut(2, "stop", 7, 2, None)


def test_min_tokens_ignores_what_completes_too_early_and_never_returns_to_it() -> None:
    rule = rules(stop="ab", min_tokens=2)
    assert cut(rule, [4, 7, 7]).finish_reason is None
    assert cut(rule, [4, 2, 3]) == Cut(3, "stop", "ab", 3, 2)
    assert cut(rules(min_tokens=2), [EOS, EOS, EOS, 2]).n_kept == 3


def test_max_tokens_and_context_cut_the_run() -> None:
    assert cut(rules(max_tokens=5), [2] * 8, emitted=2) == Cut(3, "length", None, 3, None)
    assert cut(rules(prompt=6, max_seq_len=8), [2] * 8) == Cut(2, "length", None, 2, None)
    assert cut(rules(max_tokens=3), [2, 2, EOS]).finish_reason == "stop"
    assert cut(rules(max_tokens=2), [2, 2, EOS]).finish_reason == "length"
    assert rules(prompt=6, max_seq_len=8).room(1) == 1


@pytest.mark.parametrize("prompt", [0, 8, 9])
def test_prompt_without_room_is_refused(prompt: int) -> None:
    with pytest.raises(RequestError, match=f"1 to 7 tokens.*has {prompt};"):
        rules(prompt=prompt, max_seq_len=8)


@given(text=st.text("ab", max_size=10), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_safe_text_is_the_longest_that_no_continuation_takes_back(text: str, stop: list[str]) -> None:
    held = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) and s != text[n:] for s in stop)]
    assert safe_text_length(text, stop) == min(held, default=len(text))


def test_included_stop_string_holds_nothing_back() -> None:
    assert rules(stop="abc", include_stop_str_in_output=True).safe_text_length("xab") == 3
    assert rules(stop="abc").safe_text_length("xab") == 1
