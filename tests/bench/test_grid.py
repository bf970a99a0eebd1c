"""A real small grid on a tiny engine: samples, the clock's window, interruption and resume, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree import LLM
from trtllm_v4tree.bench.grid import Grid, check_fits, fitting_prompts
from trtllm_v4tree.bench.measure import Ranker, decode
from trtllm_v4tree.bench.plan import GridPlan
from trtllm_v4tree.bench.results import summarise
from trtllm_v4tree.bench.samples import DiskError, OutputError, SampleFile
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.tables import Tree

from ..harness import Built

PLAN = GridPlan(("a", "b"), (5,), (1, 3), ((3, 2),), (), num_prompts=3, max_tokens=10, min_blocks=2)
PROMPTS = {
    "a": [[0, 5, 7 + i, 9] for i in range(3)],
    "b": [[0, 50 + i, 20, 30, 40, 60] for i in range(3)],
}
HEADER = {"engine": "x"}


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Built]) -> LLM:
    return LLM(tiny("w16").engine, threads=1)


def test_a_grid_measures_every_cell_and_keeps_the_text(llm: LLM, tmp_path: Path) -> None:
    check_fits(llm, PLAN, PROMPTS)
    grid, file = Grid(llm, PLAN, PROMPTS), SampleFile(tmp_path, HEADER, resume=False)
    assert grid.estimate(file.samples) > 0
    assert grid.run(file, lambda tick: None)
    results = summarise(file.samples, PLAN, {}, True)
    assert len(results.cells) == 2 * 2 * 3
    assert results.batch_spread is not None and results.batch_spread < 0.05
    for cell in results.cells:
        assert 1 <= cell.accepted_length.value <= 5
        assert cell.same_text == 1.0
        assert cell.kind != "plain" or cell.accepted_length.value == 1.0
    for sample in file.samples:
        assert sample.emitted == [PLAN.max_tokens - 1] * sample.batch
        assert sample.full_tokens <= sample.tokens and sample.full_seconds <= sample.seconds
        followed = sum(map(sum, sample.accepted))
        assert followed <= sum(sample.emitted)


def test_the_clock_starts_with_a_full_batch(llm: LLM) -> None:
    llm.set_speculation("none")
    run = decode(llm.engine, PROMPTS["a"] + [[0] * 200], 12)
    assert llm.engine.idle
    lengths = [len(r.output_ids) for r in run.requests]
    assert lengths == [12] * 4
    assert 0 < run.full_tokens <= run.tokens <= 4 * 11


def test_an_interrupted_run_goes_on_where_it_stopped(llm: LLM, tmp_path: Path) -> None:
    file = SampleFile(tmp_path, HEADER, resume=False)
    grid = Grid(llm, PLAN, PROMPTS)
    grid.estimate([])
    calls = 0

    def interrupt(tick: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid.run(file, interrupt)
    with file.path.open("a") as half:
        half.write('{"dataset": "a", "bat')
    again = SampleFile(tmp_path, HEADER, resume=True)
    assert len(again.samples) == 2 * 3
    assert len(grid.missing(again.samples)) == len(PLAN.units()) - 2
    assert grid.run(again, lambda tick: None)
    assert not grid.missing(SampleFile(tmp_path, HEADER, resume=True).samples)


def test_time_that_is_up_ends_a_run_between_blocks(llm: LLM, tmp_path: Path) -> None:
    file, grid = SampleFile(tmp_path, HEADER, resume=False), Grid(llm, PLAN, PROMPTS)
    grid.estimate([])
    assert not grid.run(file, lambda tick: None, seconds=1e-3)
    assert len(file.samples) == len(PLAN.speculations())


def test_another_plan_is_estimated_from_the_same_warm_up(llm: LLM) -> None:
    grid = Grid(llm, PLAN, PROMPTS)
    needed = grid.estimate([])
    assert grid.estimate_other(PLAN) == pytest.approx(needed)
    wider = dataclasses.replace(PLAN, max_tokens=20, batch_sizes=(1, 3, 4), others=("s3_k3_d6", "s3_k3_d7", "s3_k3_d8"))
    assert grid.estimate_other(wider) > 2 * 2 * needed


def test_samples_of_another_run_are_not_mixed(tmp_path: Path) -> None:
    SampleFile(tmp_path, HEADER, resume=False)
    with pytest.raises(OutputError, match="--resume"):
        SampleFile(tmp_path, HEADER, resume=False)
    with pytest.raises(OutputError, match="other engine"):
        SampleFile(tmp_path, {"engine": "y"}, resume=True)


def test_a_full_disk_keeps_what_was_written(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, grid = SampleFile(tmp_path, HEADER, resume=False), Grid(llm, PLAN, PROMPTS)
    grid.estimate([])
    grid.run(file, lambda tick: None, seconds=1e-3)
    before = file.path.read_bytes()
    opened = Path.open

    def full(path: Path, mode: str = "r", **options: object) -> object:
        if mode == "a":
            raise OSError(28, "No space left on device")
        return opened(path, mode, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DiskError, match=r"No space left on device.*--resume"):
        grid.run(file, lambda tick: None)
    assert file.path.read_bytes() == before
    assert json.loads(before.splitlines()[0]) == HEADER
    assert llm.engine.idle


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_sizes": (1, 8)}, "batch size 8 .* 1 to 4"),
        ({"budgets": (6,)}, "s5_k1"),
        ({"budgets": (17,), "shapes": ((3, 3),)}, "verifies 17 tokens and the engine at most 16"),
        ({"others": ("fast",)}, "fast"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_runs(
    llm: LLM, changes: dict[str, object], words: str
) -> None:
    values = {**PLAN.__dict__, **changes}
    with pytest.raises(RequestError, match=words):
        check_fits(llm, GridPlan(**values), PROMPTS)


def test_too_few_prompts_is_a_sentence() -> None:
    with pytest.raises(RequestError, match=r"dataset a has 1 prompts .* --num_prompts 1"):
        fitting_prompts([[0] * 5, [0] * 100], "a", 50, PLAN)


def test_ranks_are_counted_along_the_walk() -> None:
    #     0
    #   1   2
    #   3   4 5
    parents = np.array([[-1, 0, 0, 1, 2, 2]])
    tree = Tree.make(parents, np.zeros_like(parents))
    ranker = Ranker()
    ranker(tree, Walk([[0, 2, 5]], [[0, 0, 0]], 6))
    ranker(tree, Walk([[0, 1]], [[0, 0]], 6))
    offered, accepted = ranker.counts()
    assert offered == [[2, 2], [2, 1]]
    assert accepted == [[1, 1], [0, 1]]


def test_the_command_line_end_to_end(tiny: Callable[[str], Built], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from trtllm_v4tree.cli.main import status_of

    engine, data, out = tmp_path / "engine", tmp_path / "mine.jsonl", tmp_path / "out"
    shutil.copytree(tiny("w16").engine, engine)
    _write_tokenizer(engine / "tokenizer.json")
    data.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 3} w7"}) + "\n" for i in range(4, 8)))
    command = ["bench", "--engine_dir", str(engine), "--dataset", f"mine={data}", "--output_dir", str(out)]
    options = [
        "--budgets",
        "5",
        "--batch_sizes",
        "1,2",
        "--shapes",
        "s3_k2",
        "--num_prompts",
        "2",
        "--max_tokens",
        "8",
        "--min_blocks",
        "2",
    ]
    assert status_of([*command, *options]) == 0
    assert {"report.html", "results.json", "results.csv", "samples.jsonl", "tree_over_linear.png"} <= {
        p.name for p in out.iterdir()
    }
    assert status_of([*command, *options]) == 2
    assert status_of([*command, *options, "--resume"]) == 0


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset", "mine=/nowhere/x.jsonl"], "cannot be read"),
        (["--dataset", "mine"], "NAME=PATH"),
        (["--dataset", "gsm8k={data}"], "no field 'question'"),
        (["--dataset", "empty={empty}"], "no records"),
        (["--dataset", "mine={data}", "--budgets", "5,x"], "--budgets"),
        (["--dataset", "mine={data}", "--shapes", "wide"], "shape 'wide'"),
        (["--dataset", "mine={data}", "--batch_sizes", "64"], "batch size 64"),
        (["--dataset", "mine={data}", "--budgets", "40"], "budget 40"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    tiny: Callable[[str], Built], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    pytest.importorskip("matplotlib")
    from trtllm_v4tree.cli.main import status_of

    engine, data, empty = tmp_path / "engine", tmp_path / "mine.jsonl", tmp_path / "empty.jsonl"
    engine.mkdir()
    for path in tiny("w16").engine.iterdir():
        (engine / path.name).symlink_to(path)
    _write_tokenizer(engine / "tokenizer.json")
    data.write_text('{"prompt": "w3 w4"}\n')
    empty.write_text("")
    filled = [o.format(data=data, empty=empty) for o in options]
    given = ["bench", "--engine_dir", str(engine), "--output_dir", str(tmp_path / "out"), "--num_prompts", "1"]
    assert status_of([*given, *filled]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()
