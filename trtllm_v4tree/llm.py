"""`LLM`: load an engine directory and generate. A thin shell over the round loop, names as in TensorRT-LLM and vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from trtllm_v4tree.engine_dir import LATENCY_FILE, Manifest
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.executors import check_target, make_executor
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.policies.names import make_policy
from trtllm_v4tree.runtime.request import Delta, Request, RequestMetrics
from trtllm_v4tree.runtime.sampling import TokenLogprobs
from trtllm_v4tree.tokenizer import EngineTokenizer

MAX_THREADS = 1024
MAX_NUM_TOKENS = 1 << 20


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt


@dataclass(frozen=True)
class CompletionOutput:
    """One completion: text without special tokens, token ids with the finishing one, logprobs if asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True)
class RequestOutput:
    """Result of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @classmethod
    def of(cls, request: Request, prompt: Prompt) -> RequestOutput:
        logprobs = request.logprobs if request.params.logprobs is not None else None
        output = CompletionOutput(
            0, request.text, request.output_ids, request.finish_reason, request.stop_reason, logprobs
        )
        text = prompt if isinstance(prompt, str) else None
        return cls(request.id, text, request.prompt_ids, [output], request.metrics)


class LLM:
    """An engine ready to generate. `speculation` is `none` or `sN_kK_dD`; text does not depend on it.

    `max_num_tokens` bounds the tokens of one scheduler step, verified nodes and prompt together: a long prompt that arrives is cut into
    smaller chunks while others decode. 0 chooses the chunk so that a stream's gap stays under 2.5 of its rounds.
    Raises EngineFormatError for a directory that cannot be loaded and RequestError for a speculation the engine lacks.
    Not thread-safe.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        speculation: str = "none",
        *,
        threads: int = 0,
        verify_hashes: bool = True,
        deterministic: bool = False,
        max_num_tokens: int = 0,
    ) -> None:
        if type(threads) is not int or not 0 <= threads <= MAX_THREADS:
            raise RequestError(f"threads is {threads!r}: give 0 (all cores) to {MAX_THREADS}.")
        if type(max_num_tokens) is not int or not 0 <= max_num_tokens <= MAX_NUM_TOKENS:
            raise RequestError(f"max_num_tokens is {max_num_tokens!r}: give 0 (automatic) to {MAX_NUM_TOKENS}.")
        directory = Path(engine_dir)
        self.manifest = _loadable(directory, verify_hashes)
        latency = _latency(directory)
        _check_name(speculation)
        make_policy(speculation, self.manifest.sizes, self.manifest.draft_shapes, latency)
        self.tokenizer = _tokenizer(directory)
        executor = make_executor(directory, self.manifest, threads)
        decoder = self.tokenizer.tokenizer if self.tokenizer else None
        encode = partial(self.tokenizer.encode, add_bos=False) if self.tokenizer else None
        self.engine = Engine(
            executor, speculation, decoder, deterministic=deterministic, latency=latency, encode=encode,
            max_num_tokens=max_num_tokens,
        )  # fmt: skip
        self._inboxes: dict[Request, deque[Delta]] = {}

    def set_speculation(self, speculation: str) -> None:
        """Changes the drafting shape; RequestError for one that the engine lacks, or while a stream is open."""
        _check_name(speculation)
        if not self.engine.idle:
            raise RequestError("speculation cannot change while requests run: read or close every open stream first.")
        self.engine.set_speculation(speculation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates all prompts together (in-flight batching) and returns their results in order.

        Raises RequestError for a prompt or parameter that cannot be served; then nothing stays queued.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else _listed(prompts, "prompts")
        encoded = [self._encode(p) for p in items]
        requests: list[Request] = []
        try:
            for ids, params in zip(encoded, _params_of(sampling_params, len(items)), strict=True):
                requests.append(self.engine.submit(ids, params))
            while any(r.finish_reason is None for r in requests):
                self._step()
        finally:
            self._abandon(requests)
        return [RequestOutput.of(r, p) for r, p in zip(requests, items, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Generates one prompt and yields what each pass adds; leaving the loop early cancels it.

        Several streams may be open at once. Raises RequestError at the first `next`.
        """
        [params] = _params_of(sampling_params, 1)
        request = self.engine.submit(self._encode(prompt), params)
        inbox = self._inboxes[request] = deque()
        try:
            while inbox or request.finish_reason is None:
                if not inbox:
                    self._step()
                while inbox:
                    yield inbox.popleft()
        finally:
            del self._inboxes[request]
            self._abandon([request])

    def encode_chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, text) turns in the chat format, ready for the assistant's answer."""
        if not any(text.strip() for _, text in turns):
            raise RequestError("the prompt is empty: give at least one turn with text.")
        return self._need_tokenizer().chat(turns)

    def _step(self) -> None:
        """One scheduler step; deltas go to the streams that wait for them."""
        for delta in self.engine.step():
            if delta.request in self._inboxes:
                self._inboxes[delta.request].append(delta)

    def _abandon(self, requests: Iterable[Request]) -> None:
        """Cancels what has not finished and frees its slots and pages."""
        running = [r for r in requests if r.finish_reason is None]
        for request in running:
            self.engine.cancel(request)
        if running:
            self._step()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise RequestError(
                    f"a prompt has the keys {sorted(map(str, prompt))}: give text or {{'prompt_token_ids': [...]}}."
                )
            return _listed(prompt["prompt_token_ids"], "prompt_token_ids")
        if not isinstance(prompt, str):
            raise RequestError(f"a prompt is {prompt!r:.60}: give text or {{'prompt_token_ids': [...]}}.")
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token.")
        return self._need_tokenizer().encode(prompt)

    def _need_tokenizer(self) -> EngineTokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give prompt_token_ids.")
        return self.tokenizer


def _check_name(speculation: str) -> None:
    if not isinstance(speculation, str):
        raise RequestError(f"speculation is {speculation!r}: give a name such as none, auto or s3_k2_d6.")


def _loadable(directory: Path, verify_hashes: bool) -> Manifest:
    manifest = Manifest.read(directory)
    check_target(directory, manifest)
    if verify_hashes:
        manifest.verify(directory)
    return manifest


def check_engine(engine_dir: str | Path, speculation: str) -> Manifest:
    """The manifest, after the checks of `LLM` that need no graph loaded; raises as it does."""
    directory = Path(engine_dir)
    manifest = _loadable(directory, verify_hashes=False)
    _check_name(speculation)
    make_policy(speculation, manifest.sizes, manifest.draft_shapes, _latency(directory))
    return manifest


def _tokenizer(directory: Path) -> EngineTokenizer | None:
    path = directory / "tokenizer.json"
    return EngineTokenizer(path) if path.is_file() else None


def _latency(directory: Path) -> LatencyTable | None:
    path = directory / LATENCY_FILE
    return LatencyTable.read(path) if path.is_file() else None


def _listed(values: Any, name: str) -> list[Any]:
    """A plain list; RequestError for text or a single value."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r:.60}: give a list.")
    return list(values)


def _params_of(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    params = _listed(given, "sampling_params")
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params are {len(params)} values for {count} prompts: give one SamplingParams, or one per prompt."
        )
    return params
