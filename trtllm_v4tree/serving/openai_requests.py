"""OpenAI JSON bodies become `Generation`s, one per choice, or a ServingError that names the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.serving.events import Code, Prompt, ServingError, Submission, Turn, invalid
from trtllm_v4tree.serving.requests import Generation, Limits, at_most, checked_ids, sampling_params

MAX_TURNS = 1024
MAX_CHOICES = 16


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
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "bad_words",
        "ignore_eos",
        "min_tokens",
        "include_stop_str_in_output",
    ]
)
_ENVELOPE = frozenset(["model", "stream", "stream_options", "n", "user", "metadata"])
_COMPLETION_FIELDS = (
    _SAMPLING_FIELDS | _ENVELOPE | {"prompt", "max_tokens", "logprobs", "echo", "best_of", "suffix", "logit_bias"}
)
_CHAT_FIELDS = (
    _SAMPLING_FIELDS
    | _ENVELOPE
    | frozenset(
        [
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "logprobs",
            "top_logprobs",
            "logit_bias",
            "tools",
            "tool_choice",
            "response_format",
            "modalities",
            "store",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "service_tier",
            "audio",
            "reasoning_effort",
        ]
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
    if data.get("max_completion_tokens") is not None and data.get("max_tokens") not in (
        None,
        data["max_completion_tokens"],
    ):
        raise invalid("max_tokens", "differs from max_completion_tokens: send one of them.")
    asked = data.get("max_completion_tokens")
    asked = data.get("max_tokens") if asked is None else asked
    logprobs = None
    if _boolean(data, "logprobs"):
        logprobs = 0 if data.get("top_logprobs") is None else data["top_logprobs"]
    elif data.get("top_logprobs") is not None:
        raise invalid("top_logprobs", "needs logprobs true.")
    return _openai(
        data, limits, request_id, [turns], _count(data), limits.max_seq_len if asked is None else asked, logprobs, False
    )


def _openai(
    data: Body,
    limits: Limits,
    request_id: str,
    prompts: Sequence[Prompt],
    n: int,
    max_tokens: Any,
    logprobs: Any,
    echo: bool,
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
        generations.append(Generation(Submission(own, prompt, seeded, stream=stream), echo))
    return OpenAIRequest(
        request_id, generations, len(prompts), data["model"], stream, _include_usage(data, stream), params.logprobs
    )


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The choices of one prompt differ: choice i takes seed + i."""
    return (
        params
        if params.seed is None or not choice
        else dataclasses.replace(params, seed=(params.seed + choice) % 2**63)
    )


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
        raise invalid(
            "prompt", "must be a non-empty string, a list of strings, a list of token ids or a list of such lists."
        )
    if all(isinstance(p, str) for p in prompt):
        at_most(prompt, "prompt", MAX_CHOICES)
        return [_prompt_text(p, "prompt", limits) for p in prompt]
    if all(isinstance(p, list) for p in prompt):
        at_most(prompt, "prompt", MAX_CHOICES)
        return [_prompt_ids(p, limits) for p in prompt]
    return [_prompt_ids(prompt, limits)]


def _prompt_ids(ids: list[Any], limits: Limits) -> list[int]:
    if not ids:
        raise invalid("prompt", "is empty: give at least one token.")
    if len(ids) >= limits.max_seq_len:
        raise invalid(
            "prompt",
            f"has {len(ids)} tokens and may have {limits.max_seq_len - 1} (one less than the engine's max_seq_len).",
        )
    return checked_ids(ids, "prompt", limits)


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
    at_most(messages, "messages", MAX_TURNS)
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
