"""Prompts from the real file formats of GSM8K, MBPP (JSON lines) and ShareGPT (JSON), or any JSON lines with a named field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_v4tree.errors import InputError

_FIELDS = {"gsm8k": "question", "mbpp": "text"}


class DatasetError(InputError):
    """A data set that cannot be read as prompts."""


@dataclass(frozen=True)
class DatasetSpec:
    """`NAME=PATH` or `NAME=PATH:FIELD`: the name decides the format, a field overrides it."""

    name: str
    path: Path
    field: str | None

    @classmethod
    def parse(cls, text: str) -> DatasetSpec:
        name, equals, rest = text.partition("=")
        if not equals or not name or not rest:
            raise DatasetError(
                f"dataset {text!r} is not NAME=PATH: give for example gsm8k=test.jsonl or mine=prompts.jsonl:question."
            )
        path, colon, field = rest.rpartition(":")
        if colon and not Path(rest).exists():
            return cls(name, Path(path), field)
        return cls(name, Path(rest), None)


def load_prompts(spec: DatasetSpec, limit: int | None = None) -> list[str]:
    """The first user turn of each record, in file order; raises DatasetError for an unreadable or empty file or a missing field."""
    try:
        text = spec.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"dataset {spec.path} cannot be read ({error}): give a UTF-8 JSON or JSON lines file."
        ) from error
    reader = _reader(spec)
    prompts = []
    for number, record in _records(spec.path, text):
        prompts.append(_prompt(reader, record, spec, number))
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise DatasetError(f"dataset {spec.path} has no records: give a file with at least one prompt.")
    return prompts


def _reader(spec: DatasetSpec) -> Callable[[Any], str]:
    if spec.field is None and spec.name == "sharegpt":
        return _first_human_turn
    field = spec.field or _FIELDS.get(spec.name, "prompt")
    return lambda record: record[field]


def _first_human_turn(record: Any) -> str:
    return next(turn["value"] for turn in record["conversations"] if turn["from"] in ("human", "user"))


def _records(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        if text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), 1)
            return
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 and U+0085 within a string
            if line.strip():
                yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"dataset {path} is not JSON or JSON lines ({error}): check the file.") from error


def _prompt(reader: Callable[[Any], str], record: Any, spec: DatasetSpec, number: int) -> str:
    try:
        prompt = reader(record)
    except (KeyError, TypeError, StopIteration) as error:
        wanted = spec.field or _FIELDS.get(spec.name, "conversations" if spec.name == "sharegpt" else "prompt")
        raise DatasetError(
            f"record {number} of {spec.path} has no field {wanted!r}: name the field as {spec.name}=PATH:FIELD."
        ) from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise DatasetError(f"record {number} of {spec.path} has no text: every prompt must be a non-empty string.")
    return prompt
