"""The library of native CPU operators: where it is, whether it loads, and which instruction set it uses.

It is compiled from `src/` when the package is installed on a machine with a C++ compiler. Without it engines are built from ONNX
Runtime's own operators, which are slower.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_SUFFIXES = (".so", ".dylib", ".pyd")


@cache
def library() -> Path | None:
    """The library's path, or None where it was not compiled or does not load."""
    for path in sorted(Path(__file__).parent.glob("_ops*")):
        if path.suffix in _SUFFIXES and _instruction_set(path) is not None:
            return path
    return None


def instruction_set() -> str | None:
    """`avx512`, `avx2` or `base`, as chosen on this machine; None without the library."""
    path = library()
    return None if path is None else _instruction_set(path)


def set_num_threads(count: int) -> None:
    """Limits the threads of every native operator of the process; 0 is one per processor."""
    path = library()
    if path is not None:
        ctypes.CDLL(str(path)).v4tree_set_num_threads(ctypes.c_int(count))


def _instruction_set(path: Path) -> str | None:
    try:
        ask = ctypes.CDLL(str(path)).v4tree_instruction_set
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    return str(ask().decode())
