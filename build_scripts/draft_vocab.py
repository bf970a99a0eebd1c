"""Counts the tokens of text files and writes the most frequent ones as the drafter's vocabulary.

    python build_scripts/draft_vocab.py --tokenizer models/v4-nano/tokenizer.json --data answers.jsonl --size 1024 --output ids.json
    v4tree build --draft_vocab ids.json ...

Count what the model will write: its own answers, or text like them. Says which share of that text the vocabulary covers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trtllm_v4tree.errors import InputError
from trtllm_v4tree.tokenizer import load_tokenizer
from trtllm_v4tree.training.documents import Document, read_documents

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command(help=__doc__)
def count(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the model")],
    data: Annotated[list[Path], typer.Option(help="text, .jsonl or .json, as for train_nano.py")],
    size: Annotated[int, typer.Option(min=16, help="tokens of the vocabulary")],
    output: Annotated[Path, typer.Option(help="JSON file to write: token ids, most frequent first")],
    end: Annotated[int, typer.Option(help="id that ends an answer, which no text holds: always among them")] = 1,
) -> None:
    try:
        encode = load_tokenizer(tokenizer).encode
        counts = Counter(
            i for path in data for d in read_documents(path) for text in written(d) for i in encode(text).ids
        )
    except (InputError, ValueError) as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
    if len(counts) < size:
        console.print(
            f"error: the files hold {len(counts)} different tokens and --size is {size}: add text, or take fewer."
        )
        raise typer.Exit(2)
    counts.pop(end, None)
    chosen = counts.most_common(size - 1)
    try:
        output.write_text(json.dumps([end, *(token for token, _ in chosen)]), encoding="utf-8")
    except OSError as error:
        console.print(f"error: {output} cannot be written ({error.strerror}): give another --output.", markup=False)
        raise typer.Exit(2) from None
    share = sum(n for _, n in chosen) / counts.total()
    console.print(f"{size} of {len(counts) + 1} tokens, {100 * share:.1f} % of {counts.total()}: {output}")


def written(document: Document) -> list[str]:
    """What a model writes of a document: its answers, or the text."""
    return [answer for _, answer in document.turns] + ([document.text] if document.text else [])


if __name__ == "__main__":
    sys.exit(app())
