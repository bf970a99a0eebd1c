"""The real device: `cuda.core` for memory, stream, kernels and graphs, TensorRT's runtime for plans.

Imported only when an engine of target tensorrt is loaded. Neither torch nor triton is needed to run one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tensorrt as trt
from cuda.bindings import driver
from cuda.core import Buffer, Device, LaunchConfig, ObjectCode, PinnedMemoryResource, launch

from trtllm_v4tree.engine_dir import KernelCode
from trtllm_v4tree.errors import EngineFormatError, V4TreeError
from trtllm_v4tree.runtime.device import Bytes, Context, Kernel, Program, TensorInfo, aligned

_NAMES = {
    trt.DataType.FLOAT: "float32", trt.DataType.HALF: "float16", trt.DataType.BF16: "bfloat16", trt.DataType.INT64: "int64",
}  # fmt: skip
LEAST_BLOCK = 1 << 8


class DeviceError(V4TreeError):
    """A CUDA or TensorRT call failed."""


class CudaDevice:
    """The current GPU and one stream of its own."""

    def __init__(self) -> None:
        self.device = Device()
        self.device.set_current()
        capability = self.device.compute_capability
        self.capability = f"SM{capability.major}{capability.minor}"
        self.stream = self.device.create_stream()
        self.handle = int(self.stream.handle)
        self._host = PinnedMemoryResource()
        self._held: list[Buffer] = []
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)

    def allocate(self, size: int) -> int:
        return self._keep(self.device.allocate(max(size, LEAST_BLOCK), stream=self.stream))

    def pinned(self, size: int) -> Bytes:
        at = self._keep(self._host.allocate(max(size, LEAST_BLOCK), stream=self.stream))
        self.stream.sync()
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))

    def _keep(self, buffer: Buffer) -> int:
        self._held.append(buffer)
        return int(buffer.handle)

    def upload(self, target: int, source: Bytes) -> None:
        if source.nbytes:
            _check(driver.cuMemcpyHtoDAsync(target, source.ctypes.data, source.nbytes, self.handle))

    def download(self, target: Bytes, source: int) -> None:
        if target.nbytes:
            _check(driver.cuMemcpyDtoHAsync(target.ctypes.data, source, target.nbytes, self.handle))
        self.stream.sync()

    def copy(self, target: int, source: int, size: int) -> None:
        _check(driver.cuMemcpyDtoDAsync(target, source, size, self.handle))

    def clear(self, target: int, size: int) -> None:
        _check(driver.cuMemsetD8Async(target, 0, size, self.handle))

    def load(self, path: Path) -> Program:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EngineFormatError(f"{path} cannot be read ({error.strerror}): build the engine again.") from error
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineFormatError(
                f"TensorRT {trt.__version__} cannot load {path}: build the engine again with this TensorRT, on this GPU."
            )
        if engine.streamable_weights_size:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        return _Plan(self, engine)

    def kernel(self, code: KernelCode) -> Kernel:
        loaded = ObjectCode.from_cubin(code.code).get_kernel(code.entry)

        def run(grid: tuple[int, int, int], *arguments: int | np.int32) -> None:
            config = LaunchConfig(grid=grid, block=code.threads, shmem_size=code.shared)
            launch(self.stream, config, loaded, *arguments)

        return run

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        builder = self.stream.create_graph_builder()
        builder.begin_building("relaxed")
        work()
        graph = builder.end_building().complete()
        return lambda: graph.launch(self.stream)


def _check(result: tuple[driver.CUresult, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA failed: {result[0].name}.")


class _Plan:
    """An engine; its contexts, one per bucket so that captured graphs stay valid, share one block of memory."""

    def __init__(self, device: CudaDevice, engine: trt.ICudaEngine) -> None:
        self.device, self.engine = device, engine
        profiles = range(engine.num_optimization_profiles)
        self.memory = aligned(max(LEAST_BLOCK, *map(engine.get_device_memory_size_for_profile_v2, profiles)))
        self.at = device.allocate(self.memory)

    def tensors(self) -> Mapping[str, TensorInfo]:
        found = {}
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            dtype = self.engine.get_tensor_dtype(name)
            is_input = self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            found[name] = TensorInfo(_NAMES.get(dtype, str(dtype)), tuple(self.engine.get_tensor_shape(name)), is_input)
        return found

    def context(self, profile: int) -> Context:
        context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise DeviceError("TensorRT gave no execution context: see that GPU memory is free.")
        context.set_device_memory(self.at, self.memory)
        if not context.set_optimization_profile_async(profile, self.device.handle):
            raise DeviceError(f"TensorRT refused optimisation profile {profile}.")
        return _Context(self.device, context)


class _Context:
    """Raises DeviceError for what TensorRT refuses."""

    def __init__(self, device: CudaDevice, context: trt.IExecutionContext) -> None:
        self.device, self.context = device, context

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.context.set_input_shape(name, shape):
            raise DeviceError(f"TensorRT refused shape {list(shape)} of {name}: no optimisation profile takes it.")

    def set_address(self, name: str, address: int) -> None:
        if not self.context.set_tensor_address(name, address):
            raise DeviceError(f"TensorRT refused the address of {name}.")

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(self.device.handle):
            raise DeviceError("TensorRT failed to enqueue a pass.")
