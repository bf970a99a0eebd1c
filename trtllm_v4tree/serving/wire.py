"""Frames between the owner of the engine and the other processes of one server: a Unix socket, length-prefixed JSON, nothing else.

Only processes of the same user can connect: the socket lies in a directory of mode 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from trtllm_v4tree.errors import V4TreeError

MAX_FRAME = 32 << 20
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class WireError(V4TreeError):
    """The peer is gone or does not speak this protocol."""


def frame(data: Any) -> bytes:
    body = json.dumps(data, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is larger than {MAX_FRAME}.")
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Raises WireError beyond MAX_FRAME."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise WireError(f"a frame of {length} bytes is larger than {MAX_FRAME}.")
    return int(length)


def default_socket(engine_dir: Path, server_pid: int) -> Path:
    """The socket of the server process `server_pid` for this engine; all model processes of one Triton server find the same."""
    name = hashlib.sha256(str(engine_dir.resolve()).encode()).hexdigest()[:16]
    return private_directory(Path(tempfile.gettempdir()) / f"v4tree-{os.getuid()}") / f"{server_pid}-{name}.sock"


def private_directory(path: Path) -> Path:
    """Creates it with mode 0700; raises WireError if somebody else owns it or may enter it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WireError(f"{path} must be a directory of mode 0700 that belongs to this user: remove it or set TMPDIR.")
    return path


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None where the stream ends. Raises WireError."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return parse(stream.read(body_length(header)))


def parse(body: bytes) -> dict[str, Any]:
    """Raises WireError for anything but a JSON object."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise WireError(f"a frame is not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise WireError("a frame is not a JSON object.")
    return data
