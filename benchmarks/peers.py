"""Peers beside this engine on one checkpoint, batch 1: transformers' cached generate and llama.cpp, interleaved in one run.

    python benchmarks/peers.py --checkpoint_dir models/v4-nano --dataset gsm8k=... --dataset mbpp=... --dataset sharegpt=... \
        --first_step float32=engines/f32-first --multi_step float32=engines/f32-multi --first_step int8=... --multi_step int8=... \
        --gguf bf16=v4-nano-bf16.gguf --gguf q8_0=v4-nano-q8_0.gguf --llama_python llama/bin/python

llama.cpp runs in a process of its own (`peers_llama.py`) with the interpreter given by `--llama_python`; `peers_gguf.py` makes its files. One
that was built for this processor:

    python -m venv llama && CMAKE_ARGS=-DGGML_NATIVE=ON llama/bin/pip install llama-cpp-python==0.3.36

Every repeat runs every row once over the same prompts, greedily, and then times passes over eight tokens behind 300; figures are medians
over repeats, ratios medians of the ratios within a repeat. Prefill and tokenisation are not counted. Speculation emits several tokens
per pass; the time per token is that of the text. Ours: a pass verifies a tree of eight nodes and commits three; llama.cpp's and transformers'
write all eight into their cache. Run it on an idle machine: threads meet after every operator, llama.cpp's most often, and where other work
takes a core, its figures fall first. `same text` is the share of tokens before the first one that differs from the first plain row's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from decode_speed import Transformers
from step_latency import Cases

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts

NODES, CONTEXT, PASSES = 8, 300, 16
LENGTH = 1024
PAUSE = 0.05  # seconds in which the threads of the row before fall asleep


@dataclass(frozen=True)
class Text:
    """Greedy ids behind one prompt, and the seconds per token after the prefill."""

    ids: list[int]
    token: float


@dataclass(frozen=True)
class Sample:
    """One row in one repeat: seconds per token of text, seconds per pass, token ids per prompt."""

    token: float
    step: float
    ids: list[list[int]]


class Peer(Protocol):
    """Anything that decodes greedily."""

    def generate(self, prompt: list[int], max_tokens: int) -> Text:
        """`max_tokens` tokens."""

    def time_pass(self) -> float:
        """Median seconds of a pass over NODES tokens behind CONTEXT, not a number where another row of the engine has it."""


class Ours:
    """An engine with one speculation."""

    def __init__(self, llm: LLM, speculation: str) -> None:
        self.llm, self.speculation = llm, speculation
        cases = Cases(llm.engine.executor, CONTEXT)  # type: ignore[arg-type]
        self.verify, self.feeds, self.commit = llm.engine.executor.target, cases.step(1, NODES).feeds, cases.commit(1)

    def generate(self, prompt: list[int], max_tokens: int) -> Text:
        self.llm.set_speculation(self.speculation)
        engine = self.llm.engine
        request = engine.submit(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        while not request.output_ids:
            engine.step()
        before, started = len(request.output_ids), time.perf_counter()  # the first step may decode a round, too
        while not engine.idle:
            engine.step()
        seconds = time.perf_counter() - started
        return Text(list(request.output_ids), seconds / (len(request.output_ids) - before))

    def time_pass(self) -> float:
        if self.speculation != "none":
            return float("nan")
        times = []
        for _ in range(PASSES):
            started = time.perf_counter()
            self.verify(self.feeds)
            self.commit()
            times.append(time.perf_counter() - started)
        return float(np.median(times))


class LlamaCpp:
    """A worker process that holds one GGUF. Between requests it sleeps in a read."""

    def __init__(self, python: str, gguf: str, threads: int) -> None:
        script = Path(__file__).with_name("peers_llama.py")
        self.command = [python, str(script), gguf, str(threads), str(LENGTH)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status, command = self.process.wait(), " ".join(self.command)
            raise SystemExit(f"llama.cpp ended with status {status}: run `{command}` to see why.")
        return json.loads(line)

    def _ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def generate(self, prompt: list[int], max_tokens: int) -> Text:
        ids, seconds = self._ask("generate", prompt, max_tokens)
        return Text(ids, seconds / (max_tokens - 1))

    def time_pass(self) -> float:
        return float(np.median(self._ask("time_pass", NODES, CONTEXT, PASSES)))


class CachedGenerate(Transformers):
    """transformers; the first token's time is that of a second call which ends there."""

    def generate(self, prompt: list[int], max_tokens: int) -> Text:
        _, first = self.timed(prompt, 1)
        ids, seconds = self.timed(prompt, max_tokens)
        return Text(ids, (seconds - first) / (max_tokens - 1))

    def time_pass(self) -> float:
        tokens = self.torch.randint(0, self.model.config.vocab_size, (1, CONTEXT))
        times = []
        with self.torch.inference_mode():
            cache = self.model(tokens, use_cache=True).past_key_values
            for _ in range(max(3, PASSES // 4)):
                started = time.perf_counter()
                self.model(tokens[:, :NODES], past_key_values=cache, use_cache=True)
                times.append(time.perf_counter() - started)
        return float(np.median(times))


def llama_missing(python: str) -> str | None:
    """Why llama.cpp cannot run with this interpreter, or None."""
    try:
        probe = subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if probe.returncode == 0 else probe.stderr.strip().splitlines()[-1]


def make_rows(args: argparse.Namespace) -> dict[str, Peer]:
    """Rows by name, plain decoding of the first engine before the others of ours."""
    rows: dict[str, Peer] = {}
    if args.checkpoint_dir:
        rows["transformers"] = CachedGenerate(args.checkpoint_dir, args.threads)
    missing = llama_missing(args.llama_python) if args.gguf else "no --gguf was given; peers_gguf.py makes one"
    if missing:
        print(f"llama.cpp is left out: {missing}.")
    else:
        for name, path in _named(args.gguf).items():
            rows[f"llama.cpp {name}"] = LlamaCpp(args.llama_python, path, args.threads)
    shapes = {"first-step": args.tree, "multi-step": args.chain}
    engines = {"first-step": _named(args.first_step), "multi-step": _named(args.multi_step)}
    for name in {n: None for paths in engines.values() for n in paths}:
        for drafter, paths in engines.items():
            if name in paths:
                llm = LLM(paths[name], threads=args.threads)
                rows.setdefault(f"ours {name} plain", Ours(llm, "none"))
                rows[f"ours {name} {drafter} {shapes[drafter]}"] = Ours(llm, shapes[drafter])
    return rows


def _named(pairs: Sequence[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs)


def run(peer: Peer, prompts: Sequence[list[int]], max_tokens: int) -> Sample:
    """One row of one repeat."""
    time.sleep(PAUSE)
    texts = [peer.generate(prompt, max_tokens) for prompt in prompts]
    return Sample(float(np.mean([t.token for t in texts])), peer.time_pass(), [t.ids for t in texts])


def same_share(texts: list[list[int]], reference: list[list[int]]) -> float:
    """Share of the tokens before the first difference."""
    pairs = [list(zip(a, b, strict=False)) for a, b in zip(texts, reference, strict=False)]
    same = sum(next((i for i, (x, y) in enumerate(p) if x != y), len(p)) for p in pairs)
    return same / sum(len(p) for p in pairs)


def report(results: dict[str, list[Sample]], args: argparse.Namespace) -> None:
    """The table; ratios are to the first plain row of ours and to the first row of llama.cpp."""
    plain = next(name for name in results if name.endswith(" plain"))
    llama = next((name for name in results if name.startswith("llama.cpp")), None)
    print(
        f"{platform.machine()}, {args.threads} threads, batch 1, {args.repeats} repeats; plain is {plain!r}, llama.cpp {llama!r}"
    )
    print("| row | tokens/s (lowest, highest) | ms a token | ms a pass of 8 | x plain | x llama.cpp | same text |")
    print("|---|---|---|---|---|---|---|")
    for name, samples in results.items():
        token = [s.token for s in samples]
        ratios = [_ratio(results[base], token) if base else "" for base in (plain, llama)]
        speeds = f"{1 / np.median(token):,.0f} ({1 / max(token):,.0f}, {1 / min(token):,.0f})"
        step = float(np.median([s.step for s in samples])) * 1e3
        passes = "" if np.isnan(step) else f"{step:.2f}"
        same = same_share(samples[0].ids, results[plain][0].ids)
        print(f"| {name} | {speeds} | {np.median(token) * 1e3:.2f} | {passes} | {' | '.join(ratios)} | {same:.0%} |")


def _ratio(base: list[Sample], token: list[float]) -> str:
    return f"{np.median([b.token / t for b, t in zip(base, token, strict=True)]):.2f}"


def main() -> int:
    args = _arguments()
    rows = make_rows(args)
    tokenizer = next(row.llm.tokenizer for row in rows.values() if isinstance(row, Ours))
    assert tokenizer is not None
    texts = [p for d in args.dataset for p in load_prompts(DatasetSpec.parse(d), args.prompts)]
    prompts = [tokenizer.chat([("user", t)])[:256] for t in texts]
    results: dict[str, list[Sample]] = {}
    for repeat in range(-1, args.repeats):
        for name, peer in rows.items():
            slow = isinstance(peer, CachedGenerate)
            part, tokens = (prompts[:1], args.max_tokens // 2) if slow else (prompts, args.max_tokens)
            sample = run(peer, part, tokens)
            if repeat >= 0:
                results.setdefault(name, []).append(sample)
    report(results, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_dir", type=Path, help="run transformers on this checkpoint")
    parser.add_argument("--first_step", action="append", default=[], help="NAME=DIR, engine with a first-step drafter")
    parser.add_argument("--multi_step", action="append", default=[], help="NAME=DIR, engine with a multi-step drafter")
    parser.add_argument("--tree", default="s3_k2_d6", help="speculation of the first-step engines")
    parser.add_argument("--chain", default="s5_k1_d6", help="speculation of the multi-step engines")
    parser.add_argument("--gguf", action="append", default=[], help="NAME=FILE")
    parser.add_argument("--llama_python", default=sys.executable, help="interpreter that has llama_cpp")
    parser.add_argument("--dataset", action="append", required=True, help="NAME=PATH")
    parser.add_argument("--prompts", type=int, default=1, help="per data set")
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if not args.first_step and not args.multi_step:
        parser.error("give an engine of ours with --first_step or --multi_step.")
    return args


if __name__ == "__main__":
    sys.exit(main())
