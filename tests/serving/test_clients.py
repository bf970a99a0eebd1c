"""Clients that nobody here wrote get the text of `LLM.generate`: alone, together, streamed or not, with every speculation."""

from __future__ import annotations

import concurrent.futures
import json
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tritonclient", reason="the extra serve is not installed")
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from trtllm_v4tree import LLM, SamplingParams

from .harness import KEY, Server, stream, tensors, text_of

MODES = ("none", "s4_k1_d5", "s3_k2_d6")
PROMPTS = [
    "Once upon a time", "What is 2 + 2?", "The cat", "A train leaves", "Tom has 3 apples.", "In the morning", "x", "Dear Sir",
    "Natalia sold clips", "How many hours", "She said", "1, 2, 3,", "The price is", "If a dog", "日本", "Write a poem",
]  # fmt: skip


def _asked(index: int) -> dict[str, object]:
    """Sampling of prompt `index`: some greedy, some with a seed and filters."""
    if index % 2 == 0:
        return {"max_tokens": 24, "temperature": 0.0}
    return {"max_tokens": 24, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": index}


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> list[str]:
    """Text of each prompt from the Python API, one at a time."""
    llm = LLM(engine_dir, threads=1)
    return [llm.generate(p, SamplingParams(**_asked(i)))[0].outputs[0].text for i, p in enumerate(PROMPTS)]


def _tensors(index: int, client: object = grpcclient, **more: object) -> list[object]:
    asked = {"random_seed" if k == "seed" else k: v for k, v in _asked(index).items()}
    return tensors(client, text_input=PROMPTS[index], **asked, **more)


@pytest.mark.parametrize("mode", MODES)
def test_grpc_streams_equal_the_python_api_alone_and_together(
    mode: str, server_of: Callable[[str], Server], expected: list[str]
) -> None:
    server = server_of(mode)

    def one(index: int) -> str:
        with server.grpc() as client:
            return text_of(list(stream(client, "ensemble", _tensors(index, stream=True))))

    assert [one(i) for i in (0, 1)] == expected[:2]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == expected


def test_grpc_stream_comes_in_parts_with_an_honest_final_flag(server: Server, expected: list[str]) -> None:
    with server.grpc() as client:
        results = list(stream(client, "ensemble", _tensors(0, stream=True), request_id="my-id"))
    reasons = [r.as_numpy("finish_reason").item().decode() for r in results]
    assert len(results) > 1 and reasons == [""] * (len(results) - 1) + ["length"]
    assert results[-1].as_numpy("completion_tokens").item() == 24
    assert results[-1].get_response().id == "my-id"
    assert '"request_id": "my-id"' in server.log.read_text()


def test_clients_that_read_late_get_the_whole_text_and_hold_up_nobody(server: Server, engine_dir: Path) -> None:
    params = SamplingParams(max_tokens=1900, temperature=0.0, ignore_eos=True)
    text = LLM(engine_dir, threads=1).generate(PROMPTS[0], params)[0].outputs[0].text
    late = threading.Event()
    results: queue.Queue[object] = queue.Queue()

    def callback(result: object, error: object) -> None:
        late.wait(120)  # holds up the only thread that reads this stream
        results.put(error or result)

    before = server.metrics()["v4tree_finished_total"]
    with server.grpc() as grpc, _openai_socket(server, PROMPTS[0], 1900) as sse:
        grpc.start_stream(callback)
        inputs = tensors(text_input=PROMPTS[0], max_tokens=1900, temperature=0.0, end_id=-1, stream=True)
        grpc.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        with server.grpc() as other:
            assert text_of(list(stream(other, "ensemble", tensors(text_input="x", max_tokens=4))))
        deadline = time.monotonic() + 120
        while server.metrics()["v4tree_finished_total"] < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        late.set()
        read = [results.get(timeout=60)]
        while not read[-1].get_response().parameters["triton_final_response"].bool_param:  # type: ignore[attr-defined]
            read.append(results.get(timeout=60))
        assert text_of(read) == text  # type: ignore[arg-type]
        events = [json.loads(line[6:]) for line in sse.makefile("rb") if line.startswith(b"data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == text


def _openai_socket(server: Server, prompt: str, max_tokens: int) -> socket.socket:
    """A streamed completion that nobody reads yet, with little room in the kernel for what it sends."""
    body = {"model": "engine", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.openai_port))
    fields = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\nConnection: close"
    client.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


def test_token_model_by_tensorrt_llms_names(server: Server, engine_dir: Path) -> None:
    want = (
        LLM(engine_dir, threads=1)
        .generate({"prompt_token_ids": [0, 5, 6, 7]}, SamplingParams(max_tokens=9, temperature=0.0, logprobs=0))[0]
        .outputs[0]
    )
    inputs = {
        "input_ids": [0, 5, 6, 7],
        "input_lengths": 4,
        "request_output_len": 9,
        "return_log_probs": True,
        "beam_width": 1,
    }
    with server.grpc() as client:
        parts = list(stream(client, "tensorrt_llm", tensors(streaming=True, **inputs)))
        [whole] = list(stream(client, "tensorrt_llm", tensors(**inputs)))
    ids = [t for r in parts for t in r.as_numpy("output_ids").reshape(-1).tolist()]
    assert ids == want.token_ids == whole.as_numpy("output_ids").reshape(-1).tolist()
    assert sum(r.as_numpy("sequence_length").item() for r in parts) == 9
    chosen = [p.chosen for p in want.logprobs or []]
    np.testing.assert_allclose(whole.as_numpy("output_log_probs").reshape(-1), chosen, atol=1e-3)
    np.testing.assert_allclose(whole.as_numpy("cum_log_probs").item(), sum(chosen), atol=1e-3)


def test_stop_sequences_and_end_id(server: Server) -> None:
    with server.grpc() as client:

        def ids(**more: object) -> list[int]:
            [whole] = list(
                stream(client, "tensorrt_llm", tensors(input_ids=[0, 5, 6, 7], request_output_len=12, **more))
            )
            return whole.as_numpy("output_ids").reshape(-1).tolist()

        free = ids(end_id=-1)
        stop = np.array([[[free[4]], [1]]], np.int32)
        assert ids(stop_words_list=stop, end_id=-1) == free[: free.index(free[4]) + 1]
        assert ids(end_id=free[6]) == free[: free.index(free[6]) + 1]


def test_bad_words_are_those_of_the_python_api(server: Server, engine_dir: Path, expected: list[str]) -> None:
    """Texts and token sequences taken from the free output; each protocol gives the text of `LLM.generate`."""
    llm, options = LLM(engine_dir, threads=1), SamplingParams(max_tokens=24, temperature=0.0)
    words = [w for w in expected[0].split() if w.isalpha()][:2]
    want = llm.generate(PROMPTS[0], replace(options, bad_words=words))[0].outputs[0].text
    assert want != expected[0] and not set(words) & set(want.split())
    with server.grpc() as client:
        assert text_of(list(stream(client, "ensemble", _tensors(0, stream=True, bad_words=words)))) == want
        assert text_of([client.infer("ensemble_unary", _tensors(0, bad_words=words))]) == want
        inputs = {"input_ids": [0, 5, 6, 7], "request_output_len": 12, "end_id": -1}
        free = _output_ids(client, **inputs)
        sequences = np.array([[[*free[2:4], free[7], 0], [2, 3, -1, -1]]], np.int32)
        got = _output_ids(client, **inputs, bad_words_list=sequences)
    params = replace(options, max_tokens=12, ignore_eos=True, bad_words_list=[free[2:4], free[7:8]])
    assert got == llm.generate({"prompt_token_ids": inputs["input_ids"]}, params)[0].outputs[0].token_ids != free
    body = {"text_input": PROMPTS[0], "max_tokens": 24, "temperature": 0, "bad_words": words}
    assert json.loads(_curl(server.url("/v2/models/ensemble/generate"), body))["text_output"] == want


def _output_ids(client: grpcclient.InferenceServerClient, **inputs: object) -> list[int]:
    [whole] = list(stream(client, "tensorrt_llm", tensors(**inputs)))
    return whole.as_numpy("output_ids").reshape(-1).tolist()


def test_auto_gives_the_same_text(server_of: Callable[[str], Server], expected: list[str]) -> None:
    server = server_of("auto")

    def one(index: int) -> str:
        with server.grpc() as client:
            return text_of(list(stream(client, "ensemble", _tensors(index, stream=True))))

    for _ in range(2):  # it learns from the first
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert list(pool.map(one, range(16))) == expected


def test_deterministic_gives_the_same_token_ids(start: Callable[..., Server], engine_dir: Path) -> None:
    """Alone and among 16, plain in the Python API and with a tree on the server: equal ids, not only equal text."""
    server = start("--speculation", "s3_k2_d6", "--deterministic")
    llm = LLM(engine_dir, threads=1, deterministic=True)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 4000, int(n)).tolist() for n in rng.integers(1, 200, 16)]
    params = [SamplingParams(max_tokens=20, temperature=0.7, seed=i, ignore_eos=True) for i in range(16)]
    want = [
        llm.generate({"prompt_token_ids": p}, q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)
    ]

    def one(index: int) -> list[int]:
        sampling = {"temperature": 0.7, "random_seed": index, "end_id": -1}
        with server.grpc() as client:
            return _output_ids(client, input_ids=prompts[index], request_output_len=20, **sampling)

    assert one(0) == want[0]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == want
    assert server.stop() == 0


