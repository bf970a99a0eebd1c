"""`make demo`: builds the shipped model with both drafters and continues three prompts plainly, with a chain and with a tree."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_v4tree import LLM, InputError, SamplingParams
from trtllm_v4tree.compiler.build import BuildOptions, build

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "v4-nano"
ENGINES = ROOT / "engines"
MAX_TOKENS = 96
PROMPTS = {
    "word problem": "A baker sells 12 loaves in the morning and twice as many in the afternoon. "
    "Each loaf costs 3 dollars. How much money does the baker make in a day?",
    "small program": "Write a function to find the largest number in a given list.",
    "chat turn": "What should I pack for a week of hiking in the mountains?",
}
SHAPES = ((4, 3), (5, 1), (6, 2))
RUNS = (
    ("none", "first-step", "none"),
    ("linear", "first-step", "s5_k1_d6"),
    ("tree", "first-step", "s4_k3_d6"),
    ("linear", "multi-step", "s5_k1_d6"),
    ("tree", "multi-step", "s6_k2_d8"),
)

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Tally:
    """What one way of decoding did over all prompts."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    round_tokens: int = 0
    texts: list[list[int]] = field(default_factory=list)


def build_engines() -> dict[str, Path]:
    """One engine per drafter."""
    options = BuildOptions(max_batch_size=4, max_seq_len=2048, draft_shapes=SHAPES)
    built = {}
    for drafter, weights in (("first-step", None), ("multi-step", MODEL / "mtp_multistep.safetensors")):
        started = time.perf_counter()
        built[drafter] = ENGINES / f"v4-nano-{drafter}"
        build(MODEL, built[drafter], options, weights)
        console.print(f"built {built[drafter].relative_to(ROOT)} in {time.perf_counter() - started:.1f} s")
    return built


def continue_prompts(llm: LLM, show: bool) -> Tally:
    """Greedy continuations, printed as they come if `show`."""
    assert llm.tokenizer is not None
    tally = Tally()
    for title, text in PROMPTS.items():
        prompt = {"prompt_token_ids": llm.tokenizer.chat([("user", text)])}
        if show:
            console.print(f"\n[bold]{title}[/bold]: {text}")
        started = time.perf_counter()
        for delta in llm.stream(prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)):  # type: ignore[arg-type]
            request = delta.request
            if show:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        tally.seconds += time.perf_counter() - started
        tally.tokens += len(request.output_ids)
        tally.rounds += request.metrics.rounds
        tally.round_tokens += request.metrics.round_tokens
        tally.texts.append(request.output_ids)
        if show:
            sys.stdout.write("\n")
    return tally


def results_table(rows: list[tuple[str, str, str, Tally]]) -> Table:
    table = Table(title="three prompts, greedy, batch 1 (accepted: tokens per verify pass)", title_justify="left")
    for column in ("decoding", "drafter", "shape", "tokens/s", "accepted", "passes", "same text"):
        table.add_column(
            column, no_wrap=True, justify="left" if column in ("decoding", "drafter", "shape") else "right"
        )
    reference = rows[0][3].texts
    for name, drafter, speculation, t in rows:
        same = "yes" if t.texts == reference else "NO"
        length = f"{t.round_tokens / t.rounds:.2f}"
        table.add_row(
            name,
            drafter if speculation != "none" else "-",
            speculation,
            f"{t.tokens / t.seconds:.0f}",
            length,
            str(t.rounds),
            same,
        )
    return table


def main() -> int:
    try:
        engines = build_engines()
        llms = {drafter: LLM(path) for drafter, path in engines.items()}
        rows = []
        for index, (name, drafter, speculation) in enumerate(RUNS):
            llm = llms[drafter]
            llm.set_speculation(speculation)
            continue_prompts(llm, show=False)
            rows.append((name, drafter, speculation, continue_prompts(llm, show=index == 2)))
    except InputError as error:
        console.print(f"error: {error}")
        return 2
    console.print()
    console.print(results_table(rows))
    return 0 if all(t.texts == rows[0][3].texts for *_, t in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
