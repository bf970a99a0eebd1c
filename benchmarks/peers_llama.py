"""llama.cpp as `peers.py` asks for it: a process that reads a request per line (JSON), answers with a line, and sleeps between them.

It may run in an interpreter of its own that has `llama_cpp` and NumPy and nothing of this project.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

CHUNK = 512  # tokens of one prefill pass


class Llama:
    """One model and one sequence, through the C API: no sampler, no tokenizer, nothing but passes and argmax."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}: make it again with peers_gguf.py.")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, CHUNK, CHUNK
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self.length = 0

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.length = 0

    def feed(self, tokens: list[int], all_logits: bool = False) -> None:
        """One pass over at most CHUNK tokens; logits of the last one, or of all."""
        batch, last = self.batch, len(tokens) - 1
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_logits or i == last
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp refused {len(tokens)} tokens at position {self.length}")
        self.length += len(tokens)

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """[vocab] of one row of the last pass, valid until the next one."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.frombuffer((ctypes.c_float * self.vocab).from_address(ctypes.addressof(pointer.contents)), np.float32)

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Greedy ids, and the seconds of those after the first."""
        self.reset()
        for start in range(0, len(prompt), CHUNK):
            self.feed(prompt[start : start + CHUNK])
        ids = [int(self.logits().argmax())]
        started = time.perf_counter()
        while len(ids) < max_tokens:
            self.feed(ids[-1:])
            ids.append(int(self.logits().argmax()))
        return ids, time.perf_counter() - started

    def time_pass(self, nodes: int, context: int, repeats: int) -> list[float]:
        """Seconds of each pass over `nodes` tokens of which all logits are wanted, behind at least `context` tokens."""
        tokens = np.random.default_rng(0).integers(0, self.vocab, max(nodes, context)).tolist()
        self.reset()
        self.feed(tokens[:context])
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self.feed(tokens[:nodes], all_logits=True)
            self.logits().argmax()
            times.append(time.perf_counter() - started)
        return times


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    llama = Llama(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    calls: dict[str, Callable[..., Any]] = {"generate": llama.generate, "time_pass": llama.time_pass}
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(calls[name](*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
