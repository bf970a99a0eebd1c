"""The library of native CPU operators: where it is, whether it loads, and which instruction set it uses.

It is compiled from `src/` when the package is installed on a machine with a C++ compiler. Without it engines are built from ONNX
Runtime's own operators, which are slower.
"""

from __future__ import annotations

import ctypes
import struct
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
    """`avx512bf16`, `avx512vnni`, `avx512`, `avx2` or `base`, as chosen on this machine; None without the library."""
    path = library()
    return None if path is None else _instruction_set(path)


def set_num_threads(count: int) -> None:
    """Limits the threads of every native operator of the process; 0 is one per processor."""
    path = library()
    if path is not None:
        ctypes.CDLL(str(path)).v4tree_set_num_threads(ctypes.c_int(count))


def set_patience(microseconds: int) -> None:
    """How long an idle thread of the operators keeps its core: 1,000 at first, less where other processes need the core between passes."""
    path = library()
    if path is not None:
        ctypes.CDLL(str(path)).v4tree_set_patience(ctypes.c_int(microseconds))


@cache
def tables() -> ctypes.PyDLL | None:
    """The library with the functions of `src/tables.cc` declared, or None without it. They keep the interpreter's lock: giving it up for a
    microsecond would let other threads have it for milliseconds."""
    path = library()
    if path is None:
        return None
    made = ctypes.PyDLL(str(path))
    for name in ("step", "commit", "draft"):
        function = getattr(made, f"v4tree_{name}_tables")
        function.restype = ctypes.c_int64
        number, memory = ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [memory, number, number, memory, memory, memory, number, memory]
    return made


def _instruction_set(path: Path) -> str | None:
    if not _is_whole(path):
        return None
    try:
        ask = ctypes.CDLL(str(path)).v4tree_instruction_set
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    return str(ask().decode())


def _is_whole(path: Path) -> bool:
    """Whether an ELF file reaches to the end of its section headers, its last part. The loader maps a file that was cut off all the
    same, and the process dies (SIGBUS) at the first page that is not there. True for other formats, which their loaders check.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return True
    offset, (size, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    return bool(path.stat().st_size >= offset + size * count)
