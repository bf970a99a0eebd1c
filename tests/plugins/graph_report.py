"""Takes every plugin node of the typed networks of v4-nano through NVIDIA's front end, as TensorRT's builder would, and prints what came out.

A process of its own, as `quick_report`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tests.plugins import frontend, quick_report
from trtllm_v4tree import contract
from trtllm_v4tree.compiler.plugin_ops import NODES, PluginOps
from trtllm_v4tree.compiler.typed import retype
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network import graphs
from trtllm_v4tree.sizes import EngineSizes

NANO = Path(__file__).resolve().parents[2] / "models" / "v4-nano"
SYMBOLS = {"B": 2, "N": 6, "W": 128, "E": 70, "M": 3, "F": 4, "Q": 1, "T": 7, "S": 3}
TRT_NAMES = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "INT64": "INT64", "INT8": "INT8"}
DROPPED = ("plugin_namespace", "plugin_version")


def size(dim: Any) -> int:
    """A dim in numbers; one that the trace could not name is one of a window layer's zero entries."""
    return (
        int(dim) if isinstance(dim, int) else sum(SYMBOLS[s] for s in str(dim).split("+")) if str(dim) != "None" else 0
    )


def case(node: ir.Node) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, Any]]:
    """Operands and attributes of a node, as `quick_report` takes them."""
    operands = []
    for value in node.inputs:
        assert value is not None and value.dtype is not None and value.shape is not None, node.name
        operands.append(
            (
                TRT_NAMES[value.dtype.name],
                tuple(size(dim.value if hasattr(dim, "value") else dim) for dim in value.shape),
            )
        )
    return operands, {name: a.value for name, a in node.attributes.items() if name not in DROPPED}


def nodes(dtype: str) -> list[ir.Node]:
    """Plugin nodes of the target step and of a draft round, one of each signature; of the drafter also with experts in FP4."""
    config = dataclasses.replace(ModelConfig.from_pretrained(NANO), index_topk=32)
    s = EngineSizes.make(config, max_batch_size=2, max_seq_len=1024, max_verify_tokens=8, prefill_chunk=64)
    plain, fp4 = (PluginOps(90, dtype=dtype, fp4_experts=fp4) for fp4 in (False, True))
    found: dict[object, ir.Node] = {}
    for spec, model in (
        (contract.target_step(config, s), graphs.target_step(config, s, plain)),
        (contract.draft_round(config, s, 2, 2), graphs.draft_round(config, s, plain, 2, 2)),
        (contract.draft_round(config, s, 2, 2), graphs.draft_round(config, s, fp4, 2, 2)),
    ):
        retype(model, contract.typed(spec, dtype), dtype)
        for node in model.graph:
            if node.domain == "v4tree":
                found.setdefault((node.op_type, str(case(node)[0])), node)
    return list(found.values())


def main(dtypes: list[str]) -> None:
    trt = frontend.install()
    import v4tree_plugins.quick  # noqa: F401

    out = []
    for dtype in dtypes:
        for index, node in enumerate(nodes(dtype)):
            key = f"{node.op_type} {index}"
            quick_report.CASES[key] = case(node)
            assert len(quick_report.CASES[key][0]) == len(NODES[node.op_type][0])
            out.append({"dtype": dtype, "node": node.op_type} | quick_report.drive(trt, key))
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
