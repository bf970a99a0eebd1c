"""`v4tree inspect --config` against formulas written here from the published numbers, and against an engine that was built."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest

from trtllm_v4tree import contract
from trtllm_v4tree.accounting import (
    FORMATS,
    checkpoint_bytes,
    num_parameters,
    pool_bytes,
    raw_compressor_bytes,
    state_bytes,
)
from trtllm_v4tree.bench import footprint
from trtllm_v4tree.bench.published import published
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler import dry
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.engine_dir import WEIGHTS_FILE
from trtllm_v4tree.sizes import EngineSizes

from .oracle.tiny import CONFIGS, write_tiny
from .test_cli import Ran, refused

ROOT = Path(__file__).resolve().parents[1]
V, d, di, m, rank, topk = 129280, 512, 128, 4, 1024, 6
"""What both models share: vocabulary, head and index dim, streams, rank of a group's output, experts per token."""


class Numbers(NamedTuple):
    """A published model: hidden size, layers by kind, heads, query rank, output groups, experts, their width, tensors in its files."""

    D: int
    swa: int
    csa: int
    hca: int
    H: int
    q: int
    G: int
    E: int
    I: int
    tensors: int

    @property
    def L(self) -> int:
        """Layers with the drafter's."""
        return self.swa + self.csa + self.hca + 1


MODELS = {
    "flash": Numbers(4096, 2, 21, 20, 64, 1024, 8, 256, 2048, 69_187),
    "pro": Numbers(7168, 0, 30, 31, 128, 1536, 16, 384, 3072, 145_116),
}
both = pytest.mark.parametrize("name", MODELS)


def sizes_of(config: ModelConfig, max_seq_len: int = 1 << 20) -> EngineSizes:
    return EngineSizes.make(config, max_batch_size=1, max_seq_len=max_seq_len, max_verify_tokens=16)


# ---------------------------------------------------------------- checkpoints


