"""Cancels, killed clients, faults in the engine, a full queue, a lost owner, SIGTERM under load: on the real server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tritonclient", reason="the extra serve is not installed")
from tritonclient.utils import InferenceServerException

from trtllm_v4tree.serving import launch

from .harness import KEY, ROOT, Server, free_ports, stream, tensors, text_of

LONG = {"text_input": "Once upon a time", "max_tokens": 1900, "end_id": -1, "stream": True}
SHORT = {"text_input": "Once upon a time", "max_tokens": 8, "end_id": -1}


def _short(server: Server) -> str:
    with server.grpc() as client:
        return text_of(list(stream(client, "ensemble", tensors(**SHORT))))


def _wait_active(server: Server, count: int) -> None:
    deadline = time.monotonic() + 20
    while server.metrics()["v4tree_slots_active"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _wait_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [p for p in processes if Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_cancelled_grpc_streams_free_their_slots(server: Server) -> None:
    before = server.wait_idle()["v4tree_cancelled_total"]
    for model, inputs in (
        ("ensemble", LONG),
        ("tensorrt_llm", {"input_ids": [0, 5], "request_output_len": 1900, "end_id": -1, "streaming": True}),
    ):
        with server.grpc() as client:
            results = stream(client, model, tensors(**inputs))
            for _ in range(3):
                next(results)
            results.close()
    assert server.wait_idle()["v4tree_cancelled_total"] == before + 2
    assert _short(server)


def test_a_clients_timeout_ends_its_request(server: Server) -> None:
    with server.grpc() as client:
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED: .* 0\.1 s"):
            list(stream(client, "ensemble", tensors(**LONG), timeout=100_000))
        assert text_of(list(stream(client, "ensemble", tensors(**SHORT), timeout=60_000_000)))
    server.wait_idle()


def _http_stream(port: int, path: str, body: dict[str, object]) -> socket.socket:
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    return client


def test_closed_openai_streams_free_their_slots(server: Server) -> None:
    before = server.wait_idle()["v4tree_cancelled_total"]
    body = {"model": "engine", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    clients = [_http_stream(server.openai_port, "/v1/completions", body) for _ in range(3)]
    for client in clients:
        client.close()
    assert server.wait_idle()["v4tree_cancelled_total"] == before + 3


def test_closed_openai_request_without_stream_frees_its_slot(server: Server) -> None:
    before = server.wait_idle()["v4tree_cancelled_total"]
    data = json.dumps({"model": "engine", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        server.openai_url("/v1/completions"),
        data,
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(request, timeout=0.5)
    assert server.wait_idle()["v4tree_cancelled_total"] == before + 1


def test_closed_generate_streams_free_their_slots(server: Server) -> None:
    server.wait_idle()
    client = _http_stream(server.http_port, "/v2/models/ensemble/generate_stream", LONG)
    client.close()
    server.wait_idle(40)


_CLIENT = """
import sys, tritonclient.grpc as g, numpy as np
c = g.InferenceServerClient(sys.argv[1])
def t(name, kind, value): i = g.InferInput(name, [1, 1], kind); i.set_data_from_numpy(value); return i
c.start_stream(callback=lambda result, error: print("chunk", flush=True))
c.async_stream_infer("ensemble", [t("text_input", "BYTES", np.array([[b"Once"]], object)), t("max_tokens", "INT32", np.array([[1900]], np.int32)),
    t("end_id", "INT32", np.array([[-1]], np.int32)), t("stream", "BOOL", np.array([[True]]))])
