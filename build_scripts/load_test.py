"""Load on a real server: starts `v4tree serve`, drives concurrent streams with random prompts, lengths, cancels and killed connections.

    python build_scripts/load_test.py --engine_dir engines/v4-nano --seconds 600 --streams 16 --speculation s3_k2_d6 --output report.json

Three phases, each of which can be left out: one client and many clients in turns, streaming and not (--batching_seconds for each turn), one
stream beside the arrival of 2,000-token prompts (--probe_seconds), and the load (--seconds). All clients live in one asyncio loop, so that
they take little of the processor from the server. Prints one JSON object; exit status 1 if an error came that was not provoked, if a slot or page is
still taken at the end, or if resident memory rose by 2 % or more over the last half of the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

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
TURNS = 3  # of one client and many clients
PATIENCE_S = 120.0


Samples = list[tuple[float, int]]  # seconds, resident bytes


@dataclass
class Tally:
    """What the clients saw."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    processor_seconds: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, parts: Iterable[Tally]) -> Tally:
        """Several turns as one."""
        whole = cls()
        for part in parts:
            whole.requests += part.requests
            whole.processor_seconds += part.processor_seconds
            whole.tokens, whole.seconds = whole.tokens + part.tokens, whole.seconds + part.seconds
            whole.first, whole.gaps = whole.first + part.first, whole.gaps + part.gaps
            whole.errors = whole.errors + part.errors
        return whole

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def add(self, kind: str, tokens: int, times: list[float]) -> None:
        """times: start, then each chunk."""
        self.requests[kind] += 1
        self.tokens += tokens
        if len(times) > 1:
            self.first.append(times[1] - times[0])
            self.gaps += np.diff(times[1:]).tolist()

    def fail(self, kind: str, error: Exception) -> None:
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

    def processor_seconds(self) -> Counter[str]:
        """Taken by each of the server's processes since it started, and by this one, the clients'."""
        used = Counter({"clients": time.process_time()})
        for pid in _family(self.process.pid):
            used[_role(pid)] += _processor_seconds(pid)
        return used

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


