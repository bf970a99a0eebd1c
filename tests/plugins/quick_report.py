"""Drives every registered plugin through NVIDIA's front end as TensorRT would, and prints what came out as JSON.

A process of its own: the kernels must be compiled here, while the other tests interpret them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.plugins import frontend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins"))

B, N, H, D, R, W, E, M, S = 2, 6, 64, 512, 300, 128, 70, 3, 8
K, EXPERTS, HIDDEN, INNER, LINES = 6, 256, 4096, 2048, 72
"""Of the experts of V4-Flash: each pair of a token and an expert may need a line of its own."""
F32, I64, I8, ACT = "FLOAT", "INT64", "INT8", "BF16"
SOURCES: list[tuple[str, tuple[int, ...]]] = [
    (ACT, (B, N, H, D)), (ACT, (R, D)), (I64, (B, W)), (ACT, (B, N, D)), (F32, (B, N, W + N)), (ACT, (R, D)), (I64, (B, E)),
    (ACT, (B, M, D)), (F32, (B, N, E + M)), (F32, (H,)), (F32, (B, N, 32)), (F32, (B, N, 32)),
]  # fmt: skip
CASES: dict[str, tuple[list[tuple[str, tuple[int, ...]]], dict[str, Any]]] = {
    "tree_pool": (
        [(F32, (9, 3, 2 * D)), (I64, (B,)), (ACT, (B, 2 * N, 2 * D)), (I64, (B, M, S)), (ACT, (D,)),
         (F32, (B, M, 32)), (F32, (B, M, 32))],
        {"eps": 1e-6, "capability": 90},
    ),
    "tree_index_score": (
        [(ACT, (B, N, 64, 128)), (ACT, (B, N, 64)), (ACT, (R, 128)), (I64, (B, E)), (ACT, (B, M, 128)), (F32, (B, N, E + M))],
        {"capability": 90},
    ),
    "tree_attention": (SOURCES, {"capability": 90}),
    "tree_attention packed": (
        [(I64, (B, N, 4)) if shape in ((B, N, W + N), (B, N, E + M)) else (t, shape) for t, shape in SOURCES],
        {"capability": 90},
    ),
    "tree_attention_split": (SOURCES, {"splits": 4, "capability": 90}),
    "tree_attention_combine": (
        [(F32, (B, 4, N * H, D)), (F32, (B, 4, N * H)), (F32, (B, 4, N * H)), (F32, (H,)), (F32, (B, N, 32)), (F32, (B, N, 32)),
         (ACT, (B, N, H, D))],
        {"capability": 90},
    ),
    "moe_align": ([(I64, (B, N, K))], {"experts": EXPERTS, "block": 16, "capability": 90}),
    "moe_fc1": (
        [(ACT, (B, N, HIDDEN)), (I64, (LINES, 17)), (ACT, (EXPERTS, 2 * INNER, HIDDEN))],
        {"topk": K, "limit": 10.0, "capability": 90},
    ),
    "moe_fc2": (
        [(ACT, (B, N, K, INNER)), (I64, (LINES, 17)), (ACT, (EXPERTS, HIDDEN, INNER))],
        {"capability": 90},
    ),
    "moe_fc1_fp4": (
        [(ACT, (B, N, HIDDEN)), (I64, (LINES, 17)), (I8, (EXPERTS, 2 * INNER, HIDDEN // 2)), (I8, (EXPERTS, 2 * INNER, HIDDEN // 32))],
        {"topk": K, "limit": 10.0, "capability": 90},
    ),
    "moe_fc2_fp4": (
        [(ACT, (B, N, K, INNER)), (I64, (LINES, 17)), (I8, (EXPERTS, HIDDEN, INNER // 2)), (I8, (EXPERTS, HIDDEN, INNER // 32))],
        {"capability": 90},
    ),
    "moe_combine": (
        [(F32, (B, N, K, HIDDEN)), (F32, (B, N, K)), (ACT, (B, N, HIDDEN))],
        {"scale": 1.5, "capability": 90},
    ),
}  # fmt: skip


def ir_type(dtype: str) -> Any:
    """ONNX's name of a TensorRT dtype."""
    import onnx_ir

    return getattr(onnx_ir.DataType, {"BF16": "BFLOAT16"}.get(dtype, dtype))


class Setter(dict):
    """Receives the extra scalars of a launch."""

    nbSymExprs = 0


def descriptions(trt: Any, operands: list[tuple[str, tuple[int, ...]]]) -> list[Any]:
    """TensorRT's descriptions of concrete tensors."""
    out = []
    for dtype, shape in operands:
        desc = trt.DynamicPluginTensorDesc()
        desc.desc.type, desc.desc.format = getattr(trt.DataType, dtype), trt.TensorFormat.LINEAR
        desc.desc.dims = desc.min = desc.max = desc.opt = shape
        out.append(desc)
    return out


def drive(trt: Any, name: str) -> dict[str, Any]:
    """Everything that TensorRT's builder asks of a plugin, in its order."""
    operands, attributes = CASES[name]
    name = name.split()[0]
    spec = trt.plugin._lib.QDP_REGISTRY[f"v4tree::{name}"]
    plugin = trt.plugin._plugin_class._TemplateAOTPlugin(name, "v4tree", spec.num_outputs)
    plugin.init(
        spec.register_func,
        attributes,
        spec.aot_impl_attr_names,
        spec.aot_impl_func,
        spec.autotune_attr_names,
        spec.autotune_func,
    )
    types = plugin.get_output_data_types([getattr(trt.DataType, t) for t, _ in operands], [len(s) for _, s in operands])
    builder = frontend.ExprBuilder()
    shapes = plugin.get_output_shapes([[frontend.Expr(d) for d in s] for _, s in operands], [], builder)
    outputs = [(t.name, tuple(e.value for e in shape)) for t, shape in zip(types, shapes, strict=True)]
    both = descriptions(trt, operands + outputs)
    combinations = plugin.get_supported_format_combinations(both, len(operands))
    plugin.set_tactic(1)
    launch, setter = type("Launch", (), {})(), Setter()
    plugin.get_launch_params([], both, len(operands), launch, setter, builder)
    entry, code = plugin.get_kernel([d.desc for d in both[: len(operands)]], [d.desc for d in both[len(operands) :]])
    return {
        "outputs": outputs,
        "combinations": len(combinations) // len(both),
        "tactics": sorted({t for found in plugin.supported_combs.values() for t in found}),
        "launch": {k: v.expr.value for k, v in vars(launch).items()},
        "scalars": [setter[i].expr.value for i in range(setter.nbSymExprs)],
        "entry": entry,
        "code_bytes": len(code),
        "elf": code[:4] == b"\x7fELF",
    }


def main() -> None:
    trt = frontend.install()
    import v4tree_plugins.quick  # noqa: F401

    from trtllm_v4tree.compiler.plugin_ops import NODES

    for name, spec in trt.plugin._lib.QDP_REGISTRY.items():
        assert NODES[name.split("::")[1]] == (tuple(spec.input_tensor_names), tuple(spec.input_attrs)), name

    print(json.dumps({name: drive(trt, name) for name in CASES}))


if __name__ == "__main__":
    main()
