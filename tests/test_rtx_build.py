"""`v4tree build --target tensorrt-rtx` up to the compiler, which a stand-in replaces here: refusals, files, manifest, whole or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler import rtx, rtx_jobs
from trtllm_v4tree.compiler.build import BuildOptions
from trtllm_v4tree.compiler.build import build as compile_engine
from trtllm_v4tree.compiler.plan_builder import CompileError, bounds
from trtllm_v4tree.engine_dir import MANIFEST, Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.llm import check_engine

from .oracle.tiny import write_tiny
from .test_cli import Ran, contents, edit_manifest, refused, remove, truncate

ROOT = Path(__file__).resolve().parents[1]
STEMS = ["target_step", "commit", "draft_catchup", "draft_s4_k3", "draft_s5_k1"]
SMALL = ("--target", "tensorrt-rtx", "--max_seq_len", "300", "--max_batch_size", "2", "--draft_shapes", "s1_k1")
Build = Callable[..., Ran]


def compile_here(workers: rtx_jobs.Workers, job: rtx_jobs.Job) -> rtx_jobs.Done:
    """Takes the place of a compiling process: the plan is the capabilities, the graph's name and its outputs."""
    model = onnx.load(job.path("onnx"))
    assert [i.name for i in model.graph.input] == [t.name for t in job.spec.inputs]
    assert all(bounds(t.shape, symbols) for t in job.spec.inputs for symbols in job.ranges)
    job.path("plan").write_text(" ".join([*job.capabilities, job.stem, *(o.name for o in model.graph.output)]))
    return rtx_jobs.Done(job.stem, len(model.graph.node), 0.0)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "load_tensorrt_rtx", lambda: SimpleNamespace(__version__="1.7"))
    monkeypatch.setattr(rtx_jobs.Workers, "compile", compile_here)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "checkpoint", "w16", seed=1)


