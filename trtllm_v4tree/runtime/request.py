"""One generation request from submit to finish: what was asked, what has been emitted, and where it stands."""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass, field

from trtllm_v4tree.runtime.bad_words import BadWords
from trtllm_v4tree.runtime.detokenize import Decoder, Detokenizer
from trtllm_v4tree.runtime.finish import Cut, FinishRules, decide
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.sampling import TokenLogprobs


class Phase(enum.Enum):
    """A request moves forward through these; only deterministic mode returns to PREFILL."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    FINISHED = 3


@dataclass
class RequestMetrics:
    """`accepted_length` counts tokens per verify pass, bonus token included; the first token comes from the prefill."""

    prompt_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        return self.round_tokens / self.rounds if self.rounds else 0.0

    def count(self, emitted: int) -> None:
        """One verify pass that emitted `emitted` tokens."""
        self.rounds += 1
        self.round_tokens += emitted
        while len(self.accepted_by_depth) < emitted:
            self.accepted_by_depth.append(0)
        for depth in range(emitted):
            self.accepted_by_depth[depth] += 1


@dataclass(eq=False)
class Delta:
    """What one step added to a request. `decoded` is filled in when somebody asks for text: a round does not wait for the tokenizer."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    decoded: str = ""

    @property
    def text(self) -> str:
        self.request.decode()
        return self.decoded


class Request:
    """State of one request. `slot` and `pages` are set while it is admitted."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        rules: FinishRules,
        decoder: Decoder | None,
        bad_words: BadWords | None = None,
    ) -> None:
        self.id, self.prompt_ids, self.params, self.rules = request_id, prompt_ids, params, rules
        self.bad_words = bad_words
        self.seed = params.seed if params.seed is not None else secrets.randbits(62)
        self.phase = Phase.QUEUED
        self.slot, self.pages = 0, list[int]()
        self.prefill_ids, self.prefilled = prompt_ids, 0
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cancelled = False
        self.metrics = RequestMetrics(prompt_tokens=len(prompt_ids))
        self._detokenizer = Detokenizer(decoder) if decoder is not None else None
        self._undecoded: list[tuple[Delta, Cut]] = []
        self._full = ""
        self._shown = 0

    @property
    def tokens_reserved(self) -> int:
        """Context that the request can reach."""
        return len(self.prompt_ids) + self.rules.limit

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that no pass has read."""
        return len(self.prefill_ids) - self.prefilled

    @property
    def room(self) -> int:
        return self.rules.room(len(self.output_ids))

    @property
    def text(self) -> str:
        """Text that may be shown."""
        self.decode()
        return self._full[: self._shown]

    def accept(self, run: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        """Takes over an accepted run up to where the finish rules cut it."""
        cut = self._cut(run)
        self.output_ids += run[: cut.n_kept]
        self.logprobs += logprobs[: cut.n_kept]
        if cut.finish_reason is not None:
            self.finish(cut.finish_reason, cut.stop_reason)
        delta = Delta(self, run[: cut.n_kept], self.finish_reason)
        if self._detokenizer is not None:
            self._undecoded.append((delta, cut))
        return delta

    def decode(self) -> None:
        """Decodes the runs accepted since the last call."""
        for delta, cut in self._undecoded:
            assert self._detokenizer is not None
            self._full += self._detokenizer.append(delta.token_ids[: cut.n_text])
            before = self._shown
            self._settle(cut)
            delta.decoded = self._full[before : self._shown]
        self._undecoded.clear()

    def restart(self) -> None:
        """Back to prefill over everything known, to choose the next token from a pass that no tree has touched."""
        self.prefill_ids, self.prefilled = [*self.prompt_ids, *self.output_ids], 0
        self.phase = Phase.PREFILL

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.phase = Phase.FINISHED

    def _cut(self, run: list[int]) -> Cut:
        """Where the finish rules end the run; stop strings need the text before it and of each of its tokens."""
        emitted = len(self.output_ids)
        if not self.rules.stop:
            return decide(self.rules, run, emitted)
        assert self._detokenizer is not None, "stop strings need a tokenizer"
        self.decode()
        return decide(self.rules, run, emitted, self._full, self._detokenizer.pieces(run))

    def _settle(self, cut: Cut) -> None:
        assert self._detokenizer is not None
        if cut.finish_reason is None:
            self._shown = max(self._shown, self.rules.safe_text_length(self._full))
            return
        if cut.text_length is None:
            self._full += self._detokenizer.flush()
        else:
            self._full = self._full[: cut.text_length]
        self._shown = len(self._full)
