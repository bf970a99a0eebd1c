"""The OpenAI-style endpoint: /v1/models, /v1/completions, /v1/chat/completions on Starlette and uvicorn.

Reads bounded bodies, checks the key, submits to the engine's owner and answers; what a request means is in `requests`, what an
answer looks like in `openai_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.serving.events import Backend, Code, Event, ServingError, Ticket
from trtllm_v4tree.serving.logs import log
from trtllm_v4tree.serving.openai_answers import Answer, ChatAnswer, CompletionAnswer, TokenTexts, error_body
from trtllm_v4tree.serving.openai_requests import OpenAIRequest, chat_request, completion_request
from trtllm_v4tree.serving.remote import RemoteLoop
from trtllm_v4tree.serving.requests import Limits, checked_id
from trtllm_v4tree.tokenizer import EngineTokenizer

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as _error:
    raise ConfigError(f"the OpenAI endpoint needs {_error.name}: pip install 'trtllm_v4tree[serve]'.") from _error

BODY_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 1024
MAX_DROPPED_BYTES = 64 << 20
_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.CANCELLED: 499,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.INTERNAL: 500,
}


class _HttpError(Exception):
    """An answer with this status and error body."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.response = JSONResponse(error_body(status, message, code, param), status, _error_headers(status))


def _error_headers(status: int) -> dict[str, str]:
    return {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status, {})


