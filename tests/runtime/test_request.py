"""A request's text: decoded when asked for, whole and by delta, whatever was asked before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from trtllm_v4tree.runtime.finish import FinishRules
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.request import Request

from .test_detokenize import bytes_only_tokenizer

RUNS = ["ab", "c", "é", "de"]


class Counted:
    """A decoder that counts its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def request_of(decoder: Counted, **options: object) -> Request:
    params = SamplingParams(max_tokens=9, **options)  # type: ignore[arg-type]
    return Request("r", [1], params, FinishRules.of(params, [], 1, 100), decoder)


def runs_of(tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of RUNS but for the last byte of the é, which comes with the run after it."""
    a, c, e, d = (tokenizer.encode(text, add_special_tokens=False).ids for text in RUNS)
    return [a, c, e[:1], [*e[1:], *d]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_every_delta_has_its_own_text_in_whatever_order_it_is_asked_for(order: tuple[int, ...]) -> None:
    tokenizer = bytes_only_tokenizer()
    request = request_of(Counted(tokenizer))
    deltas = [request.accept(run, []) for run in runs_of(tokenizer)]
    texts = {i: deltas[i].text for i in order}
    assert [texts[i] for i in range(4)] == ["ab", "c", "", "éde"]
    assert request.text == "abcéde"


def test_nothing_is_decoded_before_it_is_asked_for() -> None:
    tokenizer = bytes_only_tokenizer()
    decoder = Counted(tokenizer)
    request = request_of(decoder)
    for run in runs_of(tokenizer):
        request.accept(run, [])
    assert decoder.calls == 0
    assert request.text == "abcéde" and decoder.calls
    before = decoder.calls
    assert request.text == "abcéde" and decoder.calls == before


def test_a_stop_string_cuts_text_that_nobody_has_asked_for() -> None:
    tokenizer = bytes_only_tokenizer()
    request = request_of(Counted(tokenizer), stop="cé")
    deltas = [request.accept(run, []) for run in runs_of(tokenizer)]
    assert (request.text, request.finish_reason, request.stop_reason) == ("ab", "stop", "cé")
    assert [d.text for d in deltas] == ["ab", "", "", ""]


def test_a_cancelled_request_has_the_text_of_what_was_accepted() -> None:
    tokenizer = bytes_only_tokenizer()
    request = request_of(Counted(tokenizer))
    for run in runs_of(tokenizer)[:3]:
        request.accept(run, [])
    request.finish("cancelled")
    assert request.text == "abc"
