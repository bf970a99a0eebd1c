"""Accepted length (tokens per verify pass, bonus included) of chains and trees at equal D, per data set and drafter, greedy.

    python benchmarks/accepted_length.py --engine_dir first=engines/v4-nano-first-step --engine_dir multi=engines/v4-nano-multi-step \
        --dataset gsm8k=... --dataset mbpp=... --dataset sharegpt=...
"""

from __future__ import annotations

import argparse
import sys

from same_text import decode

from trtllm_v4tree import LLM
from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts

BUDGETS = (5, 6, 7, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", action="append", required=True, help="NAME=DIR")
    parser.add_argument("--dataset", action="append", required=True, help="NAME=PATH")
    parser.add_argument("--tree", default="s4_k3")
    parser.add_argument("--prompts", type=int, default=24, help="per data set")
    parser.add_argument("--longest", type=int, default=200, help="prompt tokens; longer prompts are passed over")
    parser.add_argument("--max_tokens", type=int, default=96)
    args = parser.parse_args()
    for name, path in (e.split("=", 1) for e in args.engine_dir):
        llm = LLM(path)
        assert llm.tokenizer is not None
        for spec in map(DatasetSpec.parse, args.dataset):
            encoded = (llm.tokenizer.chat([("user", t)]) for t in load_prompts(spec))
            prompts = [p for p in encoded if len(p) <= args.longest][: args.prompts]
            row = []
            for d in BUDGETS:
                chain, tree = (
                    decode(llm, prompts, s, 8, 0.0, args.max_tokens)[1]
                    for s in (f"s{d - 1}_k1_d{d}", f"{args.tree}_d{d}")
                )
                row.append(f"D={d} {chain:.2f} -> {tree:.2f} ({100 * (tree / chain - 1):+.1f} %)")
            print(f"{name:6s} {spec.name:9s} {'  '.join(row)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
