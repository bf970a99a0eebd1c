"""A vocabulary too large for a table per token, as the published models have: the drafter embeds tokens with the trunk's weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.engine_dir import WEIGHTS_FILE
from trtllm_v4tree.network import draft
from trtllm_v4tree.runtime.executor import DraftResult, OnnxRuntimeExecutor

from .harness import Driver
from .oracle.tiny import write_tiny

OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=300, draft_shapes=((2, 2),))


def drafted(checkpoint: Path, engine: Path) -> DraftResult:
    """Two levels of candidates after nine tokens, of which the drafter has not read four."""
    driver = Driver(OnnxRuntimeExecutor(engine, build(checkpoint, engine, OPTIONS), threads=1))
    [seq] = driver.start(np.random.default_rng(0), 1)
    seq = driver.prefill(seq, [3, 1, 4, 1, 5, 9, 2, 6, 5], [5, 4])
    return driver.draft([seq], [3], 2, 2).result


def test_same_candidates_and_one_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny(tmp_path / "checkpoint", "w16", seed=1)
    table = drafted(checkpoint, tmp_path / "table")
    monkeypatch.setattr(draft, "FOLD_LIMIT", 0)
    embedded = drafted(checkpoint, tmp_path / "embedded")
    np.testing.assert_array_equal(embedded.tokens, table.tokens)
    np.testing.assert_array_equal(embedded.parents, table.parents)
    np.testing.assert_allclose(embedded.scores, table.scores, rtol=0, atol=1e-4)
    with safe_open(tmp_path / "embedded" / WEIGHTS_FILE, framework="numpy") as file:
        names = list(file.keys())
    assert [name for name in names if "embed" in name] == ["embed.weight"]
    assert not [name for name in names if name.endswith("mtp.table")]
