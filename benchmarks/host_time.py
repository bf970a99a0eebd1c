"""Host time of a decode round: everything outside the engine calls, on recorded engine results.

    python benchmarks/host_time.py --engine_dir engines/v4-nano --batch 1 --batch 16 --speculation none --speculation s3_k2_d6

Runs every configuration once on the engine and records what its calls return; then replays the recording, where an engine call costs
nothing. With `--sweep MIB` a replayed call walks through that much memory instead, untimed, so that the host finds its caches as cold as a
real call leaves them. `min`: of every round the fastest repeat, averaged over rounds; in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.runtime.engine import Engine

PROMPTS = (
    "Write a function that adds two numbers.",
    "Once upon a time there was a cat.",
    "What is 3 + 4?",
    "Explain gravity.",
)


class Calls:
    """Stands in for an executor: records what its engine calls return, or returns what was recorded."""

    def __init__(self, inner: Any, recorded: list[Any] | None = None, sweep: int = 0) -> None:
        self._inner, self.results = inner, deque(recorded or ())
        self._replays, self._memory = recorded is not None, np.zeros(sweep << 18, np.float32)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def target(self, feeds: Any) -> Any:
        return self._call(lambda: self._inner.target(feeds))

    def draft(self, steps: int, topk: int, feeds: Any) -> Any:
        return self._call(lambda: self._inner.draft(steps, topk, feeds))

    def commit(self, step: Any, draft: Any, feeds: Any) -> None:
        self._call(lambda: self._inner.commit(step, draft, feeds))

    def _call(self, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        if self._replays:
            self._memory += 1
            result = self.results.popleft()
        else:
            result = run()
            self.results.append(copy.deepcopy(result))  # an executor may write its arrays again
        self.seconds += time.perf_counter() - started
        return result


def host_seconds(llm: LLM, calls: Calls, speculation: str, batch: int, max_tokens: int) -> list[float]:
    """Host seconds of every decode round in which all sequences take part."""
    # Prefill chunks of one size: by the clock they would differ between the recording and a replay.
    engine = Engine(calls, speculation, llm.engine.decoder, latency=llm.engine.latency, max_num_tokens=1 << 16)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [llm.encode_chat([("user", PROMPTS[i % len(PROMPTS)])]) for i in range(batch)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    rounds = []
    while not engine.idle:
        decoding = all(r.output_ids for r in requests)
        called, started = calls.seconds, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started - (calls.seconds - called)
        if decoding and engine.num_active == batch:
            rounds.append(seconds)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--speculation", action="append", help="default: none and s3_k2_d6")
    parser.add_argument("--batch", action="append", type=int, help="default: 1 and 16")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", type=int, default=0, metavar="MIB", help="memory that a replayed call walks through")
    args = parser.parse_args()
    llm = LLM(args.engine_dir)
    print(f"{'speculation':<12} {'batch':>5} {'rounds':>6} {'min us':>8} {'median us':>10}")
    for speculation in args.speculation or ["none", "s3_k2_d6"]:
        for batch in args.batch or [1, 16]:
            recorder = Calls(llm.engine.executor)
            host_seconds(llm, recorder, speculation, batch, args.max_tokens)
            repeats = [
                host_seconds(
                    llm, Calls(recorder, list(recorder.results), args.sweep), speculation, batch, args.max_tokens
                )
                for _ in range(args.repeats)
            ]
            least = statistics.mean(min(same) for same in zip(*repeats, strict=True))
            median = statistics.median(x for rounds in repeats for x in rounds)
            print(
                f"{speculation:<12} {batch:>5} {len(repeats[0]):>6} {1e6 * least:>8.0f} {1e6 * median:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
