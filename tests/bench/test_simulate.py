"""Footprints against the published files, the roofline against its own limits, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree.bench.footprint import cache_bytes, checkpoint_bytes
from trtllm_v4tree.bench.prediction import from_paper, from_results, predict
from trtllm_v4tree.bench.published import published
from trtllm_v4tree.bench.results import summarise, write_results
from trtllm_v4tree.bench.roofline import HARDWARE, Assumptions, Roofline
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.errors import InputError

from .synthetic import full_plan, samples

FLASH = published("flash")


def _roofline(hardware: str = "h200x8", context: int = 1024, **changes: float) -> Roofline:
    return Roofline(FLASH, HARDWARE[hardware], context, dataclasses.replace(Assumptions(), **changes))  # type: ignore[arg-type]


def test_checkpoints_have_the_published_size() -> None:
    """Flash: 159,617,149,040 bytes with 69,187 headers of about 110 bytes; Pro: 805.32 GiB (spec section 9)."""
    headers = 159_617_149_040 - checkpoint_bytes(FLASH)
    assert 90 < headers / 69_187 < 130
    assert checkpoint_bytes(published("pro")) / 2**30 == pytest.approx(805.32, abs=0.02)


def test_cache_is_that_of_the_specification() -> None:
    flash, pro = cache_bytes(FLASH), cache_bytes(published("pro"))
    assert (flash.per_token, flash.window, flash.state) == (3850.25, 44 * 128 * 584, 12_206_080)
    assert (pro.per_token, pro.state) == (5511.4375, 18_710_528)


def test_layer_kinds_are_the_published_ones() -> None:
    assert [len(FLASH.layers_of(k)) for k in ("swa", "csa", "hca")] == [2, 21, 20]
    assert [len(published("pro").layers_of(k)) for k in ("swa", "csa", "hca")] == [0, 30, 31]


def test_experts_touched_is_the_mean_of_draws() -> None:
    rng, tokens = np.random.default_rng(0), 32
    drawn = [len(set(np.concatenate([rng.permutation(256)[:6] for _ in range(tokens)]).tolist())) for _ in range(200)]
    assert _roofline().experts_touched(tokens) == pytest.approx(np.mean(drawn), rel=0.01)
    assert _roofline().experts_touched(1) == pytest.approx(6)


def test_one_plain_step_reads_what_one_token_needs() -> None:
    """Without overheads and at batch 1 the time is active bytes over bandwidth; 13 B parameters are active."""
    r = _roofline(memory_efficiency=1.0, layer_us=0.0, collective_us=0.0, round_host_us=0.0, context=1)
    active = r.plain(1) * r.bandwidth
    assert 7e9 < active < 13.5e9


def test_more_of_anything_takes_longer() -> None:
    base = _roofline()
    assert base.verify(4, 8) > base.verify(4, 1) > base.verify(1, 1)
    assert _roofline(context=100_000).verify(4, 8) > base.verify(4, 8)
    assert base.round(4, 8, 7, 1, 2.8) > base.round(4, 8, 3, 1, 2.8)
    assert _roofline("b200x8").plain(1) < base.plain(1)


def test_what_does_not_fit_is_read_over_pcie() -> None:
    assert _roofline().spilled == 0
    alone = _roofline("rtxpro6000")
    assert 0.4 < alone.spilled < 0.6
    assert alone.plain(1) > 5 * _roofline().plain(1)


def test_prediction_follows_accepted_length() -> None:
    [a] = [x for x in from_paper() if x.dataset == "gsm8k"]
    [p] = predict(_roofline(), [a], [4])
    [twice] = predict(_roofline(), [dataclasses.replace(a, tree=2 * a.tree)], [4])
    assert 1.8 < twice.tree / p.tree <= 2.0
    assert p.tree_over_linear == pytest.approx(p.tree / p.linear)


def test_acceptance_is_read_from_a_bench(tmp_path: Path) -> None:
    plan = full_plan(budgets=(6, 8), batch_sizes=(1,))
    results = summarise(samples(plan), plan, {}, True)
    write_results(results, tmp_path)
    found = from_results(tmp_path / "results.json")
    assert [(a.dataset, a.budget) for a in found] == [(d, b) for d in plan.datasets for b in (6, 8)]
    (tmp_path / "bad.json").write_text("{}")
    for name, words in (("bad.json", "no results.json"), ("none.json", "cannot be read")):
        with pytest.raises(InputError, match=words):
            from_results(tmp_path / name)


def test_command_prints_assumptions_and_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["simulate", "--config", "pro", "--hardware", "b200x8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["predictions"]) == 3 * 4
    assert any("PCIe" in line for line in data["assumptions_text"])
    assert any("The paper measured" in line for line in data["comparison"])
    assert status_of(["simulate"]) == 0
    assert "a prediction, not a measurement" in capsys.readouterr().out
    assert status_of(["simulate", "--hardware", "abacus"]) == 2
    assert status_of(["simulate", "--config", "/nowhere"]) == 2
