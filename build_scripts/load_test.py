"""Load on a real server: starts `v4tree serve`, drives concurrent streams with random prompts, lengths, cancels and killed connections.

    python build_scripts/load_test.py --engine_dir engines/v4-nano --seconds 600 --streams 16 --speculation s3_k2_d6 --output report.json

Three phases, each of which can be left out: one client alone (--single_seconds), the load (--seconds), and one stream beside the arrival of
2,000-token prompts (--probe_seconds). Prints one JSON object; exit status 1 if an error came that was not provoked, if a slot or page is
still taken at the end, or if resident memory rose by 2 % or more over the last half of the load.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

ROOT = Path(__file__).resolve().parents[1]
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "train",
    "price",
    "hour",
    "apple",
    "Tom",
    "Mary",
    "buys",
    "sells",
    "runs",
    "3",
    "12",
    "100",
    "dollars",
    "every",
    "morning",
    "and",
    "then",
    "how",
    "many",
    "are",
    "left",
]
SAMPLE_S = 2.0
CALM_LENGTH, PROBE_LENGTH = 64, 1500  # tokens; a stream of the probe outlasts the prompts that arrive


@dataclass
class Tally:
    """What the clients saw; one lock for all of it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, kind: str, tokens: int, times: list[float]) -> None:
        """times: start, then each chunk."""
        with self.lock:
            self.requests[kind] += 1
            self.tokens += tokens
            if len(times) > 1:
                self.first.append(times[1] - times[0])
                self.gaps += np.diff(times[1:]).tolist()

    def fail(self, kind: str, error: Exception) -> None:
        with self.lock:
            self.errors.append(f"{kind}: {error!r}"[:300])


def percentiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    if not values:
        return {}
    return {f"p{p}_ms": round(1e3 * float(np.percentile(values, p)), 2) for p in (50, 99)}


