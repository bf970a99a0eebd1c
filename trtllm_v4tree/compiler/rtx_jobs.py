"""Compiles the graphs of an engine in processes of their own, some at a time.

The compiler works for minutes in native code, where Python hears no signal: a process can be ended at once, takes no build down with
it, and keeps what the compiler prints off the terminal.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trtllm_v4tree.compiler.plan_builder import CompileError, Range
from trtllm_v4tree.compiler.rtx import RtxBuilder
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.errors import V4TreeError

MAX_WORKERS = 4
"""A process takes about 1.5 GB."""
COMMAND = (sys.executable, "-m", "trtllm_v4tree.compiler.rtx_jobs")


@dataclass(frozen=True)
class Job:
    """One graph: `<stem>.onnx` lies in `directory` with its weights, `<stem>.plan` is to be written there."""

    spec: GraphContract
    ranges: Sequence[dict[str, Range]]
    capabilities: tuple[str, ...]
    dtype: str
    directory: Path

    @property
    def stem(self) -> str:
        return self.spec.name

    def path(self, ending: str) -> Path:
        return self.directory / f"{self.stem}.{ending}"


@dataclass(frozen=True)
class Done:
    """What became of a job: layers of the parsed network, seconds to parse and build."""

    stem: str
    layers: int
    seconds: float


def compile_here(job: Job) -> Done:
    """In this process; raises CompileError."""
    plan = RtxBuilder(job.capabilities, job.dtype).compile(job.path("onnx"), job.spec, job.ranges)
    job.path("plan").write_bytes(plan.data)
    return Done(job.stem, plan.layers, plan.seconds)


class Workers:
    """At most `count` compiling processes; leaving the block ends those that still run."""

    def __init__(self, count: int | None = None, command: Sequence[str] | None = None) -> None:
        self.command = COMMAND if command is None else command
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(min(MAX_WORKERS, cores) if count is None else count)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._closed = threading.Lock(), False

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """Results as they come; raises CompileError of the first job that fails."""
        for future in as_completed([self._pool.submit(self.compile, job) for job in jobs]):
            yield future.result()

    def compile(self, job: Job) -> Done:
        """In a process of its own, which answers in `<stem>.json`."""
        known = os.environ.get("PYTHONPATH")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *([known] if known else [])])}
        with self._lock:
            if self._closed:
                raise CompileError(f"graph {job.stem} was not compiled: the build ended before.")
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env=environment, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        _, printed = process.communicate(pickle.dumps(job))
        with self._lock:
            self._running.discard(process)
        return _answer(job, process.returncode, printed.decode(errors="replace"))


_ROOT = Path(__file__).resolve().parents[2]


def _answer(job: Job, status: int, printed: str) -> Done:
    """Reads and removes the answer; CompileError with what went wrong."""
    path = job.path("json")
    if status != 0 or not path.is_file():
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        last = (printed.strip().splitlines() or ["it said nothing"])[-1][:200].rstrip(".")
        raise CompileError(f"the compiler of graph {job.stem} died ({how}; {last}): see that 2 GB of memory are free.")
    answer = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if "error" in answer:
        raise CompileError(answer["error"])
    return Done(**answer)


def main(work: Callable[[Job], Done] = compile_here) -> None:
    """The process: a pickled job on stdin."""
    job: Job = pickle.load(sys.stdin.buffer)
    try:
        answer = vars(work(job))
    except V4TreeError as error:
        answer = {"error": str(error)}
    job.path("json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
