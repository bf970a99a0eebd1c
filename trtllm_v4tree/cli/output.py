"""Where the command line writes: results on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def prepare_streams() -> None:
    """Makes any text printable: a closed stream swallows it, and one that is not UTF-8 shows `?` for what it lacks."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and not _is_unicode():
        sys.stdout.reconfigure(errors="replace")


def complain(message: str) -> None:
    """One line on stderr; line breaks and control characters of quoted input cannot change the terminal."""
    stderr.print(Text.assemble(("error: ", "red"), printable(message)))


def printable(text: str) -> str:
    """One line without control characters or lone surrogates."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def print_text(text: str) -> None:
    """A piece of the result on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(data: dict[str, Any]) -> None:
    """One object on stdout."""
    print_text(json.dumps(data, ensure_ascii=not _is_unicode()) + "\n")


def _is_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").startswith("utf")
