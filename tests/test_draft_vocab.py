"""A drafter that may propose some tokens alone: its candidates against the oracle's MTP over these, the text, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.compiler.draft_vocab import parse_draft_vocab
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.tokenizer import load_tokenizer

from .harness import Built, Driver
from .oracle.reference import Oracle
from .oracle.tiny import write_tiny
from .test_exact_draft import check_candidates, filled

VOCAB = 211
IDS = sorted(np.random.default_rng(5).choice(VOCAB, 40, replace=False).tolist())
SHAPES = ((1, 1), (3, 2), (4, 1))
OPTIONS = BuildOptions(max_batch_size=4, max_seq_len=300, prefill_chunk=64, draft_shapes=SHAPES, draft_dtype="float32")


class Among(Oracle):
    """An oracle whose drafter knows the tokens of IDS alone."""

    def mtp_chain_logits(self, ids: object, draft_tokens: object) -> np.ndarray:
        logits = super().mtp_chain_logits(ids, draft_tokens)  # type: ignore[arg-type]
        outside = np.setdiff1d(np.arange(VOCAB), IDS)
        logits[:, outside] = -np.inf
        return logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("vocab") / "checkpoint", "w16", seed=1)


def listed(directory: Path) -> str:
    """IDS as a file, most frequent first, that is in any order."""
    (directory / "ids.json").write_text(json.dumps(IDS[::-1]))
    return str(directory / "ids.json")


@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
def test_candidates_are_the_best_of_these_tokens(checkpoint: Path, tmp_path: Path, kernels: str) -> None:
    manifest = build(
        checkpoint, tmp_path / "engine", replace(OPTIONS, draft_vocab=listed(tmp_path), cpu_kernels=kernels)
    )
    assert manifest.draft_vocab_size == len(IDS)
    driver = Driver(OnnxRuntimeExecutor(tmp_path / "engine", manifest, threads=1))
    built = Built("vocab", checkpoint, tmp_path / "engine", driver, Among(checkpoint))
    rng = np.random.default_rng(3)
    batch = filled(built, rng, [5, 42, 95], [[5], [1, 9, 32], [64, 31]])
    for steps, topk in SHAPES:
        roots = rng.integers(0, VOCAB, len(batch)).tolist()
        result = driver.draft(batch, roots, steps, topk).result
        assert set(result.tokens.flatten().tolist()) <= set(IDS)
        for b, held in enumerate(batch):
            check_candidates(built, [*held.ids, roots[b]], result, b, steps, topk)


def test_the_text_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(2, VOCAB, 20).tolist()} for n in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=7, ignore_eos=True)
    texts, lengths = [], []
    for name, vocab in (("all", None), ("some", listed(tmp_path))):
        build(checkpoint, tmp_path / name, replace(OPTIONS, draft_vocab=vocab))
        for speculation in ("none", "s3_k2_d6"):
            done = LLM(tmp_path / name, speculation=speculation).generate(prompts, params)  # type: ignore[arg-type]
            texts.append([list(r.outputs[0].token_ids) for r in done])
            lengths.append(sum(r.metrics.accepted_length for r in done) / len(done))
    assert all(text == texts[0] for text in texts)
    assert lengths[1] > lengths[3] > 1, "what cannot be proposed is not accepted, and the rest is"


def test_a_number_means_the_lowest_ids() -> None:
    assert parse_draft_vocab("32", VOCAB) == tuple(range(32))
    assert parse_draft_vocab(str(VOCAB), VOCAB) == tuple(range(VOCAB))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2, 3]", "3 tokens"),
        (json.dumps([*range(20), 211]), "token id 211"),
        (json.dumps([*range(20), -1]), "token id -1"),
        (json.dumps([*range(20), 3]), "more than once"),
        (json.dumps([*range(20), True]), "list of integers"),
        ('{"ids": []}', "list of integers"),
        ("[1, 2", "neither a number nor a readable JSON file"),
        ("[" * 100_000, "neither a number nor a readable JSON file"),
    ],
)
def test_bad_files(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        parse_draft_vocab(str(tmp_path / "ids.json"), VOCAB)


@pytest.mark.parametrize("text", ["0", "15", "212", "999999999", "999999999999", "-5", "missing.json", ""])
def test_bad_options(text: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab"):
        build(checkpoint, tmp_path / "engine", replace(OPTIONS, draft_vocab=text))
    assert not (tmp_path / "engine").exists()


def test_no_draft_round_to_restrict(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab"):
        build(checkpoint, tmp_path / "engine", replace(OPTIONS, draft_vocab="16", draft_shapes=()))


def test_the_script_counts_answers_and_keeps_the_end(tmp_path: Path, nano_dir: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "build_scripts" / "draft_vocab.py"
    text = {"question": "zebra zebra zebra", "answer": "a b c d e f g h i j k l m n o p q r s t a a a"}
    (tmp_path / "text.jsonl").write_text(json.dumps(text))

    def run(size: int, output: Path) -> subprocess.CompletedProcess[str]:
        files = ["--tokenizer", nano_dir / "tokenizer.json", "--data", tmp_path / "text.jsonl", "--output", output]
        return subprocess.run(
            [sys.executable, script, *map(str, files), "--size", str(size)], capture_output=True, text=True
        )

    assert run(16, tmp_path / "ids.json").returncode == 0
    ids = json.loads((tmp_path / "ids.json").read_text())
    tokenizer = load_tokenizer(nano_dir / "tokenizer.json")
    assert len(set(ids)) == 16 and ids[0] == 1 and tokenizer.decode(ids[1:2]).strip() == "a"
    asked, refused = run(99, tmp_path / "more.json"), run(16, tmp_path / "missing" / "ids.json")
    assert asked.returncode == 2 and "--size is 99" in asked.stderr and not (tmp_path / "more.json").exists()
    assert refused.returncode == 2 and "cannot be written" in refused.stderr and "Traceback" not in refused.stderr
