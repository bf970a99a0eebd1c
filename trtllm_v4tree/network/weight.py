"""Parameters that know how to fill themselves from a checkpoint, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir
from onnxscript import nn


class TensorSource(Protocol):
    """What the network needs of a checkpoint: a tensor by its canonical (original DeepSeek) name."""

    def get(self, name: str) -> np.ndarray: ...


Loader = Callable[[TensorSource], np.ndarray]


class Weight(nn.Parameter):
    """A graph initializer of `shape` whose data `load(source)` reads, fuses and lays out when the engine is written."""

    def __init__(self, shape: Sequence[int], load: Loader, dtype: ir.DataType = ir.DataType.FLOAT) -> None:
        super().__init__(shape, dtype=dtype)
        self.load = load


def tensor(name: str) -> Loader:
    return lambda source: source.get(name)


def transposed(name: str) -> Loader:
    """A linear weight [out, in] as [in, out]."""
    return lambda source: source.get(name).T


def rope_first(array: np.ndarray, heads: int, head_dim: int, rope_dim: int, axis: int = 0) -> np.ndarray:
    """Moves the rotated trailing dims of every head to its front, so that RoPE acts on a leading slice."""
    moved = np.moveaxis(array, axis, 0)
    split = moved.reshape(heads, head_dim, *moved.shape[1:])
    rolled = np.roll(split, rope_dim, axis=1).reshape(moved.shape)
    return np.moveaxis(rolled, 0, axis)
