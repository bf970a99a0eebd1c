"""Engines built once per run: the tiny random checkpoints of `oracle.tiny` and, where it is present, v4-nano."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor

from .harness import Built, Driver
from .oracle.reference import Oracle
from .oracle.tiny import CONFIGS, write_tiny

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = BuildOptions(
    max_batch_size=4,
    max_seq_len=640,
    max_verify_tokens=16,
    prefill_chunk=64,
    draft_shapes=((1, 1), (3, 2), (4, 1), (3, 3)),
    draft_dtype="float32",
)


def _built(name: str, checkpoint: Path, engine: Path, kernels: str = "auto") -> Built:
    manifest = build(checkpoint, engine, replace(OPTIONS, cpu_kernels=kernels))
    executor = OnnxRuntimeExecutor(engine, manifest, threads=1)
    return Built(name, checkpoint, engine, Driver(executor), Oracle(checkpoint))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """Checkpoint, engine, driver and oracle of a tiny config by name; built at the first use."""

    @cache
    def make(name: str, kernels: str = "auto") -> Built:
        root = tmp_path_factory.mktemp(name)
        return _built(name, write_tiny(root / "checkpoint", name, seed=1), root / "engine", kernels)

    return make


@pytest.fixture(scope="session", params=list(CONFIGS))
def built(request: pytest.FixtureRequest, tiny: Callable[[str], Built]) -> Built:
    """Every tiny config in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    """The v4-nano checkpoint, or a skip."""
    for place in (ROOT / "models" / "v4-nano", ROOT.parent / "shared" / "models" / "v4-nano"):
        if place.is_dir():
            return place
    pytest.skip("v4-nano is neither in models/ nor in ../shared/models/")


@pytest.fixture(scope="session")
def nano(nano_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """v4-nano, its engine and its oracle."""
    return _built("nano", nano_dir, tmp_path_factory.mktemp("nano") / "engine")
