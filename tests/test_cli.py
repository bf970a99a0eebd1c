"""The command line: every bad input ends in one sentence and status 2, results go to stdout and nothing else does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trtllm_v4tree.accounting import state_bytes
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler.weights import WeightPlan
from trtllm_v4tree.engine_dir import FORMAT_VERSION, Manifest

from .harness import Built

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--max_seq_len", "300", "--max_batch_size", "2", "--draft_shapes", "s1_k1")
Run = Callable[..., "Ran"]


class Ran(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str


@pytest.fixture
def v4tree(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        status = status_of([str(a) for a in arguments])
        return Ran(status, *capfd.readouterr())

    return call


def refused(ran: Ran, *fragments: str, status: int = 2) -> None:
    """One line on stderr that has the fragments, nothing on stdout."""
    assert (ran.status, ran.out) == (status, "")
    [line] = ran.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    for fragment in fragments:
        assert fragment in line


def contents(directory: Path) -> dict[str, str]:
    """Hash of every file under a directory."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# ---------------------------------------------------------------- build: bad checkpoints


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(data) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        change(tensors)
        save_file(tensors, checkpoint / "model.safetensors")

    return edit


def truncate(name: str, part: float) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * part)])

    return edit


def expert_out_of_range(tensors: dict[str, np.ndarray]) -> None:
    tensors["layers.0.ffn.gate.tid2eid"][3, 0] = 99


def foreign_tokenizer(checkpoint: Path) -> None:
    vocab = {"a": 0, "b": 5000}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (checkpoint / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no config": (remove("config.json"), ("config.json", "cannot be read")),
    "config is no JSON": (write("config.json", b"{"), ("config.json", "not valid JSON")),
    "config is no object": (write("config.json", b"[]"), ("JSON object",)),
    "config is not text": (write("config.json", b"\xff\xfe"), ("not valid JSON",)),
    "another architecture": (edit_config(model_type="llama"), ("'llama'", "deepseek_v4")),
    "V4.1": (edit_config(model_type="deepseek_v41"), ("deepseek_v41",)),
    "NaN": (edit_config(rms_norm_eps=float("nan")), ("rms_norm_eps",)),
    "infinite": (edit_config(rope_theta=float("inf")), ("rope_theta",)),
    "null": (edit_config(hidden_size=None), ("hidden_size",)),
    "text for a number": (edit_config(vocab_size="211"), ("vocab_size", "integer")),
    "negative": (edit_config(head_dim=-32), ("head_dim",)),
    "no weights": (remove("model.safetensors"), ("no *.safetensors",)),
    "empty weights": (write("model.safetensors", b""), ("truncated",)),
    "truncated header": (truncate("model.safetensors", 0.001), ("truncated",)),
    "truncated data": (truncate("model.safetensors", 0.5), ("truncated",)),
    "corrupt header": (write("model.safetensors", b"\x08\0\0\0\0\0\0\0{notjson"), ("not valid JSON",)),
    "missing tensor": (edit_tensors(lambda t: t.pop("layers.2.attn.wkv.weight")), ("1 missing: layers.2.attn.wkv",)),
    "unexpected tensor": (edit_tensors(lambda t: t.update(x=np.zeros(1, np.float32))), ("1 unexpected: x",)),
    "wrong shape": (
        edit_tensors(lambda t: t.update({"norm.weight": np.zeros(3, np.float32)})),
        ("norm.weight is F32 [3]", "[64]"),
    ),
    "unknown dtype": (edit_tensors(lambda t: t.update({"norm.weight": np.ones(64)})), ("F64", "F32")),
    "expert out of range": (edit_tensors(expert_out_of_range), ("tid2eid", "99")),
    "broken tokenizer": (write("tokenizer.json", b"{"), ("tokenizer.json", "not a readable tokenizer")),
    "foreign tokenizer": (foreign_tokenizer, ("5000", "vocab_size is 211")),
}


