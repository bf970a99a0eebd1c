"""Request semantics in one place: what every protocol's request becomes, and the limits it must keep.

`triton_requests` and `openai_requests` read the two wire forms and end here. What a client may send and this engine cannot do is refused; a
value that asks for nothing (beam_width 1) is accepted. Errors name the client's field and its limit.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.params import MAX_LOGPROBS, SamplingParams
from trtllm_v4tree.serving.events import Code, ServingError, Submission, invalid

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_REQUEST_ID = 128


@dataclass(frozen=True)
class Limits:
    """What an engine sets to a request."""

    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> Limits:
        c = manifest.config
        return cls(manifest.sizes.max_seq_len, c.vocab_size, tuple(c.eos_token_ids))

    @property
    def max_prompt_bytes(self) -> int:
        """No token is longer than 128 bytes, so a longer text cannot fit."""
        return 128 * self.max_seq_len


@dataclass(frozen=True)
class Generation:
    """A checked request: what to submit and how to answer."""

    submission: Submission
    include_prompt: bool = False

    @property
    def stream(self) -> bool:
        return self.submission.stream


def checked_ids(ids: Sequence[Any], name: str, limits: Limits) -> list[int]:
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise invalid(
                name, f"has {token!r} at index {index}: token ids are integers from 0 to {limits.vocab_size - 1}."
            )
    return list(ids)


def at_most(items: Sequence[Any], name: str, limit: int) -> None:
    if len(items) > limit:
        raise invalid(name, f"has {len(items)} entries and may have {limit}.")


def sampling_params(fields: Mapping[str, Any], limits: Limits, names: Mapping[str, str]) -> SamplingParams:
    """SamplingParams with the limits of the engine on top of their own; errors speak of the client's field names."""
    _check_limits(fields, limits, names)
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        ours = str(error).split(" ", 1)[0]
        theirs = names.get(ours, ours)
        message = re.sub(rf"\b{re.escape(ours)}\b", theirs, str(error)) if theirs != ours else str(error)
        raise ServingError(Code.INVALID_ARGUMENT, message[:500], theirs) from error


def _check_limits(fields: Mapping[str, Any], limits: Limits, names: Mapping[str, str]) -> None:
    def name(ours: str) -> str:
        return names.get(ours, ours)

    max_tokens = fields.get("max_tokens")
    if isinstance(max_tokens, int) and max_tokens > limits.max_seq_len:
        raise invalid(
            name("max_tokens"), f"is {max_tokens} and may be {limits.max_seq_len} (the engine's max_seq_len)."
        )
    top_k = fields.get("top_k")
    if isinstance(top_k, int) and top_k > limits.vocab_size:
        raise invalid(name("top_k"), f"is {top_k} and may be {limits.vocab_size} (the vocabulary).")
    logprobs = fields.get("logprobs")
    if logprobs is not None and (
        isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= MAX_LOGPROBS
    ):
        raise invalid(
            name("logprobs"), f"must be an integer from 0 to {MAX_LOGPROBS}, but the request has {logprobs!r:.80}."
        )
    for ours in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = fields.get(ours)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(name(ours), f"must be a finite number, but the request has {value!r}.")
    _check_stop(fields.get("stop", ()), name("stop"))
    stop_ids = fields.get("stop_token_ids", ())
    if isinstance(stop_ids, list | tuple):
        at_most(stop_ids, name("stop_token_ids"), MAX_STOPS + 1)
        checked_ids(stop_ids, name("stop_token_ids"), limits)


def _check_stop(stop: Any, name: str) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple):
        return  # SamplingParams says what is wrong
    at_most(texts, name, MAX_STOPS)
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS:
            raise invalid(name, f"has a string of {len(text)} characters and may have {MAX_STOP_CHARACTERS}.")


_ID = re.compile(r"[\x21-\x7e]{1,128}")


def checked_id(given: str | None) -> str:
    """The client's id if it is printable ASCII without blanks, else a new one."""
    if not given:
        return uuid.uuid4().hex
    if not _ID.fullmatch(given):
        raise invalid("request_id", f"must have 1 to {MAX_REQUEST_ID} printable ASCII characters without blanks.")
    return given
