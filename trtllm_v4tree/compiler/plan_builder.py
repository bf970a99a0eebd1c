"""What the TensorRT family has in common: ONNX file in, plan out, with optimisation profiles and a readable failure.

Knows no product by itself; `rtx` and `tensorrt_plan` bring the module, the flags and the chips.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.errors import V4TreeError

Range = tuple[int, int, int]
"""Smallest, typical and largest value of a symbol."""


class CompileError(V4TreeError):
    """The compiler refused a network of ours: the message names the graph, the node where known, and what the compiler said."""


@dataclass(frozen=True)
class Plan:
    """One compiled graph: `seconds` to parse and build, `layers` of the parsed network."""

    stem: str
    data: bytes
    layers: int
    seconds: float


def bounds(shape: Sequence[int | str], ranges: dict[str, Range]) -> list[tuple[int, ...]]:
    """Least, typical and largest shape of a contract shape; a dim like `W+N` is the sum of its symbols."""

    def size(dim: int | str, which: int) -> int:
        return dim if isinstance(dim, int) else sum(ranges[name][which] for name in dim.split("+"))

    return [tuple(size(dim, which) for dim in shape) for which in range(3)]


class PlanBuilder:
    """Compiles ONNX files to plans. One instance per process: TensorRT keeps the first logger."""

    product = ""

    def __init__(self, trt: ModuleType) -> None:
        self.trt = trt
        self.logger = _shared_logger(trt)

    def network_flags(self) -> int:
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def configure(self, config: Any) -> None:
        """What a product adds to a builder config."""

    def finish(self, config: Any) -> None:
        """What a product keeps of a builder config after a build."""

    def compile(self, onnx_path: Path, spec: GraphContract, ranges: Sequence[dict[str, Range]]) -> Plan:
        """Raises CompileError with the offending node or the compiler's own words."""
        started = time.monotonic()
        self.logger.errors.clear()
        builder = self.trt.Builder(self.logger)
        network = builder.create_network(self.network_flags())
        self._parse(network, onnx_path, spec.name)
        config = builder.create_builder_config()
        config.clear_flag(self.trt.BuilderFlag.TF32)
        self.configure(config)
        for symbols in ranges:
            config.add_optimization_profile(self._profile(builder, spec, symbols))
        data = builder.build_serialized_network(network, config)
        if data is None:
            raise CompileError(f"{self.product} cannot build graph {spec.name}: {self._complaint(onnx_path)}")
        self.finish(config)
        return Plan(spec.name, bytes(data), network.num_layers, time.monotonic() - started)

    def _parse(self, network: Any, onnx_path: Path, name: str) -> None:
        parser = self.trt.OnnxParser(network, self.logger)
        if parser.parse_from_file(str(onnx_path)):
            return
        error = parser.get_error(0)
        text = error.desc().splitlines()[-1]
        where = describe(onnx_path, error.node_name()) or f"{error.node_name()} ({error.node_operator()})"
        raise CompileError(f"{self.product} cannot read node {where} of graph {name}: {text}")

    def _profile(self, builder: Any, spec: GraphContract, symbols: dict[str, Range]) -> Any:
        profile = builder.create_optimization_profile()
        for tensor in spec.inputs:
            if any(isinstance(dim, str) for dim in tensor.shape):
                profile.set_shape(tensor.name, *bounds(tensor.shape, symbols))
        return profile

    def _complaint(self, onnx_path: Path) -> str:
        """The compiler's lines, and the operands of the first node of ours that they name."""
        lines = list(dict.fromkeys(line.splitlines()[0] for line in self.logger.errors))
        words = re.findall(r"[\w./]+", " ".join(lines))
        where = next((found for found in (describe(onnx_path, word) for word in words) if found), "")
        return "; ".join([*lines, *([f"node {where}"] if where else [])]) or "it gave no reason"


def describe(onnx_path: Path, node_name: str) -> str:
    """`name (Operator of operand [shape] type, ...)` of a node in an ONNX file; empty if there is none of that name."""
    graph = onnx.load(onnx_path, load_external_data=False).graph
    node = next((node for node in graph.node if node.name == node_name), None)
    if node is None or not node_name:
        return ""
    known = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    known |= {
        weight.name: onnx.helper.make_tensor_type_proto(weight.data_type, weight.dims).tensor_type
        for weight in graph.initializer
    }
    operands = ", ".join(_operand(name, known.get(name)) for name in node.input if name)
    return f"{node_name} ({node.op_type} of {operands})"


def _operand(name: str, kind: onnx.TypeProto.Tensor | None) -> str:
    if kind is None or not kind.elem_type:
        return name
    dims = ", ".join(
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in kind.shape.dim
    )
    return f"{name} [{dims}] {onnx.TensorProto.DataType.Name(kind.elem_type).lower()}"


def _logger(trt: ModuleType) -> Any:
    """A logger that keeps what the compiler complains about."""

    class Logger(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR and "CUDA driver version" not in message:
                self.errors.append(message)

    return Logger()


_LOGGERS: dict[str, Any] = {}


def _shared_logger(trt: ModuleType) -> Any:
    """TensorRT registers the first logger of a process for good."""
    return _LOGGERS.setdefault(trt.__name__, _logger(trt))
