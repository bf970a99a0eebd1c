"""`v4tree serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_v4tree.cli.output import stderr
from trtllm_v4tree.errors import ConfigError, EngineFormatError
from trtllm_v4tree.serving.events import ServingError

if TYPE_CHECKING:
    from trtllm_v4tree.serving.launch import Endpoints, TritonProcess
    from trtllm_v4tree.serving.remote import RemoteLoop

WATCH_S = 1.0
ANSWER_S = 60.0  # the longest that a busy engine's process takes to answer
ROUND_S = 300.0  # the longest that its engine thread takes for a round
END_S = 5.0  # the longest that it takes to end once it has closed its socket
ENDED = "ended"
KEY_VARIABLE = "V4TREE_API_KEY"


def serve(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    speculation: Annotated[
        str, typer.Option("--speculation", help="none, sN_kK_dD, auto or another policy; the text is the same.")
    ] = "none",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Token-identical text whatever the batch and the tree; free with native kernels, else slower.",
        ),
    ] = False,
    grpc_port: Annotated[int, typer.Option("--grpc_port", min=1, max=65535)] = 8001,
    http_port: Annotated[int, typer.Option("--http_port", min=1, max=65535)] = 8000,
    metrics_port: Annotated[int, typer.Option("--metrics_port", min=1, max=65535)] = 8002,
    openai_port: Annotated[
        int | None,
        typer.Option("--openai_port", min=1, max=65535, help="Adds /v1/models, /v1/completions, /v1/chat/completions."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every interface.")
    ] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api_key_file", help=f"File with the key of the OpenAI endpoint; or set {KEY_VARIABLE}."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served_model_name", help="Name in /v1/models; default: the engine directory's.")
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads of the engine; 0 is all cores but one.")
    ] = 0,
    max_queue_size: Annotated[
        int, typer.Option("--max_queue_size", min=1, max=1 << 20, help="Requests that may wait for a slot.")
    ] = 256,
    max_num_tokens: Annotated[
        int,
        typer.Option("--max_num_tokens", min=0, max=1 << 20, help="Tokens of a step, prompt and nodes; 0: automatic."),
    ] = 0,
    max_request_seconds: Annotated[
        int, typer.Option("--max_request_seconds", min=0, help="Longer requests are ended; 0 is no limit.")
    ] = 0,
    max_body_bytes: Annotated[
        int, typer.Option("--max_body_bytes", min=1024, help="Largest request body of the OpenAI endpoint.")
    ] = 4 << 20,
    grace_seconds: Annotated[
        int, typer.Option("--grace_seconds", min=0, help="Time for running requests to end on SIGTERM.")
    ] = 30,
    log_level: Annotated[str, typer.Option("--log_level", help="debug, info, warning or error.")] = "info",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Triton's own messages.")] = False,
) -> None:
    """Serve an engine with Triton Inference Server (gRPC, HTTP) and, if asked, an OpenAI-style endpoint."""
    from trtllm_v4tree.llm import check_engine
    from trtllm_v4tree.serving import logs
    from trtllm_v4tree.serving.launch import (
        Endpoints,
        TritonProcess,
        cache_directory,
        find_triton,
        memory_prefix,
        prepare_repository,
    )
    from trtllm_v4tree.serving.remote import RemoteLoop

    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log_level {log_level!r} is unknown: give debug, info, warning or error.")
    check_engine(engine_dir, speculation)
    if not (engine_dir / "tokenizer.json").is_file():
        raise EngineFormatError(
            f"{engine_dir} has no tokenizer.json, which serving text needs: build it from a checkpoint that has one."
        )
    key = _api_key(api_key_file)
    logs.configure(log_level)
    if openai_port is not None:
        from trtllm_v4tree.serving import openai_server  # fails here if its libraries are missing
    cache = cache_directory()
    process = None
    try:
        triton = find_triton(cache)
        socket = cache / "engine.sock"
        parameters = {
            "engine_dir": str(engine_dir.resolve()),
            "engine_socket": str(socket),
            "speculation": speculation,
            "deterministic": str(deterministic).lower(),
            "threads": str(threads or max(1, (os.cpu_count() or 2) - 1)),
            "max_queue_size": str(max_queue_size),
            "max_num_tokens": str(max_num_tokens),
            "max_request_seconds": str(max_request_seconds),
            "log_level": log_level,
        }
        repository = prepare_repository(cache / "models", parameters)
        endpoints = Endpoints(host, grpc_port, http_port, metrics_port)
        process = TritonProcess(triton, repository, endpoints, verbose, memory_prefix(cache))
        process.wait_ready(600.0)
        remote = RemoteLoop(socket)
        app = None
        if openai_port is not None:
            name = served_model_name or engine_dir.resolve().name
            app = openai_server.make_app(engine_dir, name, socket, key, max_body_bytes, max_request_seconds or None)
        asyncio.run(_until_stopped(process, remote, endpoints, app, openai_port, grace_seconds))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second one would leave Triton's processes and memory behind
        if process is not None:
            process.stop(20.0)
        shutil.rmtree(cache, ignore_errors=True)


async def _until_stopped(
    process: TritonProcess,
    remote: RemoteLoop,
    endpoints: Endpoints,
    app: object | None,
    openai_port: int | None,
    grace_s: int,
) -> None:
    """Prints the endpoints, waits for a signal or for Triton's end, and lets running requests end."""
    from trtllm_v4tree.serving.launch import LaunchError

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = None
    if app is not None and openai_port is not None:
        from trtllm_v4tree.serving import openai_server

        server = await openai_server.start(app, endpoints.host, openai_port, grace_s)
    announced = False
    while not stopping.is_set():
        try:
            await asyncio.to_thread(_check, process, remote)
        except LaunchError:
            if stopping.is_set():  # a service manager has signalled every process
                break
            raise
        if not announced:
            _announce(endpoints, openai_port)
            announced = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping.wait(), WATCH_S)
    stderr.print(f"stopping: running requests have {grace_s} s to end")
    last = await asyncio.to_thread(_drained, remote, grace_s)
    if server is not None:
        await openai_server.stop(server)
    stderr.print(last)


