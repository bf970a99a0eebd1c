"""Lets a built engine answer the questions of training files, as JSON lines: text on which its drafter can learn what it says.

python build_scripts/train_nano_answers.py --engine_dir engines/nano --data train.jsonl --output answers.jsonl --limit 500
python build_scripts/train_nano.py --data answers.jsonl --start_from runs/nano/checkpoint --freeze_trunk --output_dir runs/drafter
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from rich.progress import track

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.errors import InputError, V4TreeError
from trtllm_v4tree.training.documents import read_documents

FAILURE, BAD_INPUT = 1, 2


def main() -> int:
    args = _arguments()
    try:
        questions = _questions(args.data, args.longest, args.limit, args.seed)
        llm = LLM(args.engine_dir, args.speculation)
        with args.output.open("w", encoding="utf-8") as file:
            for start in track(range(0, len(questions), args.batch_size), description="answers"):
                for question, answer in _answers(llm, questions[start : start + args.batch_size], start, args):
                    file.write(json.dumps({"prompt": question, "response": answer}) + "\n")
    except (V4TreeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, InputError) else FAILURE
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=500, help="questions of each file, drawn with --seed")
    parser.add_argument("--longest", type=int, default=1000, help="characters; longer questions are passed over")
    parser.add_argument("--max_tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculation", default="none")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _questions(files: list[Path], longest: int, limit: int, seed: int) -> list[str]:
    """The first questions of randomly drawn documents."""
    drawn = []
    for file in files:
        asked = [document.turns[0][0] for document in read_documents(file) if document.turns]
        short = [question for question in asked if len(question) <= longest]
        drawn += random.Random(seed).sample(short, min(limit, len(short)))
    return drawn


def _answers(llm: LLM, questions: list[str], first: int, args: argparse.Namespace) -> list[tuple[str, str]]:
    """(question, answer) pairs; question n is drawn with seed n."""
    assert llm.tokenizer is not None
    prompts = [{"prompt_token_ids": llm.tokenizer.chat([("user", question)])} for question in questions]
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=first + i)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
    return [(q, out.outputs[0].text) for q, out in zip(questions, outputs, strict=True) if out.outputs[0].text.strip()]


if __name__ == "__main__":
    sys.exit(main())
