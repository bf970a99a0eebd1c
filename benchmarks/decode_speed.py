"""Tokens per second of plain, linear and tree decoding beside transformers, interleaved in one process.

    python benchmarks/decode_speed.py --engine_dir first=engines/v4-nano-first-step --engine_dir multi=engines/v4-nano-multi-step \
        --checkpoint_dir models/v4-nano --dataset gsm8k=... --dataset mbpp=... --dataset sharegpt=...

Every repeat runs every configuration once over the same prompts; figures are medians over repeats, ratios are medians of the ratios
within a repeat. Prefill and tokenisation are not counted for either side: the time is that of the tokens after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts

RUNS = (
    ("first", "none"),
    ("first", "s5_k1_d6"),
    ("first", "s7_k1_d8"),
    ("first", "s2_k2_d4"),
    ("first", "s2_k1_d3"),
    ("first", "s3_k2_d5"),
    ("first", "s3_k2_d6"),
    ("first", "s4_k3_d6"),
    ("first", "s4_k3_d8"),
    ("first", "auto"),
    ("multi", "s3_k1_d4"),
    ("multi", "s5_k1_d6"),
    ("multi", "s7_k1_d8"),
    ("multi", "s5_k2_d6"),
    ("multi", "s6_k2_d8"),
    ("multi", "auto"),
)


@dataclass
class Sample:
    """One configuration in one repeat."""

    tokens: int
    seconds: float
    accepted: float
    host_share: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def run_engine(llm: LLM, speculation: str, prompts: list[list[int]], max_tokens: int, batch: int) -> Sample:
    """Decodes all prompts in batches; the clock starts when the whole batch has its first token."""
    llm.set_speculation(speculation)
    engine, tokens, seconds, rounds, emitted = llm.engine, 0, 0.0, 0, 0
    phases = dict.fromkeys(engine.clock.seconds, 0.0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for start in range(0, len(prompts), batch):
        requests = [engine.submit(p, params) for p in prompts[start : start + batch]]
        while any(not r.output_ids for r in requests):
            engine.step()
        before = sum(len(r.output_ids) for r in requests)
        clock = dict(engine.clock.seconds)
        started = time.perf_counter()
        while not engine.idle:
            engine.step()
        seconds += time.perf_counter() - started
        for phase in phases:
            phases[phase] += engine.clock.seconds[phase] - clock[phase]
        tokens += sum(len(r.output_ids) for r in requests) - before
        rounds += sum(r.metrics.rounds for r in requests)
        emitted += sum(r.metrics.round_tokens for r in requests)
    calls = sum(phases[p] for p in ("draft", "verify", "commit"))
    return Sample(tokens, seconds, emitted / max(1, rounds), 1 - calls / seconds)


class Transformers:
    """Cached greedy generation of the same checkpoint, as a user would call it."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from transformers import DeepseekV4ForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")

    def run(self, prompts: list[list[int]], max_tokens: int) -> Sample:
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            _, first = self.timed(prompt, 1)
            seconds += self.timed(prompt, max_tokens)[1] - first
            tokens += max_tokens - 1
        return Sample(tokens, seconds, 1.0, 0.0)

    def timed(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Greedy ids behind a prompt, and the seconds of the call."""
        ids = self.torch.tensor([prompt])
        mask, started = self.torch.ones_like(ids), time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=mask, do_sample=False, use_cache=True, eos_token_id=None, max_new_tokens=max_tokens
        )
        return output[0, len(prompt) :].tolist(), time.perf_counter() - started


def main() -> int:
    args = _arguments()
    llms = {name: LLM(path, threads=args.threads) for name, path in (e.split("=", 1) for e in args.engine_dir)}
    any_llm = next(iter(llms.values()))
    assert any_llm.tokenizer is not None
    texts = [p for d in args.dataset for p in load_prompts(DatasetSpec.parse(d), args.prompts)]
    prompts = [any_llm.tokenizer.chat([("user", t)])[:256] for t in texts]
    peer = Transformers(args.checkpoint_dir, args.threads or os.cpu_count() or 1) if args.checkpoint_dir else None
    results: dict[str, list[Sample]] = {}
    for repeat in range(-1, args.repeats):
        for name, shape in (r for r in RUNS if r[0] in llms):
            sample = run_engine(llms[name], shape, prompts, args.max_tokens, args.batch)
            results.setdefault(f"{name} {shape}", []).append(sample)
        if peer is not None:
            results.setdefault("transformers", []).append(
                peer.run(prompts[: args.peer_prompts], min(48, args.max_tokens))
            )
        if repeat < 0:
            results.clear()
    _report(results, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", action="append", required=True, help="first=DIR or multi=DIR")
    parser.add_argument("--checkpoint_dir", type=Path, help="run transformers on this checkpoint too")
    parser.add_argument("--dataset", action="append", required=True, help="NAME=PATH")
    parser.add_argument("--prompts", type=int, default=2, help="per data set")
    parser.add_argument("--peer_prompts", type=int, default=1)
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _report(results: dict[str, list[Sample]], args: argparse.Namespace) -> None:
    base = [s.speed for s in results["first none"]] if "first none" in results else [1.0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, batch {args.batch}, {args.repeats} repeats")
    print(
        f"{'configuration':22s} {'tokens/s':>9s} {'min':>7s} {'max':>7s} {'x plain':>8s} {'accepted':>9s} {'host share':>11s}"
    )
    rows = {}
    for name, samples in results.items():
        speeds = [s.speed for s in samples]
        ratio = float(np.median([s / b for s, b in zip(speeds, base, strict=False)]))
        host = float(np.median([s.host_share for s in samples]))
        rows[name] = {
            "tokens_per_second": float(np.median(speeds)),
            "x_plain": ratio,
            "accepted_length": samples[0].accepted,
            "host_share": host,
        }
        print(
            f"{name:22s} {np.median(speeds):9.1f} {min(speeds):7.1f} {max(speeds):7.1f} {ratio:8.2f} {samples[0].accepted:9.3f} {host:10.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "batch": args.batch, "results": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
