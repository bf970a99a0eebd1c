"""Finish rules: where an accepted run of tokens ends its request, decided before anything is committed.

The result is that of generating one token (and, for stop strings, one character) at a time: it does not depend on how
tokens are grouped into runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.params import SamplingParams

FinishReason = Literal["stop", "length"]


class Cut(NamedTuple):
    """What to keep of a run: token ids, logprobs and committed state by `n_kept`, text by the other two."""

    n_kept: int  # tokens of the run to keep, the finishing token included
    finish_reason: FinishReason | None  # None: the request goes on
    stop_reason: int | str | None  # the stop token id or stop string; None for EOS, as in vLLM
    n_text: int  # leading tokens of the run whose text counts: n_kept, or one less after EOS or a stop token
    text_length: int | None  # cut the whole output text to this many characters; None: no stop string, keep it all


class _Match(NamedTuple):
    end: int  # in characters of the scanned window
    start: int
    stop: str


@dataclass(frozen=True)
class FinishRules:
    """The finish rules of one request, resolved once against the model and the engine."""

    eos_ids: frozenset[int]  # empty with ignore_eos
    stop_ids: frozenset[int]
    stop: tuple[str, ...]
    limit: int  # output tokens this request may have: max_tokens, or what the context leaves
    min_tokens: int
    include_stop: bool

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Sequence[int], prompt_length: int, max_seq_len: int) -> "FinishRules":
        """Raises `RequestError` if the prompt leaves no room for one token."""
        if not 0 < prompt_length < max_seq_len:
            raise RequestError(
                f"the prompt must have 1 to {max_seq_len - 1} tokens (one less than the engine's max_seq_len), but it "
                f"has {prompt_length}; change the prompt or build with a larger --max_seq_len."
            )
        return cls(
            eos_ids=frozenset() if params.ignore_eos else frozenset(eos_ids),
            stop_ids=frozenset(params.stop_token_ids),
            stop=tuple(params.stop),
            limit=min(params.max_tokens, max_seq_len - prompt_length),
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def room(self, emitted: int) -> int:
        """How many tokens may still be emitted; a tree deeper than this is wasted."""
        return self.limit - emitted

    def safe_text_length(self, text: str) -> int:
        """How much of an unfinished request's text may be shown; see the function of that name."""
        return len(text) if self.include_stop else safe_text_length(text, self.stop)


def decide(rules: FinishRules, tokens: Sequence[int], emitted: int, text: str = "", pieces: Sequence[str] = ()) -> Cut:
    """Where the run `tokens` ends the request, if it does.

    emitted: output tokens before this run. text: the whole output text before it, held-back text included (its tail of
    longest stop - 1 characters is enough if the caller adds the rest to `text_length`). pieces: the text that each
    token of the run adds; needed only if the request has stop strings.
    The first token that finishes wins; at one token EOS and stop tokens come before stop strings, these before length.
    Of stop strings the one completed first wins, then the one that starts first. Nothing but length finishes within the
    first `min_tokens` tokens, and a stop string completed there never counts later.
    """
    assert emitted < rules.limit, "the request has finished already"
    assert not rules.stop or len(pieces) == len(tokens), "stop strings need the text of each token"
    run = tokens[: rules.limit - emitted]
    first = max(0, rules.min_tokens - emitted)
    by_token = _first_stop_token(rules, run, first)
    by_text = _first_stop_string(rules, run[:by_token], first, text, pieces) if rules.stop else None
    if by_text is not None:
        return by_text
    if by_token < len(run):
        token = run[by_token]
        shown = by_token + 1 if rules.include_stop and token in rules.stop_ids else by_token
        return Cut(by_token + 1, "stop", None if token in rules.eos_ids else token, shown, None)
    return Cut(len(run), "length" if emitted + len(run) == rules.limit else None, None, len(run), None)


def safe_text_length(text: str, stop: Sequence[str]) -> int:
    """Length of the part of `text` that no stop string, completed later, could cut off."""
    held = 0
    for s in stop:
        for n in range(min(len(s) - 1, len(text)), held, -1):
            if text.endswith(s[:n]):
                held = n
                break
    return len(text) - held


def _first_stop_token(rules: FinishRules, run: Sequence[int], first: int) -> int:
    """Index of the first EOS or stop token at or after `first`; len(run) if there is none."""
    for i in range(first, len(run)):
        if run[i] in rules.eos_ids or run[i] in rules.stop_ids:
            return i
    return len(run)


def _first_stop_string(
    rules: FinishRules, run: Sequence[int], first: int, text: str, pieces: Sequence[str]
) -> Cut | None:
    longest = max(map(len, rules.stop))
    tail = text[len(text) - min(longest - 1, len(text)) :]
    window = tail + "".join(pieces[: len(run)])
    match = _earliest(window, rules.stop, len(tail) + sum(map(len, pieces[:first])))
    if match is None:
        return None
    covered, n = len(tail), 0
    while covered < match.end:
        covered += len(pieces[n])
        n += 1
    end = match.end if rules.include_stop else match.start
    return Cut(n, "stop", match.stop, n, len(text) - len(tail) + end)


def _earliest(window: str, stop: Sequence[str], after: int) -> _Match | None:
    """The match with the lowest (end, start) among those that end beyond character `after`."""
    found = []
    for s in stop:
        start = window.find(s, max(0, after - len(s) + 1))
        if start >= 0:
            found.append(_Match(start + len(s), start, s))
    return min(found, default=None)