def stored(n: Numbers) -> dict[str, int]:
    """Bytes of a published checkpoint by kind, from the table of shapes in spec section 9."""
    experts = n.L * n.E * 3 * n.D * n.I
    attention = n.q * n.D + n.H * d * n.q + d * n.D + n.G * rank * (n.H * d // n.G) + n.D * n.G * rank
    fp8 = n.L * (attention + 3 * n.I * n.D) + n.csa * 64 * di * n.q + 2 * n.D * n.D
    norms = n.L * (2 * n.D + n.q + d) + n.D + 3 * n.D
    csa, hca = 4 * d * n.D + d + 4 * di * n.D + di + 64 * n.D, 2 * d * n.D + d
    bf16 = 2 * V * n.D + norms + n.L * n.E * n.D + n.csa * csa + n.hca * hca
    mixers = n.L * 2 * (24 * m * n.D + 24 + 3) + 2 * (m * m * n.D + m + 1)
    apes = n.csa * 4 * 2 * (d + di) + n.hca * 128 * d
    fp32 = mixers + apes + n.L * n.H + (n.L - 3) * n.E
    return {
        "fp4": experts // 2, "fp8": fp8, "ue8m0": experts // 32 + fp8 // 128**2, "bf16": 2 * bf16, "fp32": 4 * fp32,
        "int64": 8 * 3 * V * topk,
    }  # fmt: skip


@both
def test_checkpoint_bytes(name: str) -> None:
    found = checkpoint_bytes(published(name))
    assert {kind: s.num_bytes for kind, s in found.items()} == stored(MODELS[name])
    assert sum(s.tensors for s in found.values()) == MODELS[name].tensors
    assert sum(s.num_bytes for s in found.values()) == footprint.checkpoint_bytes(published(name))


def test_flash_is_as_large_as_its_files() -> None:
    """159,617,149,040 bytes in 46 shards, of which each tensor's header entry takes about 110."""
    total = sum(s.num_bytes for s in checkpoint_bytes(published("flash")).values())
    assert 90 < (159_617_149_040 - total) / 69_187 < 130


def test_parameters_are_those_in_the_models_names() -> None:
    """284 B and 1.6 T."""
    assert round(num_parameters(published("flash"))[0] / 1e9) == 284
    assert round(num_parameters(published("pro"))[0] / 1e11) == 16


# ---------------------------------------------------------------- weights of an engine


def engine_floats(n: Numbers) -> int:
    """Values of the fused weights: nothing twice, hyper-connection scales inside `fn`, the output projection as one product where that
    is at most twice its factors."""
    hd, factors = n.H * d, n.G * rank * (n.H * d // n.G + n.D)
    out = hd * n.D if hd * n.D <= 2 * factors else factors
    block = 2 * (24 * m * n.D + 24) + 2 * n.D
    attention = n.D * (n.q + d) + n.q + n.q * hd + d + n.H + out
    ffn = n.D * (n.E + 2 * n.I) + n.I * n.D + 3 * n.E * n.I * n.D
    csa = n.D * (4 * d + 4 * di + 64) + n.q * 64 * di + 4 * 4 * d + d + 4 * 4 * di + di
    hca = n.D * 2 * d + 128 * 2 * d + d
    head = n.D + m * m * n.D + m
    drafter = 2 * n.D + 2 * n.D * n.D + head
    bias = (n.L - 3) * n.E
    return 2 * V * n.D + n.L * (block + attention + ffn) + n.csa * csa + n.hca * hca + bias + head + drafter


@both
def test_engine_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of traced graphs, whose weights are never loaded."""
    monkeypatch.setattr(dry, "LOWERINGS", {"onnxruntime": dry.LOWERINGS["onnxruntime"]})
    config = published(name)
    built = dry.dry_build(config, sizes_of(config))
    floats, tables = engine_floats(MODELS[name]), 8 * 3 * V * topk
    assert built.weight_bytes(4) == 4 * floats + tables
    assert built.weight_bytes(2) == 2 * floats + tables


def test_dry_build_is_the_build(tmp_path: Path) -> None:
    """Nodes and weights of an engine of ONNX Runtime's own operators, as its files have them."""
    checkpoint = write_tiny(tmp_path / "checkpoint", "w16", seed=1)
    options = BuildOptions(
        max_batch_size=1, max_seq_len=300, draft_shapes=((4, 3),), cpu_kernels="onnxruntime", max_verify_tokens=16
    )
    build(checkpoint, tmp_path / "engine", options)
    config = ModelConfig.from_pretrained(checkpoint)
    built = dry.dry_build(config, sizes_of(config, 300))
    for stem, count in built.nodes["onnxruntime"].items():
        model = onnx.load(tmp_path / "engine" / f"{stem}.onnx", load_external_data=False)
        assert len(model.graph.node) == count
    raw = (tmp_path / "engine" / WEIGHTS_FILE).read_bytes()
    assert built.weight_bytes(4) == len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert built.nodes["v4tree"]["target_step"] < built.nodes["onnxruntime"]["target_step"]


# ---------------------------------------------------------------- state and scratch


@both
def test_state_is_that_of_the_specification(name: str) -> None:
    """Spec 7.1: 584 and 132 (or 68) packed bytes, 1,024 and 256 in bf16; 7.5: scratch in bf16 with raw rows in fp32."""
    n, config = MODELS[name], published(name)
    for cache, row, key, value in zip(FORMATS, (2048, 1024, 584, 584), (512, 256, 132, 68), (4, 2, 2, 2), strict=True):
        held = state_bytes(config, sizes_of(config), cache)
        assert held.per_token == n.csa * (row + key) / 4 + n.hca * row / 128
        states = n.csa * 4 * 3 * 2 * (d + di) + n.hca * 4 * 2 * d
        assert held.per_sequence == n.L * 128 * row + states + 128 * m * n.D * value
        raw = n.csa * (8192 + 2048) + n.hca * 4096
        assert held.per_node == (n.L - 1) * row + raw + m * n.D * value
        assert (held.per_csa_boundary, held.per_hca_boundary) == (n.csa * (row + key), n.hca * row)
        assert held.per_drafter_row == row


def test_figures_of_the_specification() -> None:
    """As they stand in sections 7.1 and 7.5."""
    flash, pro = published("flash"), published("pro")
    growth = [state_bytes(flash, sizes_of(flash), cache).per_token for cache in FORMATS]
    assert growth[1:] == [6_880, 3_850.25, 3_514.25]
    assert round(state_bytes(pro, sizes_of(pro), FORMATS[2]).per_token, 1) == 5_511.4
    assert (raw_compressor_bytes(flash), raw_compressor_bytes(pro)) == (12_206_080, 18_710_528)
    assert state_bytes(flash, sizes_of(flash), FORMATS[1]).per_node == 340_992 + 32_768


@both
def test_state_is_that_of_the_contract(name: str) -> None:
    """In float32, as the graphs' inputs and outputs declare it: pools, and scratch of one node that completes no window."""
    config = published(name)
    sizes = sizes_of(config)
    pools = sum(math.prod(int(dim) for dim in t.shape) for t in contract.states(config, sizes))
    assert 4 * pools == pool_bytes(config, sizes)
    symbols = {"B": 1, "N": 1, "M": 0, "Q": 0}
    outputs = [t for t in contract.target_step(config, sizes).outputs if t.role == "scratch"]
    values = sum(math.prod(dim if isinstance(dim, int) else symbols[dim] for dim in t.shape) for t in outputs)
    assert 4 * values == state_bytes(config, sizes).per_node


def test_an_engine_that_need_not_select_keeps_no_index_keys() -> None:
    """2,048 tokens are 512 entries, the indexer's choice."""
    config = published("flash")
    assert state_bytes(config, sizes_of(config, 2048), FORMATS[1]).per_token == 21 * 256 + 20 * 8


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_flash_takes_no_memory() -> None:
    """The whole of V4-Flash in a process of its own: under 1 GB, every graph for every target."""
    command = [sys.executable, "-m", "trtllm_v4tree.cli.main", "inspect", "--config", "flash", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    facts = json.loads(done.stdout)
    assert 50e6 < facts["peak_memory"] < 1e9
    assert facts["weights"]["engine_float32"] > 1e12
    experts = 44 * 256 * 3 * 4096 * 2048
    smaller = facts["weights"]["engine_bfloat16"] - facts["weights"]["engine_bfloat16_fp4_experts"]
    assert smaller == experts * 2 - experts // 2 - experts // 32
    assert facts["experts_per_token"] == {"tensorrt": 6, "tensorrt-rtx": 256}
    assert set(facts["nodes"]) == {"v4tree", "onnxruntime", "tensorrt-rtx"}
    assert all(count > 0 for graphs in facts["nodes"].values() for count in graphs.values())


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIGS["w16"]))
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    capfd.readouterr()
    return Ran(status_of([str(a) for a in arguments]), *capfd.readouterr())


def test_a_config_file_and_its_directory(config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(config_file.read_text())
    limits = ("--max_seq_len", "512", "--max_batch_size", "3", "--max_verify_tokens", "8", "--json")
    facts: list[dict[str, Any]] = []
    for place in (config_file, tmp_path):
        ran = run(capfd, "inspect", "--config", place, *limits)
        assert (ran.status, ran.err) == (0, "")
        facts.append({k: v for k, v in json.loads(ran.out).items() if k not in ("seconds", "peak_memory")})
    assert facts[0] == facts[1]
    sizes = facts[0]["sizes"]
    assert (sizes["max_seq_len"], sizes["max_batch_size"], sizes["max_verify_tokens"]) == (512, 3, 8)


def test_tables(config_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    ran = run(capfd, "inspect", "--config", config_file)
    assert ran.status == 0
    texts = ("1 x 1,024 tokens", "target_step", "FP8 linears", "packed FP8, FP4 index", "no weight was read")
    for text in (*texts, "2 of 6 that it chose", "(3 times the work)"):
        assert text in ran.out


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((), ("exactly one of --engine_dir, --config",)),
        (("--config", "flash", "--engine_dir", "x"), ("exactly one of --engine_dir, --config",)),
        (("--config", "flash", "--contract"), ("--contract goes with --engine_dir only",)),
        (("--engine_dir", "x", "--max_seq_len", "9"), ("--max_seq_len goes with --config only",)),
        (("--config", "/nowhere"), ("/nowhere/config.json", "cannot be read")),
        (("--config", "pyproject.toml"), ("pyproject.toml", "not valid JSON")),
        (("--config", "flash", "--max_seq_len", "2000000"), ("max_seq_len=2000000", "3 to 1048576")),
        (("--config", "flash", "--max_verify_tokens", "65"), ("max_verify_tokens=65", "1 to 64")),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    fragments: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    refused(run(capfd, "inspect", *arguments), *fragments)