class Server:
    """`v4tree serve` on free ports, and what /proc and /metrics say of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
        self.grpc, self.http, self.metrics_port, self.openai = (s.getsockname()[1] for s in sockets)
        for s in sockets:
            s.close()
        self.log = Path(options.log)
        command = [
            sys.executable,
            "-m",
            "trtllm_v4tree.cli.main",
            "serve",
            "--engine_dir",
            options.engine_dir,
            "--speculation",
            options.speculation,
        ]
        ports = (
            "--grpc_port",
            self.grpc,
            "--http_port",
            self.http,
            "--metrics_port",
            self.metrics_port,
            "--openai_port",
            self.openai,
        )
        command += [*map(str, ports), "--threads", str(options.threads), "--log_level", "warning"]
        command += ["--max_num_tokens", str(options.max_num_tokens)]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)
        while "ready: openai" not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None:
                sys.exit(self.log.read_text(errors="replace")[-3000:])
            time.sleep(0.2)
        self.model = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{self.openai}/v1/models").read())["data"][0][
            "id"
        ]

    def metrics(self) -> dict[str, float]:
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).read().decode()
        return {name: float(value) for name, value in re.findall(r"^(v4tree_\S+) (\S+)$", text, re.M)}

    def resident_bytes(self) -> int:
        """Of all its processes; pages that they share count in each."""
        return sum(_resident(pid) for pid in _family(self.process.pid))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=90)


def _family(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found = [pid]
    for member in found:
        found += parents.get(member, [])
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


class Client:
    """One worker: a request at a time until `until`."""

    def __init__(
        self, server: Server, tally: Tally, seed: int, until: float, calm: bool, calm_length: int = CALM_LENGTH
    ) -> None:
        self.server, self.tally, self.until, self.calm, self.calm_length = server, tally, until, calm, calm_length
        self.random = random.Random(seed)
        self.triton = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")

    def run(self) -> None:
        while time.monotonic() < self.until:
            kind = "text" if self.calm else self.random.choices(("text", "tokens", "openai"), (6, 2, 2))[0]
            fate = "whole" if self.calm else self.random.choices(("whole", "cancelled", "killed"), (85, 9, 6))[0]
            stop_after = self.random.randint(1, 8) if fate != "whole" else 10**9
            try:
                ask = self._openai if kind == "openai" else self._triton
                tokens, times = ask(kind, fate, stop_after)
                self.tally.add(fate, tokens, times)
            except Exception as error:
                self.tally.fail(f"{kind} {fate}", error)

    def _prompt(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.choice((3, 10, 40, 120))))

    def _length(self) -> int:
        return self.calm_length if self.calm else self.random.choice((4, 16, 64, 160))

    def _triton(self, kind: str, fate: str, stop_after: int) -> tuple[int, list[float]]:
        results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.triton.start_stream(callback=lambda result, error: results.put((result, error)))
        times, tokens = [time.monotonic()], 0
        try:
            model, inputs = self._inputs(kind)
            self.triton.async_stream_infer(model, inputs, enable_empty_final_response=True)
            for _ in range(stop_after):
                result, error = results.get(timeout=120)
                if error is not None:
                    raise error
                times.append(time.monotonic())
                tokens = int(result.as_numpy("completion_tokens").item())
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        finally:
            if fate == "killed":
                self.triton.close()
                self.triton = grpcclient.InferenceServerClient(f"127.0.0.1:{self.server.grpc}")
            else:
                self.triton.stop_stream(cancel_requests=fate == "cancelled")
        return tokens, times

    def _inputs(self, kind: str) -> tuple[str, list[Any]]:
        sampling = [
            tensor("temperature", "FP32", np.float32(self.random.choice((0.0, 0.8)))),
            tensor("random_seed", "UINT64", np.uint64(self.random.getrandbits(40))),
            tensor("end_id", "INT32", np.int32(-1)),
        ]
        length = np.int32(self._length())
        if kind == "text":
            text = tensor("text_input", "BYTES", np.array(self._prompt().encode(), object))
            return "ensemble", [
                text,
                tensor("max_tokens", "INT32", length),
                tensor("stream", "BOOL", np.bool_(True)),
                *sampling,
            ]
        ids = np.array([[self.random.randrange(5, 4000) for _ in range(self.random.choice((3, 60, 400)))]], np.int32)
        prompt = grpcclient.InferInput("input_ids", list(ids.shape), "INT32")
        prompt.set_data_from_numpy(ids)
        return "tensorrt_llm", [
            prompt,
            tensor("request_output_len", "INT32", length),
            tensor("streaming", "BOOL", np.bool_(True)),
            *sampling,
        ]

    def _openai(self, kind: str, fate: str, stop_after: int) -> tuple[int, list[float]]:
        body = {
            "model": self.server.model,
            "prompt": self._prompt(),
            "max_tokens": self._length(),
            "stream": True,
            "ignore_eos": True,
        }
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        times, tokens = [time.monotonic()], 0
        with socket.create_connection(("127.0.0.1", self.server.openai), timeout=120) as client:
            fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
            lines = client.makefile("rb")
            status = lines.readline()
            if b" 200 " not in status:
                raise RuntimeError(status.decode())
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                if event["choices"]:
                    times.append(time.monotonic())
                else:
                    tokens = event["usage"]["completion_tokens"]
                if len(times) > stop_after:
                    break
            if fate == "killed":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if fate == "whole" and not tokens:
            raise RuntimeError("the stream ended early")
        return tokens, times


def tensor(name: str, kind: str, value: Any) -> Any:
    """An input of shape [1, 1]."""
    made = grpcclient.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.asarray(value).reshape(1, 1))
    return made


def drive(
    server: Server, streams: int, seconds: float, seed: int, calm: bool
) -> tuple[Tally, float, list[tuple[float, int]]]:
    """Runs `streams` clients; returns what they saw, the duration, and (time, resident bytes) samples."""
    tally, began = Tally(), time.monotonic()
    clients = [Client(server, tally, seed + i, began + seconds, calm) for i in range(streams)]
    threads = [threading.Thread(target=c.run, daemon=True) for c in clients]
    for thread in threads:
        thread.start()
    samples = []
    while any(t.is_alive() for t in threads):
        samples.append((time.monotonic() - began, server.resident_bytes()))
        time.sleep(SAMPLE_S)
    return tally, time.monotonic() - began, samples


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 1),
        "requests": dict(tally.requests),
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "time_to_first_token": percentiles(tally.first),
        "gap_between_chunks": percentiles(tally.gaps),
        "unprovoked_errors": tally.errors[:20],
    }


def memory(samples: list[tuple[float, int]], seconds: float) -> dict[str, Any]:
    """Mean resident bytes in the tenth of the load after its middle and in its last tenth."""

    def mean(low: float, high: float) -> float:
        return float(np.mean([b for t, b in samples if low * seconds <= t <= high * seconds] or [np.nan]))

    middle, end = mean(0.5, 0.6), mean(0.9, 1.0)
    return {
        "middle_mb": round(middle / 1e6, 1),
        "end_mb": round(end / 1e6, 1),
        "rise_last_half_percent": round(100 * (end / middle - 1), 2),
    }


def probe(server: Server, seconds: float, seed: int) -> dict[str, Any]:
    """One text stream's gaps, with and without 2,000-token prompts that arrive one after the other."""
    quiet, noisy, arrived = Tally(), Tally(), list[float]()
    Client(server, quiet, seed, time.monotonic() + seconds / 2, True, PROBE_LENGTH).run()
    stop = threading.Event()

    def arrivals() -> None:
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        while not stop.wait(0.5):
            results: queue.Queue[Any] = queue.Queue()
            began = time.monotonic()
            prompt = grpcclient.InferInput("input_ids", [1, 2000], "INT32")
            prompt.set_data_from_numpy(np.full((1, 2000), 9, np.int32))
            client.start_stream(callback=lambda result, error, results=results: results.put(error))
            client.async_stream_infer("tensorrt_llm", [prompt, tensor("request_output_len", "INT32", np.int32(1))])
            results.get(timeout=120)
            arrived.append(time.monotonic() - began)
            client.stop_stream()

    thread = threading.Thread(target=arrivals)
    thread.start()
    Client(server, noisy, seed, time.monotonic() + seconds / 2, True, PROBE_LENGTH).run()
    stop.set()
    thread.join()
    ratio = percentiles(noisy.gaps)["p99_ms"] / percentiles(noisy.gaps)["p50_ms"]
    return {
        "alone": percentiles(quiet.gaps),
        "beside_2000_token_prompts": percentiles(noisy.gaps),
        "p99_over_p50": round(ratio, 2),
        "first_token_of_2000_token_prompts": {"prompts": len(arrived), **percentiles(arrived)},
    }