def _role(pid: int) -> str:
    """What a process of the server does: the model it runs, or its name."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "gone"
    model = re.search(r"/(\w+)/\d+/model\.py", command)
    return (
        f"model {model[1]}" if model else "tritonserver" if "tritonserver" in command.split("\0")[0] else "v4tree serve"
    )


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


@dataclass(frozen=True)
class Mix:
    """What a client asks for. A calm one sends texts of CALM_LENGTH tokens and lets each of its requests end."""

    calm: bool
    length: int = CALM_LENGTH
    stream: bool = True


class Client:
    """One worker: a request at a time until `until`."""

    def __init__(self, server: Server, tally: Tally, seed: int, until: float, mix: Mix) -> None:
        self.server, self.tally, self.until, self.mix = server, tally, until, mix
        self.random = random.Random(seed)
        self.triton = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")

    async def run(self) -> None:
        while time.monotonic() < self.until:
            kind = "text" if self.mix.calm else self.random.choices(("text", "tokens", "openai"), (6, 2, 2))[0]
            fate = "whole" if self.mix.calm else self.random.choices(("whole", "cancelled", "killed"), (85, 9, 6))[0]
            stop_after = self.random.randint(1, 8) if fate != "whole" else 10**9
            ask = self._openai if kind == "openai" else self._triton
            try:
                tokens, times = await asyncio.wait_for(ask(kind, fate, stop_after), PATIENCE_S)
                self.tally.add(fate, tokens, times)
            except Exception as error:
                self.tally.fail(f"{kind} {fate}", error)
        await self.triton.close()

    def _length(self) -> int:
        return self.mix.length if self.mix.calm else self.random.choice((4, 16, 64, 160))

    async def _triton(self, kind: str, fate: str, stop_after: int) -> tuple[int, list[float]]:
        times, result, ended = [time.monotonic()], None, False
        results = stream(self.triton, *self._inputs(kind))
        async for result, error in results:
            if error is not None:
                raise error
            times.append(time.monotonic())
            ended = result.get_response().parameters["triton_final_response"].bool_param
            if len(times) > stop_after:
                break
        if fate == "killed":
            await self.triton.close()
            self.triton = grpcclient.InferenceServerClient(f"127.0.0.1:{self.server.grpc}")
        # A whole stream ends by itself: what Triton 2.51 knows of one that is cancelled while it ends is never freed.
        if fate != "whole":
            results.cancel()
        elif not ended:
            raise RuntimeError("the stream ended early")
        return 0 if result is None else int(result.as_numpy("completion_tokens").item()), times

    def _inputs(self, kind: str) -> tuple[str, list[Any]]:
        sampling = [
            tensor("temperature", "FP32", np.float32(self.random.choice((0.0, 0.8)))),
            tensor("random_seed", "UINT64", np.uint64(self.random.getrandbits(40))),
            tensor("end_id", "INT32", np.int32(-1)),
        ]
        length = np.int32(self._length())
        if kind == "text":
            text = tensor("text_input", "BYTES", np.array(prompt_of(self.random).encode(), object))
            streaming = tensor("stream", "BOOL", np.bool_(self.mix.stream))
            return "ensemble", [text, tensor("max_tokens", "INT32", length), streaming, *sampling]
        ids = [self.random.randrange(5, 4000) for _ in range(self.random.choice((3, 60, 400)))]
        streaming = tensor("streaming", "BOOL", np.bool_(True))
        return "tensorrt_llm", [
            token_ids(ids), tensor("request_output_len", "INT32", length), streaming, *sampling
        ]  # fmt: skip

    async def _openai(self, kind: str, fate: str, stop_after: int) -> tuple[int, list[float]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.openai)
        try:
            writer.write(self._http_request())
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(status.decode())
            tokens, times = await _server_sent(reader, stop_after)
            if fate == "killed":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            writer.close()
        if fate == "whole" and not tokens:
            raise RuntimeError("the stream ended early")
        return tokens, times

    def _http_request(self) -> bytes:
        body = {
            "model": self.server.model,
            "prompt": prompt_of(self.random),
            "max_tokens": self._length(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
        return f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data


async def _server_sent(reader: asyncio.StreamReader, stop_after: int) -> tuple[int, list[float]]:
    """Tokens, and the times of start and chunks, of a stream of server-sent events."""
    times, tokens = [time.monotonic()], 0
    async for line in reader:
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
    return tokens, times


def prompt_of(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.choice((3, 10, 40, 120))))


def stream(client: Any, model: str, inputs: list[Any]) -> Any:
    """(result, error) pairs of one request."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs, "enable_empty_final_response": True}

    return client.stream_infer(requests())


def tensor(name: str, kind: str, value: Any) -> Any:
    """An input of shape [1, 1]."""
    made = grpcclient.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.asarray(value).reshape(1, 1))
    return made


def token_ids(ids: list[int]) -> Any:
    made = grpcclient.InferInput("input_ids", [1, len(ids)], "INT32")
    made.set_data_from_numpy(np.array([ids], np.int32))
    return made


async def drive(server: Server, streams: int, seconds: float, seed: int, mix: Mix, samples: Samples) -> Tally:
    """Runs `streams` clients; returns what they saw and adds (time, resident bytes) to `samples`."""
    tally, used, began = Tally(), server.processor_seconds(), time.monotonic()
    clients = [Client(server, tally, seed + i, began + seconds, mix) for i in range(streams)]
    running = asyncio.gather(*(c.run() for c in clients))
    while not running.done():
        samples.append((time.monotonic() - began, server.resident_bytes()))
        await asyncio.wait((running,), timeout=SAMPLE_S)
    tally.seconds = time.monotonic() - began
    tally.processor_seconds = server.processor_seconds() - used
    return tally


async def batching(server: Server, streams: int, seconds: float, seed: int, stream: bool) -> dict[str, Any]:
    """One client and `streams` clients in turns, with the same kind of requests; the gain is the median over the turns."""
    one, many, mix = list[Tally](), list[Tally](), Mix(calm=True, stream=stream)
    for turn in range(TURNS):
        for count, tallies in ((1, one), (streams, many)):
            tallies.append(await drive(server, count, seconds, seed + turn * streams, mix, []))
    gains = [b.speed / a.speed for a, b in zip(one, many, strict=True)]
    return {
        "one_client": summary(Tally.of(one)),
        "many_clients": summary(Tally.of(many)),
        "gains": [round(g, 2) for g in gains],
        "gain": round(float(np.median(gains)), 2),
    }


