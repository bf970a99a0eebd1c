"""What a dtype costs in quality: cross entropy of documents under engines of one checkpoint, and how far each is from the first.

    python benchmarks/dtype_quality.py --engine_dir float32=engines/a --engine_dir bfloat16=engines/b --engine_dir int8=engines/c \
        --data gsm8k_test.jsonl --data mbpp_test.jsonl --strip '<<[^>]*>>'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tables import Sequences, Tree, commit_tables, every_node, step_tables
from trtllm_v4tree.tokenizer import EngineTokenizer
from trtllm_v4tree.training.documents import Document, read_documents

SLOT = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine_dir", action="append", required=True, help="NAME=DIR; the others are compared with the first"
    )
    parser.add_argument("--data", action="append", type=Path, required=True)
    parser.add_argument("--strip", help="regular expression; what it matches is taken out of the text")
    parser.add_argument("--documents", type=int, default=40, help="of each file")
    parser.add_argument("--longest", type=int, default=384, help="tokens; the rest of a document is left out")
    args = parser.parse_args()
    engines = {}
    for name, directory in (text.split("=", 1) for text in args.engine_dir):
        engines[name] = OnnxRuntimeExecutor(Path(directory), Manifest.read(Path(directory)), 0)
    tokenizer = EngineTokenizer(Path(args.engine_dir[0].split("=", 1)[1]) / "tokenizer.json")
    for path in args.data:
        sums, tokens = {name: np.zeros(3) for name in engines}, 0
        for document in read_documents(path, args.strip)[: args.documents]:
            ids = encoded(tokenizer, document)[: args.longest]
            tokens += len(ids) - 1
            first = None
            for name, engine in engines.items():
                log_probs = log_softmax(engine, ids)
                first = log_probs if first is None else first
                sums[name] += compared(first, log_probs, ids[1:])
        line = [f"{name}: {ce:.3f} nat, KL {kl:.1e}, best token equal {100 * same:.1f} %" for name, (ce, kl, same) in
                ((name, total / tokens) for name, total in sums.items())]  # fmt: skip
        print(f"{path.stem} ({tokens} tokens)  " + "; ".join(line), flush=True)
    return 0


def encoded(tokenizer: EngineTokenizer, document: Document) -> list[int]:
    """The turns in the chat format with the last answer behind them, or the text alone."""
    if not document.turns:
        return tokenizer.encode(document.text)
    question, answer = document.turns[0]
    return [*tokenizer.chat([("user", question)]), *tokenizer.encode(answer, add_bos=False)]


def log_softmax(engine: OnnxRuntimeExecutor, ids: list[int]) -> NDArray[np.float64]:
    """Log-probabilities after each of the tokens but the last: [n - 1, V]."""
    return np.concatenate(list(_chunks(engine, ids[:-1])))


def _chunks(engine: OnnxRuntimeExecutor, ids: list[int]) -> Iterator[NDArray[np.float64]]:
    sizes = engine.sizes
    engine.reset(SLOT)
    pages = np.arange(1, 1 + sizes.pages_per_seq)[None]
    for start in range(0, len(ids), sizes.max_verify_tokens):
        part = ids[start : start + sizes.max_verify_tokens]
        tree = Tree.make([list(range(-1, len(part) - 1))], [part])
        step = step_tables(sizes, Sequences([SLOT], [start], pages), tree, every_node(1, len(part)))
        result = engine.target(step.feeds)
        logits = result.logits[0].astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        yield logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
        engine.commit(result.scratch, None, commit_tables(sizes, step, [list(range(len(part)))], [len(part)]))


def compared(first: NDArray[np.float64], other: NDArray[np.float64], targets: list[int]) -> NDArray[np.float64]:
    """Sums over the tokens of cross entropy, KL(first | other), and whether the best token is the same."""
    cross_entropy = -other[np.arange(len(targets)), targets].sum()
    kl = (np.exp(first) * (first - other)).sum()
    return np.array([cross_entropy, kl, (first.argmax(axis=-1) == other.argmax(axis=-1)).sum()])


if __name__ == "__main__":
    sys.exit(main())
