"""Triton tensors, under the names of TensorRT-LLM's back end, become a `Generation`, or a ServingError that names the tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.serving.events import Prompt, Submission, invalid
from trtllm_v4tree.serving.requests import (
    MAX_STOP_CHARACTERS,
    Generation,
    Limits,
    checked_id,
    checked_ids,
    sampling_params,
)

Tensors = Mapping[str, NDArray[Any]]


def text_request(
    tensors: Tensors, limits: Limits, request_id: str, exclude_prompt: bool = True, timeout_s: float | None = None
) -> Generation:
    """The tensors of the model `ensemble`, as TensorRT-LLM's clients send them."""
    _refuse_unsupported(tensors, _REFUSED_TEXT)
    prompt = _text(tensors, "text_input", limits.max_prompt_bytes)
    extra = {"stop": _strings(tensors, "stop_words"), "bad_words": _strings(tensors, "bad_words")}
    return _generation(tensors, limits, request_id, exclude_prompt, timeout_s, prompt, _TEXT_NAMES, "stream", extra)


def token_request(
    tensors: Tensors,
    limits: Limits,
    request_id: str,
    exclude_prompt: bool = True,
    timeout_s: float | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Generation:
    """The tensors of the model `tensorrt_llm`. `decode` gives the text of a stop sequence of several tokens."""
    _refuse_unsupported(tensors, _REFUSED_TOKEN)
    prompt = _token_ids(tensors, "input_ids", limits)
    given = _integer(tensors, "input_lengths", len(prompt))
    if given != len(prompt):
        raise invalid("input_lengths", f"is {given} and input_ids has {len(prompt)} tokens: send the number of tokens.")
    stop_ids, stop = _stops(_sequences(tensors, "stop_words_list", limits), decode)
    bad_words = _sequences(tensors, "bad_words_list", limits)
    extra = {"stop": stop, "stop_token_ids": stop_ids, "bad_words_list": bad_words}
    return _generation(tensors, limits, request_id, exclude_prompt, timeout_s, prompt, _TOKEN_NAMES, "streaming", extra)


# our name -> the client's, per model
_COMMON = {
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "random_seed",
}
_TEXT_NAMES = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop_words",
    "bad_words": "bad_words",
    **_COMMON,
}
_TOKEN_NAMES = {
    "max_tokens": "request_output_len",
    "min_tokens": "min_length",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "min_p": "runtime_min_p",
    "stop": "stop_words_list",
    "stop_token_ids": "stop_words_list",
    "bad_words_list": "bad_words_list",
    **_COMMON,
}


@dataclass(frozen=True)
class _Refused:
    """An input that a client may send only with a value that asks for nothing."""

    name: str
    neutral: Callable[[NDArray[Any]], bool]
    reason: str


def _equals(*values: float) -> Callable[[NDArray[Any]], bool]:
    return lambda array: bool(np.isin(array, values).all())


_ALWAYS_REFUSED = (
    _Refused("beam_width", _equals(1), "must be 1: beam search is not supported."),
    _Refused(
        "num_return_sequences", _equals(1), "must be 1: send the request several times with different random_seed."
    ),
    _Refused("return_context_logits", _equals(0), "must be false: logits are not returned, use return_log_probs."),
    _Refused("return_generation_logits", _equals(0), "must be false: logits are not returned, use return_log_probs."),
)
_REFUSED_TEXT = (
    *_ALWAYS_REFUSED,
    _Refused("length_penalty", _equals(0, 1), "must be 1: it belongs to beam search, which is not supported."),
)
_REFUSED_TOKEN = (
    *_ALWAYS_REFUSED,
    _Refused("len_penalty", _equals(0, 1), "must be 1: it belongs to beam search, which is not supported."),
)


def _refuse_unsupported(tensors: Tensors, refused: Sequence[_Refused]) -> None:
    for rule in refused:
        if rule.name in tensors and not rule.neutral(tensors[rule.name]):
            raise invalid(rule.name, rule.reason)


def _generation(
    tensors: Tensors,
    limits: Limits,
    request_id: str,
    exclude_prompt: bool,
    timeout_s: float | None,
    prompt: Prompt,
    names: Mapping[str, str],
    stream_name: str,
    extra: dict[str, Any],
) -> Generation:
    fields: dict[str, Any] = dict(extra)
    for ours in ("max_tokens", "min_tokens", "top_k", "seed"):
        if names[ours] in tensors:
            fields[ours] = _integer(tensors, names[ours])
    for ours in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if names[ours] in tensors:
            fields[ours] = _real(tensors, names[ours])
    if fields.get("top_p") == 0.0:
        fields["top_p"] = 1.0  # TensorRT-LLM's clients write 0 for "off"
    if not {"temperature", "top_k", "top_p"} & fields.keys():
        fields["temperature"] = 0.0  # and mean greedy when they give none of the three
    if _flag(tensors, "return_log_probs"):
        fields["logprobs"] = 0
    _apply_end_id(tensors, limits, fields)
    params = sampling_params(fields, limits, names)
    include_prompt = not _flag(tensors, "exclude_input_in_output", exclude_prompt)
    stream = _flag(tensors, stream_name)
    return Generation(Submission(checked_id(request_id), prompt, params, timeout_s, stream), include_prompt)


