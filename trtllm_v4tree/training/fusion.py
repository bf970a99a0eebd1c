"""Functions that may be compiled into fused kernels: several times faster for long batches, useless for a quick test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_compiling = False


def fusible(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run by torch's compiler after `compile_fusible(True)`; it must be pure and see few different shapes."""
    compiled = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled if _compiling else function)(*args, **kwargs)

    return call


def compile_fusible(on: bool) -> bool:
    """Switches compilation on or off; returns whether it is on: it stays off where there is no C++ compiler."""
    global _compiling
    _compiling = on and any(map(shutil.which, ("g++", "clang++")))
    return _compiling
