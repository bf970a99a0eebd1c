"""The weights file of an engine: safetensors, written one tensor at a time, external data of all its graphs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtllm_v4tree.engine_dir import WEIGHTS_FILE
from trtllm_v4tree.network.weight import TensorSource, Weight

_CODES: dict[ir.DataType, str] = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.INT64: "I64",
    ir.DataType.UINT8: "U8",
    ir.DataType.INT8: "I8",
}
_DTYPES: dict[ir.DataType, np.dtype[Any]] = {
    ir.DataType.FLOAT: np.dtype("<f4"),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    ir.DataType.FLOAT16: np.dtype("<f2"),
    ir.DataType.INT64: np.dtype("<i8"),
    ir.DataType.UINT8: np.dtype("u1"),
    ir.DataType.INT8: np.dtype("i1"),
}
_ALIGN = 64


class _Stored(NamedTuple):
    """A weight with its place in the file."""

    weight: Weight
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int
    size: int


class WeightPlan:
    """Every weight of a set of graphs, once each, with its place in the file."""

    def __init__(self, models: Iterable[ir.Model]) -> None:
        weights: dict[str, Weight] = {}
        for model in models:
            for name, value in model.graph.initializers.items():
                if isinstance(value, Weight):
                    known = weights.setdefault(name, value)
                    assert known.shape == value.shape, f"two graphs disagree on the shape of {name}"
        self.header, self.stored = _layout(weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, the header not counted."""
        return sum(stored.size for stored in self.stored.values())

    def write(self, path: Path, source: TensorSource, progress: Callable[[str, int], None]) -> None:
        """Loads, checks and appends each tensor; `progress(name, bytes)` after each."""
        with path.open("wb") as out:
            out.write(self.header)
            for name, stored in self.stored.items():
                array = np.ascontiguousarray(stored.weight.load(source), dtype=_DTYPES[stored.dtype])
                assert array.shape == stored.shape, f"{name}: {array.shape} != {stored.shape}"
                out.write(array.view(np.uint8).data if array.ndim else array.tobytes())
                del array
                progress(name, stored.size)

    def attach(self, model: ir.Model) -> None:
        """Points the graph's weights into the file."""
        for name, value in model.graph.initializers.items():
            if isinstance(value, Weight):
                s = self.stored[name]
                value.const_value = ir.ExternalTensor(
                    WEIGHTS_FILE, s.offset, s.size, s.dtype, shape=ir.Shape(s.shape), name=name
                )


def _layout(weights: dict[str, Weight]) -> tuple[bytes, dict[str, _Stored]]:
    """The safetensors header, padded so that data starts aligned, and where in the file each tensor goes."""
    placed, end = {}, 0
    for name, weight in weights.items():
        assert weight.dtype is not None and weight.shape is not None
        shape = tuple(int(str(dim)) for dim in weight.shape)
        size = math.prod(shape) * _DTYPES[weight.dtype].itemsize
        placed[name] = _Stored(weight, weight.dtype, shape, end, size)
        end += size
    entries = {
        name: {"dtype": _CODES[s.dtype], "shape": s.shape, "data_offsets": [s.offset, s.offset + s.size]}
        for name, s in placed.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: s._replace(offset=s.offset + len(header)) for name, s in placed.items()}
