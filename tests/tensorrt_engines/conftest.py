"""Whole engines on a GPU with TensorRT: `pytest tests/tensorrt_engines`. Everything is skipped, with the reason, where that is missing."""

from __future__ import annotations

import pytest

from trtllm_v4tree.compiler import tensorrt_plan
from trtllm_v4tree.errors import ConfigError


@pytest.fixture(scope="session")
def capability() -> str:
    """Compute capability of the GPU here, or a skip that says what is missing."""
    try:
        tensorrt_plan.load_tensorrt()
        return tensorrt_plan.local_capability(None)
    except ConfigError as error:
        pytest.skip(str(error))
