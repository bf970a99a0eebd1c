"""Every kernel compiles ahead of time for every chip within its limits. In a process of its own: here kernels are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
NO_SPILLS = (90, 100)


def run_module(*command: str) -> str:
    """Standard output of `python -m ...` with compiled kernels."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(PLUGINS), str(PLUGINS.parent)]), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-m", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check(rows: list[dict[str, Any]]) -> None:
    assert rows
    for row in rows:
        assert row["fits"], row
        assert row["capability"] not in NO_SPILLS or row["spill_bytes"] == 0, row


def test_bf16_for_hopper() -> None:
    rows = json.loads(run_module("v4tree_plugins.aot", "--json", "--capability", "90", "--dtype", "bf16"))
    assert len({row["variant"] for row in rows}) == 17
    check(rows)


@pytest.mark.compile
@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_every_dtype_and_chip(capability: str) -> None:
    rows = json.loads(run_module("v4tree_plugins.aot", "--json", "--capability", capability))
    assert len(rows) == 51
    check(rows)
