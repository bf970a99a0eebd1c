"""The file of samples: append-only JSON lines after a header line, so that an interruption loses at most the line being written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtllm_v4tree.bench.measure import Sample
from trtllm_v4tree.errors import InputError, V4TreeError

FILE = "samples.jsonl"
_FIELDS = {f.name for f in dataclasses.fields(Sample)}


class OutputError(InputError):
    """An output directory that cannot be used for this run."""


class DiskError(V4TreeError):
    """Results cannot be written on; what was written before is kept."""


class SampleFile:
    """Samples of one run in `directory`; `header` says what they were measured with.

    Without `resume` the file must not exist; with it, its header must be the same. Raises OutputError.
    """

    def __init__(self, directory: Path, header: dict[str, Any], resume: bool) -> None:
        self.path, self.header = directory / FILE, header
        self.samples: list[Sample] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._continue(header, resume)
            else:
                self._append(header)
        except OSError as error:
            raise OutputError(
                f"output_dir {directory} cannot be used ({error.strerror or error}): give a directory where you may write."
            ) from error

    def add(self, sample: Sample) -> None:
        """Keeps a sample; DiskError if it cannot be written."""
        try:
            self._append(sample.to_dict())
        except OSError as error:
            raise DiskError(
                f"{self.path} cannot be written on ({error.strerror or error}): "
                f"the {len(self.samples)} samples before are kept; free space and run again with --resume."
            ) from error
        self.samples.append(sample)

    def _continue(self, header: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise OutputError(
                f"{self.path} holds an earlier run: add --resume to go on with it, or give another --output_dir."
            )
        lines, whole = _whole_lines(self.path)
        if not lines or lines[0] != json.loads(json.dumps(header)):
            raise OutputError(
                f"{self.path} was measured with {_difference(lines[0] if lines else {}, header)}: "
                "give the same options, or another --output_dir."
            )
        os.truncate(self.path, whole)
        self.samples = [Sample(**line) for line in lines[1:] if set(line) == _FIELDS]

    def _append(self, line: dict[str, Any]) -> None:
        """One line, on the disk before this returns; what a failed write left is cut off."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            if self.path.exists():
                os.truncate(self.path, size)
            raise


def read_samples(path: Path) -> tuple[dict[str, Any], list[Sample]]:
    """(header, samples) of a file of samples."""
    lines, _ = _whole_lines(path)
    return lines[0], [Sample(**line) for line in lines[1:]]


def latest(samples: Iterable[Sample]) -> list[Sample]:
    """The last sample of every (data set, batch, block, speculation): a block that was interrupted is measured again."""
    return list({(s.dataset, s.batch, s.block, s.speculation): s for s in samples}.values())


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Parsed lines and the bytes they take; a line that an interruption cut off is left out."""
    lines, whole = [], 0
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                break
            if not raw.endswith(b"\n") or not isinstance(line, dict):
                break
            lines.append(line)
            whole += len(raw)
    return lines, whole


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in new if old.get(name) != json.loads(json.dumps(new[name]))]
    return f"other {' and '.join(names)}" if names else "other settings"
