"""The executor of an engine directory, by its target."""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.device import Device
from trtllm_v4tree.runtime.executor import Executor, OnnxRuntimeExecutor
from trtllm_v4tree.runtime.tensorrt_executor import TensorRtExecutor

NEEDS = {"tensorrt": "tensorrt-cu13", "cuda.core": "cuda-core"}
"""Modules that an engine of target tensorrt needs, and what installs them."""


def make_executor(directory: Path, manifest: Manifest, threads: int = 0) -> Executor:
    """Raises EngineFormatError for an engine that cannot run here; `threads` are those of a CPU engine."""
    check_target(directory, manifest)
    if manifest.target == "tensorrt":
        return TensorRtExecutor(directory, manifest, _gpu(directory, manifest))
    return OnnxRuntimeExecutor(directory, manifest, threads, reuse_results=True)


def check_target(directory: Path, manifest: Manifest) -> None:
    """EngineFormatError for a target that this version or this installation does not run; loads nothing."""
    if manifest.target == "onnxruntime":
        return
    gpus = f" ({', '.join(manifest.compute_capabilities)})" if manifest.compute_capabilities else ""
    if manifest.target != "tensorrt":
        raise EngineFormatError(
            f"{directory} is an engine for target {manifest.target}{gpus}, for which this version has no GPU executor: "
            "build the checkpoint with --target tensorrt on that GPU, or with --target onnxruntime to generate here."
        )
    missing = [package for module, package in NEEDS.items() if not _installed(module)]
    if missing:
        raise EngineFormatError(
            f"{directory} is an engine for target tensorrt{gpus}, and {' and '.join(missing)} is not installed here: "
            f"pip install {' '.join(missing)} on a machine with that GPU."
        )


def _installed(module: str) -> bool:
    """Whether a module can be imported; an empty package, as type stubs leave it, does not count."""
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _gpu(directory: Path, manifest: Manifest) -> Device:
    gpus = ", ".join(manifest.compute_capabilities)
    try:
        made: Device = import_module("trtllm_v4tree.runtime.cuda_device").CudaDevice()
    except Exception as error:  # CUDA's and TensorRT's own error types, by driver and version
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")[:100]
        raise EngineFormatError(
            f"{directory} needs a GPU {gpus} with its driver, and none answers here ({reason}): generate on that machine, or "
            "build with --target onnxruntime."
        ) from error
    return made
