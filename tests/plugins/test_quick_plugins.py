"""NVIDIA's own front end accepts every plugin, and shapes, dtype combinations, launches and scalars come out right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plugins import frontend
from tests.plugins.test_aot import run_module

pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
pytestmark = pytest.mark.skipif(
    frontend.bindings_folder() is None, reason="pip install --no-deps tensorrt-cu13-bindings"
)
B, N, H, D, E, M = 2, 6, 64, 512, 70, 3
ROWS, LINES = N * H, 6 * B * N


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    return json.loads(run_module("tests.plugins.quick_report").splitlines()[-1])


EXPECTED: dict[str, tuple[list[list[Any]], list[int], list[int]]] = {
    "tree_pool": ([["BF16", [B, M, D]]], [B * M, 1, 1], [M, 2 * N, 8]),
    "tree_index_score": ([["FLOAT", [B, N, E + M]]], [2, 1, B], [N, E, M]),
    "tree_attention": ([["BF16", [B, N, H, D]]], [ROWS // 32, 1, B], [N, 128, E, M, 0]),
    "tree_attention packed": ([["BF16", [B, N, H, D]]], [ROWS // 32, 1, B], [N, 128, E, M, 0]),
    "tree_attention_split": (
        [["FLOAT", [B, 4, ROWS, D]], ["FLOAT", [B, 4, ROWS]], ["FLOAT", [B, 4, ROWS]]],
        [ROWS // 32, 4, B],
        [N, 128, E, M, 0],
    ),
    "tree_attention_combine": ([["BF16", [B, N, H, D]]], [ROWS // 4, B, 1], [N]),
    "moe_align": ([["INT64", [LINES, 17]]], [257, 1, 1], [LINES, LINES]),
    "moe_fc1": ([["BF16", [B, N, 6, 2048]]], [LINES, 64, 1], [LINES]),
    "moe_fc2": ([["FLOAT", [B, N, 6, 4096]]], [LINES, 128, 1], [LINES]),
    "moe_fc1_fp4": ([["BF16", [B, N, 6, 2048]]], [LINES, 64, 1], [LINES]),
    "moe_fc2_fp4": ([["FLOAT", [B, N, 6, 4096]]], [LINES, 128, 1], [LINES]),
    "moe_combine": ([["BF16", [B, N, 4096]]], [B * N, 4, 1], [B * N]),
}
COMBINATIONS = {"tree_attention": 6, "tree_attention packed": 6, "tree_attention_split": 6, "moe_align": 1}
COMBINATIONS |= {"moe_fc1_fp4": 2, "moe_fc2_fp4": 2}
"""Of dtypes, where they are not one for each dtype of the activations."""


@pytest.mark.parametrize("name", EXPECTED)
def test_plugin(name: str, report: dict[str, dict[str, Any]]) -> None:
    outputs, grid, scalars = EXPECTED[name]
    got = report[name]
    assert got["outputs"] == outputs
    assert [got["launch"][f"grid_{axis}"] for axis in "xyz"] == grid
    assert got["scalars"] == scalars
    assert got["combinations"] == COMBINATIONS.get(name, 3) and got["tactics"][0] == 1
    assert got["elf"] and got["launch"]["block_x"] in (128, 256)
    assert got["launch"]["shared_mem"] <= 232_448
