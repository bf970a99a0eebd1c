"""Two results side by side: intervals against simulation, what is flagged, what is refused, the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree.bench.changes import ComparisonError, changes, check_comparable, load, ratio_of, summary, surely
from trtllm_v4tree.bench.results import Results, summarise, write_results
from trtllm_v4tree.bench.stats import Estimate
from trtllm_v4tree.cli.main import status_of

from .synthetic import full_plan, samples

ABOUT: dict[str, Any] = {
    "machine": {"processor": "a chip", "cores": 2},
    "versions": {"trtllm_v4tree": "1"},
    "settings": {"num_prompts": 12, "max_tokens": 128},
    "data": {"gsm8k": "a" * 64, "mbpp": "b" * 64, "sharegpt": "c" * 64},
    "load_average": [0.5, 0.6],
}


def made(faster: dict[str, float] | None = None, **about: Any) -> Results:
    """Results of the synthetic engine; `faster`: factor on the speed by speculation."""
    plan = full_plan(batch_sizes=(1, 4), budgets=(5, 8))
    seen = [
        dataclasses.replace(s, full_seconds=s.full_seconds / (faster or {}).get(s.speculation, 1.0))
        for s in samples(plan)
    ]
    return summarise(seen, plan, {**ABOUT, **about}, True)


def test_a_change_of_one_speculation_is_flagged_in_its_cells_only() -> None:
    found = changes(made(), made({"s3_k2_d8": 1.3, "s7_k1_d8": 0.7}))
    assert len(found) == len(made().cells)
    for change in found:
        expected = {"s3_k2_d8": "faster", "s7_k1_d8": "slower"}.get(change.speculation, "")
        assert change.verdict == expected
        factor = {"s3_k2_d8": 1.3, "s7_k1_d8": 0.7}.get(change.speculation, 1.0)
        assert change.speed.value == pytest.approx(factor)
        assert change.accepted.value == pytest.approx(1.0) and not surely(change.accepted)
    assert "6 surely faster, 6 surely slower" in summary(found)


def test_a_slower_day_cancels_over_plain() -> None:
    before = made()
    found = changes(before, made({c.speculation: 0.8 for c in before.cells}))
    assert all(c.speed.value == pytest.approx(0.8) for c in found)
    assert all(c.relative is None or c.relative.value == pytest.approx(1.0) for c in found)


def test_interval_of_a_ratio_covers_19_of_20() -> None:
    """Estimates of two known means, each with its own interval of +-1.96 standard errors."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        a, b = rng.normal(100, 5), rng.normal(150, 10)
        ratio = ratio_of(Estimate(b, b - 19.6, b + 19.6), Estimate(a, a - 9.8, a + 9.8))
        covered += ratio.low <= 1.5 <= ratio.high
    assert 0.93 < covered / 2000 < 0.97


def test_a_single_observation_is_never_sure() -> None:
    assert surely(ratio_of(Estimate(5.0, 5.0, 5.0), Estimate(1.0, 1.0, 1.0))) == 0
    assert surely(ratio_of(Estimate(0.0, 0.0, 0.0), Estimate(1.0, 1.0, 1.0))) == 0


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"settings": {"num_prompts": 20, "max_tokens": 128}}, r"number of prompts \(12 and 20\)"),
        ({"settings": {"num_prompts": 12, "max_tokens": 64}}, "new tokens per prompt"),
        ({"data": {**ABOUT["data"], "mbpp": "d" * 64}}, r"content of mbpp \(b+ and d+\)"),
        ({"machine": {"processor": "another", "cores": 2}}, "different machines .*--any_machine"),
    ],
)
def test_results_of_another_question_are_refused(about: dict[str, Any], words: str) -> None:
    with pytest.raises(ComparisonError, match=words):
        check_comparable(made(), made(**about))


def test_what_a_reader_must_know_is_said() -> None:
    loaded = made(
        machine={"processor": "another", "cores": 2}, load_average=[9.0, None], versions={"trtllm_v4tree": "2"}
    )
    notes = " ".join(check_comparable(made(), dataclasses.replace(loaded, complete=False), any_machine=True))
    assert all(
        words in notes for words in ("different machines", "second run was not finished", "load of 9.0", "1 to 2")
    )
    assert check_comparable(made(), made()) == []


def test_command_prints_a_table_and_refuses_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, results in (("a", made()), ("b", made({"s3_k2_d8": 1.3}))):
        (tmp_path / name).mkdir()
        write_results(results, tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b" / "results.json")
    assert status_of(["bench_compare", a, b, "--changed"]) == 0
    out = capsys.readouterr().out
    assert out.count("faster") == 6 + 1 and "s3_k2_d8" in out and "s7_k1_d8" not in out and "1.30" in out
    assert status_of(["bench-compare", a, b, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == len(made().cells)
    (tmp_path / "c.json").write_text("[]")
    for wrong in (tmp_path / "c.json", tmp_path / "nowhere"):
        assert status_of(["bench_compare", a, str(wrong)]) == 2
        assert "results.json" in capsys.readouterr().err
    assert len(load(tmp_path / "a").cells) == len(made().cells)
