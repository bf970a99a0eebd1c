"""`v4tree generate`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_v4tree.cli.output import print_json, stderr
from trtllm_v4tree.errors import RequestError


def generate(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", help="A user's turn; the chat format is put around it.")] = None,
    prompt_token_ids: Annotated[str | None, typer.Option("--prompt_token_ids", help="Token ids, e.g. 0,2,17.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens")] = 64,
    speculation: Annotated[str, typer.Option("--speculation", help="none or sN_kK_dD.")] = "none",
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top_k", help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top_p")] = 1.0,
    min_p: Annotated[float, typer.Option("--min_p")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")] = None,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="Top logprobs per token (with --json).")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore_eos")] = False,
    threads: Annotated[int, typer.Option("--threads", help="Threads of the engine; 0 is all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Continue one prompt; text streams to stdout as it comes."""
    from trtllm_v4tree import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        stop=stop or (), logprobs=logprobs, ignore_eos=ignore_eos,
    )  # fmt: skip
    choose_one(prompt=prompt, chat=chat, prompt_token_ids=prompt_token_ids)
    llm = LLM(engine_dir, speculation, threads=threads)
    request = None
    started = time.perf_counter()
    for delta in llm.stream(_prompt(llm, prompt, chat, prompt_token_ids), params):
        request = delta.request
        if not as_json:
            sys.stdout.write(delta.text if llm.tokenizer else "".join(f"{t} " for t in delta.token_ids))
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    assert request is not None
    _report(request, seconds, as_json)


def choose_one(**given: str | None) -> None:
    """Exactly one of the options that give the prompt."""
    names = ", ".join(f"--{n}" for n in given)
    if sum(value is not None for value in given.values()) != 1:
        raise RequestError(f"give exactly one of {names}.")


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RequestError(f"prompt_token_ids {text!r} is not a list of integers: give for example 0,2,17.") from None


def _prompt(llm: Any, prompt: str | None, chat: str | None, token_ids: str | None) -> Any:
    if token_ids is not None:
        return {"prompt_token_ids": parse_ids(token_ids)}
    if chat is not None:
        if llm.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give --prompt_token_ids.")
        return {"prompt_token_ids": llm.tokenizer.chat([("user", chat)])}
    return prompt


def _report(request: Any, seconds: float, as_json: bool) -> None:
    m = request.metrics
    metrics = {
        "rounds": m.rounds,
        "accepted_length": round(m.accepted_length, 4),
        "accepted_by_depth": m.accepted_by_depth,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(request.output_ids) / seconds, 2),
    }
    if as_json:
        usage = {"prompt_tokens": m.prompt_tokens, "completion_tokens": len(request.output_ids)}
        data = {
            "text": request.text,
            "token_ids": request.output_ids,
            "finish_reason": request.finish_reason,
            "usage": usage,
            "metrics": metrics,
        }
        if request.params.logprobs is not None:
            data["logprobs"] = [dataclasses.asdict(_Logprob(*entry)) for entry in request.logprobs]
        print_json(data)
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    stderr.print(
        f"{len(request.output_ids)} tokens, {request.finish_reason}, {metrics['tokens_per_second']} tokens/s, "
        f"{m.rounds} passes, accepted length {m.accepted_length:.2f}"
    )


@dataclasses.dataclass
class _Logprob:
    logprob: float
    top: list[tuple[int, float]]
