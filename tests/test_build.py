"""What a build writes: every weight of the checkpoint once, shared by all graphs; whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trtllm_v4tree import CheckpointError, ConfigError, V4TreeError, native
from trtllm_v4tree.checkpoint import expected_tensors
from trtllm_v4tree.compiler.build import BuildOptions, build, default_draft_shapes
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import FORMAT_VERSION, MANIFEST, WEIGHTS_FILE, Manifest, graph_stems, replacing

from .harness import Built
from .oracle.tiny import CONFIGS, write_tiny

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=300, draft_shapes=((1, 1), (2, 2)))
KERNELS = ["onnxruntime"] + (["native"] if native.library() else [])


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


# ---------------------------------------------------------------- weights


def number(checkpoint: Path) -> dict[str, np.ndarray]:
    """Fills each float tensor with an odd prime of its own; returns the tensors."""
    tensors = load_file(checkpoint / "model.safetensors")
    floats = [name for name in sorted(tensors) if tensors[name].dtype == np.float32]
    primes = (n for n in itertools.count(3, 2) if all(n % d for d in range(3, math.isqrt(n) + 1, 2)))
    for name, prime in zip(floats, primes, strict=False):
        tensors[name] = np.full_like(tensors[name], prime)
    save_file(tensors, checkpoint / "model.safetensors")
    return tensors


def times(found: Counter[float], value: float) -> int:
    """How often a value is stored, up to rounding."""
    return sum(count for f, count in found.items() if math.isclose(f, value, rel_tol=1e-6))


def expected_counts(
    tensors: dict[str, np.ndarray], config: ModelConfig, sparse: bool, found: Counter[float], kernels: str
) -> dict[float, int]:
    """How often each value must be stored: as often as in the checkpoint, but for what the network multiplies together,
    and for the indexer of an engine that need not select."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    left = {name: (float(t.flat[0]), t.size) for name, t in tensors.items() if t.dtype == np.float32}
    folded = {
        "wo_a.weight": ("wo_b.weight", config.o_lora_rank, heads * hidden),
        "e_proj.weight": ("enorm.weight", hidden, config.vocab_size * hidden),
        "_scale": ("_fn", 1, None),
    }
    counts: Counter[float] = Counter()
    for name, (value, size) in list(left.items()):
        if ".indexer." in name and not sparse:
            del left[name]
        if ".experts." in name and name.endswith(".w2.weight") and kernels == "onnxruntime":
            left[name] = (value * config.routed_scaling_factor, size)
        for suffix, (partner, terms, many) in folded.items():
            if name.endswith(suffix):
                other = name.removesuffix(suffix) + partner
                product = value * left[other][0] * terms
                if times(found, product):
                    counts[product] += many or left[other][1]
                    del left[name], left[other]
    for value, size in left.values():
        counts[value] += size
    return counts


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_of_the_checkpoint_is_stored_once(name: str, kernels: str, tmp_path: Path) -> None:
    """A count of values: it holds for any layout of the weights, and shows what is lost, doubled or mixed up."""
    checkpoint = write_tiny(tmp_path / "checkpoint", name, seed=1)
    tensors = number(checkpoint)
    manifest = build(checkpoint, tmp_path / "engine", replace(OPTIONS, cpu_kernels=kernels))
    assert manifest.cpu_kernels == kernels
    stored = load_file(tmp_path / "engine" / WEIGHTS_FILE)
    found: Counter[float] = Counter()
    for array in stored.values():
        if array.dtype == np.float32:
            values, counts = np.unique(array, return_counts=True)
            found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    for value, count in expected_counts(tensors, manifest.config, manifest.sizes.sparse, found, kernels).items():
        assert times(found, value) == count, value
    tables = sorted(t.tobytes() for t in tensors.values() if t.dtype == np.int64)
    assert sorted(t.tobytes() for t in stored.values() if t.dtype == np.int64) == tables


def external(model: onnx.ModelProto) -> dict[str, tuple[str, int, int]]:
    """(file, offset, length) of every initializer that is external."""
    out = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            out[tensor.name] = (where["location"], int(where["offset"]), int(where["length"]))
    return out


def test_graphs_share_the_weights(built: Built) -> None:
    """Every graph's weights lie where the safetensors header says; all are used, and none is in two places."""
    with safe_open(built.engine / WEIGHTS_FILE, "numpy") as file:
        names = set(file.keys())
    raw = (built.engine / WEIGHTS_FILE).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    manifest = Manifest.read(built.engine)
    used: dict[str, set[str]] = {}
    for stem in graph_stems(manifest.sizes.has_mtp, manifest.draft_shapes):
        model = onnx.load(built.engine / f"{stem}.onnx", load_external_data=False)
        for name, (location, offset, length) in external(model).items():
            begin, end = header[name]["data_offsets"]
            assert (location, offset, length) == (WEIGHTS_FILE, start + begin, end - begin)
            used.setdefault(name, set()).add(stem)
        assert sum(len(t.raw_data) for t in model.graph.initializer) < 100_000
    assert set(used) == names
    drafts = {stem for stem in graph_stems(True, manifest.draft_shapes) if stem.startswith("draft_s")}
    assert drafts | {"target_step"} in used.values(), "embedding and head serve the trunk and every draft round"
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
    assert start % 64 == 0


