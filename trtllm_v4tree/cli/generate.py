"""`v4tree generate`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_v4tree.cli.output import print_json, print_text, stderr
from trtllm_v4tree.errors import RequestError

if TYPE_CHECKING:
    from trtllm_v4tree.llm import LLM, Prompt
    from trtllm_v4tree.runtime.params import SamplingParams
    from trtllm_v4tree.runtime.request import Request

CHAT = "A user's turn; the chat format is put around it."
STOP = "Stop string; may be given several times."
BAD_WORDS = "Text that must not be generated; may be given several times."
LOGPROBS = "Top logprobs per token (with --json)."


def generate(
    engine_dir: Annotated[Path, typer.Option("--engine_dir", help="Engine directory of `v4tree build`.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", help=CHAT)] = None,
    prompt_token_ids: Annotated[str | None, typer.Option("--prompt_token_ids", help="Token ids, e.g. 0,2,17.")] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="Output tokens at most.")] = 64,
    speculation: Annotated[str, typer.Option("--speculation", help="none, sN_kK_dD, auto or another policy.")] = "none",
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top_k", help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top_p", help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min_p", help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help=STOP)] = None,
    bad_words: Annotated[list[str] | None, typer.Option("--bad_words", help=BAD_WORDS)] = None,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help=LOGPROBS)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore_eos", help="Go on after the end token.")] = False,
    threads: Annotated[int, typer.Option("--threads", help="Threads of the engine; 0 is all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Continue one prompt; text streams to stdout as it comes."""
    from trtllm_v4tree import LLM, SamplingParams

    stops = [as_text("--stop", s) for s in stop or ()]
    banned = [as_text("--bad_words", word) for word in bad_words or ()]
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        stop=stops, bad_words=banned, logprobs=logprobs, ignore_eos=ignore_eos,
    )  # fmt: skip
    check_one_given(prompt=prompt, chat=chat, prompt_token_ids=prompt_token_ids)
    llm = LLM(engine_dir, speculation, threads=threads)
    started = time.perf_counter()
    request = stream_out(llm, encode(llm, prompt, chat, prompt_token_ids), params, quiet=as_json)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(result(request, seconds))
    else:
        print_summary(request, seconds)


def check_one_given(**given: object) -> None:
    """Exactly one of some options."""
    if sum(value is not None for value in given.values()) != 1:
        raise RequestError(f"give exactly one of {', '.join(f'--{name}' for name in given)}.")


def as_text(option: str, value: str) -> str:
    """An argument as text: UTF-8 where the locale could not decode it."""
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise RequestError(f"{option} is not valid UTF-8: give text in the encoding of the locale or UTF-8.") from None


def parse_ids(text: str) -> list[int]:
    """`0,2,17` -> [0, 2, 17]."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    bad = next((part for part in parts if not re.fullmatch(r"-?[0-9]{1,18}", part)), None)
    if bad is not None:
        raise RequestError(f"prompt_token_ids has {bad[:40]!r}, which is no token id: give integers such as 0,2,17.")
    return [int(part) for part in parts]


def encode(llm: LLM, prompt: str | None, chat: str | None, token_ids: str | None) -> Prompt:
    """The prompt that was given, as `LLM` takes it."""
    if token_ids is not None:
        return {"prompt_token_ids": parse_ids(token_ids)}
    if chat is not None:
        return {"prompt_token_ids": llm.encode_chat([("user", as_text("--chat", chat))])}
    assert prompt is not None
    return as_text("--prompt", prompt)


def stream_out(llm: LLM, prompt: Prompt, params: SamplingParams, quiet: bool) -> Request:
    """Generates, and unless `quiet` prints text (token ids where there is no tokenizer) as it comes."""
    for delta in llm.stream(prompt, params):
        request = delta.request
        if not quiet:
            print_text(delta.text if llm.tokenizer else "".join(f"{t} " for t in delta.token_ids))
    return request


def result(request: Request, seconds: float) -> dict[str, Any]:
    """What `--json` prints."""
    m, count = request.metrics, len(request.output_ids)
    data: dict[str, Any] = {
        "text": request.text,
        "token_ids": request.output_ids,
        "finish_reason": request.finish_reason,
        "usage": {"prompt_tokens": m.prompt_tokens, "completion_tokens": count},
        "metrics": {
            "rounds": m.rounds,
            "accepted_length": round(m.accepted_length, 4),
            "accepted_by_depth": m.accepted_by_depth,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(count / seconds, 2),
        },
    }
    if request.params.logprobs is not None:
        data["logprobs"] = [{"logprob": entry.chosen, "top": entry.top} for entry in request.logprobs]
    return data


def print_summary(request: Request, seconds: float) -> None:
    """Ends the streamed text; one line of figures on stderr."""
    print_text("\n")
    m, count = request.metrics, len(request.output_ids)
    stderr.print(
        f"{count} tokens, {request.finish_reason}, {count / seconds:.2f} tokens/s, "
        f"{m.rounds} passes, accepted length {m.accepted_length:.2f}"
    )
