"""NVIDIA's front end takes every plugin node of real typed networks: types, shapes and machine code come out right."""

from __future__ import annotations

import json

import pytest

from tests.plugins import frontend
from tests.plugins.test_aot import run_module

pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(frontend.bindings_folder() is None, reason="pip install --no-deps tensorrt-cu13-bindings"),
]


@pytest.mark.parametrize(("dtype", "name"), [("float16", "HALF"), ("bfloat16", "BF16")])
def test_every_node_of_a_typed_network(dtype: str, name: str) -> None:
    found = json.loads(run_module("tests.plugins.graph_report", dtype).splitlines()[-1])
    kinds = {"moe_align": "INT64", "moe_fc2": "FLOAT", "moe_fc2_fp4": "FLOAT", "tree_index_score": "FLOAT"}
    names = {*kinds, "tree_attention", "tree_pool", "moe_fc1", "moe_fc1_fp4", "moe_combine"}
    assert {entry["node"] for entry in found} == names and len(found) >= 12
    for entry in found:
        [(kind, shape)] = entry["outputs"]
        assert kind == kinds.get(entry["node"], name)
        assert all(size > 0 for size in shape) and entry["elf"] and entry["code_bytes"] > 1000
        assert all(entry["launch"][f"grid_{axis}"] > 0 for axis in "xyz")
