"""What a measurement ran on: processor, cores, memory, system, versions of what took part."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("trtllm_v4tree", "onnxruntime", "numpy", "tokenizers")


def machine() -> dict[str, Any]:
    return {
        "processor": _from_proc("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_average() -> float | None:
    """Runnable processes over the last minute; above the cores, timings are not to be trusted."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _from_proc(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
