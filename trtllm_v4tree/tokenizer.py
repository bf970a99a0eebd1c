"""The engine's tokenizer and DeepSeek's chat format (`tokenizer.json`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from trtllm_v4tree.errors import EngineFormatError, RequestError

_MARKS = {"bos": "<｜begin▁of▁sentence｜>", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"}
_ROLES = ("user", "assistant", "system")


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises ValueError with the reason for a file that is no tokenizer."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(str(error)) from error


class EngineTokenizer:
    """Encodes prompts as DeepSeek does: `<bos>` text, or `<bos><user>text<assistant>` for a chat turn."""

    def __init__(self, path: Path) -> None:
        try:
            self.tokenizer = load_tokenizer(path)
        except ValueError as error:
            raise EngineFormatError(f"{path} is not a readable tokenizer ({error}): build the engine again.") from error
        self._literal = load_tokenizer(path)
        self._literal.encode_special_tokens = True

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of raw text, special marks in it included; a missing `<bos>` is put before it.

        Raises RequestError for a string that is no valid Unicode text.
        """
        ids, bos = self._ids(text), self._mark("bos")
        return [bos, *ids] if add_bos and bos is not None and ids[:1] != [bos] else ids

    def chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, text) turns, roles user, assistant and system, ready for the assistant's answer.

        Marks inside a turn are plain text: nobody can write another's turn.
        """
        bos, assistant = self._mark("bos"), self._mark("assistant")
        ids = [] if bos is None else [bos]
        for role, text in turns:
            if role not in _ROLES:
                raise RequestError(f"role {role!r} is unknown: choose one of {', '.join(_ROLES)}.")
            mark = self._mark(role)
            ids += ([] if mark is None else [mark]) + self._ids(text.strip(), literal=True)
        return ids + ([] if assistant is None else [assistant])

    def _ids(self, text: str, literal: bool = False) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt has a lone surrogate at character {error.start}: give valid Unicode text."
            ) from None
        tokenizer = self._literal if literal else self.tokenizer
        return tokenizer.encode(text, add_special_tokens=False).ids

    def _mark(self, name: str) -> int | None:
        return self.tokenizer.token_to_id(_MARKS[name]) if name in _MARKS else None
