"""Starts `v4tree serve` on free loopback ports and talks to it with clients that nobody here wrote."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

ROOT = Path(__file__).resolve().parents[2]
KEY = "test-key"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


@dataclass
class Server:
    """A running `v4tree serve`."""

    process: subprocess.Popen[bytes]
    log: Path
    grpc_port: int
    http_port: int
    metrics_port: int
    openai_port: int

    @classmethod
    def start(cls, engine_dir: Path, log: Path, *options: str, command: list[str] | None = None) -> Server:
        grpc, http, metrics, openai = free_ports(4)
        arguments = [
            *(command or [sys.executable, "-m", "trtllm_v4tree.cli.main", "serve"]),
            "--engine_dir", str(engine_dir), "--grpc_port", str(grpc), "--http_port", str(http),
            "--metrics_port", str(metrics), "--openai_port", str(openai), "--threads", "1", *options,
        ]  # fmt: skip
        with log.open("wb") as file:
            environment = {**os.environ, "V4TREE_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(arguments, stdout=file, stderr=file, env=environment)
        server = cls(process, log, grpc, http, metrics, openai)
        server._wait_ready()
        return server

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while "ready: openai" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def grpc(self) -> grpcclient.InferenceServerClient:
        return grpcclient.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http_port}{path}"

    def openai_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.openai_port}{path}"

    def metrics(self) -> dict[str, float]:
        """The v4tree_ metrics of Triton's /metrics, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("v4tree_"))
        }

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, float]:
        """Until no slot and no page is in use."""
        deadline = time.monotonic() + timeout_s
        while True:
            time.sleep(0.6)
            m = self.metrics()
            if m["v4tree_slots_active"] == m["v4tree_pages_used"] == m["v4tree_queue_depth"] == 0:
                return m
            assert time.monotonic() < deadline, m

    def children(self) -> list[int]:
        return _descendants(self.process.pid)


def _descendants(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if re.search(rf"^PPid:\s+{pid}$", status.read_text(), re.M):
                child = int(status.parent.name)
                found += [child, *_descendants(child)]
    return found


_TYPES = {
    "BYTES": ("text_input", "stop_words", "bad_words"),
    "BOOL": (
        "stream", "streaming", "return_log_probs", "exclude_input_in_output", "return_context_logits", "return_generation_logits"
    ),
    "UINT64": ("random_seed",),
    "FP32": (
        "temperature", "top_p", "runtime_top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "length_penalty", "len_penalty",
    ),
}  # fmt: skip
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}
_DTYPES = {"BYTES": np.object_, "BOOL": np.bool_, "UINT64": np.uint64, "FP32": np.float32, "INT32": np.int32}


def tensor(name: str, value: object, kind: str | None = None, client: object = grpcclient) -> object:
    """An input of batch size 1; lists become [1, n], arrays keep their shape."""
    kind = kind or _TYPE_OF.get(name, "INT32")
    if not isinstance(value, np.ndarray):
        items = value if isinstance(value, list) else [value]
        value = np.array([[v.encode() if isinstance(v, str) else v for v in items]], _DTYPES[kind])
    made = client.InferInput(name, list(value.shape), kind)  # type: ignore[attr-defined]
    made.set_data_from_numpy(value)
    return made


def tensors(client: object = grpcclient, **values: object) -> list[object]:
    return [tensor(name, value, client=client) for name, value in values.items()]


def stream(
    client: grpcclient.InferenceServerClient, model: str, inputs: list[object], **options: object
) -> Iterator[grpcclient.InferResult]:
    """Results of one request over gRPC streaming, up to the final flag; raises InferenceServerException."""
    import queue

    results: queue.Queue[tuple[object, object]] = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    try:
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        while True:
            result, error = results.get(timeout=60)
            if error is not None:
                raise error  # type: ignore[misc]
            yield result  # type: ignore[misc]
            if result.get_response().parameters["triton_final_response"].bool_param:  # type: ignore[attr-defined]
                return
    finally:
        client.stop_stream(cancel_requests=True)


def text_of(results: list[grpcclient.InferResult]) -> str:
    return b"".join(r.as_numpy("text_output").reshape(-1)[0] for r in results).decode()
