"""Prompts from files as they come."""

from __future__ import annotations

import json
from pathlib import Path

from trtllm_v4tree.bench.datasets import DatasetSpec, load_prompts


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """JSON allows the other line separators of Unicode inside a string."""
    questions = ["one\u2028two", "three\x85four", "five"]
    path = tmp_path / "odd.jsonl"
    lines = [json.dumps({"question": q}, ensure_ascii=False) for q in questions]
    path.write_text("\r\n".join(lines) + "\n", encoding="utf-8", newline="")
    assert load_prompts(DatasetSpec("gsm8k", path, None), 3) == questions
