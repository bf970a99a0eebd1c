"""What one request asks of sampling and finishing: checked once, where it enters, and never changed afterwards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from trtllm_v4tree.errors import RequestError

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters of a text, tokens of a sequence


@dataclass(frozen=True)
class SamplingParams:
    """Names, defaults and meaning as in vLLM; `top_k=0` is off and `temperature=0` is greedy.

    `stop` may be one string or several and is stored as a tuple, as `stop_token_ids` is. `seed=None` leaves the choice
    of a seed to the runtime. `logprobs=0` asks for the logprob of the emitted token alone.
    `bad_words` are texts and `bad_words_list` token sequences that the output never completes: the last token of one is
    banned wherever those before it have just come, prompt included. A text is banned as the tokenizer writes it at the
    start of a text and behind a space; written with other tokens it may still appear.
    Raises `RequestError` naming the field, the value and what is allowed.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: str | Sequence[str] = ()
    bad_words_list: Sequence[Sequence[int]] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_sampling()
        self._check_penalties()
        self._check_stops()
        self._check_bad_words()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")

    def _check_lengths(self) -> None:
        _require(_is_int(self.max_tokens, 1), "max_tokens", self.max_tokens, "an integer >= 1")
        _require(
            _is_int(self.min_tokens, 0, self.max_tokens),
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )

    def _check_sampling(self) -> None:
        _require(_is_real(self.temperature, 0.0), "temperature", self.temperature, "a finite number >= 0 (0 is greedy)")
        _require(_is_int(self.top_k, 0), "top_k", self.top_k, "an integer >= 0 (0 is off)")
        _require(
            _is_real(self.top_p, 0.0, 1.0) and self.top_p > 0.0, "top_p", self.top_p, "a number > 0 and <= 1 (1 is off)"
        )
        _require(_is_real(self.min_p, 0.0, 1.0), "min_p", self.min_p, "a number from 0 to 1 (0 is off)")
        _require(
            self.seed is None or _is_int(self.seed, 0, 2**63 - 1),
            "seed",
            self.seed,
            "null or an integer from 0 to 2**63 - 1",
        )
        _require(
            self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"null or an integer from 0 to {MAX_LOGPROBS}",
        )

    def _check_penalties(self) -> None:
        _require(
            _is_real(self.repetition_penalty, 0.0) and self.repetition_penalty > 0.0,
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number > 0 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value, -2.0, 2.0), name, value, "a number from -2 to 2 (0 is off)")

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(
            isinstance(stop, Sequence) and all(isinstance(s, str) and s for s in stop),
            "stop",
            self.stop,
            "a non-empty string or a list of them",
        )
        ids = self.stop_token_ids
        _require(
            isinstance(ids, Sequence) and not isinstance(ids, str | bytes) and all(_is_int(i, 0) for i in ids),
            "stop_token_ids",
            ids,
            "a list of token ids >= 0",
        )
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))

    def _check_bad_words(self) -> None:
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        _require(
            isinstance(words, Sequence) and len(words) <= MAX_BAD_WORDS and all(_is_word(w) for w in words),
            "bad_words",
            self.bad_words,
            f"at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters",
        )
        ids = self.bad_words_list
        _require(
            _is_list(ids) and len(ids) <= MAX_BAD_WORDS and all(_is_sequence(i) for i in ids),
            "bad_words_list",
            ids,
            f"at most {MAX_BAD_WORDS} lists of 1 to {MAX_BAD_WORD_LENGTH} token ids >= 0",
        )
        object.__setattr__(self, "bad_words", tuple(words))
        object.__setattr__(self, "bad_words_list", tuple(tuple(int(t) for t in i) for i in ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes a logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_bad_words(self) -> bool:
        return bool(self.bad_words or self.bad_words_list)


def _require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise RequestError(
            f"{name} must be {allowed}, but the request has {value!r:.200}; correct it or leave {name} out."
        )


def _is_int(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _is_real(value: Any, low: float, high: float = math.inf) -> bool:
    return (
        isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and low <= float(value) <= high
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_word(value: Any) -> bool:
    """Text that a tokenizer can read: lone surrogates are none."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_BAD_WORD_LENGTH
        and not any("\ud800" <= c <= "\udfff" for c in value)
    )


def _is_sequence(value: Any) -> bool:
    return _is_list(value) and 1 <= len(value) <= MAX_BAD_WORD_LENGTH and all(_is_int(t, 0) for t in value)
