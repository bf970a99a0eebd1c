"""The weights file of an engine: safetensors, written one tensor at a time, shared by all graphs as ONNX external data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtllm_v4tree.network.weight import TensorSource, Weight

WEIGHTS_FILE = "weights.safetensors"
_NAMES = {ir.DataType.FLOAT: ("F32", np.dtype("<f4")), ir.DataType.INT64: ("I64", np.dtype("<i8"))}
_ALIGN = 64


class WeightPlan:
    """Every weight of a set of graphs, once each, with its place in the file."""

    def __init__(self, models: Iterable[ir.Model]) -> None:
        self.weights: dict[str, Weight] = {}
        for model in models:
            for name, value in model.graph.initializers.items():
                if isinstance(value, Weight):
                    self._add(name, value)
        self.header, self.offsets = self._layout()

    def _add(self, name: str, weight: Weight) -> None:
        known = self.weights.setdefault(name, weight)
        assert known.shape == weight.shape, f"two graphs disagree on the shape of {name}"

    def _layout(self) -> tuple[bytes, dict[str, tuple[int, int]]]:
        entries, spans, at = {}, {}, 0
        for name, weight in self.weights.items():
            assert weight.dtype is not None
            code, dtype = _NAMES[weight.dtype]
            size = int(np.prod([int(d) for d in weight.shape])) * dtype.itemsize  # type: ignore[union-attr,arg-type]
            entries[name] = {"dtype": code, "shape": [int(d) for d in weight.shape], "data_offsets": [at, at + size]}  # type: ignore[union-attr,arg-type]
            spans[name], at = (at, size), at + size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGN)
        header = len(text).to_bytes(8, "little") + text
        return header, {name: (len(header) + start, size) for name, (start, size) in spans.items()}

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.offsets.values())

    def write(self, path: Path, source: TensorSource, progress: Callable[[str, int], None]) -> None:
        """Loads, checks and appends each tensor; `progress(name, bytes)` after each."""
        with path.open("wb") as out:
            out.write(self.header)
            for name, weight in self.weights.items():
                assert weight.dtype is not None
                array = np.ascontiguousarray(weight.load(source), dtype=_NAMES[weight.dtype][1])
                assert list(array.shape) == list(weight.shape), f"{name}: {array.shape} != {weight.shape}"  # type: ignore[arg-type]
                out.write(array.data)
                progress(name, array.nbytes)

    def attach(self, model: ir.Model) -> None:
        """Points the graph's weights into the file."""
        for name, value in model.graph.initializers.items():
            if isinstance(value, Weight):
                offset, size = self.offsets[name]
                assert value.dtype is not None and value.shape is not None
                value.const_value = ir.ExternalTensor(
                    WEIGHTS_FILE, offset, size, value.dtype, shape=ir.Shape(value.shape), name=name
                )
