"""Request semantics in one place: Triton tensors and OpenAI JSON become a `Generation`, or a ServingError that names field and limit.

What a client may send and this engine cannot do is refused here. A value that asks for nothing (beam_width 1, an empty bad_words) is accepted.
"""

from __future__ import annotations

import dataclasses
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.params import MAX_LOGPROBS, SamplingParams
from trtllm_v4tree.serving.events import Code, Prompt, ServingError, Submission, Turn, invalid

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_REQUEST_ID = 128
MAX_TURNS = 1024
MAX_CHOICES = 16

Tensors = Mapping[str, NDArray[Any]]


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
    stream: bool = False
    include_prompt: bool = False


# ---------------------------------------------------------------- Triton


def text_request(tensors: Tensors, limits: Limits, request_id: str, exclude_prompt: bool = True, timeout_s: float | None = None) -> Generation:
    """The tensors of the model `ensemble`, as TensorRT-LLM's clients send them."""
    _refuse_unsupported(tensors, _REFUSED_TEXT)
    prompt = _text(tensors, "text_input", limits.max_prompt_bytes)
    stop = _strings(tensors, "stop_words")
    return _generation(tensors, limits, request_id, exclude_prompt, timeout_s, prompt, _TEXT_NAMES, "stream", {"stop": stop})


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
    stop_ids, stop = _stop_sequences(tensors, limits, decode)
    extra = {"stop": stop, "stop_token_ids": stop_ids}
    return _generation(tensors, limits, request_id, exclude_prompt, timeout_s, prompt, _TOKEN_NAMES, "streaming", extra)


