"""Parameters that know how to fill themselves from a checkpoint, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from trtllm_v4tree.errors import CheckpointError


class TensorSource(Protocol):
    """What the network needs of a checkpoint: a tensor by its canonical (original DeepSeek) name."""

    def get(self, name: str) -> np.ndarray: ...

    def has_fp4_experts(self, drafter: bool) -> bool:
        """Whether every routed expert of the drafter, or of the trunk, is stored in FP4 with power-of-two scales."""

    def fp4(self, name: str) -> np.ndarray:
        """Such a weight [O, I] as it is stored: bytes [O, I / 2], the even input in the low half."""

    def fp4_scales(self, name: str) -> np.ndarray:
        """Its scales as they are stored: bytes [O, I / 32] that mean 2^(byte - 127)."""


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


def held_scales(source: TensorSource, name: str, held: range) -> np.ndarray:
    """Scale bytes [O, I / 32] of a weight in FP4; a byte below `held` is let pass where its 32 inputs are all zero.

    Raises CheckpointError for any other byte outside `held`, with which the kernels may round weights, to zero too, or make them infinite.
    """
    scales = source.fp4_scales(name)
    low, high = scales < held.start, scales >= held.stop
    if low.any():
        codes = source.fp4(name).reshape(*scales.shape, -1)
        low &= (codes & 0x77).any(axis=-1)
    wrong = scales[low | high]
    if wrong.size:
        raise CheckpointError(
            f"{name} has FP4 scales of bytes {wrong.min()} to {wrong.max()}, but the kernels of this dtype hold {held.start} to "
            f"{held.stop - 1}, 2^(byte - 127); choose --dtype float32, which widens experts, or bfloat16 in place of float16, and where "
            "the byte is 255, which is no number, download the checkpoint again."
        )
    return scales


def rope_first(array: np.ndarray, heads: int, head_dim: int, rope_dim: int, axis: int = 0) -> np.ndarray:
    """Moves the rotated trailing dims of every head to its front, so that RoPE acts on a leading slice."""
    moved = np.moveaxis(array, axis, 0)
    split = moved.reshape(heads, head_dim, *moved.shape[1:])
    rolled = np.roll(split, rope_dim, axis=1).reshape(moved.shape)
    return np.moveaxis(rolled, 0, axis)


INT8_BLOCK = 32
"""Inputs of a row that share one scale, as in the FP4 experts of the released checkpoints."""


def quantized(weight: Weight, transpose: bool) -> tuple[Weight, Weight]:
    """A weight [.., O, I], or [I, O] with `transpose`, as unsigned 8-bit blocks [.., O, I / 32, 32], zero at 128, and scales [.., O, I / 32]."""
    assert weight.shape is not None
    shape = [int(str(dim)) for dim in weight.shape]
    *outer, inputs = shape[::-1] if transpose else shape
    blocks = [*outer, inputs // INT8_BLOCK]

    def rows(source: TensorSource) -> np.ndarray:
        array = weight.load(source)
        return np.ascontiguousarray(array.T if transpose else array).reshape(*blocks, INT8_BLOCK)

    packed = Weight([*blocks, INT8_BLOCK], lambda source: quantize_blocks(rows(source))[0], dtype=ir.DataType.UINT8)
    scale = Weight(blocks, lambda source: quantize_blocks(rows(source))[1])
    packed.name, scale.name = f"{weight.name}.int8", f"{weight.name}.scale"
    return packed, scale


def quantize_blocks(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks on the last axis -> (uint8 with zero 128, scale): a power-of-two scale where it loses nothing (FP4 values), else
    the largest magnitude over 127."""
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    safe = np.where(largest > 0, largest, 1)
    exact = np.exp2(np.floor(np.log2(safe)) - 6).astype(np.float32)
    is_exact = (np.mod(rows, exact) == 0).all(axis=-1, keepdims=True)
    scale = np.where(is_exact, exact, safe / 127).astype(np.float32)
    codes = np.clip(np.rint(rows / scale), -127, 127) + 128
    return codes.astype(np.uint8), scale[..., 0]
