"""Every kernel compiles ahead of time for every chip within its limits. In a process of its own: here kernels are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
TABLE = ROOT / "benchmarks" / "kernels_aot.md"
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Most shared memory of one block, from the table of compute capabilities in the CUDA programming guide."""
NO_SPILLS = (90, 100)
KERNELS = {
    "tree_pool_csa_512", "tree_pool_csa_128", "tree_pool_hca_512", "tree_index_score", "scatter_rows", "fold_csa", "fold_hca",
    *(f"tree_attention_h{h}_s{s}{masks}" for h in (64, 128) for s in (1, 16) for masks in ("", "_packed")),
    "combine_h64_s16", "combine_h128_s16", "moe_align", "moe_fc1", "moe_fc2", "moe_combine",
}  # fmt: skip
FP8_KERNELS = {
    "pack_rows",
    "scatter_rows_fp8",
    *(f"tree_attention_h{h}_s{s}_packed_fp8" for h in (64, 128) for s in (1, 16)),
}
FP4_KERNELS = {"moe_fc1_fp4", "moe_fc2_fp4"}


def expected(dtype: str, chip: int) -> set[str]:
    """Kernels of a dtype and chip: those over FP8 rows need a chip that converts them and activations of 16 bits, those over FP4
    experts the same, but for bf16 any chip."""
    converts = chip >= 90 and dtype != "fp32"
    return KERNELS | (FP8_KERNELS if converts else set()) | (FP4_KERNELS if converts or dtype == "bf16" else set())


def run_module(*command: str) -> str:
    """Standard output of `python -m ...` with compiled kernels."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(PLUGINS), str(PLUGINS.parent)]), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-m", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def compiled(*options: str) -> list[dict[str, Any]]:
    return json.loads(run_module("v4tree_plugins.kernel_table", "--json", *options))


def check(rows: list[dict[str, Any]], dtype: str, chip: int) -> None:
    """All kernels of one dtype and chip, within the chip's limits, with the figures of the committed table."""
    rows = [row for row in rows if (row["dtype"], row["chip"]) == (dtype, chip)]
    kernels = [row["kernel"] for row in rows]
    assert set(kernels) == expected(dtype, chip) and len(kernels) == len(set(kernels))
    committed = {line[:3]: line[3:] for line in table()}
    for row in rows:
        assert 0 < row["registers"] <= 255 and row["ptx"] > 0 and row["cubin"] > 0, row
        assert row["shared"] <= SHARED_LIMIT[chip], row
        assert chip not in NO_SPILLS or row["spills"] == 0, row
        figures = tuple(row[name] for name in ("warps", "registers", "spills", "shared"))
        assert committed[row["kernel"], dtype, f"sm_{chip}"][:4] == figures, "run python -m v4tree_plugins.kernel_table"


def table() -> list[tuple[Any, ...]]:
    """Rows of benchmarks/kernels_aot.md: kernel, dtype, chip, then the figures as integers."""
    lines = [
        line.strip("| \n").split(" | ")
        for line in TABLE.read_text().splitlines()
        if line.startswith("| ") and " sm_" in line
    ]
    return [(*line[:3], *(int(cell.replace(",", "")) for cell in line[3:])) for line in lines]


def test_bf16_for_hopper() -> None:
    check(compiled("--capability", "90", "--dtype", "bf16"), "bf16", 90)


@pytest.fixture(scope="module")
def matrix() -> list[dict[str, Any]]:
    """Everything, by as many processes as there are processors."""
    return compiled()


@pytest.mark.compile
@pytest.mark.parametrize("chip", [80, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_dtype_and_chip(matrix: list[dict[str, Any]], dtype: str, chip: int) -> None:
    check(matrix, dtype, chip)


def test_the_table_has_every_kernel_dtype_and_chip() -> None:
    pairs = product(("fp32", "fp16", "bf16"), SHARED_LIMIT)
    kinds = {(kernel, dtype, f"sm_{chip}") for dtype, chip in pairs for kernel in expected(dtype, chip)}
    rows = [line[:3] for line in table()]
    assert set(rows) == kinds and len(rows) == len(kinds)
