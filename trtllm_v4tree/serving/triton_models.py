"""The two python-backend models of `triton_server_repo`: `TokenModel` owns the engine thread, `TextModel` reaches it over the owner's socket.

Triton runs each python model in a process of its own, so one engine for all models means one owner. The owner is the token model; it
shares its engine thread by a Unix socket rather than by BLS, because a socket carries one frame per round for all streams (BLS: one
message per stream and chunk through the server process), keeps typed errors, and passes a cancel on at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.serving import endings, logs
from trtllm_v4tree.serving.events import Backend, Code, Event, ServingError, Ticket
from trtllm_v4tree.serving.loop import EngineLoop
from trtllm_v4tree.serving.metrics import Exporter
from trtllm_v4tree.serving.outbox import Outbox
from trtllm_v4tree.serving.owner import Owner
from trtllm_v4tree.serving.remote import RemoteLoop
from trtllm_v4tree.serving.requests import Generation, Limits
from trtllm_v4tree.serving.triton_requests import text_request, token_request
from trtllm_v4tree.serving.wire import default_socket

CANCEL_POLL_S = 0.02  # a few rounds of a full batch; each question is a round trip to the server process
SEND_REST = 2.0  # times what a pass over several streams took


@dataclass(frozen=True)
class Settings:
    """The `parameters` of a config.pbtxt."""

    engine_dir: Path
    socket: Path
    speculation: str = "none"
    deterministic: bool = False
    threads: int = 0
    max_queue_size: int = 256
    max_num_tokens: int = 0
    exclude_input_in_output: bool = True
    max_request_seconds: float = 0.0
    log_level: str = "info"

    @classmethod
    def of(cls, model_config: dict[str, Any]) -> Settings:
        """Raises ConfigError that names the parameter."""
        given = {k: v["string_value"] for k, v in model_config.get("parameters", {}).items()}
        if not given.get("engine_dir"):
            raise ConfigError("the parameter engine_dir is empty: write the engine's directory into config.pbtxt.")
        engine_dir = Path(given["engine_dir"])
        socket = given.get("engine_socket")
        return cls(
            engine_dir=engine_dir,
            socket=Path(socket) if socket else default_socket(engine_dir, os.getppid()),
            speculation=given.get("speculation") or "none",
            deterministic=_switch(given, "deterministic", False),
            threads=_number(given, "threads", 0, 1024),
            max_queue_size=_number(given, "max_queue_size", 256, 1 << 20),
            max_num_tokens=_number(given, "max_num_tokens", 0, 1 << 20),
            exclude_input_in_output=_switch(given, "exclude_input_in_output", True),
            max_request_seconds=float(_number(given, "max_request_seconds", 0, 1 << 30)),
            log_level=given.get("log_level") or "info",
        )


def _number(given: dict[str, str], name: str, default: int, high: int) -> int:
    text = given.get(name) or str(default)
    if not text.isdecimal() or int(text) > high:
        raise ConfigError(f"the parameter {name} is {text!r}: give an integer from 0 to {high}.")
    return int(text)


def _switch(given: dict[str, str], name: str, default: bool) -> bool:
    text = (given.get(name) or str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"the parameter {name} is {text!r}: give true or false.")
    return text == "true"


def _leave_the_end_to_triton() -> None:
    """This process ends when Triton finalizes the model or is gone; the stub's own answer to SIGTERM, which a service manager may send to
    every process, would skip `finalize`."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class TritonUtils(Protocol):
    """The part of triton_python_backend_utils that is used here."""

    Tensor: Any
    InferenceResponse: Any
    TritonError: Any
    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int


@dataclass(eq=False)
class _Live:
    """A request of Triton that is being answered.

    Triton 2.51 crashes if it is asked about cancellation while or after the final response goes out: `lock` keeps the two apart.
    """

    sender: Any
    generation: Generation
    ticket: Ticket | None = None
    started: bool = False
    cancelled: bool = False
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    cum_log_prob: float = 0.0

    def ask_cancelled(self) -> bool:
        """True once, when the client has gone."""
        with self.lock:
            if self.ended or self.cancelled or not self.sender.is_cancelled():
                return False
            self.cancelled = True
            return True


