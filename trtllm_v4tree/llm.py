"""`LLM`: load an engine directory and generate. A thin shell over the round loop; names as in TensorRT-LLM and vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError, RequestError
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.request import Delta, Request, RequestMetrics
from trtllm_v4tree.runtime.sampling import TokenLogprobs
from trtllm_v4tree.tokenizer import EngineTokenizer


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


@dataclass(frozen=True)
class CompletionOutput:
    """One completion: text without special tokens, token ids with the finishing one, logprobs per token if asked for."""

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
    def of(cls, request: Request, prompt: str | None) -> RequestOutput:
        logprobs = request.logprobs if request.params.logprobs is not None else None
        output = CompletionOutput(
            0, request.text, request.output_ids, request.finish_reason, request.stop_reason, logprobs
        )
        return cls(request.id, prompt, request.prompt_ids, [output], request.metrics)


class LLM:
    """An engine ready to generate. `speculation` is `none` or `sN_kK_dD`; text does not depend on it.

    Raises EngineFormatError for a directory that cannot be loaded and RequestError for a speculation the engine lacks.
    """

    def __init__(self, engine_dir: str | Path, speculation: str = "none", *, threads: int = 0, verify_hashes: bool = True) -> None:
        directory = Path(engine_dir)
        self.manifest = Manifest.read(directory)
        if self.manifest.target != "onnxruntime":
            raise EngineFormatError(
                f"{directory} was built for target {self.manifest.target}, which cannot run here: build with --target onnxruntime."
            )
        if verify_hashes:
            self.manifest.verify(directory)
        tokenizer = directory / "tokenizer.json"
        self.tokenizer = EngineTokenizer(tokenizer) if tokenizer.is_file() else None
        executor = OnnxRuntimeExecutor(directory, self.manifest, threads)
        self.engine = Engine(executor, speculation, self.tokenizer.tokenizer if self.tokenizer else None)

    def set_speculation(self, speculation: str) -> None:
        """Changes the drafting shape between generations; the engine must be idle."""
        self.engine.set_speculation(speculation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates all prompts together (in-flight batching) and returns their results in order."""
        items: list[Prompt] = [prompts] if isinstance(prompts, str | dict) else list(prompts)  # type: ignore[list-item]
        params = self._params_for(items, sampling_params)
        encoded = [self._encode(p) for p in items]
        requests = []
        try:
            for ids, each in zip(encoded, params, strict=True):
                requests.append(self.engine.submit(ids, each))
        except RequestError:
            self._abandon(requests)
            raise
        while not self.engine.idle:
            self.engine.step()
        texts = [p if isinstance(p, str) else None for p in items]
        return [RequestOutput.of(r, t) for r, t in zip(requests, texts, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Generates one prompt and yields what each pass adds; leaving the loop early cancels it."""
        request = self.engine.submit(self._encode(prompt), sampling_params or SamplingParams())
        try:
            while request.finish_reason is None:
                yield from (d for d in self.engine.step() if d.request is request)
        finally:
            if request.finish_reason is None:
                self._abandon([request])

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request)
        if requests:
            self.engine.step()

    def _params_for(
        self, items: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * len(items)
        if len(given) != len(items):
            raise RequestError(f"{len(given)} sampling_params for {len(items)} prompts: give one, or one per prompt.")
        return list(given)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, dict):
            return prompt["prompt_token_ids"]
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give prompt_token_ids.")
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token.")
        return self.tokenizer.encode(prompt)