@pytest.fixture
def checkpoint(tiny: Callable[[str], Built], tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny("w16").checkpoint, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(name: str, checkpoint: Path, tmp_path: Path, v4tree: Run) -> None:
    """Refused, and nothing is left: no engine, no scratch, no parents made on the way."""
    damage, fragments = BAD_CHECKPOINTS[name]
    damage(checkpoint)
    ran = v4tree("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "a" / "b" / "engine", *SMALL)
    refused(ran, *fragments)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_checkpoint_dir_is_not_there(tmp_path: Path, v4tree: Run) -> None:
    ran = v4tree("build", "--checkpoint_dir", tmp_path / "nope", "--output_dir", tmp_path / "engine")
    refused(ran, "nope", "No such file or directory")


@pytest.mark.parametrize(
    ("option", "value", "fragments"),
    [
        ("--target", "cuda", ("'cuda'", "onnxruntime, tensorrt, tensorrt-rtx")),
        ("--target", "tensorrt", ("TensorRT", "pip install 'trtllm_v4tree[tensorrt]'")),
        ("--dtype", "int4", ("'int4'", "float32, float16, bfloat16, int8")),
        ("--dtype", "float16", ("float16", "float32, bfloat16 or int8")),
        ("--max_batch_size", "0", ("max_batch_size=0", "1 to 1024")),
        ("--max-seq-len", "1025", ("max_seq_len=1025", "3 to 1024")),
        ("--max_verify_tokens", "65", ("max_verify_tokens=65", "1 to 64")),
        ("--prefill_chunk", "-1", ("prefill_chunk=-1", "1 to 4096")),
        ("--num_pages", "1", ("num_pages=1", "at least 2")),
        ("--max_batch_size", "many", ("'--max_batch_size'", "v4tree build --help")),
        ("--draft_shapes", "s3", ("'s3'", "s4_k3,s7_k1")),
        ("--draft_shapes", "s99_k1", ("s99_k1", "1 to 16")),
        ("--draft_shapes", "", ("''",)),
        ("--mtp_weights", "/nope", ("/nope",)),
        ("--mtp_weights", str(ROOT / "pyproject.toml"), ("pyproject.toml", "safetensors")),
        ("--batch", "1", ("--batch",)),
    ],
)
def test_bad_build_option(
    option: str, value: str, fragments: tuple[str, ...], checkpoint: Path, tmp_path: Path, v4tree: Run
) -> None:
    given = [*SMALL, option, value]
    refused(v4tree("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *given), *fragments)
    assert not (tmp_path / "e").exists()


# ---------------------------------------------------------------- build: output_dir


def occupied(place: Path) -> Path:
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    return place


def engine_with_notes(place: Path) -> Path:
    """An engine in whose directory somebody keeps something else."""
    occupied(place)
    (place / "engine.json").write_text(json.dumps({"format_version": 0, "files": {}}))
    return place


def a_file(place: Path) -> Path:
    place.write_text("mine")
    return place


BAD_PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (a_file, "file"),
    "under a file": (lambda place: a_file(place) / "engine", "file"),
    "not empty": (occupied, "notes.txt"),
    "an engine and more": (engine_with_notes, "notes.txt"),
    "not writable": (lambda place: Path("/proc/nothing/engine"), "cannot be made"),
    "NUL": (lambda place: Path("a\0b"), "null byte"),
    "too long": (lambda place: place / ("x" * 300), "too long"),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_bad_output_dir(name: str, checkpoint: Path, tmp_path: Path, v4tree: Run) -> None:
    make, fragment = BAD_PLACES[name]
    place = make(tmp_path / "place")
    before = contents(tmp_path)
    refused(v4tree("build", "--checkpoint_dir", checkpoint, "--output_dir", place, *SMALL), "output_dir", fragment)
    assert contents(tmp_path) == before


def test_a_link_stays_a_link(checkpoint: Path, tmp_path: Path, v4tree: Run) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "engine")
    assert v4tree("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "link", *SMALL).status == 0
    assert (tmp_path / "link").is_symlink()
    Manifest.read(tmp_path / "engine")


class Break(NamedTuple):
    """What happens while weights are written."""

    error: BaseException
    status: int
    fragment: str


BREAKS = {
    "disk full": Break(OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
    "Ctrl-C": Break(KeyboardInterrupt(), 1, "interrupted"),
    "no memory": Break(MemoryError(), 1, "memory"),
}


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("name", BREAKS)
def test_broken_build(
    name: str, existing: bool, checkpoint: Path, tmp_path: Path, v4tree: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing engine stays byte-identical; without one, nothing appears."""
    command = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "out" / "engine", *SMALL)
    if existing:
        assert v4tree(*command).status == 0
    before = contents(tmp_path)
    original = WeightPlan.write

    def broken(self: WeightPlan, path: Path, *rest: Any) -> None:
        original(self, path, *rest)
        raise BREAKS[name].error

    monkeypatch.setattr(WeightPlan, "write", broken)
    refused(v4tree(*command), BREAKS[name].fragment, status=BREAKS[name].status)
    assert contents(tmp_path) == before
    assert (tmp_path / "out").exists() == existing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_build(number: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    """The process ends with status 1 and cleans up."""
    out = tmp_path / "out"
    shapes = ",".join(f"s16_k{k}" for k in range(1, 17))
    arguments = (
        "build",
        "--checkpoint_dir",
        checkpoint,
        "--output_dir",
        out / "engine",
        *SMALL,
        "--draft_shapes",
        shapes,
    )
    process = subprocess.Popen(command_line(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not out.exists():
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    refused(Ran(process.returncode, "", err), "interrupted", status=1)
    assert not out.exists()


# ---------------------------------------------------------------- build: what it does


def test_build_without_mtp(checkpoint: Path, tmp_path: Path, v4tree: Run) -> None:
    """Builds, and refuses speculation and draft shapes."""
    edit_tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")])(checkpoint)
    engine = tmp_path / "engine"
    build = ("build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--max_seq_len", "300")
    refused(v4tree(*build, "--draft_shapes", "s1_k1"), "no mtp tensors", "--mtp_weights")
    ran = v4tree(*build)
    assert (ran.status, ran.out) == (0, "")
    assert "no drafter in the checkpoint" in ran.err
    generate = ("generate", "--engine_dir", engine, "--prompt_token_ids", "1,2", "--max_tokens", "3", "--json")
    assert len(json.loads(v4tree(*generate).out)["token_ids"]) == 3
    refused(v4tree(*generate, "--speculation", "s1_k1_d2"), "no mtp tensors", "use none")


def test_build_takes_mtp_weights_from_a_file(checkpoint: Path, tmp_path: Path, v4tree: Run) -> None:
    """The trunk's text is that of the whole checkpoint."""
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n.startswith("mtp.")}, tmp_path / "mtp.safetensors")
    build = ("build", "--checkpoint-dir", checkpoint, "--no-latency-table", *SMALL)
    assert v4tree(*build, "--output-dir", tmp_path / "whole").status == 0
    edit_tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")])(checkpoint)
    split = v4tree(*build, "--output-dir", tmp_path / "split", "--mtp-weights", tmp_path / "mtp.safetensors")
    assert split.status == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "split")


# ---------------------------------------------------------------- generate and inspect: bad engines


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(engine: Path) -> None:
        path = engine / "engine.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


def rehashed(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The damage, and a manifest that agrees with it."""

    def edit(engine: Path) -> None:
        damage(engine)
        files = json.loads((engine / "engine.json").read_text())["files"]
        hashes = {n: hashlib.sha256((engine / n).read_bytes()).hexdigest() for n in files if (engine / n).exists()}
        edit_manifest(lambda data: data["files"].update(hashes))(engine)

    return edit


def swap(name: str, other: str) -> Callable[[Path], None]:
    return lambda engine: (engine / name).write_bytes((engine / other).read_bytes()) and None


def flip_a_byte(engine: Path) -> None:
    data = bytearray((engine / "weights.safetensors").read_bytes())
    data[-5] ^= 1
    (engine / "weights.safetensors").write_bytes(data)


BAD_ENGINES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no manifest": (remove("engine.json"), ("no engine.json",)),
    "no JSON": (write("engine.json", b"\xff"), ("not valid JSON",)),
    "deep JSON": (write("engine.json", b"[" * 100_000), ("not valid JSON",)),
    "no object": (write("engine.json", b"[1]"), ("not a JSON object",)),
    "another format": (
        edit_manifest(lambda d: d.update(format_version=99)),
        ("format 99", f"reads format {FORMAT_VERSION}"),
    ),
    "another target": (edit_manifest(lambda d: d.update(target="metal")), ("metal", "--target onnxruntime")),
    "target is a number": (edit_manifest(lambda d: d.update(target=3)), ("damaged", "target is 3")),
    "no sizes": (edit_manifest(lambda d: d.pop("sizes")), ("damaged", "sizes")),
    "sizes of text": (edit_manifest(lambda d: d["sizes"].update(max_batch_size="4")), ("max_batch_size is '4'",)),
    "sizes that do not fit": (edit_manifest(lambda d: d["sizes"].update(window=4)), ("damaged", "sizes")),
    "config is bad": (edit_manifest(lambda d: d["config"].update(head_dim=0)), ("damaged", "head_dim")),
    "draft shapes are bad": (edit_manifest(lambda d: d.update(draft_shapes=[[1]])), ("draft_shapes has [1]",)),
    "a draft round is missing": (edit_manifest(lambda d: d.update(draft_shapes=[[9, 9]])), ("draft_s9_k9.onnx",)),
    "path traversal": (edit_manifest(lambda d: d["files"].update({"../x": "0" * 64})), ("'../x'", "no plain file")),
    "weights are not listed": (edit_manifest(lambda d: d["files"].pop("weights.safetensors")), ("weights",)),
    "tampered weights": (flip_a_byte, ("weights.safetensors", "hash", "build the engine again")),
    "tampered graph": (truncate("commit.onnx", 0.5), ("commit.onnx", "hash")),
    "a graph is missing": (remove("target_step.onnx"), ("target_step.onnx", "lacks")),
    "a graph is damaged": (rehashed(truncate("target_step.onnx", 0.5)), ("cannot load", "build the engine again")),
    "a graph is empty": (rehashed(write("target_step.onnx", b"")), ("cannot load",)),
    "a graph is another": (
        rehashed(swap("target_step.onnx", "commit.onnx")),
        ("target_step.onnx", "build the engine again"),
    ),
    "weights are truncated": (
        rehashed(truncate("weights.safetensors", 0.5)),
        ("cannot load", "build the engine again"),
    ),
}


@pytest.fixture
def engine(tiny: Callable[[str], Built], tmp_path: Path) -> Path:
    """A copy of the tiny engine that a test may damage."""
    return Path(shutil.copytree(tiny("w16").engine, tmp_path / "engine"))


@pytest.mark.parametrize("name", BAD_ENGINES)
def test_bad_engine(name: str, engine: Path, v4tree: Run) -> None:
    damage, fragments = BAD_ENGINES[name]
    damage(engine)
    refused(v4tree("generate", "--engine_dir", engine, "--prompt_token_ids", "1,2", "--max_tokens", "3"), *fragments)
    if "cannot load" not in fragments and name not in ("another target", "a graph is another"):
        refused(v4tree("inspect", "--engine_dir", engine, "--json"), *fragments)


def test_a_broken_tokenizer_in_an_engine(nano: Built, tmp_path: Path, v4tree: Run) -> None:
    engine = Path(shutil.copytree(nano.engine, tmp_path / "engine"))
    rehashed(write("tokenizer.json", b"{"))(engine)
    refused(v4tree("generate", "--engine_dir", engine, "--prompt", "a"), "tokenizer.json", "build the engine again")


def test_engine_dir_is_not_there(tmp_path: Path, v4tree: Run) -> None:
    for command in (("inspect",), ("generate", "--prompt", "a")):
        refused(v4tree(*command, "--engine_dir", tmp_path / "nope"), "No engine directory", "v4tree build")


# ---------------------------------------------------------------- generate: bad requests


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((), ("--prompt, --chat, --prompt_token_ids",)),
        (("--prompt", "a", "--prompt_token_ids", "1"), ("exactly one",)),
        (("--prompt", ""), ("prompt is empty",)),
        (("--chat", " "), ("prompt is empty",)),
        (("--prompt_token_ids", ""), ("prompt is empty",)),
        (("--prompt_token_ids", "1,x"), ("'x'", "0,2,17")),
        (("--prompt_token_ids", "1,,2"), ("''",)),
        (("--prompt_token_ids", "1_0"), ("'1_0'",)),
        (("--prompt_token_ids", "4096"), ("4096", "0 to 4095")),
        (("--prompt_token_ids", "3,-1"), ("token 1 is -1", "0 to 4095")),
        (("--prompt_token_ids", ",".join(["3"] * 640)), ("1 to 639 tokens", "640", "--max_seq_len")),
        (("--prompt", "\udcff"), ("--prompt", "UTF-8")),
        (("--prompt", "a", "--max_tokens", "0"), ("max_tokens", ">= 1", "0")),
        (("--prompt", "a", "--max_tokens", "x"), ("'--max_tokens'", "v4tree generate --help")),
        (("--prompt", "a", "--speculation", "eagle"), ("'eagle'", "none", "sN_kK_dD")),
        (("--prompt", "a", "--speculation", "s3_k2"), ("'s3_k2'", "sN_kK_dD")),
        (("--prompt", "a", "--speculation", "s3_k3_d17"), ("verifies 17", "at most 16", "--max_verify_tokens")),
        (("--prompt", "a", "--speculation", "s3_k2_d99"), ("s3_k2_d99", "d11")),
        (("--prompt", "a", "--speculation", "s2_k2_d4"), ("s1_k1, s3_k2, s4_k1, s3_k3", "--draft_shapes s2_k2")),
        (("--prompt", "a", "--temperature", "-1"), ("temperature", ">= 0")),
        (("--prompt", "a", "--temperature", "nan"), ("temperature", "finite")),
        (("--prompt", "a", "--top_k", "-1"), ("top_k",)),
        (("--prompt", "a", "--top-p", "0"), ("top_p",)),
        (("--prompt", "a", "--min_p", "2"), ("min_p",)),
        (("--prompt", "a", "--seed", "-1"), ("seed",)),
        (("--prompt", "a", "--stop", ""), ("stop", "non-empty")),
        (("--prompt", "a", "--logprobs", "21"), ("logprobs", "0 to 20")),
        (("--prompt", "a", "--threads", "-1"), ("threads is -1",)),
        (("--prompt", "a", "--prompt"), ("--prompt",)),
        (("--prompt", "a", "b"), ("b",)),
        (("--nope", "a"), ("--nope",)),
    ],
)
def test_bad_request(arguments: tuple[str, ...], fragments: tuple[str, ...], nano: Built, v4tree: Run) -> None:
    refused(v4tree("generate", "--engine_dir", nano.engine, *arguments), *fragments)


def test_text_needs_a_tokenizer(engine: Path, v4tree: Run) -> None:
    generate = ("generate", "--engine_dir", engine)
    refused(v4tree(*generate, "--prompt", "a"), "no tokenizer", "prompt_token_ids")
    refused(v4tree(*generate, "--chat", "a"), "no tokenizer", "prompt_token_ids")
    refused(v4tree(*generate, "--prompt_token_ids", "1", "--stop", "a"), "stop", "tokenizer")


@pytest.mark.parametrize("arguments", [("nope",), ("--nope",), ("build",), ("serve",), ("doctor", "x")])
def test_bad_command_line(arguments: tuple[str, ...], v4tree: Run) -> None:
    refused(v4tree(*arguments), "--help")


# ---------------------------------------------------------------- generate: results


def test_values_are_taken_as_they_are(nano: Built, v4tree: Run) -> None:
    """Hyphens in an option's name are underscores; in its value they stay, even in front."""
    generate = ("generate", "--engine-dir", nano.engine, "--max-tokens=3", "--json", "--prompt")
    tokenizer = nano_tokenizer(nano)
    for prompt in ("--what-is-this", "-x", "a-b", "--json", "--"):
        usage = json.loads(v4tree(*generate, prompt).out)["usage"]
        assert usage["prompt_tokens"] == len(tokenizer.encode(prompt, add_special_tokens=False).ids) + 1


def nano_tokenizer(nano: Built) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(nano.engine / "tokenizer.json"))


def test_streamed_text_is_the_json_text(nano: Built, v4tree: Run) -> None:
    generate = ("generate", "--engine_dir", nano.engine, "--chat", "Tell me a story.", "--max_tokens", "20")
    tree = v4tree(*generate, "--json", "--speculation", "s3_k2_d6")
    data = json.loads(tree.out)
    assert list(data) == ["text", "token_ids", "finish_reason", "usage", "metrics"]
    assert tree.err == ""
    plain = v4tree(*generate)
    assert plain.out == data["text"] + "\n"
    assert "20 tokens, length" in plain.err
    assert data["usage"]["completion_tokens"] == len(data["token_ids"]) == 20
    assert 1 + data["metrics"]["rounds"] * data["metrics"]["accepted_length"] == pytest.approx(20, abs=0.01)
    assert sum(data["metrics"]["accepted_by_depth"]) == 19


def test_json_logprobs(nano: Built, v4tree: Run) -> None:
    ran = v4tree(
        "generate", "--engine_dir", nano.engine, "--prompt", "a", "--max_tokens", "4", "--logprobs", 2, "--json"
    )
    data = json.loads(ran.out)
    assert len(data["logprobs"]) == 4
    for token, entry in zip(data["token_ids"], data["logprobs"], strict=True):
        assert entry["top"][0] == [token, entry["logprob"]]


def test_token_ids_where_there_is_no_tokenizer(engine: Path, v4tree: Run) -> None:
    generate = ("generate", "--engine_dir", engine, "--prompt_token_ids", "1, 2", "--max_tokens", "5", "--ignore_eos")
    ids = json.loads(v4tree(*generate, "--json").out)["token_ids"]
    assert v4tree(*generate).out.split() == [str(i) for i in ids]


# ---------------------------------------------------------------- inspect and doctor


def test_inspect(nano: Built, v4tree: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed bytes are the closed formulas."""
    monkeypatch.setenv("COLUMNS", "160")
    manifest = Manifest.read(nano.engine)
    held = state_bytes(manifest.config, manifest.sizes)
    data = json.loads(v4tree("inspect", "--engine_dir", nano.engine, "--json").out)
    assert data["state_bytes"] == held.__dict__
    assert data["sizes"] == manifest.sizes.to_dict()
    assert data["draft_shapes"] == ["s1_k1", "s3_k2", "s4_k1", "s3_k3"]
    shown = v4tree("inspect", "--engine_dir", nano.engine, "--contract")
    assert (shown.status, shown.err) == (0, "")
    for number in (f"{held.per_token:,.2f}", f"{held.per_sequence:,}", f"{held.per_node:,}"):
        assert f" {number} bytes" in shown.out
    assert "graph target_step" in shown.out


def test_doctor(v4tree: Run) -> None:
    ran = v4tree("doctor")
    assert (ran.status, ran.err) == (0, "")
    assert "support matrix" in ran.out


# ---------------------------------------------------------------- as a process


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "trtllm_v4tree.cli.main", *map(str, arguments)]


def process(*arguments: object, shell: str = '"$@"', **environment: str) -> Ran:
    """`shell` is bash with the command as its arguments."""
    line = ["bash", "-c", shell, "bash", *command_line(*arguments)]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=120)
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def test_nothing_given(tmp_path: Path) -> None:
    ran = process()
    assert ran.status == 2
    assert "Usage" in ran.out


def test_streams_that_are_closed(nano: Built) -> None:
    generate = ("generate", "--engine_dir", nano.engine, "--prompt", "a", "--max_tokens", "40")
    assert process(*generate, shell='"$@" <&- >&- 2>&-').status == 0
    head = process(*generate, shell='"$@" | head -c 3; exit ${PIPESTATUS[0]}')
    assert (head.status, len(head.out)) == (1, 3)
    assert "Traceback" not in head.err
    full = process(*generate, "--json", shell='"$@" > /dev/full')
    refused(full, "No space left on device", status=1)


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_that_is_not_utf8(environment: dict[str, str], nano: Built) -> None:
    """The text arrives as it was given, JSON stays exact, and what cannot be shown is replaced."""
    prompt = "naïve 中文"
    generate = ("generate", "--engine_dir", nano.engine, "--prompt", prompt, "--max_tokens", "4", "--temperature", "3")
    ran = process(*generate, "--seed", "4", "--json", LC_ALL="C", **environment)
    assert ran.status == 0
    here = process(*generate, "--seed", "4", "--json", PYTHONUTF8="1")
    assert json.loads(ran.out)["text"] == json.loads(here.out)["text"]
    assert process(*generate, LC_ALL="C", **environment).status == 0