import time; time.sleep(60)
"""


def test_killed_grpc_clients_free_their_slots(server: Server) -> None:
    before = server.wait_idle()["v4tree_cancelled_total"]
    clients = [
        subprocess.Popen([sys.executable, "-c", _CLIENT, f"127.0.0.1:{server.grpc_port}"], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for client in clients:
        assert client.stdout is not None and client.stdout.readline() == b"chunk\n"
    for client in clients:
        client.kill()
        client.wait()
    assert server.wait_idle()["v4tree_cancelled_total"] == before + 3
    assert _short(server)


def test_full_queue_is_unavailable(start: Callable[..., Server]) -> None:
    server = start("--max_queue_size", "1")
    body = json.dumps({"model": "engine", "prompt": "Once", "max_tokens": 64, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}

    def ask(_: int) -> int:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(server.openai_url("/v1/completions"), body, headers), timeout=120
            ) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            assert "queue is full" in error.read().decode()
            return error.code

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        statuses = list(pool.map(ask, range(40)))
    assert set(statuses) == {200, 503} and statuses.count(200) >= 16
    assert ask(0) == 200
    assert server.stop() == 0


_FAULTY = """
import sys
from pathlib import Path
from trtllm_v4tree.serving import launch
real = launch.prepare_repository
FAULTS = '''
import os
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
_target = OnnxRuntimeExecutor.target
def target(self, feeds):
    if os.path.exists({path!r}):
        os.remove({path!r})
        raise RuntimeError("injected")
    return _target(self, feeds)
OnnxRuntimeExecutor.target = target
'''
def prepare(target, parameters):
    repository = real(target, parameters)
    model = repository / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text() + FAULTS.format(path=sys.argv[1]))
    return repository
launch.prepare_repository = prepare
from trtllm_v4tree.cli.main import run
run(sys.argv[2:])
"""


def test_a_fault_in_the_engine_ends_its_batch_and_the_server_goes_on(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    flag = tmp_path / "fault"
    server = start("--speculation", "s3_k2_d6", command=[sys.executable, "-c", _FAULTY, str(flag), "serve"])
    want = _short(server)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.grpc()) for _ in range(4)]
        running = [stream(client, "ensemble", tensors(**LONG)) for client in clients]
        for results in running:
            next(results)
        flag.touch()
        for results in running:
            with pytest.raises(InferenceServerException, match="INTERNAL: the engine failed"):
                list(results)
    assert _short(server) == want
    metrics = server.wait_idle()
    assert (
        metrics["v4tree_engine_faults_total"] == 1
        and metrics["v4tree_failed_total"] == 4
        and metrics["v4tree_ready"] == 1
    )
    assert server.stop() == 0


def _owner(server: Server) -> int:
    (pid,) = [p for p in server.children() if f"models/{launch.OWNER_MODEL}" in Path(f"/proc/{p}/cmdline").read_text()]
    return pid


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "SIGKILL (Killed)"), (signal.SIGSEGV, "SIGSEGV (Segmentation fault)")]
)
def test_a_lost_engine_process_ends_the_server(start: Callable[..., Server], number: int, words: str) -> None:
    """Running requests get UNAVAILABLE, and the server ends with a message that says how the process ended, since Triton would go
    on saying that it is ready."""
    server = start()
    owner = _owner(server)
    with server.grpc() as client:
        results = stream(client, "ensemble", tensors(**LONG))
        next(results)
        os.kill(owner, number)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            list(results)
    assert server.process.wait(timeout=60) == 1
    log = _words(server)
    assert f"the engine's process ended: process {owner}, by {words}" in log
    assert number == signal.SIGKILL or ("Fatal Python error" in log and "loop.py" in log)


def _words(server: Server) -> str:
    """The log without its line breaks, which depend on the width of a terminal."""
    return " ".join(server.log.read_text(errors="replace").split())


_HANGING = """
import sys
from trtllm_v4tree.cli import serve
from trtllm_v4tree.serving import launch
serve.ANSWER_S = serve.ROUND_S = 3.0
real = launch.prepare_repository
HANG = '''
import ctypes, os
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
_target = OnnxRuntimeExecutor.target
def target(self, feeds):
    if os.path.exists({path!r}):
        {call}
    return _target(self, feeds)
OnnxRuntimeExecutor.target = target
'''
def prepare(target, parameters):
    repository = real(target, parameters)
    model = repository / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text() + HANG.format(path=sys.argv[1], call=sys.argv[2]))
    return repository