def summary(tally: Tally) -> dict[str, Any]:
    return {
        "seconds": round(tally.seconds, 1),
        "requests": dict(tally.requests),
        "tokens_per_second": round(tally.speed, 1),
        "time_to_first_token": percentiles(tally.first),
        "gap_between_chunks": percentiles(tally.gaps),
        "tokens_per_chunk": round(tally.tokens / max(1, len(tally.gaps) + len(tally.first)), 2),
        "processor_us_per_token": {
            role: round(1e6 * used / tally.tokens) for role, used in tally.processor_seconds.most_common()
        },
        "unprovoked_errors": tally.errors[:20],
    }


def memory(samples: Samples, seconds: float) -> dict[str, Any]:
    """Mean resident bytes in the tenth of the load after its middle and in its last tenth."""

    def mean(low: float, high: float) -> float:
        return float(np.mean([b for t, b in samples if low * seconds <= t <= high * seconds] or [np.nan]))

    middle, end = mean(0.5, 0.6), mean(0.9, 1.0)
    return {
        "middle_mb": round(middle / 1e6, 1),
        "end_mb": round(end / 1e6, 1),
        "rise_last_half_percent": round(100 * (end / middle - 1), 2),
    }


async def probe(server: Server, seconds: float, seed: int) -> dict[str, Any]:
    """One text stream's gaps, with and without 2,000-token prompts that arrive one after the other."""
    mix = Mix(calm=True, length=PROBE_LENGTH)
    quiet = await drive(server, 1, seconds / 2, seed, mix, [])
    arrived = list[float]()
    arriving = asyncio.create_task(arrivals(server, arrived))
    noisy = await drive(server, 1, seconds / 2, seed, mix, [])
    arriving.cancel()
    ratio = percentiles(noisy.gaps)["p99_ms"] / percentiles(noisy.gaps)["p50_ms"]
    return {
        "alone": percentiles(quiet.gaps),
        "beside_2000_token_prompts": percentiles(noisy.gaps),
        "p99_over_p50": round(ratio, 2),
        "first_token_of_2000_token_prompts": {"prompts": len(arrived), **percentiles(arrived)},
    }


async def arrivals(server: Server, arrived: list[float]) -> None:
    """2,000-token prompts one after the other until cancelled; takes down when their first tokens came."""
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")
    while True:
        await asyncio.sleep(0.5)
        began = time.monotonic()
        inputs = [token_ids([9] * 2000), tensor("request_output_len", "INT32", np.int32(1))]
        async for _, error in stream(client, "tensorrt_llm", inputs):
            if error is not None:
                raise error
            break
        arrived.append(time.monotonic() - began)


async def idle(server: Server) -> dict[str, float]:
    """Slots, pages and queue once the clients are gone; waits up to 30 s."""
    deadline = time.monotonic() + 30
    while True:
        await asyncio.sleep(1.0)
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
    parser.add_argument("--batching_seconds", type=float, default=10)
    parser.add_argument("--probe_seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="/tmp/v4tree_load_server.log")
    parser.add_argument("--output", default=None)
    return parser.parse_args()


async def phases(server: Server, options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Fills the report; whether something went wrong."""
    bad, streams, seed = False, options.streams, options.seed
    if options.batching_seconds:
        for name, stream in (("streaming", True), ("not_streaming", False)):
            report[f"batching_{name}"] = await batching(server, streams, options.batching_seconds, seed, stream)
    if options.probe_seconds:
        report["prefill_beside_a_stream"] = await probe(server, options.probe_seconds, seed)
    if options.seconds:
        samples: Samples = []
        tally = await drive(server, streams, options.seconds, seed, Mix(calm=False), samples)
        report["load"] = {**summary(tally), "memory": memory(samples, options.seconds)}
        bad = bool(tally.errors) or report["load"]["memory"]["rise_last_half_percent"] >= 2.0
    report["at_the_end"] = await idle(server)
    report["metrics"] = server.metrics()
    return bad or any(report["at_the_end"].values())


def main() -> int:
    options = arguments()
    server = Server(options)
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "processors": os.cpu_count(),
        "speculation": options.speculation,
        "streams": options.streams,
    }
    try:
        bad = asyncio.run(phases(server, options, report))
    finally:
        report["exit_status_of_the_server"] = server.stop()
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
