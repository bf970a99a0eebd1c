"""Bad words: token sequences that an output must never complete, and which tokens they ban after a given past."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.params import SamplingParams

Encode = Callable[[str], Sequence[int]]


class BadWords:
    """The banned sequences of one request, found by the token before their last.

    As in TensorRT-LLM the past is prompt and output together: a word that the prompt begins is not completed either.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        words = {tuple(int(t) for t in s) for s in sequences}
        self.always = sorted(word[0] for word in words if len(word) == 1)
        self.reach = max(map(len, words), default=1) - 1  # tokens of the past that decide
        self.last_tokens = {word[-1] for word in words}
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in sorted(word for word in words if len(word) > 1):
            self._after.setdefault(word[-2], []).append(word)

    @classmethod
    def of(
        cls, params: SamplingParams, encode: Encode | None, vocab_size: int, eos_ids: Sequence[int] = ()
    ) -> BadWords:
        """Raises RequestError for text without a tokenizer, a token that is not in the vocabulary, or words that leave no token."""
        if params.bad_words and encode is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none: use bad_words_list.")
        texts = [variant for word in params.bad_words for variant in _variants(word, encode)] if encode else []
        found = cls((*texts, *params.bad_words_list))
        for token in sorted({t for word in params.bad_words_list for t in word}):
            if token >= vocab_size:
                raise RequestError(
                    f"bad_words_list has token {token}: token ids are integers from 0 to {vocab_size - 1}."
                )
        closed = {*eos_ids, *params.stop_token_ids} if params.min_tokens else set()
        if len(found.last_tokens | closed) >= vocab_size:
            raise RequestError("bad_words ban every token of the vocabulary: leave at least one that may be generated.")
        return found

    def after(self, *parts: Sequence[int]) -> list[int]:
        """Tokens banned next, where `parts` joined (prompt, output, path) are the past."""
        past = _last(self.reach, parts)
        matched = (w[-1] for w in self._after.get(past[-1], ()) if past[-len(w) + 1 :] == w[:-1]) if past else ()
        return [*self.always, *matched]


def _variants(word: str, encode: Encode) -> list[Sequence[int]]:
    """Tokens of the word at the start of a text and, where the tokenizer tells them apart, behind a space, as in vLLM.

    The second is left out only where the first is its end and bans it already; vLLM also leaves it out where the two differ in length,
    and then the word may still come inside a text. Raises RequestError for a word without tokens.
    """
    bare = word.lstrip() or word
    first, spaced = list(encode(bare)), list(encode(" " + bare))
    if not first:
        raise RequestError(f"bad_words has {word!r:.80}, which the tokenizer drops: leave it out.")
    return [first] if spaced[-len(first) :] == first else [first, spaced]


def _last(count: int, parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The last `count` tokens of the parts joined."""
    found: tuple[int, ...] = ()
    for part in reversed(parts):
        missing = count - len(found)
        if missing <= 0:
            break
        found = (*(int(t) for t in part[-missing:]), *found)
    return found