launch.prepare_repository = prepare
from trtllm_v4tree.cli.main import run
run(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("call", "words"),
    [("ctypes.PyDLL(None).sleep(120)", "did not answer"), ("ctypes.CDLL(None).sleep(120)", "did not end a round")],
    ids=["with Python's lock", "without it"],
)
def test_an_engine_process_that_hangs_shows_where_and_ends_the_server(
    start: Callable[..., Server], tmp_path: Path, call: str, words: str
) -> None:
    flag = tmp_path / "hang"
    server = start(command=[sys.executable, "-c", _HANGING, str(flag), call, "serve"])
    owner = _owner(server)
    assert _short(server)
    flag.touch()
    with server.grpc() as client, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        list(stream(client, "ensemble", tensors(**LONG)))
    assert server.process.wait(timeout=60) == 1
    log = _words(server)
    assert f"the engine's process ({owner}) {words} within 3 s" in log and "in target" in log


def _triton(server: Server) -> int:
    (pid,) = [p for p in server.children() if Path(f"/proc/{p}/comm").read_text().startswith("tritonserver")]
    return pid


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "by SIGKILL (Killed)"), (signal.SIGTERM, "with status 0")]
)
def test_the_end_of_tritonserver_is_told_as_its_own(start: Callable[..., Server], number: int, words: str) -> None:
    server = start()
    triton = _triton(server)
    os.kill(triton, number)
    assert server.process.wait(timeout=60) == 1
    log = _words(server)
    assert f"tritonserver (process {triton}) ended {words}" in log
    assert "did not answer" not in log and "Fatal Python error" not in log


def test_a_stopped_server_leaves_nothing(start: Callable[..., Server]) -> None:
    """No process crashes on its way out, Triton waits for nothing, and no shared memory stays."""
    server = start()
    assert _short(server)
    server.metrics()
    os.kill(_owner(server), signal.SIGTERM)
    assert _memory(server)
    assert server.stop() == 0
    log = server.log.read_text(errors="replace")
    assert "Fatal Python error" not in log and "Exit timeout expired" not in log
    assert not _memory(server)


@pytest.mark.parametrize("first", [True, False], ids=["serve first", "serve last"])
def test_a_server_whose_processes_all_get_the_signal_stops_as_well(start: Callable[..., Server], first: bool) -> None:
    """As a service manager does, in any order: Triton ends the engine's process while `v4tree serve` waits for its requests."""
    server = start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.grpc()) for _ in range(16)]
        running = [stream(client, "ensemble", tensors(**LONG)) for client in clients]
        for results in running:
            next(results)
        children = server.children()
        if first:
            server.terminate()
            time.sleep(0.3)
        for pid in children:
            os.kill(pid, signal.SIGTERM)
        server.terminate()
        for results in running:
            with contextlib.suppress(InferenceServerException):
                list(results)
    assert server.stop() == 0
    log = _words(server)
    assert "stopped" in log and "Fatal Python error" not in log and "Traceback" not in log
    assert not _memory(server)


def _memory(server: Server) -> list[Path]:
    return list(Path("/dev/shm").glob(f"v4tree_{server.process.pid}-*"))


def test_the_next_start_removes_what_a_killed_server_left(start: Callable[..., Server]) -> None:
    server = start()
    processes = server.children()
    server.process.kill()
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    _wait_gone(processes)
    assert _memory(server)
    assert start().stop() == 0 and not _memory(server)


def test_shared_memory_that_cannot_be_removed_stops_nothing(tmp_path: Path) -> None:
    """A directory stands for another user's file in /dev/shm, which only that user may remove."""
    prefix = launch.memory_prefix(tmp_path)
    foreign, own = Path(f"/dev/shm/{prefix}a"), Path(f"/dev/shm/{prefix}b")
    foreign.mkdir()
    try:
        own.touch()
        launch._remove_memory(prefix)
        assert foreign.exists() and not own.exists()
    finally:
        foreign.rmdir()


