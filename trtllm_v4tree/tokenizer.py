"""The engine's tokenizer and chat template (`tokenizer.json`, and `chat_template.jinja` where the checkpoint has one)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from trtllm_v4tree.errors import EngineFormatError

_MARKS = {"bos": ("<｜begin▁of▁sentence｜>",), "user": ("<｜User｜>",), "assistant": ("<｜Assistant｜>",)}


class EngineTokenizer:
    """Encodes prompts as DeepSeek does: `<bos>` text, or `<bos><user>text<assistant>` for a chat turn."""

    def __init__(self, path: Path) -> None:
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise EngineFormatError(f"{path} is not a readable tokenizer ({error}): build the engine again.") from error

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of raw text, special marks in it included; a missing `<bos>` is put before it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        bos = self._mark("bos")
        return [bos, *ids] if add_bos and bos is not None and ids[:1] != [bos] else ids

    def chat(self, turns: list[tuple[str, str]]) -> list[int]:
        """Token ids of (role, text) turns, roles user, assistant and system, ready for the assistant's answer."""
        bos, user, assistant = self._mark("bos"), self._mark("user"), self._mark("assistant")
        ids = [] if bos is None else [bos]
        for role, text in turns:
            mark = {"user": user, "assistant": assistant}.get(role)
            ids += ([] if mark is None else [mark]) + self.tokenizer.encode(text.strip(), add_special_tokens=False).ids
        return ids + ([] if assistant is None else [assistant])

    def _mark(self, name: str) -> int | None:
        for text in _MARKS[name]:
            token = self.tokenizer.token_to_id(text)
            if token is not None:
                return int(token)
        return None
