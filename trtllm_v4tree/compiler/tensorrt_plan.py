"""The target tensorrt: plans whose tree operators are plugins, built on the GPU they are for.

`tensorrt` and the plugins are imported only when this target is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_v4tree.compiler import plugin_ops
from trtllm_v4tree.compiler.plan_builder import PlanBuilder
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import ConfigError

INSTALL = "pip install 'trtllm_v4tree[tensorrt]' on a machine with that GPU"
LEAST = {"head_dim": 32, "index_head_dim": 16, "index_n_heads": 16}
"""Least sizes that the kernels take; all are powers of two."""


@dataclass(frozen=True)
class PlanOptions:
    """`timing_cache` is read if it is there and written after every plan; with `weight_streaming` a plan may keep weights on the host."""

    timing_cache: Path
    weight_streaming: bool = False


def check_options(capabilities: Sequence[str] | None, dtype: str, draft_dtype: str, max_verify_tokens: Any) -> None:
    """Raises ConfigError for what this target lacks, whatever the model; needs no TensorRT."""
    known = ", ".join(map(str, plugin_ops.CAPABILITIES))
    for name in capabilities or ():
        if name not in [f"SM{c}" for c in plugin_ops.CAPABILITIES]:
            raise ConfigError(
                f"compute capability {name[:20].removeprefix('SM')!r} is none that target tensorrt has kernels for: choose from {known}."
            )
    if capabilities is not None and len(capabilities) != 1:
        raise ConfigError(
            f"target tensorrt builds for the one GPU it runs on, not for {len(capabilities)}: leave compute_capability out, "
            f"or give one of {known}."
        )
    if draft_dtype not in ("auto", dtype):
        raise ConfigError(
            f"target tensorrt drafts in the dtype of the engine, not in {draft_dtype}: leave draft_dtype out and give --dtype."
        )
    if type(max_verify_tokens) is int:
        plugin_ops.check_options(plugin_ops.CAPABILITIES[0], dtype, max_verify_tokens)


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError for a model whose widths the kernels do not take."""
    sizes = {"head_dim": config.head_dim}
    if config.layers_of("csa"):
        sizes |= {"index_head_dim": config.index_head_dim, "index_n_heads": config.index_n_heads}
    for name, value in sizes.items():
        if value < LEAST[name] or value & (value - 1):
            raise ConfigError(
                f"{name}={value} is not a power of two from {LEAST[name]}, as the kernels of target tensorrt need it: "
                "build with --target onnxruntime."
            )


def load_tensorrt() -> ModuleType:
    """The `tensorrt` module with the plugins registered; ConfigError with the install line where something is missing."""
    try:
        trt = import_module("tensorrt")
        if not hasattr(trt, "Builder"):  # type stubs alone leave an empty package
            raise ImportError("tensorrt has no Builder")
        import_module("v4tree_plugins.quick")
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")[:100]
        raise ConfigError(
            f"target tensorrt needs TensorRT, torch and triton, which are not all installed here ({reason}): {INSTALL}."
        ) from error
    return trt


def local_capability(wanted: Sequence[str] | None) -> str:
    """Compute capability of the GPU here, e.g. SM90; ConfigError without one, or if `wanted` or the kernels want another."""
    found = _gpu_capability()
    if wanted is not None and tuple(wanted) != (found,):
        raise ConfigError(
            f"compute capability {wanted[0].removeprefix('SM')} was asked for and the GPU here is {found.removeprefix('SM')}: "
            "target tensorrt builds on the GPU it is for."
        )
    check_options((found,), "float32", "auto", 1)
    return found


def _gpu_capability() -> str:
    try:
        core = import_module("cuda.core")
        major, minor = core.Device().compute_capability
    except ImportError as error:
        raise ConfigError(f"target tensorrt needs cuda-core, which is not installed here: {INSTALL}.") from error
    except Exception as error:  # the CUDA binding has error types of its own, by driver
        reason = str(error).splitlines()[0].rstrip(".")[:100] if str(error) else type(error).__name__
        raise ConfigError(
            f"target tensorrt builds on the GPU it is for, and none answers here ({reason}): build on that machine, or with "
            "--target tensorrt-rtx or onnxruntime."
        ) from error
    return f"SM{major}{minor}"


class TensorRtBuilder(PlanBuilder):
    """Compiles ONNX files whose `v4tree` nodes the parser resolves to the quick plugins; their code is embedded ahead of time."""

    product = "TensorRT"

    def __init__(self, options: PlanOptions) -> None:
        super().__init__(load_tensorrt())
        self.options = options

    def network_flags(self) -> int:
        return super().network_flags() | 1 << int(self.trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)

    def configure(self, config: Any) -> None:
        if self.options.weight_streaming:
            config.set_flag(self.trt.BuilderFlag.WEIGHT_STREAMING)
        path = self.options.timing_cache
        known = path.read_bytes() if path.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)

    def finish(self, config: Any) -> None:
        """Writes what was timed, whole or not at all."""
        path = self.options.timing_cache
        half = path.with_name(f".{path.name}.{os.getpid()}")
        half.write_bytes(bytes(config.get_timing_cache().serialize()))
        half.replace(path)
