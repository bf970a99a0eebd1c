"""The connection to the engine's process when that process goes away; nothing here needs an engine."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_v4tree.serving.events import Code, Event
from trtllm_v4tree.serving.remote import RemoteLoop


class Contested(dict[int, Any]):
    """Another thread takes number 1 back between the look at the numbers and the first pop."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        self.pop(1, None)
        return iter(numbers)


def test_a_number_that_is_taken_back_meanwhile_keeps_no_other_waiting(tmp_path: Path) -> None:
    path = tmp_path / "s"
    events: queue.Queue[Event] = queue.Queue()
    answers: queue.Queue[object] = queue.Queue()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        link = RemoteLoop(path)._connected()
        peer, _ = listener.accept()
        link.handlers = Contested({1: events.put, 2: events.put})
        link.replies = Contested({1: answers.put, 2: answers.put})
        peer.close()
        error = events.get(timeout=20).error
        assert error is not None and error.code is Code.UNAVAILABLE
        assert answers.get(timeout=20) is None
    assert events.empty() and answers.empty()
