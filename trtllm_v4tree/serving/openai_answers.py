"""Answers of the OpenAI endpoint as JSON values: whole bodies, stream chunks, logprobs, errors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from tokenizers import Tokenizer

from trtllm_v4tree.runtime.sampling import TokenLogprobs
from trtllm_v4tree.serving.events import Event, Usage
from trtllm_v4tree.serving.openai_requests import OpenAIRequest

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TokenTexts:
    """Bytes and text of single tokens of a byte-level tokenizer; special tokens are their own name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_of_character()

    def bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token) or ""
        try:
            return bytes(self._bytes[c] for c in name)
        except KeyError:
            return name.encode()

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet of bytes, which byte-level tokenizers share."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Answer(ABC):
    """What completions and chat share: choices in order, usage, chunks."""

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, asked: OpenAIRequest, tokens: TokenTexts) -> None:
        self.asked, self.tokens = asked, tokens
        self.request_id = asked.request_id
        self.created = int(time.time())
        self.events: list[Event | None] = [None] * len(asked.generations)
        self.usages = [Usage()] * len(asked.generations)

    def take(self, index: int, event: Event) -> None:
        before = self.events[index]
        self.events[index] = event if before is None else before.then(event)
        self.usages[index] = event.usage

    def whole(self) -> Json:
        """The body of an answer that is not streamed."""
        choices = [self.choice(i, event) for i, event in enumerate(self.events) if event is not None]
        return {**self._head(self.object), "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        return []

    def chunks(self, index: int, event: Event) -> list[Json]:
        """Stream chunks of one event."""
        self.usages[index] = event.usage
        if not event.text and not event.logprobs and not event.last:
            return []
        return [self._chunk([self.delta(index, event)])]

    def closing(self) -> list[Json]:
        return (
            [{**self._head(self.chunk_object), "choices": [], "usage": self.usage()}]
            if self.asked.include_usage
            else []
        )

    def usage(self) -> Json:
        """Prompts count once, however many choices they have."""
        per_prompt = len(self.usages) // self.asked.prompts
        prompt = sum(u.prompt_tokens for u in self.usages[::per_prompt])
        completion = sum(u.completion_tokens for u in self.usages)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @abstractmethod
    def choice(self, index: int, event: Event) -> Json: ...

    @abstractmethod
    def delta(self, index: int, event: Event) -> Json: ...

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        return {**chunk, "usage": None} if self.asked.include_usage else chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
        }


class CompletionAnswer(Answer):
    """POST /v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: OpenAIRequest, tokens: TokenTexts) -> None:
        super().__init__(asked, tokens)
        self._offset = [len(self._echo(i)) for i in range(len(asked.generations))]
        self._begun = [False] * len(asked.generations)

    def choice(self, index: int, event: Event) -> Json:
        return {
            "index": index,
            "text": self._echo(index) + event.text,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
            "logprobs": self._logprobs(index, event),
        }

    def delta(self, index: int, event: Event) -> Json:
        choice = self.choice(index, event)
        if self._begun[index]:
            choice["text"] = event.text
        self._begun[index] = True
        return choice

    def _echo(self, index: int) -> str:
        generation = self.asked.generations[index]
        return str(generation.submission.prompt) if generation.include_prompt else ""

    def _logprobs(self, index: int, event: Event) -> Json | None:
        if self.asked.logprobs is None:
            return None
        texts = [self.tokens.text_of(t) for t in event.token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset[index])
            self._offset[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(p.chosen) for p in event.logprobs],
            "top_logprobs": [{self.tokens.text_of(t): _finite(x) for t, x in p.top} for p in event.logprobs],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """POST /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        start = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": start, "finish_reason": None, "logprobs": None}])
            for i in range(len(self.usages))
        ]

    def choice(self, index: int, event: Event) -> Json:
        return {**self._choice(index, event), "message": {"role": "assistant", "content": event.text, "refusal": None}}

    def delta(self, index: int, event: Event) -> Json:
        return {**self._choice(index, event), "delta": {"content": event.text} if event.text else {}}

    def _choice(self, index: int, event: Event) -> Json:
        return {
            "index": index,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
            "logprobs": self._logprobs(event),
        }

    def _logprobs(self, event: Event) -> Json | None:
        if self.asked.logprobs is None:
            return None
        rows = zip(event.token_ids, event.logprobs, strict=True)
        return {"content": [self._row(token, p) for token, p in rows], "refusal": None}

    def _row(self, token: int, logprobs: TokenLogprobs) -> Json:
        return {**self._entry(token, logprobs.chosen), "top_logprobs": [self._entry(t, x) for t, x in logprobs.top]}

    def _entry(self, token: int, logprob: float) -> Json:
        raw = self.tokens.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