def test_a_server_that_stops_amid_short_lived_clients_leaves_nothing(start: Callable[..., Server]) -> None:
    """Clients that end, cancel or vanish after a few chunks, and SIGTERM while they come: no process crashes."""
    server = start("--grace_seconds", "5")
    stopping, served = threading.Event(), Counter[str]()

    def client(number: int) -> None:
        chance = random.Random(number)
        while not stopping.is_set():
            inputs = {**LONG, "max_tokens": chance.choice((1, 2, 8, 64))}
            connection = server.grpc()
            results = stream(connection, "ensemble", tensors(**inputs))
            with contextlib.suppress(InferenceServerException):  # the server stops
                for count, _ in enumerate(results):
                    if count == chance.choice((0, 1, 100)):
                        break
                served["asked"] += 1
            if chance.random() < 0.5:
                results.close()
            connection.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, i) for i in range(8)]
        time.sleep(8.0)
        server.terminate()
        time.sleep(0.5)
        stopping.set()
        for done in running:
            done.result(timeout=120)
    assert server.stop() == 0 and served["asked"] > 50
    log = server.log.read_text(errors="replace")
    assert "Fatal Python error" not in log and "terminate called" not in log
    assert not _memory(server)


def test_sigkill_of_the_server_leaves_no_process(start: Callable[..., Server]) -> None:
    server = start()
    children = server.children()
    assert len(children) >= 4
    server.process.kill()
    _wait_gone(children)


def test_sigterm_under_load_loses_no_accepted_stream(start: Callable[..., Server]) -> None:
    server = start("--grace_seconds", "60")
    inputs = {**LONG, "max_tokens": 300}
    started: queue.Queue[int] = queue.Queue()

    def one(number: int) -> int:
        if number % 2:
            body = {
                "model": "engine",
                "prompt": "Once upon a time",
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": True,
            }
            with _http_stream(server.openai_port, "/v1/completions", body) as client:
                started.put(number)
                data = b""
                while part := client.recv(65536):
                    data += part
                    if b"[DONE]" in data:
                        break
            assert b'"finish_reason": "length"' in data and b"[DONE]" in data
            return 300
        with server.grpc() as client:
            count = 0
            for result in stream(client, "ensemble", tensors(**inputs)):
                if not count:
                    started.put(number)
                count = result.as_numpy("completion_tokens").item()
            return count

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(one, i) for i in range(8)]
        for _ in waiting:
            started.get(timeout=60)
        children = server.children()
        server.terminate()
        assert [w.result(timeout=120) for w in waiting] == [300] * 8
    assert server.stop() == 0
    assert children
    _wait_gone(children)


def test_the_repository_serves_without_v4tree_serve(engine_dir: Path, tmp_path: Path) -> None:
    """As in an existing Triton container: the template with an engine written into it, and `tritonserver` on it."""
    triton = launch.find_triton(tmp_path / "cache")
    repository = launch.prepare_repository(tmp_path / "models", {"engine_dir": str(engine_dir), "threads": "1"})
    grpc, http, metrics = free_ports(3)
    process = launch.TritonProcess(
        triton, repository, launch.Endpoints("127.0.0.1", grpc, http, metrics), False, f"v4tree_{os.getpid()}-test_"
    )
    try:
        process.wait_ready(60.0)
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/v2/models/ensemble/generate",
            b'{"text_input": "Once upon a time", "max_tokens": 3}',
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["completion_tokens"] == 3
    finally:
        process.stop(20.0)


def test_unusable_options_are_refused_early(engine_dir: Path, tmp_path: Path) -> None:
    def serve(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trtllm_v4tree.cli.main", "serve", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)

    missing = serve("--engine_dir", str(tmp_path / "none"))
    assert missing.returncode == 2 and "No engine directory" in missing.stderr
    wrong = serve("--engine_dir", str(engine_dir), "--speculation", "s9_k9_d99")
    assert wrong.returncode != 0 and "d99" in wrong.stderr
