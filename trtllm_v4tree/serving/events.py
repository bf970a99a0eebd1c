"""What travels between a front end and the engine thread: a submission one way, events the other, both as plain JSON values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from trtllm_v4tree.errors import RequestError, V4TreeError
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.sampling import TokenLogprobs


class Code(str, enum.Enum):
    """Kinds of failure, named as in gRPC."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class ServingError(V4TreeError):
    """A request that ends without its result; `field` is the input to blame, if there is one."""

    def __init__(self, code: Code, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.field = code, message, field


def invalid(field: str, message: str) -> ServingError:
    """An INVALID_ARGUMENT that starts with the field's name."""
    return ServingError(Code.INVALID_ARGUMENT, f"{field} {message}", field)


Turn = tuple[str, str]  # role, text
Prompt = str | list[int] | list[Turn]


@dataclass(frozen=True)
class Submission:
    """One generation: text, token ids or chat turns, what to sample, and how long it may take in all.

    Without `stream` the result comes as one event.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    timeout_s: float | None = None
    stream: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "params": dataclasses.asdict(self.params),
            "timeout_s": self.timeout_s,
            "stream": self.stream,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Submission:
        """Raises ServingError for anything that `to_json` does not write."""
        try:
            prompt = data["prompt"]
            if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
                prompt = [(str(role), str(text)) for role, text in prompt]
            timeout = data["timeout_s"]
            return cls(
                str(data["request_id"]),
                prompt,
                SamplingParams(**data["params"]),
                None if timeout is None else float(timeout),
                bool(data["stream"]),
            )
        except (KeyError, TypeError, ValueError, RequestError) as error:
            raise ServingError(Code.INVALID_ARGUMENT, f"the submission cannot be read: {error}") from error


class Usage(NamedTuple):
    """Counts of one request so far; `rounds` are verify passes and `round_tokens` what they emitted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0

    @property
    def accepted_length(self) -> float:
        return self.round_tokens / self.rounds if self.rounds else 0.0


NO_USAGE = Usage()


@dataclass(frozen=True)
class Event:
    """What one or more rounds added to a request. The last event of a request has `finish_reason` or `error`."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage = NO_USAGE
    error: ServingError | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def then(self, later: Event) -> Event:
        """Both events as one."""
        return Event(
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.stop_reason,
            later.usage,
            later.error,
        )

    def without_error(self) -> Event:
        """What had been emitted before the error."""
        return dataclasses.replace(self, error=None)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "token_ids": self.token_ids,
            "text": self.text,
            "usage": self.usage,
        }
        if self.logprobs:
            data["logprobs"] = self.logprobs
        if self.finish_reason is not None:
            data["finish_reason"], data["stop_reason"] = self.finish_reason, self.stop_reason
        if self.error is not None:
            data["error"] = [self.error.code.value, self.error.message, self.error.field]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Event:
        error = data.get("error")
        return cls(
            token_ids=data["token_ids"],
            text=data["text"],
            logprobs=[TokenLogprobs(chosen, [(i, p) for i, p in top]) for chosen, top in data.get("logprobs", ())],
            finish_reason=data.get("finish_reason"),
            stop_reason=data.get("stop_reason"),
            usage=Usage(*data["usage"]),
            error=None if error is None else ServingError(Code(error[0]), error[1], error[2]),
        )


def failure(error: ServingError, usage: Usage | None = None) -> Event:
    return Event(error=error, usage=usage or NO_USAGE)


class Ticket(Protocol):
    """A submitted request, as its submitter sees it."""

    def cancel(self) -> None: ...


class Backend(Protocol):
    """Where a front end submits: the engine thread itself, or a connection to the process that owns it."""

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> Ticket: ...
