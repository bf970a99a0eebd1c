"""Shares the engine thread of this process with other processes of the same server, over a Unix socket.

One process owns the engine; a lock file beside the socket keeps a second one out. A connection that closes cancels its requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.serving import wire
from trtllm_v4tree.serving.events import Event, ServingError, Submission, failure
from trtllm_v4tree.serving.logs import log
from trtllm_v4tree.serving.loop import EngineLoop, LoopTicket
from trtllm_v4tree.serving.outbox import Outbox

MAX_BACKLOG = 4096  # requests whose events a peer may leave unread before its connection is closed
RETRY_S = 0.1


class Owner:
    """Listens on `socket_path` until `close`; one reading and one writing thread per connection."""

    def __init__(self, loop: EngineLoop, socket_path: Path) -> None:
        self.engine_loop, self.path = loop, socket_path
        self._lock = _locked(socket_path)
        self._listener = _listen(socket_path)
        self._connections: set[_Connection] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="v4tree-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        for path in (self.path, self.path.with_suffix(".lock")):
            path.unlink(missing_ok=True)
        os.close(self._lock)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError as error:  # `close`, or no descriptor is free
                if not self._closing.wait(RETRY_S):
                    log("accept_failed", logging.WARNING, reason=str(error))
                continue
            connection = _Connection(self.engine_loop, peer, self._connections.discard)
            self._connections.add(connection)
            connection.start()


class _Connection:
    """One peer process: its requests, and the events that wait for it to read."""

    def __init__(self, loop: EngineLoop, peer: socket.socket, on_end: Any) -> None:
        self.loop, self.peer, self.on_end = loop, peer, on_end
        self.tickets: dict[int, LoopTicket] = {}
        self._submitting, self._sending = threading.Lock(), threading.Lock()
        self._outbox: Outbox[int] = Outbox()

    def start(self) -> None:
        for name, run in (("v4tree-owner-in", self._read), ("v4tree-owner-out", self._write)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """Ends both threads; the reading one cancels what runs."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            with self.peer.makefile("rb") as stream:
                while (message := wire.read(stream)) is not None:
                    self._handle(message)
        except OSError:
            pass  # the peer or this process ends
        except Exception as error:
            log("connection_closed", logging.WARNING, reason=str(error))
        finally:
            self.close()
            for ticket in list(self.tickets.values()):
                ticket.cancel()
            self._outbox.close()
            self.on_end(self)

    def _write(self) -> None:
        """One frame for all that waits: a round's events while the peer keeps up, those of several when it does not."""
        try:
            while waiting := self._outbox.take():
                self._forget(number for number, event in waiting.items() if event.last)
                self._send({"events": [(number, event.to_json()) for number, event in waiting.items()]})
        except (OSError, wire.WireError) as error:
            log("connection_closed", logging.WARNING, reason=str(error))
        finally:
            self.close()

    def _handle(self, message: dict[str, Any]) -> None:
        kind, number = message["op"], int(message["id"])
        if kind == "submit":
            self._submit(number, message["submission"])
        elif kind == "cancel":
            if (ticket := self.tickets.get(number)) is not None:
                ticket.cancel()
        elif kind == "stats":
            self._send({"reply": number, "data": {**self.loop.stats.to_json(), "round_s": self.loop.round_s}})
        elif kind == "drain":
            threading.Thread(target=self._drain, args=(number, float(message["grace_s"])), daemon=True).start()
        else:
            raise wire.WireError(f"unknown op {kind!r}.")

    def _submit(self, number: int, data: dict[str, Any]) -> None:
        try:
            submission = Submission.from_json(data)
        except ServingError as error:
            self._outbox.put(number, failure(error))
            return
        with self._submitting:
            self.tickets[number] = self.loop.submit_to(submission, lambda _, event: self._on_event(number, event))

    def _forget(self, numbers: Any) -> None:
        with self._submitting:
            for number in numbers:
                self.tickets.pop(number, None)

    def _drain(self, number: int, grace_s: float) -> None:
        whole = self.loop.drain(grace_s)
        with contextlib.suppress(OSError):
            self._send({"reply": number, "data": {"all_ended": whole}})

    def _on_event(self, number: int, event: Event) -> None:
        """Engine thread."""
        self._outbox.put(number, event)
        if len(self._outbox) > MAX_BACKLOG:
            self.close()

    def _send(self, data: dict[str, Any]) -> None:
        body = wire.frame(data)
        with self._sending:
            self.peer.sendall(body)


def _listen(socket_path: Path) -> socket.socket:
    """Raises EngineFormatError if the path cannot be listened on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        socket_path.unlink(missing_ok=True)
        listener.bind(str(socket_path))
        socket_path.chmod(0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise EngineFormatError(f"cannot listen on {socket_path} ({error.strerror}).") from error
    return listener


def _locked(socket_path: Path) -> int:
    """The owner's lock; raises EngineFormatError while another process holds it."""
    wire.private_directory(socket_path.parent)
    descriptor = os.open(socket_path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise EngineFormatError(
            "another process of this server owns the engine already: give the model tensorrt_llm an instance_group of count 1."
        ) from None
    return descriptor