def _apply_end_id(tensors: Tensors, limits: Limits, fields: dict[str, Any]) -> None:
    """`end_id` takes the place of the model's end token; -1 means none."""
    if "end_id" not in tensors:
        return
    end = _integer(tensors, "end_id")
    if end in limits.eos_token_ids:
        return
    if not -1 <= end < limits.vocab_size:
        raise invalid("end_id", f"is {end}: give a token id from 0 to {limits.vocab_size - 1}, or -1 for none.")
    fields["ignore_eos"] = True
    if end >= 0:
        fields["stop_token_ids"] = (*fields.get("stop_token_ids", ()), end)


def _single(tensors: Tensors, name: str) -> Any:
    array = tensors[name]
    if array.size != 1:
        raise invalid(name, f"has shape {list(array.shape)}: send one value.")
    return array.reshape(-1)[0]


def _integer(tensors: Tensors, name: str, default: int | None = None) -> int:
    if name not in tensors and default is not None:
        return default
    return int(_single(tensors, name))


def _real(tensors: Tensors, name: str) -> float:
    return float(_single(tensors, name))


def _flag(tensors: Tensors, name: str, default: bool = False) -> bool:
    return bool(_single(tensors, name)) if name in tensors else default


def _text(tensors: Tensors, name: str, max_bytes: int) -> str:
    return _decoded(_single(tensors, name), name, max_bytes)


def _strings(tensors: Tensors, name: str) -> tuple[str, ...]:
    """Non-empty strings; clients send one empty string for none."""
    items = tensors[name].reshape(-1) if name in tensors else ()
    return tuple(_decoded(item, name, 4 * MAX_STOP_CHARACTERS) for item in items if len(item))


def _decoded(raw: Any, name: str, max_bytes: int) -> str:
    data = raw.encode() if isinstance(raw, str) else bytes(raw)
    if len(data) > max_bytes:
        raise invalid(name, f"has {len(data)} bytes and may have {max_bytes}.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not valid UTF-8 (byte {error.start}).") from error
    if not text:
        raise invalid(name, "is empty: give at least one character.")
    return text


def _token_ids(tensors: Tensors, name: str, limits: Limits) -> list[int]:
    array = tensors[name]
    if array.ndim > 1 and array.shape[0] != 1:
        raise invalid(name, f"has batch size {array.shape[0]}: send one prompt per request.")
    ids = array.reshape(-1)
    if not ids.size:
        raise invalid(name, "is empty: give at least one token.")
    if ids.size >= limits.max_seq_len:
        raise invalid(
            name,
            f"has {ids.size} tokens and may have {limits.max_seq_len - 1} (one less than the engine's max_seq_len).",
        )
    return checked_ids(ids.tolist(), name, limits)


def _sequences(tensors: Tensors, name: str, limits: Limits) -> list[list[int]]:
    """TensorRT-LLM's form, int32 [1, 2, n]: all tokens in a row, then the end of each sequence, padded with -1."""
    array = tensors.get(name)
    if array is None or array.size == 0:
        return []
    if array.ndim < 2 or array.shape[-2] != 2 or array.size != 2 * array.shape[-1]:
        raise invalid(name, f"has shape {list(array.shape)}: send [1, 2, n], the tokens and the end of each sequence.")
    flat, ends = array.reshape(2, -1).tolist()
    found, start = [], 0
    for end in (e for e in ends if e != -1):
        if not start < end <= len(flat):
            raise invalid(name, f"has the end {end} after {start}: ends rise and are at most {len(flat)}.")
        found.append(checked_ids(flat[start:end], name, limits))
        start = end
    return found


def _stops(
    sequences: list[list[int]], decode: Callable[[Sequence[int]], str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids and texts that stop: one token by its id, several where their text appears, however it is tokenised."""
    texts = []
    for sequence in (s for s in sequences if len(s) > 1):
        text = decode(sequence) if decode is not None else ""
        if not text:
            raise invalid(
                "stop_words_list",
                f"has the sequence {sequence}, which has no text: stop sequences of several tokens stop by their text.",
            )
        texts.append(text)
    return tuple(s[0] for s in sequences if len(s) == 1), tuple(texts)
