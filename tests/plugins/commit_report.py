"""Compiles the commit kernels of v4-nano for the capability and dtype given, and prints what `commit.json` would hold, without the code."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from trtllm_v4tree.compiler.tensorrt_commit import compile_kernels
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

NANO = Path(__file__).resolve().parents[2] / "models" / "v4-nano"


def main(capability: str, dtype: str) -> None:
    config = dataclasses.replace(ModelConfig.from_pretrained(NANO), index_topk=32)
    s = EngineSizes.make(config, max_batch_size=2, max_seq_len=1024, max_verify_tokens=8, prefill_chunk=64)
    kernels = compile_kernels(config, s, dtype, capability)
    print(json.dumps({n: [k.entry, k.threads, k.shared, k.code[:4] == b"\x7fELF"] for n, k in kernels.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