class Endpoint:
    """The handlers, bound to one engine."""

    def __init__(
        self,
        backend: Backend,
        stats: Callable[[], dict[str, Any]],
        limits: Limits,
        tokens: TokenTexts,
        model: str,
        key: str | None,
        max_body_bytes: int,
        timeout_s: float | None,
    ) -> None:
        self.backend, self.stats, self.limits, self.tokens = backend, stats, limits, tokens
        self.model, self.key, self.max_body_bytes, self.timeout_s = model, key, max_body_bytes, timeout_s

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._guarded(self.one_model), methods=["GET"]),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})  # type: ignore[dict-item]

    # ---------------------------------------------------------------- handlers

    async def health(self, request: Request) -> Response:
        try:
            ready = bool((await asyncio.to_thread(self.stats))["ready"])
        except ServingError:
            ready = False
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_card())

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        asked = completion_request(body, self.limits, _request_id(request))
        return await self._answer(request, asked, CompletionAnswer(asked, self.tokens))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        asked = chat_request(body, self.limits, _request_id(request))
        return await self._answer(request, asked, ChatAnswer(asked, self.tokens))

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "trtllm_v4tree",
            "max_model_len": self.limits.max_seq_len,
        }

    # ---------------------------------------------------------------- before

    def _guarded(self, handler: Any) -> Any:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                response: Response = await handler(request)
            except _HttpError as error:
                return error.response
            except ServingError as error:
                status = _STATUS[error.code]
                return JSONResponse(
                    error_body(status, error.message, error.code.value.lower(), error.field),
                    status,
                    _error_headers(status),
                )
            except Exception as error:
                log("openai_failed", logging.ERROR, exc_info=True)
                return JSONResponse(
                    error_body(500, f"the request could not be answered ({type(error).__name__})."), 500
                )
            return response

        return guarded

    def _check_key(self, request: Request) -> None:
        """Compares in constant time, so that timing tells nothing about the key."""
        if self.key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise _HttpError(401, "the API key is missing or wrong: send Authorization: Bearer KEY.", "invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise _HttpError(
                404, f"model {name[:200]!r} does not exist: this server has {self.model!r}.", "model_not_found", "model"
            )

    async def _body(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _HttpError(415, f"content-type {kind[:100]!r} is not application/json.")
        try:
            data = await asyncio.wait_for(self._bytes(request), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise _HttpError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
        try:
            return json.loads(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _HttpError(400, f"the body is not valid UTF-8 (byte {error.start}).") from None
        except (ValueError, RecursionError) as error:
            raise _HttpError(400, f"the body is not valid JSON ({error})."[:300]) from None

    async def _bytes(self, request: Request) -> bytes:
        """The body; of one that is too large the rest is read and dropped, so that a client that still sends sees the answer."""
        limit, size, data = self.max_body_bytes, 0, bytearray()
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                data += part
            elif size > limit + MAX_DROPPED_BYTES:
                break
        if size > limit:
            raise _HttpError(413, f"the body is larger than {limit} bytes: send less.")
        return bytes(data)

    # ---------------------------------------------------------------- generation

    async def _answer(self, request: Request, asked: OpenAIRequest, answer: Answer) -> Response:
        self._check_model(asked.model)
        running = _Running(self.backend, asked, self.timeout_s)
        headers = {"X-Request-Id": answer.request_id}
        try:
            await running.start()
            if asked.stream:
                await running.first_event()
                return _Stream(running, answer, headers)
            await _until_ended(running, answer, request)
            return JSONResponse(answer.whole(), headers=headers)
        except BaseException:
            running.cancel()
            raise


class _Running:
    """The generations of one HTTP request; events of a choice that the client has not taken wait as one."""

    def __init__(self, backend: Backend, asked: OpenAIRequest, timeout_s: float | None) -> None:
        self.backend, self.asked, self.timeout_s = backend, asked, timeout_s
        self.tickets: list[Ticket] = []
        self.open = len(asked.generations)
        self._io = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: dict[int, Event] = {}
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        """Submits. Raises ServingError."""
        for index, generation in enumerate(self.asked.generations):
            submission = dataclasses.replace(generation.submission, timeout_s=self.timeout_s)
            on_event = partial(self._on_event, index)
            self.tickets.append(await asyncio.to_thread(self.backend.submit, submission, on_event))

    async def first_event(self) -> None:
        """Waits for one, so that a refusal still has its own HTTP status. Raises ServingError."""
        await self._arrived.wait()
        for event in list(self._waiting.values()):
            if event.error is not None and not event.token_ids:
                raise event.error

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self.open:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            for index, event in waiting.items():
                self.open -= event.last
                yield index, event

    def _on_event(self, index: int, event: Event) -> None:
        """From the backend's thread."""
        with self._lock:
            first, before = not self._waiting, self._waiting.get(index)
            self._waiting[index] = event if before is None else before.then(event)
        if first:
            with contextlib.suppress(RuntimeError):  # the server's loop has ended
                self._io.call_soon_threadsafe(self._arrived.set)

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()


class _Stream(StreamingResponse):
    """Server-sent events; a client that leaves early cancels."""

    def __init__(self, running: _Running, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(
            _sse(running, answer), media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache"}
        )
        self._running = running

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _sse(running: _Running, answer: Answer) -> AsyncIterator[str]:
    for chunk in answer.opening():
        yield _data(chunk)
    async for index, event in running:
        if event.error is not None:
            for chunk in answer.chunks(index, event.without_error()):
                yield _data(chunk)
            yield _data(
                error_body(
                    _STATUS[event.error.code], event.error.message, event.error.code.value.lower(), event.error.field
                )
            )
            return
        for chunk in answer.chunks(index, event):
            yield _data(chunk)
    for chunk in answer.closing():
        yield _data(chunk)
    yield "data: [DONE]\n\n"


def _data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _until_ended(running: _Running, answer: Answer, request: Request) -> None:
    """Gathers all choices; a client that goes away ends them. Raises ServingError."""

    async def gather() -> None:
        async for index, event in running:
            if event.error is not None:
                raise event.error
            answer.take(index, event)

    work, gone = asyncio.create_task(gather()), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ServingError(Code.CANCELLED, "the client went away.")
        work.result()
    finally:
        for task in (work, gone):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _request_id(request: Request) -> str:
    return checked_id(request.headers.get("x-request-id"))


async def _http_exception(request: Request, error: HTTPException) -> Response:
    return JSONResponse(
        error_body(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}."), error.status_code
    )


# ---------------------------------------------------------------- process


def make_app(
    engine_dir: Path, model: str, socket_path: Path, key: str | None, max_body_bytes: int, timeout_s: float | None
) -> Starlette:
    """The ASGI application for the engine whose owner listens on `socket_path`."""
    remote = RemoteLoop(socket_path)
    tokens = TokenTexts(EngineTokenizer(engine_dir / "tokenizer.json").tokenizer)
    return Endpoint(
        remote, remote.stats, Limits.of(Manifest.read(engine_dir)), tokens, model, key, max_body_bytes, timeout_s
    ).app()


class _Server(uvicorn.Server):
    """Leaves signals to `v4tree serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def start(app: Any, host: str, port: int, grace_s: int) -> tuple[_Server, asyncio.Task[None]]:
    """Listens and serves; raises ConfigError if the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(f"openai_port {port} on {host} cannot be used ({error.strerror}): give another.") from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=max(1, grace_s),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    return server, task


async def stop(running: tuple[_Server, asyncio.Task[None]]) -> None:
    """Lets open answers end and closes."""
    server, task = running
    server.should_exit = True
    await task
