"""One plan on a device: buffers for its widest pass allocated once, one captured graph per bucket, one copy in and one out per call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.contract import GraphContract, TensorSpec
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.buckets import Bucket, Symbols, pad, shape_of, symbols_of
from trtllm_v4tree.runtime.device import Bytes, Context, Device, aligned

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A tensor in a buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def view(self, buffer: Bytes) -> NDArray[Any]:
        return buffer[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


def layout(tensors: list[TensorSpec], symbols: Symbols) -> tuple[dict[str, Place], int]:
    """Places of tensors one behind the other, and the bytes they take."""
    places, end = {}, 0
    for tensor in tensors:
        place = places[tensor.name] = Place(end, shape_of(tensor.shape, symbols), DTYPES[tensor.dtype])
        end += aligned(place.size)
    return places, end


@dataclass(frozen=True)
class Layouts:
    """Places of a bucket: tables, and outputs with the results that the host reads first."""

    tables: dict[str, Place]
    table_bytes: int
    outputs: dict[str, Place]
    output_bytes: int
    result_bytes: int


class DeviceScratch(Mapping[str, NDArray[np.float32]]):
    """Scratch of one call, where it lies on the device; valid until the next call of its graph. Reading an entry downloads it.

    Rows are padded: `actual` and `padded` sizes say how.
    """

    def __init__(
        self, device: Device, base: int, specs: Mapping[str, TensorSpec], places: Mapping[str, Place],
        actual: Symbols, padded: Symbols,
    ) -> None:  # fmt: skip
        self.device, self.base, self.specs, self.places = device, base, specs, places
        self.actual, self.padded = actual, padded

    def address(self, name: str) -> int:
        return self.base + self.places[name].offset

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        place, shape = self.places[name], shape_of(self.specs[name].shape, self.actual)
        raw = np.empty(place.size, np.uint8)
        self.device.download(raw, self.address(name))
        whole = raw.view(place.dtype).reshape(place.shape)
        return whole[tuple(slice(size) for size in shape)].astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class Stage:
    """A plan that is called with tables; `choose` gives the bucket of actual sizes, `widest` those that buffers must hold."""

    def __init__(
        self,
        device: Device,
        path: Path,
        spec: GraphContract,
        states: Mapping[str, int],
        choose: Callable[[Symbols], Bucket],
        widest: list[Bucket],
        profile: Callable[[Bucket], int],
    ) -> None:
        self.device, self.spec, self.states = device, spec, states
        self.choose, self.profile = choose, profile
        self.program = device.load(path)
        check_contract(path, self.program.tensors(), spec)
        self.tables = [t for t in spec.inputs if t.role == "table"]
        results = [t for t in spec.outputs if t.role == "result"]
        self.results = results
        self.outputs = results + [t for t in spec.outputs if t.role != "result"]
        most = [self.layouts(bucket) for bucket in widest]
        self.table_bytes, self.output_bytes = max(m.table_bytes for m in most), max(m.output_bytes for m in most)
        self.staging = device.pinned(self.table_bytes)
        self.fetched = device.pinned(max(1, *(m.result_bytes for m in most)))
        self.inputs_at, self.outputs_at = device.allocate(self.table_bytes), device.allocate(self.output_bytes)
        self._ready: dict[Bucket, tuple[Layouts, Callable[[], None]]] = {}

    def layouts(self, bucket: Bucket) -> Layouts:
        symbols = bucket.symbols
        tables, table_bytes = layout(self.tables, symbols)
        outputs, output_bytes = layout(self.outputs, symbols)
        return Layouts(tables, table_bytes, outputs, output_bytes, layout(self.results, symbols)[1])

    def call(self, feeds: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], DeviceScratch]:
        """Results by name, in host memory that the next call overwrites, and the scratch."""
        actual = symbols_of(self.spec, feeds)
        bucket = self.choose(actual)
        known = self._ready.get(bucket)
        layouts = self.layouts(bucket) if known is None else known[0]
        assert layouts.table_bytes <= self.table_bytes and layouts.output_bytes <= self.output_bytes, bucket
        for tensor in self.tables:
            pad(tensor, feeds[tensor.name], actual, layouts.tables[tensor.name].view(self.staging), bucket.symbols)
        self.device.upload(self.inputs_at, self.staging[: layouts.table_bytes])
        if known is None:
            self._ready[bucket] = layouts, self._first_run(bucket, layouts)
        else:
            known[1]()
        return self._fetch(layouts, actual), self._scratch(layouts, actual, bucket.symbols)

    def _first_run(self, bucket: Bucket, layouts: Layouts) -> Callable[[], None]:
        """Runs a new bucket once outside a graph, as TensorRT asks after new shapes, then captures it."""
        context = self.program.context(self.profile(bucket))
        self._bind(context, bucket.symbols, layouts)
        context.enqueue()
        return self.device.capture(context.enqueue)

    def _bind(self, context: Context, symbols: Symbols, layouts: Layouts) -> None:
        known = self.program.tensors()
        for tensor in self.spec.inputs:
            if tensor.name in known:
                context.set_shape(tensor.name, shape_of(tensor.shape, symbols))
                table = layouts.tables.get(tensor.name)
                at = self.states[tensor.name] if table is None else self.inputs_at + table.offset
                context.set_address(tensor.name, at)
        for name, place in layouts.outputs.items():
            context.set_address(name, self.outputs_at + place.offset)

    def _fetch(self, layouts: Layouts, actual: Symbols) -> dict[str, NDArray[Any]]:
        """One copy for all results; of a single one only the sequences there are."""
        if not self.results:
            return {}
        size = layouts.result_bytes
        if len(self.results) == 1:
            place = layouts.outputs[self.results[0].name]
            size = place.size // place.shape[0] * actual["B"]
        self.device.download(self.fetched[:size], self.outputs_at)
        found = {}
        for tensor in self.results:
            whole = layouts.outputs[tensor.name].view(self.fetched)
            shape = shape_of(tensor.shape, {**dict.fromkeys("C", whole.shape[-1]), **actual})
            found[tensor.name] = whole[tuple(slice(size) for size in shape)]
        return found

    def _scratch(self, layouts: Layouts, actual: Symbols, padded: Symbols) -> DeviceScratch:
        return DeviceScratch(self.device, self.outputs_at, self._scratch_specs(), layouts.outputs, actual, padded)

    def _scratch_specs(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.outputs if t.role == "scratch"}

    def adopt(self, scratch: Mapping[str, NDArray[Any]]) -> DeviceScratch:
        """Scratch of another executor, brought here unpadded, in the place of this one's last."""
        specs, actual = self._scratch_specs(), {}
        for name, tensor in specs.items():
            for dim, size in zip(tensor.shape, scratch[name].shape, strict=True):
                if isinstance(dim, str):
                    actual[dim] = size
        places, size = layout(list(specs.values()), actual)
        assert size <= self.output_bytes
        for name, place in places.items():
            values = np.ascontiguousarray(scratch[name].astype(place.dtype))
            if values.size:
                self.device.upload(self.outputs_at + place.offset, values.reshape(-1).view(np.uint8))
        return DeviceScratch(self.device, self.outputs_at, specs, places, actual, actual)


def check_contract(path: Path, found: Mapping[str, Any], spec: GraphContract) -> None:
    """EngineFormatError unless what a plan binds has the names, dtypes and fixed sizes of its contract; an unused input may lack."""
    wanted = {t.name: t for t in (*spec.inputs, *spec.outputs)}
    outputs = {t.name for t in spec.outputs}
    wrong = sorted(outputs - set(found)) + [
        name
        for name, info in found.items()
        if name not in wanted
        or info.dtype != wanted[name].dtype
        or info.is_input == (name in outputs)
        or len(info.shape) != len(wanted[name].shape)
        or any(
            isinstance(d, int) and size not in (d, -1) for d, size in zip(wanted[name].shape, info.shape, strict=True)
        )
    ]
    if wrong:
        raise EngineFormatError(
            f"{path} is not the plan that engine.json describes ({wrong[0]} differs): build the engine again."
        )
