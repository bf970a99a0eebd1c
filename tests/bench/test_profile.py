"""Tracing: ranges cover a step, names can be read again, nsys's SQLite gives the same table."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_v4tree import LLM
from trtllm_v4tree.bench import nsys
from trtllm_v4tree.bench.profile import run_traced, table
from trtllm_v4tree.bench.tracer import Event, parse_label

from ..harness import Built

PROMPTS = [[0, 5, 7, 9, 11], [0, 6]]


def test_labels_can_be_read_again() -> None:
    event = Event("s3_k2_d6", "verify", 4, 6, 0.5)
    assert parse_label(event.label, 0.5) == event
    for other in ("", "verify", "verify b n x", "cudaLaunch b1 n1 none", "verify bx n1 none"):
        assert parse_label(other, 1.0) is None


def test_ranges_cover_a_generation(tiny: Callable[[str], Built]) -> None:
    llm = LLM(tiny("w16").engine, threads=1)
    llm.set_speculation("s3_k2_d5")
    executor, clock = llm.engine.executor, llm.engine.clock
    events, seconds = run_traced(llm, "s3_k2_d5", PROMPTS, 12)
    assert (llm.engine.executor, llm.engine.clock) == (executor, clock)
    phases = {e.phase for e in events}
    assert phases == {"draft", "verify", "accept", "commit", "prefill", "host"}
    assert 0.9 * seconds <= sum(e.seconds for e in events) <= 1.01 * seconds
    prefills = [e for e in events if e.phase == "prefill"]
    assert [(e.batch, e.nodes) for e in prefills] == [(2, 5)]
    verifies = [e for e in events if e.phase == "verify"]
    assert verifies[0].batch == 2 and max(e.nodes for e in verifies) == 5
    counts = {p: sum(e.phase == p for e in events) for p in ("draft", "verify", "accept", "commit")}
    assert len(set(counts.values())) == 1


def test_prompts_that_come_beside_decoding_are_told_apart(tiny: Callable[[str], Built]) -> None:
    llm = LLM(tiny("w16").engine, threads=1, max_num_tokens=1024)
    llm.set_speculation("none")
    events, _ = run_traced(llm, "none", [[0, 5], [0] * 150, [0] * 3], 6)
    assert sum(e.phase == "prefill" for e in events) == 4
    assert sum(e.phase == "verify" for e in events) == sum(e.phase == "commit" for e in events)


def test_table_has_medians_and_shares() -> None:
    events = [Event("none", "verify", 2, 1, s) for s in (0.001, 0.002, 0.009)] + [Event("none", "host", 2, 0, 0.004)]
    verify, host = table(events)
    assert (verify.phase, verify.count, verify.median_ms) == ("verify", 3, 2.0)
    assert verify.share == pytest.approx(0.75) and host.share == pytest.approx(0.25)
    assert 8.0 < verify.p99_ms <= 9.0


def test_ranges_are_read_from_nsys_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)")
        database.execute("INSERT INTO StringIds VALUES (7, 'draft b2 n10 s3_k2_d6')")
        rows = [
            (200, 5200, None, 7),
            (100, 200, "host b0 n0 s3_k2_d6", None),
            (0, None, "host b0 n0 x", None),
            (0, 9, "other", None),
        ]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", rows)
    assert nsys.events(path) == [Event("s3_k2_d6", "host", 0, 0, 1e-7), Event("s3_k2_d6", "draft", 2, 10, 5e-6)]


def test_a_report_without_our_ranges_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("no database")
    with pytest.raises(nsys.NsysError, match="cannot be read"):
        nsys.events(tmp_path / "x.sqlite")
    with pytest.raises(nsys.NsysError, match="neither a report nor"):
        nsys.export(tmp_path / "nothing")


def test_command_with_the_built_in_timer(
    tiny: Callable[[str], Built], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from trtllm_v4tree.cli.main import status_of

    options = [
        "--speculation",
        "none,s3_k2_d5",
        "--batch_size",
        "2",
        "--max_tokens",
        "6",
        "--repeats",
        "1",
        "--nsys",
        "off",
    ]
    engine = str(tiny("w16").engine)
    assert status_of(["profile", "--engine_dir", engine, "--output_dir", str(tmp_path), *options]) == 0
    data = json.loads((tmp_path / "profile.json").read_text())
    assert {r["phase"] for r in data["phases"] if r["speculation"] == "none"} == {
        "verify",
        "accept",
        "commit",
        "prefill",
        "host",
    }
    assert (tmp_path / "profile.png").is_file()
    assert "verify" in capsys.readouterr().out
    assert (
        status_of(
            ["profile", "--engine_dir", engine, "--output_dir", str(tmp_path), "--batch_size", "99", "--nsys", "off"]
        )
        == 2
    )


def test_a_refused_engine_leaves_nothing_behind(
    tiny: Callable[[str], Built], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, and no output directory, for an older engine and for a speculation that the engine lacks."""
    pytest.importorskip("matplotlib")
    from trtllm_v4tree.cli.main import status_of

    old = tmp_path / "old"
    old.mkdir()
    (old / "engine.json").write_text('{"format_version": 2}')
    engines = {"format 2": (old, "none"), "s9_k9": (tiny("w16").engine, "none,s9_k9_d5")}
    for reason, (engine, speculation) in engines.items():
        command = ["profile", "--engine_dir", str(engine), "--output_dir", str(tmp_path / "out")]
        assert status_of([*command, "--speculation", speculation]) == 2
        error = capsys.readouterr().err
        assert reason in error and len(error.splitlines()) == 1
        assert not (tmp_path / "out").exists()
