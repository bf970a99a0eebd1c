"""A dry build: the step networks of a config traced without a checkpoint, their nodes and weights counted; no weight is read or allocated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtllm_v4tree.compiler.ort_ops import OnnxRuntimeOps
from trtllm_v4tree.compiler.trt_ops import TensorRtOps
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import Shapes, graph_stems
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import FunctionOps, V4TreeOps
from trtllm_v4tree.network.weight import Weight
from trtllm_v4tree.sizes import EngineSizes

SHAPES: Shapes = ((4, 3),)
"""The draft round that is traced."""


@dataclass(frozen=True)
class DryBuild:
    """`nodes[lowering][graph]`: nodes of its graphs. `weights`: elements by dtype of the onnxruntime engine, each weight once."""

    nodes: Mapping[str, Mapping[str, int]]
    weights: Mapping[str, int]

    def weight_bytes(self, float_bytes: int) -> int:
        """Bytes of an engine that keeps its floats in `float_bytes` each and its tables in int64."""
        return sum(count * (float_bytes if dtype == "float32" else 8) for dtype, count in self.weights.items())


LOWERINGS: dict[str, Callable[[], V4TreeOps]] = {
    "v4tree": FunctionOps,
    "onnxruntime": OnnxRuntimeOps,
    "tensorrt-rtx": TensorRtOps,
}
"""The portable network with every v4tree operator kept as one node, then those of the targets."""


def dry_build(config: ModelConfig, sizes: EngineSizes, shapes: Shapes = SHAPES) -> DryBuild:
    """Traces every graph once per lowering, one in memory at a time."""
    stems = graph_stems(sizes.has_mtp, shapes)
    weights: dict[str, tuple[str, int]] = {}
    nodes: dict[str, dict[str, int]] = {}
    for lowering, make_ops in LOWERINGS.items():
        nodes[lowering] = {}
        for stem, model in zip(stems, _traced(config, sizes, shapes, make_ops()), strict=True):
            nodes[lowering][stem] = len(model.graph)
            if lowering == "onnxruntime":
                weights.update(_weights(model))
    return DryBuild(nodes, _totals(weights.values()))


def _traced(config: ModelConfig, sizes: EngineSizes, shapes: Shapes, ops: V4TreeOps) -> Iterator[ir.Model]:
    """The graphs of an engine in the order of `graph_stems`."""
    yield graphs.target_step(config, sizes, ops)
    yield graphs.commit(config, sizes, ops)
    for steps, topk in ((0, 1), *shapes) if sizes.has_mtp else ():
        yield graphs.draft_round(config, sizes, ops, steps, topk)


def _weights(model: ir.Model) -> dict[str, tuple[str, int]]:
    """Dtype and elements of every weight of a graph, by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        if isinstance(value, Weight):
            assert value.shape is not None and value.dtype is not None and value.const_value is None
            dtype = "float32" if value.dtype == ir.DataType.FLOAT else "int64"
            found[name] = (dtype, math.prod(int(str(dim)) for dim in value.shape))
    return found


def _totals(weights: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for dtype, count in weights:
        totals[dtype] += count
    return dict(totals)
