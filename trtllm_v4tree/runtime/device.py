"""What the GPU executor needs of a device: memory, copies, plans, kernels and graph capture, all in the order of one stream.

Addresses are plain integers. `cuda_device` is the real one; the tests have one on NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.engine_dir import KernelCode

Bytes = NDArray[np.uint8]
ALIGN = 256
"""Alignment in bytes of whatever lies at an address of its own."""


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that a plan binds; -1 is a size known when it runs."""

    dtype: str
    shape: tuple[int, ...]
    is_input: bool


class Context(Protocol):
    """A plan with shapes and addresses."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None: ...

    def set_address(self, name: str, address: int) -> None: ...

    def enqueue(self) -> None: ...


class Program(Protocol):
    """A loaded plan."""

    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def context(self, profile: int) -> Context: ...


class Kernel(Protocol):
    """A loaded kernel; an int argument is an address, an np.int32 a number."""

    def __call__(self, grid: tuple[int, int, int], *arguments: int | np.int32) -> None: ...


class Device(Protocol):
    """One GPU and one stream. Everything but `download` returns before it is done."""

    capability: str

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes, ALIGN-ed; they live as long as the device."""
        ...

    def pinned(self, size: int) -> Bytes:
        """Host memory that copies run from and to without a detour."""
        ...

    def upload(self, target: int, source: Bytes) -> None: ...

    def download(self, target: Bytes, source: int) -> None:
        """Waits for all work before it."""
        ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def clear(self, target: int, size: int) -> None:
        """Zero bytes."""
        ...

    def load(self, path: Path) -> Program:
        """Raises EngineFormatError for a plan that this device or its TensorRT cannot run."""
        ...

    def kernel(self, code: KernelCode) -> Kernel: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` enqueues, without running it; calling the result runs all of it."""
        ...
