"""Do plain, linear and tree decoding give the same token ids? Prompts of real data sets, greedy and sampled, batch 1 and 8.

    python benchmarks/same_text.py --engine_dir engines/v4-nano-first-step --dataset gsm8k=... --dataset mbpp=... --dataset sharegpt=...

Every difference is listed with the gap between the two best logits (greedy) or the distance of the draw from the next token's
boundary (sampled) at the first differing position, computed on the plain path; a gap of 1e-4 or more is an error (exit status 1).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts
from trtllm_v4tree.runtime.sampling import target_distribution, uniform

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """First difference of one prompt against plain decoding at batch 1."""

    prompt: int
    index: int
    gap: float


def decode(
    llm: LLM, prompts: list[list[int]], speculation: str, batch: int, temperature: float, tokens: int
) -> tuple[list[list[int]], float]:
    """Token ids of every prompt (seed = its number), and the accepted length."""
    llm.set_speculation(speculation)
    ids, rounds, emitted = [], 0, 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=start + i) for i in range(len(part))]
        for out in llm.generate([{"prompt_token_ids": p} for p in part], params):
            ids.append(out.outputs[0].token_ids)
            rounds, emitted = rounds + out.metrics.rounds, emitted + out.metrics.round_tokens
    return ids, emitted / max(rounds, 1)


def gap_after(llm: LLM, ids: list[int], temperature: float, seed: int) -> float:
    """How close the choice after `ids` was: logit gap of the two best, or the draw's distance from a boundary of the CDF."""
    logits = last_logits(llm, ids)
    if temperature == 0.0:
        best = np.sort(logits)[-2:]
        return float(best[1] - best[0])
    cdf = np.cumsum(target_distribution(logits[None], [temperature], [0], [1.0], [0.0])[0])
    return float(np.abs(cdf - uniform([seed], [len(ids)])[0]).min())


def last_logits(llm: LLM, ids: list[int]) -> np.ndarray:
    """Logits after `ids`, from a fresh one-token decode of them."""
    llm.set_speculation("none")
    engine, seen = llm.engine, []
    target = engine.executor.target
    engine.executor.target = lambda feeds: seen.append(target(feeds)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0))
    finally:
        engine.executor.target = target  # type: ignore[method-assign]
    return seen[-1].logits[0, -1]


def compare(
    llm: LLM, prompts: list[list[int]], reference: list[list[int]], got: list[list[int]], temperature: float
) -> list[Difference]:
    found = []
    for number, (a, b) in enumerate(zip(reference, got, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(Difference(number, at, gap_after(llm, prompts[number] + a[:at], temperature, number)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--dataset", action="append", required=True, help="NAME=PATH")
    parser.add_argument("--prompts", type=int, default=20, help="per data set")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--budgets", default="5,6,7,8")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    llm = LLM(args.engine_dir, deterministic=args.deterministic, threads=args.threads)
    assert llm.tokenizer is not None
    texts = [p for d in args.dataset for p in load_prompts(DatasetSpec.parse(d), args.prompts)]
    prompts = [llm.tokenizer.chat([("user", t)]) for t in texts]
    prompts = [p[-(llm.manifest.sizes.max_seq_len - args.max_tokens) :] for p in prompts]
    shapes = [
        f(int(d)) for d in args.budgets.split(",") for f in (lambda d: f"s{d - 1}_k1_d{d}", lambda d: f"s4_k3_d{d}")
    ]
    bad = total = 0
    for temperature in (0.0, 0.8):
        reference, _ = decode(llm, prompts, "none", 1, temperature, args.max_tokens)
        for shape in ["none", *shapes]:
            for batch in (1, 8):
                got, accepted = decode(llm, prompts, shape, batch, temperature, args.max_tokens)
                found = compare(llm, prompts, reference, got, temperature)
                wrong = [d for d in found if d.gap >= TOLERANCE]
                bad, total = bad + len(wrong), total + len(found)
                print(
                    f"T={temperature} {shape:10s} batch {batch}: accepted {accepted:.3f}, "
                    f"{len(found)} of {len(prompts)} differ, {len(wrong)} beyond {TOLERANCE}",
                    flush=True,
                )
                for d in found:
                    print(f"    prompt {d.prompt} token {d.index} gap {d.gap:.2e}")
    print(f"{total} differences, {bad} beyond the tolerance")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