@pytest.fixture
def build(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Build:
    """Builds the tiny checkpoint to `engine` with the stand-in installed."""
    stand_in(monkeypatch)
    command = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", *SMALL)
    return lambda *options: run(capfd, *command, *options)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with the default draft rounds, built once."""
    root = tmp_path_factory.mktemp("rtx")
    checkpoint = write_tiny(root / "checkpoint", "w16", seed=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        options = BuildOptions(target="tensorrt-rtx", max_seq_len=300, max_batch_size=2, max_verify_tokens=6)
        compile_engine(checkpoint, root / "engine", options)
    return root / "engine"


@pytest.fixture
def engine(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "engine"))


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    capfd.readouterr()
    status = status_of([str(a) for a in arguments])
    return Ran(status, *capfd.readouterr())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (("--compute_capability", "90"), ("'90'", "80, 86, 89, 120, 121")),
        (("--compute_capability", "7.5,89"), ("'75'", "80, 86, 89, 120, 121")),
        (("--compute_capability", "rtx4090"), ("'rtx4090'", "80, 86, 89, 120, 121")),
        (("--compute_capability", ","), ("no compute capability", "80, 86, 89, 120, 121")),
        (("--dtype", "bfloat16"), ("tensorrt-rtx", "bfloat16", "--dtype float32")),
        (("--draft_dtype", "int8"), ("tensorrt-rtx", "int8", "--draft_dtype float32")),
        (("--max_verify_tokens", "65"), ("max_verify_tokens=65", "1 to 64")),
        (("--draft_shapes", "s1_k300"), ("s1_k300", "1 to 16")),
        (("--target", "onnxruntime", "--compute_capability", "89"), ("compute_capability", "leave it out")),
    ],
)
def test_bad_option(options: tuple[str, ...], fragments: tuple[str, ...], build: Build, tmp_path: Path) -> None:
    refused(build(*options), *fragments)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_without_tensorrt_rtx(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with the line that installs it; the other targets never ask for it."""
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    command = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", *SMALL)
    refused(run(capfd, *command), "not installed", "pip install 'tensorrt-rtx>=1.7'")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert run(capfd, *command, "--target", "onnxruntime", "--no_latency_table").status == 0


@pytest.mark.parametrize("error", [CompileError("TensorRT-RTX cannot build graph commit: why."), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failing_compiler_changes_nothing(
    error: BaseException, existing: bool, build: Build, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        shutil.copytree(original, tmp_path / "engine")
    before = contents(tmp_path)

    def failing(workers: rtx_jobs.Workers, job: rtx_jobs.Job) -> rtx_jobs.Done:
        if job.stem == "commit":
            raise error
        return compile_here(workers, job)

    monkeypatch.setattr(rtx_jobs.Workers, "compile", failing)
    refused(build(), status=1)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1 + existing


@pytest.mark.parametrize(
    ("program", "fragment"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise RuntimeError(7)", "exit status 1; RuntimeError: 7"),
        ("pass", "exit status 0; it said nothing"),
    ],
)
def test_a_compiler_that_dies(
    program: str,
    fragment: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rtx, "load_tensorrt_rtx", lambda: SimpleNamespace(__version__="1.7"))
    monkeypatch.setattr(rtx_jobs, "COMMAND", (sys.executable, "-c", program))
    ran = run(capfd, "build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", *SMALL)
    refused(ran, "the compiler of graph", "died", fragment, status=1)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


SLOW_COMPILER = """
import sys
from types import SimpleNamespace
from trtllm_v4tree.cli.main import run
from trtllm_v4tree.compiler import rtx, rtx_jobs
rtx.load_tensorrt_rtx = lambda: SimpleNamespace(__version__="1.7")
rtx_jobs.COMMAND = (sys.executable, "-c", f"import time; open('{sys.argv[1]}', 'w'); time.sleep(300)")
run(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_compiler_at_once(number: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out"
    arguments = ("build", "--checkpoint_dir", checkpoint, "--output_dir", out / "engine", *SMALL)
    command = [sys.executable, "-c", SLOW_COMPILER, str(begun), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not begun.exists():
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    refused(Ran(process.returncode, "", err), "interrupted", status=1)
    assert not out.exists()


# ---------------------------------------------------------------- what is written


def test_engine_has_a_plan_per_graph(engine: Path) -> None:
    assert sorted(p.name for p in engine.iterdir()) == sorted([MANIFEST, *(f"{stem}.plan" for stem in STEMS)])
    manifest = Manifest.read(engine)
    manifest.verify(engine)
    assert (manifest.target, manifest.compute_capabilities) == ("tensorrt-rtx", ("SM89", "SM120"))
    assert manifest.built_with["tensorrt-rtx"] == "1.7"
    assert manifest.to_json() == (engine / MANIFEST).read_text()


def test_manifest_names_what_the_plans_bind(engine: Path) -> None:
    """Outputs as the graphs that were compiled have them, in order."""
    graphs = {graph["name"]: graph for graph in json.loads((engine / MANIFEST).read_text())["contract"]}
    assert list(graphs) == STEMS
    for stem in STEMS:
        plan = (engine / f"{stem}.plan").read_text().split()
        assert plan == ["SM89", "SM120", stem, *(t["name"] for t in graphs[stem]["outputs"])]
    assert "new_window_kv" in {t["name"] for t in graphs["commit"]["outputs"]}


@pytest.mark.parametrize("given", ["80,120", "8.0,12.0", " sm_80, SM120,80"])
def test_capabilities_as_one_writes_them(given: str, build: Build, tmp_path: Path) -> None:
    assert build("--compute_capability", given).status == 0
    assert Manifest.read(tmp_path / "engine").compute_capabilities == ("SM80", "SM120")


@pytest.mark.parametrize(
    ("budget", "shapes"), [(1, ()), (2, ((1, 3), (1, 1))), (4, ((3, 3), (3, 1))), (16, ((4, 3), (5, 1)))]
)
def test_default_draft_shapes_fit_the_budget(budget: int, shapes: tuple[tuple[int, int], ...]) -> None:
    assert rtx.default_draft_shapes(budget) == shapes


def test_options_default_to_both_chips() -> None:
    assert BuildOptions(target="tensorrt-rtx").capabilities == ("SM89", "SM120")
    assert BuildOptions().capabilities == ()


def test_an_engine_of_another_target_is_replaced(build: Build, engine: Path) -> None:
    assert build("--target", "onnxruntime", "--no_latency_table").status == 0
    assert Manifest.read(engine).target == "onnxruntime"
    assert not list(engine.glob("*.plan"))


# ---------------------------------------------------------------- what reads it


def test_inspect(engine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capfd, "inspect", "--engine_dir", engine, "--json", "--contract").out)
    assert (facts["target"], facts["compute_capabilities"]) == ("tensorrt-rtx", ["SM89", "SM120"])
    assert [graph["name"] for graph in facts["contract"]] == ["target_step", "commit", "draft_s5_k1"]
    shown = run(capfd, "inspect", "--engine_dir", engine)
    assert shown.status == 0 and "SM89, SM120" in shown.out and "5 files" in shown.out


def test_generate_and_serve_say_what_to_do(engine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(capfd, "generate", "--engine_dir", engine, "--prompt_token_ids", "1,2")
    refused(ran, "tensorrt-rtx (SM89, SM120)", "GPU executor", "--target onnxruntime")
    with pytest.raises(EngineFormatError, match="GPU executor"):
        check_engine(engine, "none")


BAD_ENGINES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "newer format": (edit_manifest(lambda d: d.update(format_version=99)), ("format 99", "update trtllm_v4tree")),
    "no capabilities": (edit_manifest(lambda d: d.pop("compute_capabilities")), ("damaged", "compute_capabilities")),
    "capability is no name": (edit_manifest(lambda d: d.update(compute_capabilities=[89])), ("damaged", "SM89")),
    "another contract": (edit_manifest(lambda d: d["contract"].pop()), ("damaged", "contract")),
    "a plan is not listed": (edit_manifest(lambda d: d["files"].pop("commit.plan")), ("damaged", "commit.plan")),
    "a plan is missing": (remove("target_step.plan"), ("lacks the file target_step.plan",)),
    "a plan is damaged": (truncate("target_step.plan", 0.5), ("target_step.plan", "hash")),
    "target of the other kind": (edit_manifest(lambda d: d.update(target="onnxruntime")), ("weights.safetensors",)),
}


@pytest.mark.parametrize("name", BAD_ENGINES)
def test_bad_engine(name: str, engine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, fragments = BAD_ENGINES[name]
    damage(engine)
    refused(run(capfd, "inspect", "--engine_dir", engine, "--json"), *fragments)
