"""The kernel tests on a GPU with torch and triton (TensorRT is not needed): `pytest tests/gpu --confcutdir=tests/gpu`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins"))


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skips without a GPU or under the interpreter; else every operand of the test lives on the GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process: run pytest tests/gpu by itself")
    from tests.plugins import cases

    monkeypatch.setattr(cases, "DEVICE", "cuda")
    yield
    torch.cuda.synchronize()
