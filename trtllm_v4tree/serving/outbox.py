"""Events on their way from the thread that makes them to one that takes longer to pass them on."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

from trtllm_v4tree.serving.events import Event

Key = TypeVar("Key", bound=Hashable)


class Outbox(Generic[Key]):
    """Events that wait for one taker; those of one request wait as one.

    A taker that keeps up gets each round's events, one that lags gets fewer and larger ones with the same text; what waits is at most the
    whole output of each request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Key, Event] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()  # an item while something waits

    def put(self, key: Key, event: Event) -> None:
        """From any thread; does not block."""
        with self._lock:
            before = self._waiting.get(key)
            first = not self._waiting
            self._waiting[key] = event if before is None else before.then(event)
        if first:
            self._wake.put(None)

    def take(self) -> dict[Key, Event]:
        """Blocks until something waits and returns all of it, first come first; nothing after `close`."""
        self._wake.get()
        with self._lock:
            taken, self._waiting = self._waiting, {}
        return taken

    def close(self) -> None:
        """Ends the taker once it has taken what waits."""
        self._wake.put(None)

    def __len__(self) -> int:
        return len(self._waiting)
