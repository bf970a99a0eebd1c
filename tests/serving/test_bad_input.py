"""Bad input through every protocol: a typed error that names the field, twice in a row, and the next good request is answered."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient", reason="the extra serve is not installed")
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from .harness import KEY, Server, stream, tensor, tensors, text_of

VOCAB = 4096
CONTEXT = 2048
NAN, INF = float("nan"), float("inf")

# name -> (inputs beside the good ones, or instead of them where named; what the message must say)
TEXT_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "empty prompt": ({"text_input": ""}, ("text_input", "empty")),
    "prompt beyond the context": ({"text_input": "a b c " * 4000}, ("prompt", "2047")),
    "prompt of a megabyte": ({"text_input": "x" * (1 << 20)}, ("text_input", str(128 * CONTEXT))),
    "prompt not UTF-8": ({"text_input": b"\xff\xfe"}, ("text_input", "UTF-8")),
    "truncated UTF-8": ({"text_input": "日本".encode()[:-1]}, ("text_input", "UTF-8")),
    "max_tokens 0": ({"max_tokens": 0}, ("max_tokens", ">= 1")),
    "max_tokens negative": ({"max_tokens": -5}, ("max_tokens", ">= 1")),
    "max_tokens huge": ({"max_tokens": 2**31 - 1}, ("max_tokens", str(CONTEXT))),
    "max_tokens one too many": ({"max_tokens": CONTEXT + 1}, ("max_tokens", str(CONTEXT))),
    "max_tokens smallest integer": ({"max_tokens": -(2**31)}, ("max_tokens", ">= 1")),
    "min_tokens above max_tokens": ({"min_tokens": 9}, ("min_tokens", "4")),
    "min_tokens negative": ({"min_tokens": -1}, ("min_tokens",)),
    "temperature NaN": ({"temperature": NAN}, ("temperature", "finite")),
    "temperature infinite": ({"temperature": INF}, ("temperature", "finite")),
    "temperature negative": ({"temperature": -0.5}, ("temperature", ">= 0")),
    "top_k negative": ({"top_k": -1}, ("top_k", ">= 0")),
    "top_k huge": ({"top_k": 2**31 - 1}, ("top_k", "vocabulary")),
    "top_p above 1": ({"top_p": 1.5}, ("top_p", "<= 1")),
    "top_p negative": ({"top_p": -0.1}, ("top_p",)),
    "top_p NaN": ({"top_p": NAN}, ("top_p", "finite")),
    "min_p above 1": ({"min_p": 2.0}, ("min_p", "1")),
    "min_p NaN": ({"min_p": NAN}, ("min_p", "finite")),
    "repetition_penalty 0": ({"repetition_penalty": 0.0}, ("repetition_penalty", "> 0")),
    "repetition_penalty NaN": ({"repetition_penalty": NAN}, ("repetition_penalty",)),
    "presence_penalty 3": ({"presence_penalty": 3.0}, ("presence_penalty", "2")),
    "frequency_penalty -3": ({"frequency_penalty": -3.0}, ("frequency_penalty", "-2")),
    "frequency_penalty infinite": ({"frequency_penalty": INF}, ("frequency_penalty",)),
    "random_seed too large": ({"random_seed": 2**63}, ("random_seed", "2**63 - 1")),
    "bad word too long": ({"bad_words": ["x" * 257]}, ("bad_words", "256 characters")),
    "bad word far too long": ({"bad_words": ["x" * 100_000]}, ("bad_words", "1024")),
    "bad word not UTF-8": ({"bad_words": [b"\xc3"]}, ("bad_words", "UTF-8")),
    "too many bad words": ({"bad_words": ["x"] * 257}, ("bad_words", "at most 256")),
    "beam_width 2": ({"beam_width": 2}, ("beam_width", "1")),
    "beam_width 0": ({"beam_width": 0}, ("beam_width", "1")),
    "num_return_sequences 2": ({"num_return_sequences": 2}, ("num_return_sequences", "1")),
    "return_context_logits": ({"return_context_logits": True}, ("return_context_logits", "false")),
    "return_generation_logits": ({"return_generation_logits": True}, ("return_generation_logits", "false")),
    "length_penalty": ({"length_penalty": 2.0}, ("length_penalty", "1")),
    "stop word not UTF-8": ({"stop_words": [b"\xc3"]}, ("stop_words", "UTF-8")),
    "stop word too long": ({"stop_words": ["x" * 257]}, ("stop_words", "256")),
    "stop word far too long": ({"stop_words": ["x" * 100_000]}, ("stop_words", "1024")),
    "too many stop words": ({"stop_words": [str(i) for i in range(17)]}, ("stop_words", "16")),
    "end_id out of range": ({"end_id": 10**6}, ("end_id", "0 to")),
    "end_id -2": ({"end_id": -2}, ("end_id", "-1")),
}
SHAPES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "no text_input": (tensors(max_tokens=4), ("text_input",)),
    "no max_tokens": (tensors(text_input="a"), ("max_tokens",)),
    "no inputs": ([], ("ensemble",)),
    "text_input is int32": ([tensor("text_input", 3, "INT32"), *tensors(max_tokens=4)], ("text_input", "BYTES")),
    "max_tokens is fp32": ([*tensors(text_input="a"), tensor("max_tokens", 4.0, "FP32")], ("max_tokens", "INT32")),
    "temperature is int32": (
        [*tensors(text_input="a", max_tokens=4), tensor("temperature", 1, "INT32")],
        ("temperature", "FP32"),
    ),
    "text_input has two": ([tensor("text_input", ["a", "b"]), *tensors(max_tokens=4)], ("text_input", "shape")),
    "max_tokens has rank 1": (
        [*tensors(text_input="a"), tensor("max_tokens", np.array([4], np.int32))],
        ("max_tokens", "shape"),
    ),
    "batch of two": (
        [
            tensor("text_input", np.array([[b"a"], [b"b"]], np.object_)),
            tensor("max_tokens", np.array([[4], [4]], np.int32)),
        ],
        ("batch",),
    ),
    "unknown input": ([*tensors(text_input="a", max_tokens=4), tensor("no_such_input", 1)], ("no_such_input",)),
    "input given twice": ([*tensors(text_input="a", max_tokens=4), tensor("max_tokens", 5)], ("input",)),
}


def _text_inputs(given: dict[str, Any], client: Any = grpcclient) -> list[Any]:
    return tensors(client, **{"text_input": "Once", "max_tokens": 4, **given})


def _says(message: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in message, message


def test_enough_cases() -> None:
    assert len(TEXT_CASES) >= 40 and len(TOKEN_CASES) + len(SHAPES) >= 25 and len(OPENAI_CASES) >= 40


@pytest.mark.parametrize("name", TEXT_CASES)
def test_text_model_over_grpc(name: str, server: Server) -> None:
    given, words = TEXT_CASES[name]
    with server.grpc() as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as caught:
                list(stream(client, "ensemble", _text_inputs(given)))
            _says(caught.value.message(), ("INVALID_ARGUMENT", *words))
        assert text_of(list(stream(client, "ensemble", _text_inputs({}))))


@pytest.mark.parametrize("name", TEXT_CASES)
def test_text_model_over_http(name: str, server: Server) -> None:
    given, words = TEXT_CASES[name]
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("ensemble_unary", _text_inputs(given, httpclient))
            assert caught.value.status() == "400"
            _says(caught.value.message(), ("INVALID_ARGUMENT", *words))
        assert client.infer("ensemble_unary", _text_inputs({}, httpclient)).as_numpy("text_output").size == 1


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_types(name: str, server: Server) -> None:
    inputs, words = SHAPES[name]
    with server.grpc() as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as caught:
                list(stream(client, "ensemble", inputs))
            _says(caught.value.message(), words)
        assert text_of(list(stream(client, "ensemble", _text_inputs({}))))


_STOP = np.array
TOKEN_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "token out of range": ({"input_ids": [0, VOCAB]}, ("input_ids", "index 1", str(VOCAB - 1))),
    "token negative": ({"input_ids": [-1]}, ("input_ids", "index 0")),
    "prompt too long": ({"input_ids": [5] * CONTEXT, "input_lengths": CONTEXT}, ("input_ids", str(CONTEXT - 1))),
    "length too small": ({"input_lengths": 1}, ("input_lengths", "3")),
    "length too large": ({"input_lengths": 9}, ("input_lengths", "3")),
    "empty prompt": ({"input_ids": np.zeros((1, 0), np.int32), "input_lengths": 0}, ("input_ids",)),
    "no output": ({"request_output_len": 0}, ("request_output_len", ">= 1")),
    "output too long": ({"request_output_len": 10**6}, ("request_output_len", str(CONTEXT))),
    "top_k negative": ({"runtime_top_k": -3}, ("runtime_top_k",)),
    "top_p 2": ({"runtime_top_p": 2.0}, ("runtime_top_p",)),
    "min_length too long": ({"min_length": 99}, ("min_length",)),
    "stop of wrong shape": ({"stop_words_list": _STOP([[[1, 2, 3]]], np.int32)}, ("stop_words_list",)),
    "stop ends fall": ({"stop_words_list": _STOP([[[5, 6], [2, 1]]], np.int32)}, ("stop_words_list", "end")),
    "stop end too large": ({"stop_words_list": _STOP([[[5, 6], [3, -1]]], np.int32)}, ("stop_words_list", "end")),
    "stop token out of range": ({"stop_words_list": _STOP([[[VOCAB], [1]]], np.int32)}, ("stop_words_list",)),
    "stop without text": ({"stop_words_list": _STOP([[[0, 1], [2, -1]]], np.int32)}, ("stop_words_list", "no text")),
    "bad words of wrong shape": ({"bad_words_list": _STOP([[[1, 2, 3]]], np.int32)}, ("bad_words_list", "shape")),
    "bad words ends fall": ({"bad_words_list": _STOP([[[5, 6], [2, 1]]], np.int32)}, ("bad_words_list", "end")),
    "bad word out of range": (
        {"bad_words_list": _STOP([[[VOCAB], [1]]], np.int32)},
        ("bad_words_list", str(VOCAB - 1)),
    ),
    "too many bad words": (
        {"bad_words_list": _STOP([[[5] * 257, [*range(1, 258)]]], np.int32)},
        ("bad_words_list", "at most 256"),
    ),
    "bad word too long": (
        {"bad_words_list": _STOP([[[5] * 257, [257] + [-1] * 256]], np.int32)},
        ("bad_words_list", "256 token ids"),
    ),
    "beam_width": ({"beam_width": 4}, ("beam_width",)),
    "len_penalty": ({"len_penalty": 0.5}, ("len_penalty",)),
}


@pytest.mark.parametrize("name", TOKEN_CASES)
def test_token_model_over_grpc(name: str, server: Server) -> None:
    given, words = TOKEN_CASES[name]
    good = {"input_ids": [0, 5, 6], "input_lengths": 3, "request_output_len": 3}
    with server.grpc() as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException) as caught:
                list(stream(client, "tensorrt_llm", tensors(**{**good, **given})))
            _says(caught.value.message(), words)
        assert len(list(stream(client, "tensorrt_llm", tensors(**good)))) == 1


def test_unknown_model_version_and_name(server: Server) -> None:
    with server.grpc() as client:
        for options in ({"model_version": "7"}, {"model_version": "x"}):
            for _ in range(2):
                with pytest.raises(InferenceServerException):
                    list(stream(client, "ensemble", _text_inputs({}), **options))
        with pytest.raises(InferenceServerException):
            list(stream(client, "no_such_model", _text_inputs({})))
        with pytest.raises(InferenceServerException, match="stream must be false"):
            client.infer("ensemble_unary", _text_inputs({"stream": True}))
        with pytest.raises(InferenceServerException, match="request_id"):
            list(stream(client, "ensemble", _text_inputs({}), request_id="no blanks allowed"))
        assert text_of(list(stream(client, "ensemble", _text_inputs({}))))


def _post(url: str, data: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# Triton itself reads these bodies; it answers 500 where its parser fails
GENERATE_BODIES = {
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
    "no fields": b"{}",
    "text_input null": b'{"text_input": null, "max_tokens": 4}',
    "text_input number": b'{"text_input": 3, "max_tokens": 4}',
    "text_input object": b'{"text_input": {}, "max_tokens": 4}',
    "max_tokens text": b'{"text_input": "a", "max_tokens": "four"}',
    "max_tokens float": b'{"text_input": "a", "max_tokens": 4.5}',
    "max_tokens beyond int64": b'{"text_input": "a", "max_tokens": 99999999999999999999}',
    "bad surrogate": b'{"text_input": "\\ud800", "max_tokens": 4}',
    "raw bytes": b'{"text_input": "\xff\xfe", "max_tokens": 4}',
    "nested": b'{"text_input": [["a"]], "max_tokens": [[[4]], 5]}',
}


@pytest.mark.parametrize("name", GENERATE_BODIES)
def test_bodies_of_generate(name: str, server: Server) -> None:
    url = server.url("/v2/models/ensemble/generate")
    for _ in range(2):
        status, answer = _post(url, GENERATE_BODIES[name])
        assert status in (400, 500) and answer["error"]
    assert _post(url, b'{"text_input": "Once", "max_tokens": 2}')[0] == 200


# field changes to a good body, or a raw body; status; words
OPENAI_CASES: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "not JSON": (b"{", 400, ("JSON",)),
    "empty body": (b"", 400, ("JSON",)),
    "a list": (b"[1]", 400, ("object",)),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, ("UTF-8",)),
    "deeply nested": (b"[" * 100_000, 400, ("JSON",)),
    "a number of 5,000 digits": (b'{"seed": ' + b"9" * 5000 + b"}", 400, ("JSON",)),
    "body too large": (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413, (str(4 << 20),)),
    "unknown field": ({"frobnicate": 1}, 400, ("frobnicate",)),
    "no model": ({"model": None}, 400, ("model",)),
    "unknown model": ({"model": "gpt-4"}, 404, ("gpt-4", "does not exist")),
    "model number": ({"model": 3}, 400, ("model",)),
    "empty prompt": ({"prompt": ""}, 400, ("prompt", "empty")),
    "empty prompt list": ({"prompt": []}, 400, ("prompt",)),
    "prompt null": ({"prompt": None}, 400, ("prompt",)),
    "prompt mixed": ({"prompt": ["a", 1]}, 400, ("prompt", "index 0")),
    "prompt object": ({"prompt": {}}, 400, ("prompt",)),
    "prompt token too large": ({"prompt": [0, VOCAB]}, 400, ("prompt", "index 1", str(VOCAB - 1))),
    "prompt token negative": ({"prompt": [-1]}, 400, ("prompt", "index 0")),
    "prompt token true": ({"prompt": [True]}, 400, ("prompt", "index 0")),
    "prompt token float": ({"prompt": [1.5]}, 400, ("prompt", "index 0")),
    "prompt too long": ({"prompt": [5] * CONTEXT}, 400, ("prompt", str(CONTEXT - 1))),
    "prompt text too long": ({"prompt": "a b c " * 4000}, 400, ("prompt", str(CONTEXT - 1))),
    "prompt lone surrogate": (b'{"model": "engine", "prompt": "\\ud800"}', 400, ("prompt", "surrogate")),
    "too many prompts": ({"prompt": ["a"] * 17}, 400, ("prompt", "16")),
    "max_tokens 0": ({"max_tokens": 0}, 400, ("max_tokens", ">= 1")),
    "max_tokens negative": ({"max_tokens": -1}, 400, ("max_tokens", ">= 1")),
    "max_tokens huge": ({"max_tokens": 10**18}, 400, ("max_tokens", str(CONTEXT))),
    "max_tokens text": ({"max_tokens": "4"}, 400, ("max_tokens",)),
    "max_tokens float": ({"max_tokens": 4.5}, 400, ("max_tokens",)),
    "max_tokens true": ({"max_tokens": True}, 400, ("max_tokens",)),
    "temperature NaN": (b'{"model": "engine", "prompt": "a", "temperature": NaN}', 400, ("temperature", "finite")),
    "temperature text": ({"temperature": "hot"}, 400, ("temperature",)),
    "temperature negative": ({"temperature": -1}, 400, ("temperature", ">= 0")),
    "top_p 0": ({"top_p": 0}, 400, ("top_p", "> 0")),
    "top_p 2": ({"top_p": 2}, 400, ("top_p", "<= 1")),
    "top_k negative": ({"top_k": -1}, 400, ("top_k",)),
    "top_k huge": ({"top_k": 10**9}, 400, ("top_k", "vocabulary")),
    "min_p 2": ({"min_p": 2}, 400, ("min_p",)),
    "presence_penalty 9": ({"presence_penalty": 9}, 400, ("presence_penalty", "2")),
    "frequency_penalty text": ({"frequency_penalty": "x"}, 400, ("frequency_penalty",)),
    "repetition_penalty 0": ({"repetition_penalty": 0}, 400, ("repetition_penalty",)),
    "seed negative": ({"seed": -1}, 400, ("seed",)),
    "seed too large": ({"seed": 2**63}, 400, ("seed",)),
    "seed text": ({"seed": "s"}, 400, ("seed",)),
    "stop number": ({"stop": 3}, 400, ("stop",)),
    "stop list of numbers": ({"stop": [3]}, 400, ("stop",)),
    "stop empty string": ({"stop": [""]}, 400, ("stop",)),
    "stop too many": ({"stop": ["x"] * 17}, 400, ("stop", "16")),
    "stop too long": ({"stop": "x" * 257}, 400, ("stop", "256")),
    "bad_words number": ({"bad_words": 3}, 400, ("bad_words",)),
    "bad_words empty string": ({"bad_words": [""]}, 400, ("bad_words", "1 to 256")),
    "bad_words too many": ({"bad_words": ["x"] * 257}, 400, ("bad_words", "at most 256")),
    "bad_words lone surrogate": (
        b'{"model": "engine", "prompt": "a", "bad_words": ["\\ud800"]}',
        400,
        ("bad_words", "characters"),
    ),
    "bad_words_list": ({"bad_words_list": [[5]]}, 400, ("bad_words_list", "not a field")),
    "stop_token_ids out of range": ({"stop_token_ids": [VOCAB]}, 400, ("stop_token_ids", str(VOCAB - 1))),
    "n 0": ({"n": 0}, 400, ("n ", "16")),
    "n 17": ({"n": 17}, 400, ("n ", "16")),
    "n times prompts": ({"n": 9, "prompt": ["a", "b"]}, 400, ("n ", "18", "16")),
    "best_of": ({"best_of": 3}, 400, ("best_of",)),
    "logprobs 21": ({"logprobs": 21}, 400, ("logprobs", "20")),
    "logprobs true": ({"logprobs": True}, 400, ("logprobs",)),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, 400, ("echo",)),
    "echo text": ({"echo": "yes"}, 400, ("echo", "true or false")),
    "suffix": ({"suffix": "end"}, 400, ("suffix", "not supported")),
    "logit_bias": ({"logit_bias": {"5": 1}}, 400, ("logit_bias", "not supported")),
    "stream text": ({"stream": "yes"}, 400, ("stream", "true or false")),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, 400, ("stream_options",)),
    "stream_options unknown": ({"stream": True, "stream_options": {"x": 1}}, 400, ("stream_options",)),
    "ignore_eos number": ({"ignore_eos": 1}, 400, ("ignore_eos",)),
    "min_tokens too many": ({"min_tokens": 99}, 400, ("min_tokens",)),
    "streamed and refused": ({"stream": True, "prompt": "a b c " * 4000}, 400, ("prompt",)),
}


def _refused_twice(url: str, data: bytes, status: int, words: tuple[str, ...]) -> None:
    for _ in range(2):
        got, answer = _post(url, data, Authorization=f"Bearer {KEY}")
        assert got == status, answer
        assert answer["error"]["type"] == "invalid_request_error"
        _says(answer["error"]["message"], words)


@pytest.mark.parametrize("name", OPENAI_CASES)
def test_openai_completions(name: str, server: Server) -> None:
    change, status, words = OPENAI_CASES[name]
    good = {"model": "engine", "prompt": "Once", "max_tokens": 2}
    url = server.openai_url("/v1/completions")
    data = change if isinstance(change, bytes) else json.dumps({**good, **change}).encode()
    _refused_twice(url, data, status, words)
    assert _post(url, json.dumps(good).encode(), Authorization=f"Bearer {KEY}")[0] == 200


CHAT_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no messages": ({"messages": None}, ("messages",)),
    "empty messages": ({"messages": []}, ("messages",)),
    "message is text": ({"messages": ["hi"]}, ("messages[0]",)),
    "unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, ("messages[0].role",)),
    "no role": ({"messages": [{"content": "x"}]}, ("messages[0].role",)),
    "no content": ({"messages": [{"role": "user"}]}, ("messages[0].content",)),
    "image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        ("messages[0].content",),
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
        ("messages[0].tool_calls",),
    ),
    "too many messages": ({"messages": [{"role": "user", "content": "x"}] * 1025}, ("messages", "1024")),
    "tools": ({"tools": [{"type": "function"}]}, ("tools", "not supported")),
    "json mode": ({"response_format": {"type": "json_object"}}, ("response_format", "not supported")),
    "two lengths": ({"max_tokens": 1, "max_completion_tokens": 2}, ("max_tokens",)),
    "top_logprobs alone": ({"top_logprobs": 2}, ("top_logprobs",)),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, ("top_logprobs", "20")),
    "logprobs number": ({"logprobs": 2}, ("logprobs", "true or false")),
    "audio": ({"modalities": ["audio"]}, ("modalities",)),
    "prompt": ({"prompt": "x"}, ("prompt",)),
}


@pytest.mark.parametrize("name", CHAT_CASES)
def test_openai_chat(name: str, server: Server) -> None:
    change, words = CHAT_CASES[name]
    good = {"model": "engine", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2}
    url = server.openai_url("/v1/chat/completions")
    _refused_twice(url, json.dumps({**good, **change}).encode(), 400, words)
    assert _post(url, json.dumps(good).encode(), Authorization=f"Bearer {KEY}")[0] == 200


def test_openai_paths_and_methods(server: Server) -> None:
    auth = {"Authorization": f"Bearer {KEY}"}
    assert _post(server.openai_url("/v1/nothing"), b"{}", **auth)[0] == 404
    assert _post(server.openai_url("/v1/models"), b"{}", **auth)[0] == 405
    assert _post(server.openai_url("/v1/completions"), b"{}", **{**auth, "Content-Type": "text/plain"})[0] == 415
    assert _post(server.openai_url("/v1/completions"), b"{}", **{**auth, "X-Request-Id": "no blanks"})[0] == 400


def test_closed_apis_of_triton(server: Server) -> None:
    """Those that would take paths or memory keys from requests."""
    for path, body in (
        ("/v2/repository/models/ensemble/load", b"{}"),
        ("/v2/systemsharedmemory/region/x/register", b'{"key": "/x", "offset": 0, "byte_size": 8}'),
        ("/v2/logging", b'{"log_file": "/tmp/x"}'),
        ("/v2/trace/setting", b'{"trace_file": "/tmp/x"}'),
    ):
        request = urllib.request.Request(server.url(path), body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 403
