"""The engine thread of another process of the same server, as a `Backend`. Reconnects when the owner comes back."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from trtllm_v4tree.serving import endings, wire
from trtllm_v4tree.serving.events import Code, Event, ServingError, Submission, failure


class RemoteTicket:
    """A request in the owner's loop."""

    def __init__(self, link: _Link, number: int) -> None:
        self._link, self._number = link, number

    def cancel(self) -> None:
        self._link.tell({"op": "cancel", "id": self._number})


class RemoteLoop:
    """Submits to the owner behind `socket_path`; thread-safe. Events come on one reader thread and must be taken quickly."""

    def __init__(self, socket_path: Path) -> None:
        self.path = socket_path
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def submit(self, submission: Submission, on_event: Callable[[Event], None]) -> RemoteTicket:
        """Raises ServingError (UNAVAILABLE) while the engine's process is down; every other refusal comes as an event."""
        link, number = self._connected(), next(self._numbers)
        link.handlers[number] = on_event
        link.tell({"op": "submit", "id": number, "submission": submission.to_json()})
        if not link.alive and link.handlers.pop(number, None) is not None:
            raise _unavailable("ended")
        return RemoteTicket(link, number)

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.alive

    @property
    def owner_pid(self) -> int | None:
        """The engine's process, as of the last connection."""
        return None if self._link is None else self._link.owner_pid

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The fields of `Stats`, and as `round_s` how long the engine thread's running round has taken."""
        return self._ask({"op": "stats"}, timeout_s)

    def drain(self, grace_s: float) -> bool:
        """Whether every accepted request ended within the grace time."""
        return bool(self._ask({"op": "drain", "grace_s": grace_s}, grace_s + 10.0)["all_ended"])

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        link, number = self._connected(), next(self._numbers)
        answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        link.replies[number] = answers.put
        link.tell({**message, "id": number})
        if not link.alive and link.replies.pop(number, None) is not None:
            raise _unavailable("ended")
        try:
            answer = answers.get(timeout=timeout_s)
        except Empty:
            raise _unavailable(f"did not answer within {timeout_s:g} s") from None
        if answer is None:
            raise _unavailable("closed the connection")
        return answer

    def _connected(self) -> _Link:
        with self._lock:
            if self._link is None or not self._link.alive:
                self._link = _Link(self.path)
            return self._link


class _Link:
    """One connection and its reader thread."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(str(path))
        except OSError as error:
            self.socket.close()
            raise _unavailable(f"is not reachable ({error.strerror})") from error
        self.owner_pid = endings.peer_pid(self.socket)
        self.handlers: dict[int, Callable[[Event], None]] = {}
        self.replies: dict[int, Callable[[dict[str, Any] | None], None]] = {}
        self.alive = True
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="v4tree-remote", daemon=True).start()

    def tell(self, message: dict[str, Any]) -> None:
        try:
            data = wire.frame(message)
            with self._sending:
                self.socket.sendall(data)
        except OSError:
            self.close()

    def close(self) -> None:
        self.alive = False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        stream = self.socket.makefile("rb")
        try:
            while (message := wire.read(stream)) is not None:
                self._dispatch(message)
        except (OSError, wire.WireError):
            pass
        finally:
            self.alive = False
            stream.close()
            self.socket.close()
            self._fail_all()

    def _dispatch(self, message: dict[str, Any]) -> None:
        for number, data in message.get("events", ()):
            event = Event.from_json(data)
            handler = self.handlers.pop(number, None) if event.last else self.handlers.get(number)
            if handler is not None:
                handler(event)
        if "reply" in message and (answer := self.replies.pop(message["reply"], None)) is not None:
            answer(message["data"])

    def _fail_all(self) -> None:
        """`submit` and `_ask` may take their own number back meanwhile."""
        for number in list(self.handlers):
            if (handler := self.handlers.pop(number, None)) is not None:
                handler(failure(_unavailable("ended while the request ran")))
        for number in list(self.replies):
            if (answer := self.replies.pop(number, None)) is not None:
                answer(None)


def _unavailable(what: str) -> ServingError:
    return ServingError(Code.UNAVAILABLE, f"the engine's process {what}: try again later.")
