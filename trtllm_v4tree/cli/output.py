"""Where the command line writes: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    stderr.print(f"[red]error:[/red] {_escaped(message)}")


def print_json(data: dict[str, Any]) -> None:
    """One object on stdout."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
