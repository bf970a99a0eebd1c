"""Tree-structured speculative decoding for DeepSeek-V4: network definition, compiler and runtime."""

from trtllm_v4tree.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineFormatError,
    InputError,
    RequestError,
    V4TreeError,
)
from trtllm_v4tree.llm import LLM, CompletionOutput, RequestOutput
from trtllm_v4tree.runtime.params import SamplingParams

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineFormatError",
    "InputError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "V4TreeError",
]
