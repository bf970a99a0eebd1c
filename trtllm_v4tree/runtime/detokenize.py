"""Text of a growing token list: each chunk is final, and the chunks joined are the tokenizer's decoding of the whole.

Prefix-offset method: only a short window of tokens is decoded, starting at an earlier boundary where the text was
whole, so that a decoder which treats the first token differently (leading space) sees the same neighbours. A tail of
U+FFFD may still become a character, so it is held back until it does, or until `flush`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class _Window(NamedTuple):
    ids: tuple[int, ...]  # the tokens decoded together
    read: int  # ids[:read] are whole and shown
    shown: int  # characters of the window's text that have been handed out


class Detokenizer:
    """Incremental decoding of one request's output, special tokens skipped."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window = _Window((), 0, 0)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of `tokens` would add; changes nothing."""
        window, found = self._window, []
        for token in tokens:
            text, window = self._step(window, (token,))
            found.append(text)
        return found

    def append(self, tokens: Sequence[int]) -> str:
        """Add a run at once, at the price of one token; returns the text it adds."""
        text, self._window = self._step(self._window, tuple(tokens))
        return text

    def flush(self) -> str:
        """The held-back tail, invalid as it is; call it once, when no token follows."""
        window = self._window
        text = self._decode(window.ids)
        self._window = window._replace(shown=len(text))
        return text[window.shown :]

    def _step(self, window: _Window, tokens: tuple[int, ...]) -> tuple[str, _Window]:
        ids = window.ids + tokens
        text = self._decode(ids)
        whole = len(text.rstrip(REPLACEMENT))
        new = text[window.shown : whole]
        if whole < len(text) or not new:
            return new, _Window(ids, window.read, max(window.shown, whole))
        recent = ids[window.read :]
        return new, _Window(recent, len(recent), len(self._decode(recent)))

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