def test_exclude_input_in_output(server: Server, expected: list[str]) -> None:
    with server.grpc() as client:
        whole = text_of(list(stream(client, "ensemble", _tensors(0, exclude_input_in_output=False))))
    assert whole == PROMPTS[0] + expected[0]


def test_unary_clients(server: Server, expected: list[str]) -> None:
    with server.grpc() as client:
        assert text_of([client.infer("ensemble_unary", _tensors(1))]) == expected[1]
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}", concurrency=8) as http:
        assert http.is_server_ready() and http.is_model_ready("ensemble") and http.is_model_ready("tensorrt_llm")
        waiting = [http.async_infer("ensemble_unary", _tensors(i, httpclient)) for i in range(8)]
        got = [w.get_result().as_numpy("text_output").reshape(-1)[0].decode() for w in waiting]
        assert got == expected[:8]


def _curl(url: str, body: object, *options: str) -> str:
    data = body if isinstance(body, str) else json.dumps(body)
    return subprocess.run(
        ["curl", "-sS", "-N", "-m", "60", *options, "-d", data, url], check=True, capture_output=True, text=True
    ).stdout


def test_curl_generate_and_generate_stream(server: Server, expected: list[str]) -> None:
    body = {"text_input": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    assert json.loads(_curl(server.url("/v2/models/ensemble/generate"), body))["text_output"] == expected[0]
    lines = _curl(server.url("/v2/models/ensemble/generate_stream"), {**body, "stream": True}).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(e["text_output"] for e in events) == expected[0]
    assert len(events) > 3 and events[-1]["finish_reason"] == "length"


def test_stop_words_are_never_shown(server: Server, expected: list[str]) -> None:
    stop = expected[0][9:14]
    body = {"text_input": PROMPTS[0], "max_tokens": 24, "stop_words": ["@@@", stop], "stream": True}
    lines = _curl(server.url("/v2/models/ensemble/generate_stream"), body).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(e["text_output"] for e in events) == expected[0][: expected[0].index(stop)]
    assert events[-1]["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def client(server: Server) -> object:
    import openai

    return openai.OpenAI(base_url=server.openai_url("/v1"), api_key=KEY, max_retries=0)


def test_openai_completions(client: object, expected: list[str]) -> None:
    model = client.models.list().data[0].id  # type: ignore[attr-defined]
    assert client.models.retrieve(model).id == model  # type: ignore[attr-defined]
    create = client.completions.create  # type: ignore[attr-defined]
    whole = create(model=model, prompt=PROMPTS[0], max_tokens=24, temperature=0, logprobs=2)
    assert whole.choices[0].text == expected[0] and whole.usage.completion_tokens == 24
    assert len(whole.choices[0].logprobs.tokens) == 24 == len(whole.choices[0].logprobs.top_logprobs)
    assert "".join(whole.choices[0].logprobs.tokens) == expected[0]
    parts = list(
        create(
            model=model,
            prompt=PROMPTS[0],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(p.choices[0].text for p in parts if p.choices) == expected[0]
    assert parts[-1].usage.completion_tokens == 24 and parts[-2].choices[0].finish_reason == "length"


def test_openai_many_choices_and_echo(client: object, expected: list[str]) -> None:
    model = client.models.list().data[0].id  # type: ignore[attr-defined]
    create = client.completions.create  # type: ignore[attr-defined]
    many = create(model=model, prompt=[PROMPTS[0], PROMPTS[2]], n=2, max_tokens=24, temperature=0, echo=True)
    assert [c.text for c in many.choices] == [PROMPTS[i] + expected[i] for i in (0, 0, 2, 2)]
    assert [c.index for c in many.choices] == [0, 1, 2, 3] and many.usage.completion_tokens == 96
    seeded = create(
        model=model, prompt=PROMPTS[1], n=2, max_tokens=24, temperature=0.8, top_p=0.9, seed=1, extra_body={"top_k": 20}
    )
    assert seeded.choices[0].text == expected[1] != seeded.choices[1].text
    word = next(w for w in expected[0].split() if w.isalpha())
    without = create(model=model, prompt=PROMPTS[0], max_tokens=24, temperature=0, extra_body={"bad_words": [word]})
    assert word not in without.choices[0].text.split() and without.choices[0].text != expected[0]


def test_openai_chat(client: object, engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.chat([("system", "Be brief."), ("user", "What is 2 + 2?")])
    want = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=20, temperature=0.7, seed=5))[0].outputs[0]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
    ]
    model = client.models.list().data[0].id  # type: ignore[attr-defined]
    create = client.chat.completions.create  # type: ignore[attr-defined]
    whole = create(
        model=model, messages=messages, max_completion_tokens=20, temperature=0.7, seed=5, logprobs=True, top_logprobs=3
    )
    assert whole.choices[0].message.content == want.text and whole.choices[0].finish_reason == want.finish_reason
    assert [len(row.top_logprobs) for row in whole.choices[0].logprobs.content] == [3] * len(want.token_ids)
    parts = list(create(model=model, messages=messages, max_tokens=20, temperature=0.7, seed=5, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == want.text


def test_openai_needs_the_key(server: Server) -> None:
    import openai

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.openai_url("/v1"), api_key="wrong", max_retries=0).models.list()
    assert json.loads(_curl(server.openai_url("/v1/completions"), {}))["error"]["code"] == "invalid_api_key"


def test_metrics_are_on_tritons_endpoint(server: Server) -> None:
    before = server.wait_idle()
    _curl(server.url("/v2/models/ensemble/generate"), {"text_input": PROMPTS[0], "max_tokens": 24})
    after = server.wait_idle()
    grown = {name: after[name] - before[name] for name in before}
    assert (
        grown["v4tree_requests_total"] == grown["v4tree_finished_total"] == 1
        and grown["v4tree_emitted_tokens_total"] == 24
    )
    assert grown["v4tree_round_tokens_total"] == 23 and after["v4tree_ready"] == 1
    depths = sum(v for name, v in grown.items() if name.startswith("v4tree_accepted_depth_total"))
    assert depths == grown["v4tree_round_tokens_total"]
    assert grown['v4tree_accepted_depth_total{depth="1"}'] == grown["v4tree_rounds_total"]
