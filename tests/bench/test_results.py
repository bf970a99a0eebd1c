"""Samples to results: ratios within blocks, sums over prompts, ranks, files that can be read again."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree.bench import figures
from trtllm_v4tree.bench.results import Acceptance, read_results, summarise, write_results, write_whole
from trtllm_v4tree.bench.samples import DiskError

from .synthetic import full_plan, samples

ABOUT = {"machine": {"cores": 2}}


def test_cells_are_medians_of_ratios_within_a_block() -> None:
    plan = full_plan(batch_sizes=(1, 4), budgets=(6,))
    seen = samples(plan)
    results = summarise(seen, plan, ABOUT, True)
    assert len(results.cells) == 3 * 2 * 4
    cell = results.cell("mbpp", 4, "s3_k2_d6")
    assert cell is not None and cell.to_linear is not None and cell.to_plain is not None
    by_block = {(s.block, s.speculation): s.full_speed for s in seen if (s.dataset, s.batch) == ("mbpp", 4)}
    blocks = {b for b, _ in by_block}
    expected = np.median([by_block[b, "s3_k2_d6"] / by_block[b, "s5_k1_d6"] for b in blocks])
    assert cell.to_linear.value == pytest.approx(expected)
    assert cell.blocks == len(blocks)
    assert cell.to_linear.low <= cell.to_linear.value <= cell.to_linear.high


def test_accepted_length_is_tokens_over_passes() -> None:
    plan = full_plan(batch_sizes=(2,), budgets=(8,))
    seen = samples(plan)
    results = summarise(seen, plan, ABOUT, True)
    group = [s for s in seen if (s.dataset, s.speculation) == ("gsm8k", "s7_k1_d8")]
    expected = sum(sum(s.emitted) for s in group) / sum(sum(s.rounds) for s in group)
    gain = next(g for g in results.gains if g.dataset == "gsm8k" and g.fixed)
    assert gain.linear.value == pytest.approx(expected)
    assert gain.gain.value == pytest.approx(gain.tree.value / gain.linear.value - 1)


def test_a_block_that_lacks_a_speculation_is_left_out() -> None:
    plan = full_plan(batch_sizes=(1,), budgets=(6,), datasets=("mbpp",))
    seen = samples(plan)
    cut = [s for s in seen if not (s.block == 3 and s.speculation == "none")]
    assert {c.blocks for c in summarise(cut, plan, ABOUT, False).cells} == {plan.blocks(1) - 1}


def test_of_a_block_measured_twice_the_later_counts() -> None:
    plan = full_plan(batch_sizes=(4,), budgets=(6,), datasets=("mbpp",))
    seen = samples(plan)
    again = [dataclasses.replace(s, full_seconds=s.full_seconds / 2) for s in seen]
    once, twice = (summarise(x, plan, ABOUT, True).cells[0].tokens_per_second.value for x in (seen, seen + again))
    assert twice == pytest.approx(2 * once)


def test_spread_over_batches_compares_the_same_prompts() -> None:
    plan = full_plan(batch_sizes=(1, 4), budgets=(6,), datasets=("mbpp",), shapes=((3, 2),), num_prompts=8)
    seen = [dataclasses.replace(s, rounds=[40 + p for p in s.prompts]) for s in samples(plan)]
    assert summarise(seen, plan, ABOUT, True).batch_spread == pytest.approx(0.0)
    some = [s for s in seen if s.batch == 4 or s.block < 3]
    assert summarise(some, plan, ABOUT, False).batch_spread == pytest.approx(0.0)
    moved = [dataclasses.replace(s, emitted=[e + 43 for e in s.emitted]) if s.batch == 4 else s for s in some]
    assert 0.9 < (summarise(moved, plan, ABOUT, False).batch_spread or 0.0) < 1.1
    assert summarise([s for s in seen if s.batch == 1], plan, ABOUT, False).batch_spread is None


def test_files_can_be_read_again(tmp_path: Path) -> None:
    plan = full_plan(batch_sizes=(1, 64), budgets=(5, 8))
    results = summarise(samples(plan), plan, ABOUT, True)
    write_results(results, tmp_path)
    assert read_results(tmp_path / "results.json") == results
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == len(results.cells)
    assert float(rows[1]["to_plain"]) == pytest.approx(results.cells[1].to_plain.value, abs=1e-4)  # type: ignore[union-attr]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_text() == "old"


def test_shares_by_rank_are_of_those_that_came_so_far() -> None:
    acceptance = Acceptance("x", "s2_k2_d5", 100, [[100, 90], [70, 60]], [[50, 20], [14, 7]])
    assert figures.shares_by_rank(acceptance) == [[0.5, 0.2], [0.2, 0.1]]
