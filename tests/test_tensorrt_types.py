"""The glue to CUDA and TensorRT passes a type check against NVIDIA's own declarations, where they are installed.

`pip install --no-deps tensorrt-stubs cuda-core` somewhere, and name the folder in V4TREE_STUBS or install it here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLASSES = (
    "ILogger", "Logger", "Runtime", "ICudaEngine", "IExecutionContext", "DataType", "TensorIOMode",
    "ExecutionContextAllocationStrategy",
)  # fmt: skip
HEADER = "# mypy: ignore-errors\nfrom __future__ import annotations\nimport typing\nfrom typing import Any\n__version__: str\n"


def declarations() -> tuple[Path, str] | None:
    """The folder of the stubs, and TensorRT's classes that the device uses; the published file as a whole is no valid Python."""
    places = [Path(p) for p in (os.environ.get("V4TREE_STUBS"), Path(sys.prefix) / "tensorrt-stubs") if p]
    spec = importlib.util.find_spec("tensorrt_stubs")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parents[1])
    for place in places:
        file = place / "tensorrt_bindings" / "tensorrt.pyi"
        if file.is_file():
            return place, extract(file.read_text(encoding="utf-8"))
    return None


def extract(text: str) -> str:
    """The classes of CLASSES, and whatever else they name as Any."""
    found = {m[1]: m[0] for m in re.finditer(r"^class (\w+).*?(?=^class |\Z)", text, re.S | re.M) if m[1] in CLASSES}
    assert set(found) == set(CLASSES)
    known = "".join(found[name] for name in CLASSES)
    others = sorted(set(re.findall(r"\b([A-Z]\w+)\b", known)) - set(CLASSES) - {"Any", "None", "True", "False"})
    return HEADER + "".join(f"{name} = Any\n" for name in others) + known


@pytest.mark.slow
def test_device_against_the_declarations(tmp_path: Path) -> None:
    found = declarations()
    if found is None:
        pytest.skip("pip install --no-deps tensorrt-stubs cuda-core, or name a folder with them in V4TREE_STUBS")
    place, text = found
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.pyi").write_text(text, encoding="utf-8")
    if (place / "cuda" / "core" / "cu13").is_dir():
        (tmp_path / "cuda" / "bindings").mkdir(parents=True)
        (tmp_path / "cuda" / "bindings" / "driver.pyi").write_text(
            "from typing import Any\ndef __getattr__(name: str) -> Any: ...\nclass CUresult(Any): ...\n"
        )
        (tmp_path / "cuda" / "core").mkdir()
        for item in (place / "cuda" / "core" / "cu13").iterdir():
            if item.name != "__init__.py":
                (tmp_path / "cuda" / "core" / item.name).symlink_to(item)
        (tmp_path / "cuda" / "core" / "__init__.py").symlink_to(place / "cuda" / "core" / "__init__.py")
    command = [
        sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--no-incremental",
        str(ROOT / "trtllm_v4tree" / "runtime" / "cuda_device.py"),
    ]  # fmt: skip
    environment = os.environ | {"MYPYPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    ours = [line for line in ran.stdout.splitlines() if line.startswith("trtllm_v4tree")]
    wrong = [
        line for line in ours if 'Module "cuda.core" has no attribute' not in line
    ]  # a star export that mypy does not follow
    assert not wrong and "prevented further checking" not in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode in (0, 1), ran.stderr