def _drained(remote: RemoteLoop, grace_s: int) -> str:
    """Lets running requests end; the last words of the server."""
    try:
        return "stopped" if remote.drain(grace_s) else "stopped; some requests did not end in time"
    except ServingError:  # as where a service manager has signalled every process
        return "stopped; the engine's process ended or did not answer, so its requests could not be waited for"


def _check(process: TritonProcess, remote: RemoteLoop) -> None:
    """Raises LaunchError if Triton has ended, or the engine's process has or hangs."""
    from trtllm_v4tree.serving.launch import LaunchError

    if process.process.poll() is not None:
        raise LaunchError(f"{process.ending()}; its messages are above.")
    trouble = _trouble(remote)
    if trouble is not None:
        raise LaunchError(_what_ended(process, remote.owner_pid, trouble))


def _trouble(remote: RemoteLoop) -> str | None:
    """None where the engine's process is well, how it hangs, or ENDED where its connection is lost and cannot be made again. A busy one has
    ANSWER_S to answer and ROUND_S for each of its rounds."""
    for _ in range(2):
        try:
            round_s = remote.stats(timeout_s=ANSWER_S)["round_s"]
        except ServingError:
            if remote.connected:
                return f"did not answer within {ANSWER_S:g} s"
        else:
            return f"did not end a round within {ROUND_S:g} s" if round_s > ROUND_S else None
    return ENDED


def _what_ended(process: TritonProcess, owner: int | None, trouble: str) -> str:
    """What a user must know about this trouble of the engine's process. One that hangs is made to show what it does, and ends."""
    from trtllm_v4tree.serving import endings

    again = "Triton does not start it again: start the server again."
    if owner is None:
        return f"the engine's process {trouble}, and {again}"
    if trouble != ENDED:
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGABRT)
        time.sleep(1.0)
        return f"the engine's process ({owner}) {trouble} and was ended; what its threads did is above. {again}"
    deadline = time.monotonic() + END_S
    while endings.running(owner) and time.monotonic() < deadline:
        time.sleep(0.05)
    how = endings.other_ending(owner)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it ends before Triton does, and when Triton is gone
        process.process.wait(timeout=3.0 if how in (None, endings.ending(0)) else 0.0)
        return f"{process.ending()}, and the engine's process with it; their messages are above."
    if endings.running(owner):
        return f"the engine's process ({owner}) took no connection any more and did not end within {END_S:g} s. {again}"
    how = how or "in a way that the system does not tell"
    return f"the engine's process ended: process {owner}, {how}; its last messages are above. {again}"


def _announce(endpoints: Endpoints, openai_port: int | None) -> None:
    e = endpoints
    stderr.print(
        f"ready: grpc {e.host}:{e.grpc_port}, http http://{e.host}:{e.http_port}, metrics http://{e.host}:{e.metrics_port}/metrics"
    )
    if openai_port is not None:
        stderr.print(f"ready: openai http://{e.host}:{openai_port}/v1")


def _api_key(path: Path | None) -> str | None:
    key = path.read_text(encoding="utf-8").strip() if path is not None else os.environ.get(KEY_VARIABLE)
    if path is not None and not key:
        raise ConfigError(f"api_key_file {path} is empty.")
    return key or None