class _Model(ABC):
    """What both models share: execute, the thread that answers and the thread that polls for cancellation."""

    settings: Settings
    limits: Limits
    backend: Backend
    input_names: Sequence[str]

    def __init__(self, pb: TritonUtils) -> None:
        self.pb = pb
        self._live: set[_Live] = set()
        self._outbox: Outbox[_Live] = Outbox()
        self._closing = False
        self._server_pid = os.getppid()

    def start(self, model_config: dict[str, Any]) -> None:
        self.settings = Settings.of(model_config)
        logs.configure(self.settings.log_level)
        endings.show_crashes()
        _leave_the_end_to_triton()
        self.limits = Limits.of(Manifest.read(self.settings.engine_dir))
        self.input_names = [i["name"] for i in model_config["input"]]
        self.decoupled = bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._answer, self._poll_cancelled)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes requests and returns at once; answers go through response senders."""
        for request in requests:
            live = None
            sender = request.get_response_sender()
            try:
                live = _Live(sender, self._checked(request))
                self._live.add(live)
                live.ticket = self.backend.submit(live.generation.submission, partial(self._outbox.put, live))
            except ServingError as error:
                if live is not None:
                    self._live.discard(live)
                self._send_error(sender, error)
            except Exception as error:
                logs.log("execute_failed", exc_info=True)
                if live is not None:
                    self._live.discard(live)
                self._send_error(
                    sender, ServingError(Code.INTERNAL, f"the request could not be read ({type(error).__name__}).")
                )

    def finalize(self) -> None:
        self._closing = True
        for live in list(self._live):
            if live.ticket is not None:
                live.ticket.cancel()
        deadline = time.monotonic() + 5.0
        while self._live and time.monotonic() < deadline:
            time.sleep(0.02)
        self._outbox.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _checked(self, request: Any) -> Generation:
        tensors: dict[str, NDArray[Any]] = {t.name(): t.as_numpy() for t in request.inputs()}
        generation = self.generation(tensors, request.request_id(), self._timeout_s(request))
        if generation.stream and not self.decoupled:
            raise ServingError(
                Code.INVALID_ARGUMENT, "stream must be false on this model: use the decoupled one.", "stream"
            )
        return generation

    def _timeout_s(self, request: Any) -> float | None:
        """The shorter of the client's `timeout` (microseconds) and the server's limit."""
        limits = [t for t in (request.timeout() / 1e6, self.settings.max_request_seconds) if t > 0]
        return min(limits, default=None)

    @abstractmethod
    def generation(self, tensors: dict[str, NDArray[Any]], request_id: str, timeout_s: float | None) -> Generation: ...

    @abstractmethod
    def outputs(self, live: _Live, event: Event) -> list[Any]: ...

    # ---------------------------------------------------------------- answers

    def _answer(self) -> None:
        """Sends what has come, one response per stream.

        After a pass over several streams it rests, so that sending takes at most a third of one processor: the busier the server, the
        more tokens a response has. A stream that is alone never waits.
        """
        while waiting := self._outbox.take():
            began = time.monotonic()
            for live, event in waiting.items():
                self._answer_one(live, event)
            if len(waiting) > 1:
                time.sleep(SEND_REST * (time.monotonic() - began))

    def _answer_one(self, live: _Live, event: Event) -> None:
        if event.last:
            with live.lock:
                live.ended = True
        try:
            if event.error is None:
                self._send(live, event)
            else:
                if live.generation.stream and event.token_ids:
                    self._send(live, event.without_error())
                self._send_error(live.sender, event.error)
        except Exception:
            logs.log("send_failed", exc_info=True, request_id=live.generation.submission.request_id)
            if live.ticket is not None:
                live.ticket.cancel()
        if event.last:
            self._live.discard(live)

    def _send(self, live: _Live, event: Event) -> None:
        live.cum_log_prob += sum(p.chosen for p in event.logprobs)
        response = self.pb.InferenceResponse(output_tensors=self.outputs(live, event))
        live.started = True
        live.sender.send(response, self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if event.last else 0)

    def _send_error(self, sender: Any, error: ServingError) -> None:
        codes = self.pb.TritonError
        code = {
            Code.INVALID_ARGUMENT: codes.INVALID_ARG,
            Code.UNAVAILABLE: codes.UNAVAILABLE,
            Code.CANCELLED: codes.CANCELLED,
            Code.DEADLINE_EXCEEDED: codes.CANCELLED,
        }.get(error.code, codes.INTERNAL)
        response = self.pb.InferenceResponse(
            output_tensors=[], error=codes(f"{error.code.value}: {error.message}", code)
        )
        sender.send(response, self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _poll_cancelled(self) -> None:
        while not self._closing:
            if os.getppid() != self._server_pid:
                logs.log("server_gone", logging.ERROR, pid=self._server_pid)
                os._exit(1)  # nobody else would end this process
            for live in list(self._live):
                if live.ticket is not None and live.ask_cancelled():
                    live.ticket.cancel()
            time.sleep(CANCEL_POLL_S)

    def _common_outputs(self, live: _Live, event: Event) -> list[Any]:
        """Outputs that both models have."""
        tensor, u = self.pb.Tensor, event.usage
        found = [
            tensor("finish_reason", np.array([[(event.finish_reason or "").encode()]], np.object_)),
            tensor("rounds", np.array([[u.rounds]], np.int32)),
            tensor("accepted_length", np.array([[u.accepted_length]], np.float32)),
            tensor("prompt_tokens", np.array([[u.prompt_tokens]], np.int32)),
            tensor("completion_tokens", np.array([[u.completion_tokens]], np.int32)),
        ]
        if live.generation.submission.params.logprobs is not None:
            chosen = np.array([p.chosen for p in event.logprobs], np.float32)
            found.append(tensor("output_log_probs", chosen.reshape(1, 1, -1)))
            found.append(tensor("cum_log_probs", np.array([[live.cum_log_prob]], np.float32)))
        return found


class TokenModel(_Model):
    """`tensorrt_llm`: token ids in, token ids out. Owns the engine thread."""

    def initialize(self, args: dict[str, str]) -> None:
        self.start(json.loads(args["model_config"]))
        s = self.settings
        self.loop = EngineLoop.load(
            s.engine_dir, s.speculation, s.threads, s.max_queue_size, s.deterministic, s.max_num_tokens
        )
        self.backend = self.loop
        self.owner = Owner(self.loop, s.socket)
        self.exporter = Exporter(self.pb, self.loop.stats)
        self.begin()
        logs.log("engine_ready", engine_dir=str(s.engine_dir), speculation=s.speculation, socket=str(s.socket))

    def finalize(self) -> None:
        super().finalize()
        self.loop.stop()
        self.owner.close()
        self.exporter.close()

    def generation(self, tensors: dict[str, NDArray[Any]], request_id: str, timeout_s: float | None) -> Generation:
        tokenizer = self.loop.tokenizer
        decode = None if tokenizer is None else tokenizer.tokenizer.decode
        s = self.settings
        return token_request(tensors, self.limits, request_id, s.exclude_input_in_output, timeout_s, decode)

    def outputs(self, live: _Live, event: Event) -> list[Any]:
        ids = event.token_ids
        if live.generation.include_prompt and not live.started:
            ids = [*live.generation.submission.prompt, *ids]  # type: ignore[list-item]
        return [
            self.pb.Tensor("output_ids", np.array(ids, np.int32).reshape(1, 1, -1)),
            self.pb.Tensor("sequence_length", np.array([[len(ids)]], np.int32)),
            *self._common_outputs(live, event),
        ]


class TextModel(_Model):
    """`ensemble` (decoupled) and `ensemble_unary` (one response): text in, text out.

    Connects at the first request: models load in any order, and Triton answers nobody before all are loaded.
    """

    def initialize(self, args: dict[str, str]) -> None:
        self.start(json.loads(args["model_config"]))
        self.remote = RemoteLoop(self.settings.socket)
        self.backend = self.remote
        self.begin()

    def finalize(self) -> None:
        super().finalize()
        self.remote.close()

    def generation(self, tensors: dict[str, NDArray[Any]], request_id: str, timeout_s: float | None) -> Generation:
        s = self.settings
        return text_request(tensors, self.limits, request_id, s.exclude_input_in_output, timeout_s)

    def outputs(self, live: _Live, event: Event) -> list[Any]:
        text = event.text
        if live.generation.include_prompt and not live.started:
            text = f"{live.generation.submission.prompt}{text}"
        return [
            self.pb.Tensor("text_output", np.array([[text.encode()]], np.object_)),
            *self._common_outputs(live, event),
        ]
