"""The engine without a server under the request mix of the calm clients of build_scripts/load_test.py: what batching can give.

    python benchmarks/serving/engine_alone.py --engine_dir E --speculation none,s3_k2_d6 --threads 1

Keeps 1 and then 16 requests running, in turns in one process; prints tokens/s of each and the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import numpy as np

from trtllm_v4tree import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))
from load_test import CALM_LENGTH, prompt_of


def speed(llm: LLM, streams: int, seconds: float, seed: int) -> float:
    """Tokens per second with `streams` requests running at all times."""
    engine, chance, tokens, live = llm.engine, random.Random(seed), 0, []
    assert llm.tokenizer is not None
    began = time.perf_counter()
    while live or time.perf_counter() - began < seconds:
        while len(live) < streams and time.perf_counter() - began < seconds:
            temperature, seed = chance.choice((0.0, 0.8)), chance.getrandbits(40)
            params = SamplingParams(max_tokens=CALM_LENGTH, temperature=temperature, seed=seed, ignore_eos=True)
            live.append(engine.submit(llm.tokenizer.encode(prompt_of(chance)), params))
        for request in (d.request for d in engine.step() if d.finish_reason is not None):
            live.remove(request)
            tokens += len(request.output_ids) if request.text else 0
    return tokens / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", required=True)
    parser.add_argument("--speculation", default="none,s3_k2_d6")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(args.engine_dir, threads=args.threads)
    for name in args.speculation.split(","):
        llm.set_speculation(name)
        speed(llm, 16, 1.0, 0)
        turns = [[speed(llm, n, args.seconds, turn) for n in (1, 16)] for turn in range(args.turns)]
        one, many = np.median(turns, axis=0)
        gain = float(np.median([b / a for a, b in turns]))
        print(f"{name}: 1 request {one:.0f} tokens/s, 16 requests {many:.0f} tokens/s, gain {gain:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
