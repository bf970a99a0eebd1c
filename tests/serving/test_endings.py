"""How processes end, in words: on real processes that ended in these ways."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_v4tree.cli import serve
from trtllm_v4tree.serving import endings
from trtllm_v4tree.serving.launch import Endpoints, LaunchError
from trtllm_v4tree.serving.remote import RemoteLoop


def _end(program: str) -> subprocess.Popen[bytes]:
    """A child that has ended and that nobody has waited for."""
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while endings.running(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pass", "with status 0"),
        ("raise SystemExit(3)", "with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL (Killed)"),
        ("import os; os.abort()", "by SIGABRT (Aborted)"),
        ("import ctypes; ctypes.string_at(96)", "by SIGSEGV (Segmentation fault)"),
    ],
)
def test_the_ending_of_a_process_that_nobody_waited_for(program: str, words: str) -> None:
    child = _end(program)
    assert endings.other_ending(child.pid) == words
    assert endings.ending(child.wait()) == words
    assert endings.other_ending(child.pid) is None and not endings.running(child.pid)


def test_a_running_process_has_no_ending() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert endings.running(child.pid) and endings.other_ending(child.pid) is None
    finally:
        child.kill()
        child.wait()


def test_a_signal_without_a_name() -> None:
    assert endings.ending(-(signal.SIGRTMAX - 1)) == f"by signal {signal.SIGRTMAX - 1}"


def test_the_listener_of_a_unix_socket_is_known(tmp_path: Path) -> None:
    path = tmp_path / "s"
    program = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)])
    try:
        client, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + 20
        while client.connect_ex(str(path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with client:
            assert endings.peer_pid(client) == child.pid
    finally:
        child.kill()
        child.wait()


def test_a_crash_shows_what_python_was_doing() -> None:
    program = "from trtllm_v4tree.serving import endings; endings.show_crashes()\nimport ctypes\ndef here(): ctypes.string_at(96)\nhere()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and "Segmentation fault" in done.stderr and "in here" in done.stderr


@pytest.fixture
def triton() -> Iterator[Any]:
    """A process in the place of Triton's that goes on."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield SimpleNamespace(process=child, ending=lambda: "tritonserver ended")
    child.kill()
    child.wait()


_LEAVING = """
import socket, sys, time
with socket.socket(socket.AF_UNIX) as s:
    s.bind(sys.argv[1])
    s.listen()
    peer, _ = s.accept()
peer.recv(1)
peer.close()
time.sleep(1)
"""


def test_an_engine_process_on_its_way_out_is_left_to_end(tmp_path: Path, triton: Any) -> None:
    """It has closed its socket and still runs."""
    path = tmp_path / "s"
    child = subprocess.Popen([sys.executable, "-c", _LEAVING, str(path)])
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    remote = RemoteLoop(path)
    trouble = serve._trouble(remote)
    assert trouble == serve.ENDED and endings.running(child.pid)
    words = serve._what_ended(triton, remote.owner_pid, trouble)
    assert f"the engine's process ended: process {child.pid}, with status 0" in words
    assert child.wait() == 0


def test_no_server_is_ready_whose_engine_process_does_not_answer(
    tmp_path: Path, triton: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    remote, endpoints = RemoteLoop(tmp_path / "none"), Endpoints("127.0.0.1", 1, 2, 3)
    with pytest.raises(LaunchError, match="the engine's process ended"):
        asyncio.run(serve._until_stopped(triton, remote, endpoints, None, None, 1))
    assert "ready" not in capfd.readouterr().err
    assert "could not be waited for" in serve._drained(remote, 1)