def idle(server: Server) -> dict[str, float]:
    """Slots, pages and queue once the clients are gone; waits up to 30 s."""
    deadline = time.monotonic() + 30
    while True:
        time.sleep(1.0)
        m = server.metrics()
        found = {k: m[f"v4tree_{k}"] for k in ("slots_active", "pages_used", "queue_depth")}
        if not any(found.values()) or time.monotonic() > deadline:
            return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", required=True)
    parser.add_argument("--speculation", default="none")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max_num_tokens", type=int, default=0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--single_seconds", type=float, default=20)
    parser.add_argument("--probe_seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="/tmp/v4tree_load_server.log")
    parser.add_argument("--output", default=None)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    server = Server(options)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "speculation": options.speculation,
        "streams": options.streams,
    }
    try:
        if options.single_seconds:
            tally, seconds, _ = drive(server, 1, options.single_seconds, options.seed, calm=True)
            report["one_client"] = summary(tally, seconds)
            tally, seconds, _ = drive(server, options.streams, options.single_seconds, options.seed, calm=True)
            report["many_calm_clients"] = summary(tally, seconds)
            report["batching_gain"] = round(
                report["many_calm_clients"]["tokens_per_second"] / report["one_client"]["tokens_per_second"], 2
            )
        if options.probe_seconds:
            report["prefill_beside_a_stream"] = probe(server, options.probe_seconds, options.seed)
        bad = False
        if options.seconds:
            tally, seconds, samples = drive(server, options.streams, options.seconds, options.seed, calm=False)
            report["load"] = {**summary(tally, seconds), "memory": memory(samples, options.seconds)}
            bad = bool(tally.errors) or report["load"]["memory"]["rise_last_half_percent"] >= 2.0
        report["at_the_end"] = idle(server)
        report["metrics"] = server.metrics()
        bad = bad or any(report["at_the_end"].values())
    finally:
        report["exit_status_of_the_server"] = server.stop()
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
