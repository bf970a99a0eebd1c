"""A GPU on NumPy: memory that starts as NaN, plans that are ONNX files beside them, commit kernels in NumPy, graphs that replay.

Counts what a test wants to know of: allocations, copies each way, captures, launches.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from trtllm_v4tree.engine_dir import KernelCode
from trtllm_v4tree.runtime.device import ALIGN, Bytes, TensorInfo

POISON = 0xFF
"""Every byte of fresh memory: NaN as a float, -1 as an integer."""
ORT_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


class FakeDevice:
    """Work runs when it is enqueued, but for what is being captured."""

    def __init__(self, capability: str = "SM90") -> None:
        self.capability = capability
        self.counts: Counter[str] = Counter()
        self.blocks: list[Bytes] = []
        self.bases: list[int] = []
        self.end = 1 << 20
        self.recording: list[Callable[[], None]] | None = None

    def allocate(self, size: int) -> int:
        self.counts["allocate"] += 1
        base = self.end
        self.blocks.append(np.full(size, POISON, np.uint8))
        self.bases.append(base)
        self.end += -(-size // ALIGN) * ALIGN + ALIGN
        return base

    def pinned(self, size: int) -> Bytes:
        self.counts["pinned"] += 1
        return np.full(size, POISON, np.uint8)

    def memory(self, address: int, size: int) -> Bytes:
        """A view; fails for an address outside what was allocated."""
        index = bisect_right(self.bases, address) - 1
        offset = address - self.bases[index]
        assert index >= 0 and offset + size <= len(self.blocks[index]), f"{size} bytes at {address} are not allocated"
        return self.blocks[index][offset : offset + size]

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.memory(address, size).view(dtype).reshape(shape)

    def submit(self, work: Callable[[], None]) -> None:
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def upload(self, target: int, source: Bytes) -> None:
        self.counts["upload"] += 1
        self.memory(target, source.nbytes)[...] = source

    def download(self, target: Bytes, source: int) -> None:
        self.counts["download"] += 1
        target[...] = self.memory(source, target.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        self.memory(target, size)[...] = self.memory(source, size)

    def clear(self, target: int, size: int) -> None:
        self.memory(target, size)[...] = 0

    def load(self, path: Path) -> FakeProgram:
        return FakeProgram(self, path)

    def kernel(self, code: KernelCode) -> Callable[..., None]:
        constants = json.loads(code.code)
        run = {"scatter_rows": self._scatter, "fold": self._fold}[code.entry]

        def launch(grid: tuple[int, int, int], *arguments: Any) -> None:
            assert all(size > 0 for size in grid), "a grid without blocks"
            for value in arguments:
                assert isinstance(value, np.int32) or value % ALIGN == 0, "an address that the kernel does not expect"
            self.counts["launch"] += 1
            self.submit(lambda: run(constants, grid, *map(int, arguments)))

        return launch

    def _scatter(
        self, constants: dict[str, Any], grid: tuple[int, int, int], scratch: int, source: int, pool: int, target: int,
        scratch_rows: int, pool_rows: int, width: int,
    ) -> None:  # fmt: skip
        count, layers, blocks = grid
        dtype = np.dtype(constants["dtype"])
        assert blocks == -(-width // constants["BLOCK"])
        rows = self.array(scratch, (layers, scratch_rows, width), dtype)
        state = self.array(pool, (layers, pool_rows, width), dtype)
        read, write = (self.array(at, (count,), np.int64) for at in (source, target))
        assert read.min() >= 0 and write.min() >= 0
        for layer in range(layers):
            state[layer, write] = rows[layer, read]

    def _fold(
        self, constants: dict[str, Any], grid: tuple[int, int, int], state: int, slots: int, raw: int, table: int,
        raw_rows: int, slots_per_layer: int, length: int,
    ) -> None:  # fmt: skip
        batch, layers, parts = grid
        dim, states = constants["DIM"], constants["STATES"]
        assert parts == dim // constants["WIDTH"]
        held = self.array(state, (layers, slots_per_layer, states, 2 * dim), np.float32)
        rows = self.array(raw, (layers, batch, raw_rows, 2 * dim), np.dtype(constants["dtype"])).astype(np.float32)
        lines = self.array(table, (batch, states, length), np.int64)
        where = self.array(slots, (batch,), np.int64)
        null = np.concatenate([np.full(dim, -1e30, np.float32), np.zeros(dim, np.float32)])[None]
        for layer in range(layers):
            for b in range(batch):
                pool = np.concatenate([held[layer, where[b]], null, rows[layer, b]])
                held[layer, where[b]] = [fold(pool[line]) for line in lines[b]]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert self.recording is None, "one capture at a time"
        self.counts["capture"] += 1
        self.recording = recorded = []
        work()
        self.recording = None
        assert recorded, "nothing was captured"

        def launch() -> None:
            self.counts["replay"] += 1
            for step in recorded:
                step()

        return launch


def fold(rows: np.ndarray) -> np.ndarray:
    """Rows (score | kv) as one: logsumexp of the scores, weighted mean of kv."""
    score, kv = np.split(rows, 2, axis=-1)
    top = score.max(axis=0)
    weight = np.exp(score - top)
    return np.concatenate([top + np.log(weight.sum(axis=0)), (weight * kv).sum(axis=0) / weight.sum(axis=0)])


class FakeProgram:
    """The graph `<stem>.onnx` beside `<stem>.plan`, on ONNX Runtime."""

    def __init__(self, device: FakeDevice, path: Path) -> None:
        self.device = device
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(path.with_suffix(".onnx"), options, providers=["CPUExecutionProvider"])

    def tensors(self) -> Mapping[str, TensorInfo]:
        found = {}
        for values, is_input in ((self.session.get_inputs(), True), (self.session.get_outputs(), False)):
            for value in values:
                shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
                found[value.name] = TensorInfo(ORT_TYPES[value.type], shape, is_input)
        return found

    def context(self, profile: int) -> FakeContext:
        self.device.counts["context"] += 1
        return FakeContext(self, profile)


class FakeContext:
    """Shapes and addresses are fixed when work is enqueued, as in a captured graph."""

    def __init__(self, program: FakeProgram, profile: int) -> None:
        self.program, self.profile = program, profile
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def enqueue(self) -> None:
        shapes, addresses, device = dict(self.shapes), dict(self.addresses), self.program.device
        known = self.program.tensors()
        assert set(addresses) == set(known), "a tensor has no address"
        types = {name: np.dtype(getattr(ml_dtypes, t.dtype, None) or t.dtype) for name, t in known.items()}

        def work() -> None:
            device.counts["enqueue"] += 1
            feeds = {n: device.array(addresses[n], shapes[n], types[n]) for n, t in known.items() if t.is_input}
            names = [name for name, tensor in known.items() if not tensor.is_input]
            for name, value in zip(names, self.program.session.run(names, feeds), strict=True):
                device.array(addresses[name], value.shape, types[name])[...] = value

        device.submit(work)
