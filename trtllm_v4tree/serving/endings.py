"""How processes end, in words: for the one message that a user gets about it. Linux's /proc tells of those that are not our children."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import struct
import sys
from pathlib import Path


def ending(returncode: int) -> str:
    """A return code as `subprocess` gives it: `with status 3` or `by SIGSEGV (Segmentation fault)`."""
    if returncode >= 0:
        return f"with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        return f"by signal {-returncode}"
    return f"by {name} ({signal.strsignal(-returncode)})"


def other_ending(pid: int) -> str | None:
    """As `ending`, of a process that its own parent has not waited for yet; None where the system no longer knows."""
    fields = _stat(pid)
    if not fields or fields[0] not in ("Z", "X"):
        return None
    with contextlib.suppress(ValueError, IndexError):
        return ending(os.waitstatus_to_exitcode(int(fields[49])))
    return None


def running(pid: int) -> bool:
    """Whether it exists and is not only waited for by its parent."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat behind the command: the state first, the wait status as number 49."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def peer_pid(connection: socket.socket) -> int | None:
    """The process that listens at the other end of a Unix socket (Linux)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def show_crashes() -> None:
    """From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT print what every Python thread of this process was doing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is no file
        faulthandler.enable(sys.stderr)