# ---------------------------------------------------------------- manifest


def test_manifest(built: Built) -> None:
    manifest = Manifest.read(built.engine)
    manifest.verify(built.engine)
    assert {**manifest.files, MANIFEST: hashes(built.engine)[MANIFEST]} == hashes(built.engine)
    assert manifest.config == ModelConfig.from_pretrained(built.checkpoint)
    assert manifest.to_json() == (built.engine / MANIFEST).read_text()


def test_default_draft_shapes() -> None:
    assert default_draft_shapes(1) == ()
    assert default_draft_shapes(3) == ((1, 1), (2, 1), (2, 2), (2, 3), (2, 4))
    assert len(default_draft_shapes(16)) == 25


def test_a_draft_shape_is_compiled_once(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "checkpoint", "mixed", seed=1)
    options = BuildOptions(max_batch_size=2, max_seq_len=300, draft_shapes=((1, 1), (1, 1)))
    assert build(checkpoint, tmp_path / "engine", options).draft_shapes == ((1, 1),)


@pytest.mark.parametrize("wrong", [{"max_batch_size": "4"}, {"max_seq_len": 4.0}, {"num_pages": True}])
def test_options_are_integers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give an integer"):
        BuildOptions(**wrong)


# ---------------------------------------------------------------- whole or not at all


@pytest.fixture
def engine(tiny: Callable[[str], Built], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("w16").engine, tmp_path / "place" / "engine"))


def test_an_engine_is_replaced(tiny: Callable[[str], Built], engine: Path) -> None:
    build(tiny("mixed").checkpoint, engine, OPTIONS)
    assert Manifest.read(engine).config == ModelConfig.from_pretrained(tiny("mixed").checkpoint)
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]
    assert engine.stat().st_mode & 0o777 == 0o755


def test_an_engine_of_another_format_is_replaced(tiny: Callable[[str], Built], engine: Path) -> None:
    written, now = (engine / MANIFEST).read_text(), f'"format_version": {FORMAT_VERSION}'
    assert now in written
    (engine / MANIFEST).write_text(written.replace(now, '"format_version": 0'))
    build(tiny("mixed").checkpoint, engine, OPTIONS)
    Manifest.read(engine).verify(engine)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failing_rename_leaves_the_old_engine(
    call: int, error: BaseException, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before or between the two renames that swap the directories."""
    import os

    before, rename, calls = hashes(engine), os.rename, iter(range(1, 10))

    def failing(source: Any, target: Any) -> None:
        if next(calls) == call:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    expected = V4TreeError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), replacing(engine) as scratch:
        (scratch / "x").write_text("x")
    assert hashes(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]


def test_a_checkpoint_that_fails_late_leaves_the_old_engine(
    tiny: Callable[[str], Built], engine: Path, tmp_path: Path
) -> None:
    """Expert ids out of range show only when the table is read, after other weights were written."""
    checkpoint = Path(shutil.copytree(tiny("w16").checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["layers.2.ffn.gate.tid2eid"][0, 0] = 6
    save_file(tensors, checkpoint / "model.safetensors")
    before = hashes(engine)
    with pytest.raises(CheckpointError, match="tid2eid"):
        build(checkpoint, engine, OPTIONS)
    assert hashes(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]


# ---------------------------------------------------------------- memory

PEAK = """
import sys
from pathlib import Path
from trtllm_v4tree.compiler.build import BuildOptions, build

def peak():  # of this program alone; ru_maxrss begins with the memory of the process that forked it
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

baseline = peak()
options = BuildOptions(max_batch_size=2, max_seq_len=300)
build(Path(sys.argv[1]), Path(sys.argv[2]), options)
print(peak() - baseline)
"""


def write_large(directory: Path, vocab: int, hidden: int, dtype: str) -> int:
    """A checkpoint whose embedding and head dwarf the rest, all zeros; returns the bytes of one in float32."""
    raw = CONFIGS["mixed"] | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [16, 16, 4, 16, 4],
    }
    config = ModelConfig.from_dict(raw)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    size = {"F32": 4, "BF16": 2}[dtype]
    entries, end = {}, 0
    for name, shape in expected_tensors(config).items():
        begin, end = end, end + int(np.prod(shape)) * size
        entries[name] = {
            "dtype": "I64" if "tid2eid" in name else dtype,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return 4 * vocab * hidden


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_peak_memory(dtype: str, tmp_path: Path) -> None:
    """At most twice the largest tensor and 300 MB, beyond what the imports take."""
    largest = write_large(tmp_path / "checkpoint", vocab=400_000, hidden=512, dtype=dtype)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "checkpoint"), str(tmp_path / "engine")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) <= 2 * largest + 300e6, f"{int(done.stdout) / 1e6:.0f} MB"
    assert int(done.stdout) >= largest, "the measurement saw the largest tensor"
