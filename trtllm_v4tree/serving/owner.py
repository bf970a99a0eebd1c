"""Shares the engine thread of this process with other processes of the same server, over a Unix socket.

One process owns the engine; a lock file beside the socket keeps a second one out. A connection that closes cancels its requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.serving import wire
from trtllm_v4tree.serving.events import Event, ServingError, Submission, failure
from trtllm_v4tree.serving.logs import log
from trtllm_v4tree.serving.loop import EngineLoop, LoopTicket

MAX_BACKLOG = 64 << 20  # bytes a connection may leave unread before it is closed


class Owner:
    """Listens on `socket_path` until `close`."""

    def __init__(self, loop: EngineLoop, socket_path: Path) -> None:
        self.engine_loop, self.path = loop, socket_path
        self._lock = _locked(socket_path)
        self._io = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="v4tree-owner", daemon=True)
        self._connections: set[_Connection] = set()
        self._flush_due: set[_Connection] = set()
        loop.after_round = self._flush
        ready = threading.Event()
        self._io.call_soon(lambda: self._io.create_task(self._serve(ready)))
        self._thread.start()
        if not ready.wait(timeout=10.0):
            raise EngineFormatError(f"cannot listen on {socket_path}.")

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._io)
        self._thread.join(timeout=5.0)
        for path in (self.path, self.path.with_suffix(".lock")):
            path.unlink(missing_ok=True)
        os.close(self._lock)

    def _run(self) -> None:
        asyncio.set_event_loop(self._io)
        self._io.run_forever()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._io.stop()

    async def _serve(self, ready: threading.Event) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))
        self.path.chmod(0o600)
        ready.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, writer)
        self._connections.add(connection)
        try:
            while True:
                length = wire.body_length(await reader.readexactly(wire.HEADER_BYTES))
                await connection.handle(wire.parse(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the peer or this process ends
        except Exception as error:
            log("connection_closed", logging.WARNING, reason=str(error))
        finally:
            self._connections.discard(connection)
            connection.close()

    def mark(self, connection: _Connection) -> None:
        """Engine thread: this connection has events to send after the round."""
        self._flush_due.add(connection)

    def _flush(self) -> None:
        """Engine thread, after each round: one frame per connection."""
        due, self._flush_due = self._flush_due, set()
        for connection in due:
            connection.flush()

    def call(self, function: Any, *args: Any) -> None:
        """Runs a function on the socket thread."""
        self._io.call_soon_threadsafe(function, *args)


class _Connection:
    """One peer process: its requests, and the events that wait for the end of the round."""

    def __init__(self, owner: Owner, writer: asyncio.StreamWriter) -> None:
        self.owner, self.writer = owner, writer
        self.tickets: dict[int, LoopTicket] = {}
        self.waiting: list[tuple[int, dict[str, Any]]] = []

    async def handle(self, message: dict[str, Any]) -> None:
        kind, number = message["op"], int(message["id"])
        if kind == "submit":
            self._submit(number, message["submission"])
        elif kind == "cancel":
            if (ticket := self.tickets.get(number)) is not None:
                ticket.cancel()
        elif kind == "stats":
            self.send({"reply": number, "data": self.owner.engine_loop.stats.to_json()})
        elif kind == "drain":
            self.owner._io.create_task(self._drain(number, float(message["grace_s"])))
        else:
            raise wire.WireError(f"unknown op {kind!r}.")

    def _submit(self, number: int, data: dict[str, Any]) -> None:
        try:
            submission = Submission.from_json(data)
        except ServingError as error:
            self.send({"events": [[number, failure(error).to_json()]]})
            return
        self.tickets[number] = self.owner.engine_loop.submit_to(
            submission, lambda _, event: self._on_event(number, event)
        )

    async def _drain(self, number: int, grace_s: float) -> None:
        whole = await asyncio.to_thread(self.owner.engine_loop.drain, grace_s)
        self.send({"reply": number, "data": {"all_ended": whole}})

    def _on_event(self, number: int, event: Event) -> None:
        """Engine thread."""
        self.waiting.append((number, event.to_json()))
        if event.last:
            self.owner.call(self.tickets.pop, number, None)
        self.owner.mark(self)

    def flush(self) -> None:
        """Engine thread."""
        waiting, self.waiting = self.waiting, []
        self.owner.call(self.send, {"events": waiting})

    def send(self, data: dict[str, Any]) -> None:
        """Socket thread."""
        if self.writer.is_closing():
            return
        self.writer.write(wire.frame(data))
        if self.writer.transport.get_write_buffer_size() > MAX_BACKLOG:
            log("connection_closed", logging.WARNING, reason=f"the peer left more than {MAX_BACKLOG} bytes unread")
            self.writer.transport.abort()

    def close(self) -> None:
        for ticket in list(self.tickets.values()):
            ticket.cancel()
        self.tickets.clear()
        self.writer.close()


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
