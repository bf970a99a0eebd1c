"""Training documents from plain files: text, JSON lines or JSON, with the field names of common public sets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_v4tree.errors import InputError

Turns = tuple[tuple[str, str], ...]

_ASKED = ("question", "prompt", "instruction", "text")
_ANSWERED = ("answer", "response", "completion", "code", "output")
_HUMAN, _MODEL = ("human", "user"), ("gpt", "assistant", "model")


class DataError(InputError):
    """Training files that cannot be used."""


@dataclass(frozen=True)
class Document:
    """(question, answer) turns of a conversation, or `text` without a question."""

    turns: Turns = ()
    text: str = ""

    def pieces(self) -> Iterator[str]:
        """Everything in it that is tokenized."""
        yield from (piece for turn in self.turns for piece in turn)
        if self.text:
            yield self.text


def read_documents(path: Path, strip: str | None = None) -> list[Document]:
    """All documents of one file; what matches the regular expression `strip` is taken out of every text.

    `.txt` holds plain documents, apart by blank lines; `.jsonl` and `.json` hold records with a question and an answer,
    with ShareGPT's `conversations`, or with `text` alone. Raises DataError for a file that is not like this or has no text.
    """
    try:
        pattern = re.compile(strip) if strip else None
    except re.error as error:
        raise DataError(f"{strip!r} is no regular expression ({error}): correct it, or leave it out.") from error
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}): give .txt, .jsonl or .json files.") from error
    found = (_plain if path.suffix == ".txt" else _structured)(path, content)
    cleaned = (_clean(document, pattern) for document in found)
    documents = [document for document in cleaned if any(document.pieces())]
    if not documents:
        raise DataError(f"{path} holds no text: give a file with at least one document.")
    return documents


def _plain(path: Path, content: str) -> Iterator[Document]:
    yield from (Document(text=part) for part in re.split(r"\n\s*\n", content))


def _structured(path: Path, content: str) -> Iterator[Document]:
    for number, record in enumerate(_records(path, content), 1):
        document = _document(record)
        if document is None:
            raise DataError(
                f"record {number} of {path} has no usable fields: it needs one of {', '.join(_ASKED)} with one of "
                f"{', '.join(_ANSWERED)}, or conversations, or text alone."
            )
        yield document


def _records(path: Path, content: str) -> Iterator[Any]:
    try:
        if content.lstrip().startswith("["):
            yield from json.loads(content)
        else:
            yield from (json.loads(line) for line in content.split("\n") if line.strip())
    except ValueError as error:
        raise DataError(f"{path} is neither JSON nor JSON lines ({error}): check the file or name it .txt.") from error


def _document(record: Any) -> Document | None:
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("conversations"), list):
        return _conversation(record["conversations"])
    asked, answered = _first(record, _ASKED), _first(record, _ANSWERED)
    if asked and answered:
        given = record.get("input")
        return Document(((f"{asked}\n{given}" if isinstance(given, str) and given else asked, answered),))
    return Document(text=record["text"]) if isinstance(record.get("text"), str) else None


def _conversation(messages: list[Any]) -> Document | None:
    """The leading pairs of a human and a model turn."""
    turns = []
    try:
        for asked, answered in zip(messages[::2], messages[1::2], strict=False):
            if asked["from"] not in _HUMAN or answered["from"] not in _MODEL:
                break
            turns.append((str(asked["value"]), str(answered["value"])))
    except (KeyError, TypeError):
        return None
    return Document(tuple(turns))


def _first(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((record[name] for name in names if isinstance(record.get(name), str) and record[name].strip()), None)


def _clean(document: Document, pattern: re.Pattern[str] | None) -> Document:
    def clean(text: str) -> str:
        text = text.replace("\r\n", "\n")
        return (pattern.sub("", text) if pattern else text).strip()

    return Document(tuple((clean(q), clean(a)) for q, a in document.turns), clean(document.text))