# our name -> the client's, per model
_COMMON = {
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "random_seed",
}
_TEXT_NAMES = {"max_tokens": "max_tokens", "min_tokens": "min_tokens", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "stop": "stop_words", **_COMMON}
_TOKEN_NAMES = {
    "max_tokens": "request_output_len",
    "min_tokens": "min_length",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "min_p": "runtime_min_p",
    "stop": "stop_words_list",
    "stop_token_ids": "stop_words_list",
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


def _empty(array: NDArray[Any]) -> bool:
    return all(not item for item in array.reshape(-1).tolist())


_ALWAYS_REFUSED = (
    _Refused("beam_width", _equals(1), "must be 1: beam search is not supported."),
    _Refused("num_return_sequences", _equals(1), "must be 1: send the request several times with different random_seed."),
    _Refused("return_context_logits", _equals(0), "must be false: logits are not returned, use return_log_probs."),
    _Refused("return_generation_logits", _equals(0), "must be false: logits are not returned, use return_log_probs."),
)
_REFUSED_TEXT = (
    *_ALWAYS_REFUSED,
    _Refused("bad_words", _empty, "must be empty: banned words are not supported."),
    _Refused("length_penalty", _equals(0, 1), "must be 1: it belongs to beam search, which is not supported."),
)
_REFUSED_TOKEN = (
    *_ALWAYS_REFUSED,
    _Refused("bad_words_list", lambda a: a.size == 0 or bool((a[..., -1, :] == -1).all()), "must be empty: banned words are not supported."),
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
    return Generation(Submission(checked_id(request_id), prompt, params, timeout_s), _flag(tensors, stream_name), include_prompt)


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
        raise invalid(name, f"has {ids.size} tokens and may have {limits.max_seq_len - 1} (one less than the engine's max_seq_len).")
    return _checked_ids(ids.tolist(), name, limits)


def _checked_ids(ids: Sequence[Any], name: str, limits: Limits) -> list[int]:
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise invalid(name, f"has {token!r} at index {index}: token ids are integers from 0 to {limits.vocab_size - 1}.")
    return list(ids)


def _stop_sequences(
    tensors: Tensors, limits: Limits, decode: Callable[[Sequence[int]], str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """TensorRT-LLM's form, int32 [1, 2, n]: all tokens in a row, then the end of each sequence, padded with -1.

    One token stops by id. Several stop where their text appears, however it is tokenised.
    """
    name = "stop_words_list"
    array = tensors.get(name)
    if array is None or array.size == 0:
        return (), ()
    if array.ndim < 2 or array.shape[-2] != 2 or array.size != 2 * array.shape[-1]:
        raise invalid(name, f"has shape {list(array.shape)}: send [1, 2, n], the tokens and the end of each sequence.")
    flat, ends = array.reshape(2, -1).tolist()
    ids, texts, start = [], [], 0
    for end in (e for e in ends if e != -1):
        if not start < end <= len(flat):
            raise invalid(name, f"has the end {end} after {start}: ends rise and are at most {len(flat)}.")
        sequence = _checked_ids(flat[start:end], name, limits)
        start = end
        if len(sequence) == 1:
            ids.append(sequence[0])
        elif decode is None or not (text := decode(sequence)):
            raise invalid(name, f"has the sequence {sequence}, which has no text: stop sequences of several tokens stop by their text.")
        else:
            texts.append(text)
    return tuple(ids), tuple(texts)


# ---------------------------------------------------------------- OpenAI


@dataclass(frozen=True)
class OpenAIRequest:
    """Body of a completions or chat request; `generations` holds one entry per choice."""

    request_id: str
    generations: list[Generation]
    prompts: int
    model: str
    stream: bool
    include_usage: bool
    logprobs: int | None


Body = Mapping[str, Any]

_SAMPLING_FIELDS = frozenset(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop stop_token_ids ignore_eos min_tokens "
    "include_stop_str_in_output".split()
)
_ENVELOPE = frozenset("model stream stream_options n user metadata".split())
_COMPLETION_FIELDS = _SAMPLING_FIELDS | _ENVELOPE | {"prompt", "max_tokens", "logprobs", "echo", "best_of", "suffix", "logit_bias"}
_CHAT_FIELDS = (
    _SAMPLING_FIELDS
    | _ENVELOPE
    | frozenset(
        "messages max_tokens max_completion_tokens logprobs top_logprobs logit_bias tools tool_choice response_format modalities store "
        "parallel_tool_calls functions function_call service_tier audio reasoning_effort".split()
    )
)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> values that ask for nothing
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "audio": (None,),
    "reasoning_effort": (None, "none"),
}


def completion_request(body: Any, limits: Limits, request_id: str) -> OpenAIRequest:
    """The body of POST /v1/completions."""
    data = _checked_body(body, _COMPLETION_FIELDS)
    prompts = _completion_prompts(data, limits)
    n = _count(data)
    if data.get("best_of") not in (None, n):
        raise invalid("best_of", "must equal n: candidates are not ranked.")
    logprobs = data.get("logprobs")
    echo = _boolean(data, "echo")
    if echo and logprobs is not None:
        raise invalid("echo", "must be false with logprobs: prompt tokens are not scored.")
    if echo and not all(isinstance(p, str) for p in prompts):
        raise invalid("echo", "must be false with a prompt of token ids.")
    return _openai(data, limits, request_id, prompts, n, data.get("max_tokens", 16), logprobs, echo)


def chat_request(body: Any, limits: Limits, request_id: str) -> OpenAIRequest:
    """The body of POST /v1/chat/completions."""
    data = _checked_body(body, _CHAT_FIELDS)
    turns = _turns(data, limits)
    if data.get("max_completion_tokens") is not None and data.get("max_tokens") not in (None, data["max_completion_tokens"]):
        raise invalid("max_tokens", "differs from max_completion_tokens: send one of them.")
    asked = data.get("max_completion_tokens")
    asked = data.get("max_tokens") if asked is None else asked
    logprobs = None
    if _boolean(data, "logprobs"):
        logprobs = 0 if data.get("top_logprobs") is None else data["top_logprobs"]
    elif data.get("top_logprobs") is not None:
        raise invalid("top_logprobs", "needs logprobs true.")
    return _openai(data, limits, request_id, [turns], _count(data), limits.max_seq_len if asked is None else asked, logprobs, False)


def _openai(
    data: Body, limits: Limits, request_id: str, prompts: Sequence[Prompt], n: int, max_tokens: Any, logprobs: Any, echo: bool
) -> OpenAIRequest:
    if len(prompts) * n > MAX_CHOICES:
        raise invalid("n", f"makes {len(prompts) * n} choices and may make {MAX_CHOICES}.")
    fields = {k: data[k] for k in _SAMPLING_FIELDS if data.get(k) is not None}
    fields |= {"max_tokens": limits.max_seq_len if max_tokens is None else max_tokens, "logprobs": logprobs}
    params = sampling_params(fields, limits, {"logprobs": "top_logprobs" if "messages" in data else "logprobs"})
    stream = _boolean(data, "stream")
    generations = []
    for index, prompt in enumerate(p for p in prompts for _ in range(n)):
        own = request_id if len(prompts) * n == 1 else f"{request_id}-{index}"
        seeded = _with_seed(params, index % n)
        generations.append(Generation(Submission(own, prompt, seeded), stream, echo))
    return OpenAIRequest(request_id, generations, len(prompts), data["model"], stream, _include_usage(data, stream), params.logprobs)


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The choices of one prompt differ: choice i takes seed + i."""
    return params if params.seed is None or not choice else dataclasses.replace(params, seed=(params.seed + choice) % 2**63)


def _checked_body(body: Any, allowed: frozenset[str]) -> Body:
    if not isinstance(body, dict):
        raise ServingError(Code.INVALID_ARGUMENT, "the body must be a JSON object.")
    for name in body:
        if name not in allowed:
            raise invalid(str(name)[:64], "is not a field of this endpoint: leave it out.")
    for name, neutral in _UNSUPPORTED.items():
        if name in body and body[name] not in neutral:
            raise invalid(name, "is not supported: leave it out.")
    if not isinstance(body.get("model"), str):
        raise invalid("model", "must be the name of the model, see /v1/models.")
    return body


def _count(data: Body) -> int:
    n = data.get("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise invalid("n", f"must be an integer from 1 to {MAX_CHOICES}, but the request has {n!r}.")
    return n


def _boolean(data: Body, name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be true or false, but the request has {value!r:.80}.")
    return bool(value)


def _include_usage(data: Body, stream: bool) -> bool:
    options = data.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "needs stream true.")
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise invalid("stream_options", "may have include_usage only.")
    return _boolean(options, "include_usage")


def _completion_prompts(data: Body, limits: Limits) -> list[Prompt]:
    prompt = data.get("prompt")
    if isinstance(prompt, str):
        return [_prompt_text(prompt, "prompt", limits)]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "must be a non-empty string, a list of strings, a list of token ids or a list of such lists.")
    if all(isinstance(p, str) for p in prompt):
        _at_most(prompt, "prompt", MAX_CHOICES)
        return [_prompt_text(p, "prompt", limits) for p in prompt]
    if all(isinstance(p, list) for p in prompt):
        _at_most(prompt, "prompt", MAX_CHOICES)
        return [_prompt_ids(p, limits) for p in prompt]
    return [_prompt_ids(prompt, limits)]


def _prompt_ids(ids: list[Any], limits: Limits) -> list[int]:
    if not ids:
        raise invalid("prompt", "is empty: give at least one token.")
    if len(ids) >= limits.max_seq_len:
        raise invalid("prompt", f"has {len(ids)} tokens and may have {limits.max_seq_len - 1} (one less than the engine's max_seq_len).")
    return _checked_ids(ids, "prompt", limits)


def _prompt_text(text: str, name: str, limits: Limits) -> str:
    if not text:
        raise invalid(name, "is empty: give at least one character.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(name, f"has a lone surrogate at character {error.start}, which is not text.") from error
    if size > limits.max_prompt_bytes:
        raise invalid(name, f"has {size} bytes and may have {limits.max_prompt_bytes}.")
    return text


def _turns(data: Body, limits: Limits) -> list[Turn]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a non-empty list.")
    _at_most(messages, "messages", MAX_TURNS)
    turns = [_turn(m, f"messages[{i}]") for i, m in enumerate(messages)]
    _prompt_text("".join(text for _, text in turns) or " ", "messages", limits)
    return turns


def _turn(message: Any, name: str) -> Turn:
    if not isinstance(message, dict):
        raise invalid(name, "must be an object with role and content.")
    if extra := set(message) - {"role", "content", "name"}:
        raise invalid(f"{name}.{min(map(str, extra))[:64]}", "is not supported: leave it out.")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise invalid(f"{name}.role", f"must be system, user or assistant, but the request has {role!r:.80}.")
    return "system" if role == "developer" else role, _content(message.get("content"), f"{name}.content")


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(name, "must be a string or a list of text parts.")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(name, 'may have parts {"type": "text", "text": ...} only.')
    return "".join(part["text"] for part in content)


def _at_most(items: Sequence[Any], name: str, limit: int) -> None:
    if len(items) > limit:
        raise invalid(name, f"has {len(items)} entries and may have {limit}.")


# ---------------------------------------------------------------- shared


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
        raise invalid(name("max_tokens"), f"is {max_tokens} and may be {limits.max_seq_len} (the engine's max_seq_len).")
    top_k = fields.get("top_k")
    if isinstance(top_k, int) and top_k > limits.vocab_size:
        raise invalid(name("top_k"), f"is {top_k} and may be {limits.vocab_size} (the vocabulary).")
    logprobs = fields.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= MAX_LOGPROBS):
        raise invalid(name("logprobs"), f"must be an integer from 0 to {MAX_LOGPROBS}, but the request has {logprobs!r:.80}.")
    for ours in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = fields.get(ours)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(name(ours), f"must be a finite number, but the request has {value!r}.")
    _check_stop(fields.get("stop", ()), name("stop"))
    stop_ids = fields.get("stop_token_ids", ())
    if isinstance(stop_ids, list | tuple):
        _at_most(stop_ids, name("stop_token_ids"), MAX_STOPS + 1)
        _checked_ids(stop_ids, name("stop_token_ids"), limits)


def _check_stop(stop: Any, name: str) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple):
        return  # SamplingParams says what is wrong
    _at_most(texts, name, MAX_STOPS)
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
