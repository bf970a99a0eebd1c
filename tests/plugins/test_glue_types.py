"""The plugins' glue against the types of TensorRT: `tensorrt-stubs` and NVIDIA's plugin front end, which mypy reads side by side."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins import frontend

STUBS = Path(sys.prefix) / "tensorrt-stubs"
GLUE = Path(__file__).resolve().parents[2] / "plugins" / "v4tree_plugins" / "quick.py"
PUBLIC = ("_lib", "_autotune", "_top_level", "_tensor")
SETTINGS = """[mypy]
python_version = 3.11
check_untyped_defs = true
disallow_untyped_defs = true
warn_unused_ignores = true
follow_imports = silent
[mypy-tensorrt_bindings.*,tensorrt.*]
ignore_errors = true
[mypy-triton.*,tensorrt_libs.*]
ignore_missing_imports = true
"""
EXPORT = """from collections.abc import Callable
from typing import Any, TypeVar
T = TypeVar("T")
IS_AOT_ENABLED = True
def public_api(module: Any = ..., symbol: str | None = ...) -> Callable[[T], T]: ...
"""
"""Its decorator of everything public, which says nothing of types, as the identity that it is."""
pytestmark = pytest.mark.skipif(
    not STUBS.is_dir() or frontend.bindings_folder() is None, reason="make .venv/.test installs tensorrt-stubs"
)


def readable(stub: str) -> str:
    """The stub without what is no Python: parameters named `in`, and one without a default behind those that have one."""
    stub = re.sub(r"\bin: list", "in_: list", stub)
    return re.sub(r"(def add_scale_nd\(.*channel_axis: int)\)", r"\1 = ...)", stub)


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for MYPYPATH with the modules `tensorrt` and `tensorrt.plugin`; the front end fills the latter only when it runs."""
    folder, front_end = tmp_path_factory.mktemp("types"), frontend.bindings_folder()
    assert front_end is not None
    for name in ("tensorrt", "tensorrt_bindings"):
        (folder / name).mkdir()
        for source in (STUBS / name).glob("*.pyi"):
            (folder / name / source.name).write_text(readable(source.read_text()))
    shutil.copytree(front_end / "plugin", folder / "tensorrt" / "plugin")
    exports = "".join(f"from tensorrt.plugin.{name} import *\n" for name in PUBLIC)
    (folder / "tensorrt" / "plugin" / "__init__.pyi").write_text(exports)
    (folder / "tensorrt" / "plugin" / "_export.pyi").write_text(EXPORT)
    (folder / "settings.ini").write_text(SETTINGS)
    return folder


def mypy(types: Path, source: Path) -> str:
    """What mypy says about a file."""
    env = os.environ | {"MYPYPATH": os.pathsep.join(map(str, (types, GLUE.parents[1])))}
    command = [sys.executable, "-m", "mypy", "--config-file", str(types / "settings.ini"), str(source)]
    return subprocess.run(
        [*command, "--cache-dir", str(types / "cache")], env=env, capture_output=True, text=True
    ).stdout


def test_the_glue(types: Path) -> None:
    said = mypy(types, GLUE)
    assert "Success: no issues found in 1 source file" in said, said


WRONG = {
    "trt.DataType.BF61": "BF61",
    "trtp.KernelLaunchParams(grid_w=1)": "grid_w",
    "trtp.cdiv(1)": "Missing positional argument",
    "trtp.from_shape_expr((1,), 5, 6)": "Too many arguments",
    "trtp.AutoTuneCombination(1)": "incompatible type",
    "trtp.TensorDesc().likes()": "likes",
}


def test_wrong_glue_is_found(types: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.py"
    source.write_text("\n".join(["import tensorrt as trt", "import tensorrt.plugin as trtp", *WRONG]))
    said = mypy(types, source).splitlines()
    for line, (code, fragment) in enumerate(WRONG.items(), start=3):
        assert any(f"wrong.py:{line}: error" in error and fragment in error for error in said), (code, said)
