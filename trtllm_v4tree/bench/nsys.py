"""NVIDIA Nsight Systems: runs a command under `nsys`, exports its report to SQLite and reads the tracer's ranges from it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtllm_v4tree.bench.tracer import Event, parse_label
from trtllm_v4tree.errors import InputError, V4TreeError

_IMPORTER = Path("/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter")
_TIMEOUT = 600
BAD_INPUT = 2


class NsysError(V4TreeError):
    """nsys, its importer or its export failed; the built-in timer works without them."""


def find() -> str | None:
    return shutil.which("nsys")


def record(command: Sequence[str], report: Path, environment: Mapping[str, str]) -> None:
    """Runs `command` with NVTX tracing into `report` (without suffix); its own error if it fails."""
    nsys = [
        "nsys",
        "profile",
        "-t",
        "nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        "-o",
        str(report),
    ]
    done = subprocess.run(
        [*nsys, *command],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        report.with_suffix(".qdstrm").unlink(missing_ok=True)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[
            -1:
        ]
        kind = InputError if done.returncode == BAD_INPUT else NsysError
        raise kind(
            " ".join(errors).removeprefix("error: ") or f"the run under nsys ended with status {done.returncode}."
        )


def export(report: Path) -> Path:
    """The SQLite file of a report; imports a raw .qdstrm first where this nsys left one."""
    whole = _whole_report(report)
    sqlite = report.with_suffix(".sqlite")
    _run(["nsys", "export", "-t", "sqlite", "--force-overwrite=true", "-o", str(sqlite), str(whole)])
    if not sqlite.is_file():
        raise NsysError(f"nsys export left no {sqlite}.")
    return sqlite


def _whole_report(report: Path) -> Path:
    for suffix in (".nsys-rep", ".qdrep"):
        if report.with_suffix(suffix).is_file():
            return report.with_suffix(suffix)
    raw = report.with_suffix(".qdstrm")
    if not raw.is_file():
        raise NsysError(f"nsys left neither a report nor a .qdstrm file at {report}.")
    if not _IMPORTER.is_file():
        raise NsysError(f"nsys left only {raw}, and its importer {_IMPORTER} is not there.")
    _run([str(_IMPORTER), "-i", str(raw)], {"LD_LIBRARY_PATH": str(_IMPORTER.parent)})
    whole = _imported(report)
    raw.unlink()
    return whole


def _imported(report: Path) -> Path:
    for suffix in (".nsys-rep", ".qdrep"):
        if report.with_suffix(suffix).is_file():
            return report.with_suffix(suffix)
    raise NsysError(f"the importer left no report at {report}.")


def events(sqlite: Path) -> list[Event]:
    """The tracer's ranges in a report, in order of their start; NsysError if it holds none."""
    query = (
        "SELECT COALESCE(e.text, s.value), e.start, e.end FROM NVTX_EVENTS e "
        "LEFT JOIN StringIds s ON s.id = e.textId WHERE e.end IS NOT NULL ORDER BY e.start"
    )
    try:
        with sqlite3.connect(sqlite) as database:
            rows = database.execute(query).fetchall()
    except sqlite3.Error as error:
        raise NsysError(f"{sqlite} cannot be read as a report of nsys ({error}).") from error
    found = [e for text, start, end in rows if (e := parse_label(text or "", (end - start) / 1e9)) is not None]
    if not found:
        raise NsysError(f"{sqlite} holds no ranges of v4tree.")
    return found


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NsysError(f"{command[0]} did not run to its end ({error}).") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise NsysError(f"{command[0]} failed ({lines[-1]}).")
