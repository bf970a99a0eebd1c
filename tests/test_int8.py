"""8-bit linears: codes against a loop, FP4 values without loss, an engine's text independent of its drafter's dtype."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.compiler.ort_ops import OnnxRuntimeOps
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.llm import LLM
from trtllm_v4tree.network.ops import OPSET
from trtllm_v4tree.network.weight import Weight, quantize_blocks
from trtllm_v4tree.runtime.params import SamplingParams

from .oracle.tiny import write_tiny

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=256, prefill_chunk=64, draft_shapes=((3, 2), (4, 1)))


def test_blocks_are_rounded_to_half_a_step() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 7, 32)).astype(np.float32)
    rows[0, 0] = 0
    codes, scale = quantize_blocks(rows)
    decoded = (codes.astype(np.float64) - 128) * scale[..., None]
    for block, back, step in zip(rows.reshape(-1, 32), decoded.reshape(-1, 32), scale.ravel(), strict=True):
        assert np.abs(block - back).max() <= 0.5001 * step
        assert step <= max(np.abs(block).max(), 1) / 63
    assert (codes[0, 0] == 128).all()


@pytest.mark.parametrize("exponent", [-30, -7, 0, 9])
def test_fp4_values_with_a_power_of_two_scale_are_exact(exponent: int) -> None:
    rows = np.random.default_rng(1).choice(FP4, (40, 32)) * np.float32(2.0**exponent)
    codes, scale = quantize_blocks(rows)
    assert ((codes.astype(np.float64) - 128) * scale[..., None] == rows).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose linears have inputs in multiples of 32."""
    return write_tiny(tmp_path_factory.mktemp("int8") / "checkpoint", "w128", seed=3)


def tokens(engine: Path, mode: str) -> list[list[int]]:
    llm = LLM(engine, mode, threads=1)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 40)]
    return [r.outputs[0].token_ids for r in llm.generate(prompts, params)]


def test_int8_drafter_changes_no_text(checkpoint: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    rounded = tmp_path / "rounded"
    build(checkpoint, plain, OPTIONS)
    build(checkpoint, rounded, dataclasses.replace(OPTIONS, draft_dtype="int8"))
    assert "U8" in {entry["dtype"] for entry in header(rounded).values()}
    expected = tokens(plain, "none")
    for mode in ("none", "s3_k2_d6", "s4_k1_d5"):
        assert tokens(rounded, mode) == expected


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (256, 320), (160, 256)])
def test_int8_product_errs_by_no_more_than_its_rounding(inputs: int, outputs: int) -> None:
    """Against float64: half a step of each weight and each activation, blocks of 32 sharing one step."""
    rng = np.random.default_rng(inputs)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    x = rng.standard_normal((6, inputs)).astype(np.float32)
    got = run_linear(weight, x)
    w_step = np.abs(weight.reshape(-1, 32, outputs)).max(axis=1).repeat(32, axis=0) / 63
    x_step = np.abs(x.reshape(6, -1, 32)).max(axis=2).repeat(32, axis=1) / 127
    bound = np.abs(x) @ (w_step / 2) + (x_step / 2) @ (np.abs(weight) + w_step / 2)
    error = np.abs(got - x.astype(np.float64) @ weight)
    assert (error <= bound).all()
    assert np.abs(error).mean() > 1e-4  # it does round
    alone = np.concatenate([run_linear(weight, row[None]) for row in x])
    assert (alone == got).all()  # sums of integers do not depend on the batch


def test_int8_experts_equal_a_loop_over_their_decoded_weights() -> None:
    """Against float64 with the same rounded weights: what is left is the rounding of activations, a percent of the largest."""
    import onnx_ir as ir
    import onnxruntime as ort
    from onnxscript._internal.builder import GraphBuilder

    rng = np.random.default_rng(5)
    e, d, i, k, limit = 6, 64, 32, 2, 1.0
    x = rng.standard_normal((1, 7, d)).astype(np.float32)
    ids = np.stack([rng.permutation(e)[:k] for _ in range(7)])[None].astype(np.int64)
    shares = rng.random((1, 7, k)).astype(np.float32) + 0.1
    fc1, fc2 = (rng.standard_normal(s).astype(np.float32) * 0.3 for s in ((e, 2 * i, d), (e, d, i)))
    graph = ir.Graph([], [], nodes=[], name="moe", opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    feeds = [builder.input(n, t, list(v.shape)) for n, t, v in (
        ("x", ir.DataType.FLOAT, x), ("ids", ir.DataType.INT64, ids), ("w", ir.DataType.FLOAT, shares))]  # fmt: skip
    held = [Weight(w.shape, lambda source, w=w: w) for w in (fc1, fc2)]
    held[0].name, held[1].name = "fc1", "fc2"
    builder.add_output(OnnxRuntimeOps(int8=True).moe(builder.op, *feeds, *held, e, k, limit), "y")
    for value in graph.initializers.values():
        if isinstance(value, Weight):
            value.const_value = ir.tensor(value.load(None), name=value.name)  # type: ignore[arg-type]
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    got = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x, "ids": ids, "w": shares})[
        0
    ]

    def decoded(w: np.ndarray) -> np.ndarray:
        codes, scale = quantize_blocks(w.reshape(*w.shape[:-1], -1, 32))
        return ((codes.astype(np.float64) - 128) * scale[..., None]).reshape(w.shape)

    a, b = decoded(fc1), decoded(fc2)
    expected = np.zeros(x.shape)
    for t in range(7):
        for expert, share in zip(ids[0, t], shares[0, t] / shares[0, t].sum(), strict=True):
            gate, up = (a[expert] @ x[0, t]).reshape(-1, 2).T
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            expected[0, t] += share * (b[expert] @ (gate / (1 + np.exp(-gate)) * up))
    assert np.abs(got - expected).max() < 0.015 * np.abs(expected).max()


def run_linear(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x [R, I] through the int8 linear of the ONNX Runtime lowering."""
    import onnx_ir as ir
    import onnxruntime as ort
    from onnxscript._internal.builder import GraphBuilder

    graph = ir.Graph([], [], nodes=[], name="linear", opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    given = builder.input("x", ir.DataType.FLOAT, ["R", weight.shape[0]])
    held = Weight(weight.shape, lambda source: weight)
    held.name = "w"
    builder.add_output(OnnxRuntimeOps(int8=True).linear(builder.op, given, held), "y")
    for value in graph.initializers.values():
        if isinstance(value, Weight):
            value.const_value = ir.tensor(value.load(None), name=value.name)  # type: ignore[arg-type]
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def header(engine: Path) -> dict[str, dict[str, str]]:
    with (engine / "weights.safetensors").open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_unknown_draft_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_dtype 'int4' is unknown"):
        BuildOptions(draft_dtype="int4")
