"""Mapping of Triton tensors and OpenAI JSON to SamplingParams; no server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.serving import wire
from trtllm_v4tree.serving.events import ServingError, Submission
from trtllm_v4tree.serving.launch import prepare_repository, repository_template, with_parameters
from trtllm_v4tree.serving.openai_requests import chat_request, completion_request
from trtllm_v4tree.serving.requests import Limits
from trtllm_v4tree.serving.triton_models import Settings
from trtllm_v4tree.serving.triton_requests import text_request, token_request

LIMITS = Limits(max_seq_len=128, vocab_size=100, eos_token_ids=(1,))


def text(**more: Any) -> Any:
    return text_request(
        {"text_input": np.array([[b"hi"]], object), "max_tokens": np.array([[4]], np.int32), **more}, LIMITS, "id"
    ).submission.params


def one(value: Any, dtype: Any) -> Any:
    return np.array([[value]], dtype)


def test_triton_defaults_are_those_of_tensorrt_llm() -> None:
    assert text().temperature == 0.0
    assert text(top_p=one(0.9, np.float32)).temperature == 1.0
    assert text(top_p=one(0.0, np.float32)).top_p == 1.0
    assert text(stop_words=np.array([[b""]], object)).stop == ()
    assert text(bad_words=np.array([[b""]], object)).bad_words == ()
    assert text(bad_words=np.array([["é".encode(), b"no"]], object)).bad_words == ("é", "no")
    assert text(end_id=one(1, np.int32)).ignore_eos is False
    assert text(end_id=one(-1, np.int32)).ignore_eos is True
    ended = text(end_id=one(7, np.int32))
    assert ended.ignore_eos and ended.stop_token_ids == (7,)


def test_stop_words_list() -> None:
    tensors = {
        "input_ids": np.array([[5]], np.int32),
        "request_output_len": one(4, np.int32),
        "stop_words_list": np.array([[[7, 8, 9], [1, 3, -1]]], np.int32),
    }
    params = token_request(tensors, LIMITS, "id", decode=lambda ids: "".join(map(str, ids))).submission.params
    assert params.stop_token_ids == (7,) and params.stop == ("89",)
    with pytest.raises(ServingError, match="stop_words_list"):
        token_request(tensors, LIMITS, "id", decode=None)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=6), st.integers(0, 3))
def test_bad_words_list_is_tensorrt_llms_form(words: list[list[int]], padding: int) -> None:
    """Written as TensorRT-LLM's clients do: tokens padded with 0, ends with -1; none is [[0], [-1]]."""
    flat = [t for w in words for t in w]
    ends = np.cumsum([len(w) for w in words]).tolist() if words else []
    width = max(1, len(flat)) + padding
    table = [flat + [0] * (width - len(flat)), ends + [-1] * (width - len(ends))]
    tensors = {
        "input_ids": np.array([[5]], np.int32),
        "request_output_len": one(4, np.int32),
        "bad_words_list": np.array([table], np.int32),
    }
    params = token_request(tensors, LIMITS, "id").submission.params
    assert params.bad_words_list == tuple(map(tuple, words)) and params.stop_token_ids == ()


def test_openai_defaults() -> None:
    asked = completion_request({"model": "m", "prompt": "x"}, LIMITS, "id")
    assert (
        asked.generations[0].submission.params.max_tokens == 16
        and asked.generations[0].submission.params.temperature == 1.0
    )
    chat = chat_request({"model": "m", "messages": [{"role": "developer", "content": "x"}]}, LIMITS, "id")
    assert chat.generations[0].submission.params.max_tokens == 128 and chat.generations[0].submission.prompt == [
        ("system", "x")
    ]
    seeds = [
        g.submission.params.seed
        for g in completion_request({"model": "m", "prompt": ["x", "y"], "n": 2, "seed": 3}, LIMITS, "id").generations
    ]
    assert seeds == [3, 4, 3, 4]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda c: st.lists(c, max_size=3),
    max_leaves=5,
)
_FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "n",
    "logprobs",
    "max_tokens",
    "min_tokens",
    "prompt",
    "echo",
    "stream",
    "presence_penalty",
    "ignore_eos",
]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_any_json_is_answered_or_refused_with_a_serving_error(fields: dict[str, Any]) -> None:
    try:
        asked = completion_request({"model": "m", "prompt": "x", **fields}, LIMITS, "id")
    except ServingError as error:
        assert error.message and len(error.message) < 1000
        return
    for generation in asked.generations:
        assert (
            Submission.from_json(wire.parse(wire.frame(generation.submission.to_json())[4:])) == generation.submission
        )


@given(st.binary(max_size=64))
def test_frames_that_are_not_ours_are_refused(data: bytes) -> None:
    try:
        wire.parse(data)
    except wire.WireError:
        return
    with pytest.raises((ServingError, KeyError)):
        Submission.from_json(wire.parse(data))


def test_parameters_are_quoted() -> None:
    config = (repository_template() / "tensorrt_llm" / "config.pbtxt").read_text()
    written = with_parameters(config, {"engine_dir": '/a "b"\\c', "no_such": "x"})
    assert 'string_value: "/a \\"b\\"\\\\c"' in written and "no_such" not in written


def test_parameters_of_the_owner_are_checked() -> None:
    def settings(**given: str) -> Settings:
        named = {"engine_dir": "/x", "engine_socket": "/x/s", **given}
        return Settings.of({"parameters": {name: {"string_value": value} for name, value in named.items()}})

    assert settings().max_num_tokens == 0 and settings(max_num_tokens="512").max_num_tokens == 512
    for value in ("-1", "many", str(1 << 30)):
        with pytest.raises(ConfigError, match="max_num_tokens"):
            settings(max_num_tokens=value)


def test_a_repository_is_prepared(tmp_path: Any) -> None:
    target = prepare_repository(tmp_path / "models", {"engine_dir": "/x"})
    for model in ("tensorrt_llm", "ensemble", "ensemble_unary"):
        assert (
            '"engine_dir"              value: { string_value: "/x" }' in (target / model / "config.pbtxt").read_text()
        )
        assert (target / model / "1" / "model.py").is_file()


def test_the_sockets_directory_must_be_private(tmp_path: Any) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(wire.WireError, match="0700"):
        wire.private_directory(tmp_path)
