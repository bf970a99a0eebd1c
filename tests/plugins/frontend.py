"""NVIDIA's quick-plugin front end without TensorRT: the Python package `plugin` of the `tensorrt-cu13-bindings` wheel over the
compiled classes of `tensorrt_rtx`, with placeholders for what RTX lacks, and integers in place of dimension expressions.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class Expr:
    """A dimension expression whose value is known."""

    def __init__(self, value: int, constant: bool = True) -> None:
        self.value, self.constant = value, constant

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        return self.value


class ExprBuilder:
    """Evaluates what the front end asks TensorRT to build."""

    def constant(self, value: int) -> Expr:
        return Expr(value)

    def operation(self, op: Any, a: Expr, b: Expr) -> Expr:
        x, y = a.value, b.value
        value = {
            "SUM": x + y, "PROD": x * y, "SUB": x - y, "MAX": max(x, y), "MIN": min(x, y), "EQUAL": int(x == y),
            "LESS": int(x < y), "FLOOR_DIV": x // y if y else 0, "CEIL_DIV": -(-x // y) if y else 0,
        }[op.name]  # fmt: skip
        return Expr(value, a.constant and b.constant)


class Placeholder:
    """Base of classes that only TensorRT's own library has."""


class DimsExprs(list):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Registry:
    """Keeps the creators."""

    def __init__(self) -> None:
        self.creators: dict[str, Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[f"{namespace}::{creator.name}"] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators[f"{namespace}::{name}"]


def bindings_folder() -> Path | None:
    """The unpacked package `tensorrt_bindings`, never imported itself (it wants libnvinfer)."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def install() -> Any:
    """Puts a module `tensorrt` with the front end as `tensorrt.plugin` into sys.modules and returns it."""
    import tensorrt_rtx as rtx

    folder = bindings_folder()
    assert folder is not None
    module = types.ModuleType("tensorrt")
    module.__dict__.update({k: v for k, v in vars(rtx).items() if not k.startswith("__")})
    for name in ("QuickPluginCreationRequest", "ISymExpr", "IPluginV3QuickAOTBuild"):
        setattr(module, name, type(name, (Placeholder,), {}))
    for name in ("IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild"):
        setattr(module, name, type(name, (Placeholder,), {}))
    module.IDimensionExpr, module.DimsExprs = Expr, DimsExprs  # type: ignore[attr-defined]
    registry = Registry()
    module.get_plugin_registry = lambda: registry  # type: ignore[attr-defined]
    module.__path__ = [str(folder)]  # type: ignore[attr-defined]
    sys.modules["tensorrt"] = module
    module.plugin = importlib.import_module("tensorrt.plugin")  # type: ignore[attr-defined]
    return module
