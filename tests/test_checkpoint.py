"""Checkpoint reading against transformers' own loading and saving, torch's fp8 decoding and hand-made fp4."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from trtllm_v4tree.checkpoint import Checkpoint, expected_tensors
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import CheckpointError

_PLACES = [
    Path(__file__).resolve().parents[1] / "models" / "v4-nano",
    Path(__file__).resolve().parents[2] / "shared" / "models" / "v4-nano",
]
NANO = next((place for place in _PLACES if place.is_dir()), None)
needs_nano = pytest.mark.skipif(NANO is None, reason="v4-nano is neither in models/ nor in shared/models/")

Tensors = dict[str, torch.Tensor]

TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 40,
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 40,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 4, 128],
    "num_nextn_predict_layers": 1,
}
CONFIG = ModelConfig.from_dict(TINY)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random_tensors(seed: int = 0) -> Tensors:
    """A whole tiny checkpoint with original names: bf16 weights, fp32 vectors, valid expert ids."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(CONFIG).items():
        value = torch.randn(shape, generator=generator)
        tensors[name] = value.bfloat16() if name.endswith(".weight") else value
        if name.endswith("tid2eid"):
            tensors[name] = torch.randint(CONFIG.num_experts, shape, generator=generator)
    return tensors


def write(directory: Path, tensors: Tensors) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def without_mtp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def only_mtp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}


def assert_same(checkpoint: Checkpoint, tensors: Tensors) -> None:
    assert set(checkpoint.names) == set(tensors)
    for name, tensor in tensors.items():
        value = checkpoint.get(name)
        assert value.dtype == (np.int64 if name.endswith("tid2eid") else np.float32)
        assert value.shape == checkpoint.shape(name)
        np.testing.assert_array_equal(value, tensor.to(torch.int64 if value.dtype == np.int64 else torch.float32))


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({}, 69_187),
        (
            {
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "n_routed_experts": 384,
                "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
            },
            145_116,
        ),
    ],
)
def test_expected_tensors_count_those_of_the_published_checkpoints(changes: dict[str, Any], stored: int) -> None:
    """Flash and Pro list 69,187 and 145,116 stored tensors; every quantised weight stores a scale too."""
    flash = {"num_hidden_layers": 43, "n_routed_experts": 256, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    names = expected_tensors(ModelConfig.from_dict({**TINY, **flash, "num_hash_layers": 3, **changes}))
    quantised = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")
    scales = [name for name in names if name.removesuffix(".weight").endswith(quantised)]
    assert len(names) + len(scales) == stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_float_dtypes_as_torch_does(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in random_tensors().items()}
    checkpoint = Checkpoint.open(write(tmp_path, tensors), CONFIG)
    assert checkpoint.has_mtp
    assert_same(checkpoint, tensors)


def test_reads_int32_expert_ids(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
    assert_same(Checkpoint.open(write(tmp_path, tensors), CONFIG), tensors)


@pytest.mark.parametrize("indexed", [True, False])
def test_reads_shards(indexed: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    if indexed:
        weight_map = {name: file for file, part in shards.items() for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"other": torch.zeros(1)}, tmp_path / "unrelated.safetensors")
    assert_same(Checkpoint.open(tmp_path, CONFIG), tensors)


def tiny_transformers_model() -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**TINY))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(0, CONFIG.num_experts)
    return model


@pytest.mark.parametrize("original_format", [True, False])
def test_both_formats_saved_by_transformers(original_format: bool, tmp_path: Path) -> None:
    """Spot values by transformers' attribute names; its "original" format is a mixture of both naming schemes."""
    model = tiny_transformers_model()
    model.save_pretrained(tmp_path, save_original_format=original_format)
    checkpoint = Checkpoint.open(tmp_path, ModelConfig.from_pretrained(tmp_path))
    assert not checkpoint.has_mtp
    csa, moe = model.model.layers[1].self_attn, model.model.layers[2].mlp
    inner = CONFIG.moe_intermediate_size
    reference = {
        "embed.weight": model.model.embed_tokens.weight,
        "head.weight": model.lm_head.weight,
        "norm.weight": model.model.norm.weight,
        "hc_head_base": model.model.hc_head.hc_base,
        "layers.0.attn.kv_norm.weight": model.model.layers[0].self_attn.kv_norm.weight,
        "layers.0.ffn.gate.tid2eid": model.model.layers[0].mlp.gate.tid2eid,
        "layers.1.attn_norm.weight": model.model.layers[1].input_layernorm.weight,
        "layers.1.ffn_norm.weight": model.model.layers[1].post_attention_layernorm.weight,
        "layers.1.hc_attn_scale": model.model.layers[1].attn_hc.scale,
        "layers.1.attn.attn_sink": csa.sinks,
        "layers.1.attn.wo_a.weight": csa.o_a_proj.weight,
        "layers.1.attn.compressor.ape": csa.compressor.position_bias,
        "layers.1.attn.compressor.wkv.weight": csa.compressor.kv_proj.weight,
        "layers.1.attn.compressor.norm.weight": csa.compressor.kv_norm.weight,
        "layers.1.attn.indexer.wq_b.weight": csa.compressor.indexer.q_b_proj.weight,
        "layers.1.attn.indexer.weights_proj.weight": csa.compressor.indexer.scorer.weights_proj.weight,
        "layers.1.attn.indexer.compressor.wgate.weight": csa.compressor.indexer.gate_proj.weight,
        "layers.2.ffn.gate.bias": moe.gate.e_score_correction_bias,
        "layers.2.ffn.experts.3.w1.weight": moe.experts.gate_up_proj[3, :inner],
        "layers.2.ffn.experts.3.w3.weight": moe.experts.gate_up_proj[3, inner:],
        "layers.2.ffn.experts.3.w2.weight": moe.experts.down_proj[3],
        "layers.2.ffn.shared_experts.w1.weight": moe.shared_experts.gate_proj.weight,
        "layers.2.ffn.shared_experts.w2.weight": moe.shared_experts.down_proj.weight,
        "layers.2.ffn.shared_experts.w3.weight": moe.shared_experts.up_proj.weight,
    }
    for name, tensor in reference.items():
        np.testing.assert_array_equal(checkpoint.get(name), tensor.detach(), err_msg=name)


def test_transformers_loads_and_saves_what_we_read(tmp_path: Path) -> None:
    """Original names -> transformers -> its fused names -> the same values, for every trunk tensor."""
    tensors = without_mtp({n: t.float() if t.is_floating_point() else t for n, t in random_tensors().items()})
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = DeepseekV4ForCausalLM.from_pretrained(write(tmp_path, tensors), dtype=torch.float32)
    (tmp_path / "again").mkdir()
    model.save_pretrained(tmp_path / "again", save_original_format=False)
    assert_same(Checkpoint.open(tmp_path / "again", CONFIG), tensors)


@needs_nano
def test_nano_and_its_other_drafter() -> None:
    assert NANO is not None
    config = ModelConfig.from_pretrained(NANO)
    tensors = load_file(NANO / "model.safetensors")
    assert_same(Checkpoint.open(NANO, config), tensors)
    tensors.update(load_file(NANO / "mtp_multistep.safetensors"))
    assert_same(Checkpoint.open(NANO, config, NANO / "mtp_multistep.safetensors"), tensors)


def quantise_fp8(tensors: Tensors, name: str) -> np.ndarray:
    """Replace `name` by random e4m3 bytes and e8m0 block scales; returns the float64 values by plain loops."""
    rows, columns = tensors[name].shape
    weight = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    weight[weight & 127 == 127] = 0
    weight = weight.view(torch.float8_e4m3fn)
    exponents = torch.randint(-9, 9, (-(-rows // 128), -(-columns // 128)))
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    tensors[name] = weight
    tensors[name.removesuffix(".weight") + ".scale"] = scale.to(torch.float8_e8m0fnu)
    values = weight.double().numpy()
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            values[128 * r : 128 * r + 128, 128 * c : 128 * c + 128] *= 2.0 ** exponents[r, c].item()
    return values


def quantise_fp4(tensors: Tensors, name: str) -> np.ndarray:
    """Replace `name` by random packed nibbles and e8m0 scales per 32 inputs; returns the values by plain loops."""
    rows, columns = tensors[name].shape
    packed = np.random.default_rng(0).integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    exponents = np.random.default_rng(1).integers(-9, 9, (rows, columns // 32))
    values = np.zeros((rows, columns))
    for r in range(rows):
        for c in range(columns):
            nibble = packed[r, c // 2] & 15 if c % 2 == 0 else packed[r, c // 2] >> 4
            values[r, c] = E2M1[nibble] * 2.0 ** exponents[r, c // 32]
    tensors[name] = torch.from_numpy(packed.view(np.int8))
    scale = torch.from_numpy((exponents + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    tensors[name.removesuffix(".weight") + ".scale"] = scale
    return values


def test_decodes_fp8_and_fp4(tmp_path: Path) -> None:
    tensors = random_tensors()
    fp8 = ["layers.0.attn.wq_b.weight", "layers.2.attn.wo_b.weight", "mtp.0.e_proj.weight"]
    fp8 += ["layers.1.attn.indexer.wq_b.weight", "layers.1.ffn.shared_experts.w2.weight", "layers.1.attn.wkv.weight"]
    fp4 = ["layers.0.ffn.experts.2.w1.weight", "layers.0.ffn.experts.2.w2.weight", "mtp.0.ffn.experts.0.w3.weight"]
    reference = {name: quantise_fp8(tensors, name) for name in fp8}
    reference |= {name: quantise_fp4(tensors, name) for name in fp4}
    checkpoint = Checkpoint.open(write(tmp_path, tensors), CONFIG)
    assert not any(name.endswith(".scale") for name in checkpoint.names)
    for name, values in reference.items():
        value = checkpoint.get(name)
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, values, err_msg=name)
    plain = "layers.0.ffn.experts.1.w1.weight"
    np.testing.assert_array_equal(checkpoint.get(plain), tensors[plain].float())


def test_experts_in_fp4_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Where all of the trunk's, or all of the drafter's, are in FP4."""
    tensors = random_tensors()
    names = [name for name in tensors if ".ffn.experts." in name]
    values = {name: quantise_fp4(tensors, name) for name in names}
    checkpoint = Checkpoint.open(write(tmp_path, tensors), CONFIG)
    assert checkpoint.has_fp4_experts(drafter=False) and checkpoint.has_fp4_experts(drafter=True)
    for name, value in values.items():
        packed, scales = checkpoint.fp4(name), checkpoint.fp4_scales(name)
        assert packed.dtype == scales.dtype == np.uint8
        codes = np.array(E2M1)[np.stack([packed & 15, packed >> 4], axis=-1).reshape(value.shape)]
        np.testing.assert_array_equal(codes * 2.0 ** (scales.astype(int) - 127).repeat(32, axis=1), value)
    for drafter in (False, True):
        name = next(name for name in names if name.startswith("mtp.") == drafter)
        scale = name.removesuffix(".weight") + ".scale"
        mixed = {n: t for n, t in tensors.items() if n != scale} | {name: random_tensors()[name]}
        checkpoint = Checkpoint.open(write(tmp_path, mixed), CONFIG)
        assert not checkpoint.has_fp4_experts(drafter) and checkpoint.has_fp4_experts(not drafter)


def test_a_checkpoint_without_mtp_opens(tmp_path: Path) -> None:
    tensors = without_mtp(random_tensors())
    checkpoint = Checkpoint.open(write(tmp_path, tensors), CONFIG)
    assert not checkpoint.has_mtp
    assert_same(checkpoint, tensors)


def test_mtp_of_a_base_checkpoint_may_carry_its_own_embedding_and_head(tmp_path: Path) -> None:
    tensors = random_tensors()
    extra = {"mtp.0.head.weight": torch.zeros(2, 2), "mtp.0.embed.weight": torch.zeros(2, 2)}
    assert_same(Checkpoint.open(write(tmp_path, {**tensors, **extra}), CONFIG), tensors)


@pytest.mark.parametrize("own", [True, False])
def test_mtp_weights_replace_those_of_the_checkpoint(own: bool, tmp_path: Path) -> None:
    first, second = random_tensors(0), random_tensors(1)
    write(tmp_path, first if own else without_mtp(first))
    save_file(only_mtp(second), tmp_path / "drafter.safetensors")
    assert_same(
        Checkpoint.open(tmp_path, CONFIG, tmp_path / "drafter.safetensors"), {**without_mtp(first), **only_mtp(second)}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("mtp.0.enorm.weight"), "1 missing: mtp.0.enorm.weight"),
        (lambda t: t.update({"norm.weight": torch.zeros(160)}), "has norm.weight, but a file of MTP weights"),
        (lambda t: t.clear(), "missing: mtp.0"),
    ],
)
def test_mtp_weights_must_be_complete_and_alone(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    drafter = only_mtp(random_tensors())
    change(drafter)
    write(tmp_path, random_tensors())
    save_file(drafter, tmp_path / "drafter.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path, CONFIG, tmp_path / "drafter.safetensors")


@pytest.mark.parametrize(
    "name",
    ["mtp.0.main_proj.weight", "mtp.2.markov_head.weight", "mtp.2.confidence_head.weight", "mtp.1.attn.wq_a.weight"],
)
def test_dspark_drafters_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write(tmp_path, {**random_tensors(), name: torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=f"{name} belongs to a DSpark drafter"):
        Checkpoint.open(tmp_path, CONFIG)


def test_mtp_against_a_config_without_it(tmp_path: Path) -> None:
    config = ModelConfig.from_dict({**TINY, "num_nextn_predict_layers": 0})
    assert not any(name.startswith("mtp.") for name in expected_tensors(config))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers 0"):
        Checkpoint.open(write(tmp_path, random_tensors()), config)


def test_all_misfits_are_listed_in_one_error(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["norm.weight"], tensors["layers.1.attn.compressor.ape"]
    tensors["layers.0.attn.compressor.ape"] = torch.zeros(4, 80)
    tensors["head.weight"] = tensors["head.weight"].T.contiguous()
    tensors["layers.0.attn.attn_sink"] = torch.zeros(4, dtype=torch.int8)
    quantise_fp8(tensors, "layers.0.attn.wq_a.weight")
    del tensors["layers.0.attn.wq_a.scale"]
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(write(tmp_path, tensors), CONFIG)
    message = str(caught.value)
    assert "3 missing: " in message and "norm.weight" in message and "layers.0.attn.wq_a.scale" in message
    assert "1 unexpected: layers.0.attn.compressor.ape" in message
    assert "2 wrong: " in message and "head.weight is BF16 [160, 40], expected F32/F16/BF16 [40, 160]" in message
    assert "layers.0.attn.attn_sink is I8 [4], expected" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    tensors = {f"stray.{i:02}": torch.zeros(1) for i in range(23)}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(write(tmp_path, {**random_tensors(), **tensors}), CONFIG)
    assert "23 unexpected: stray.00, " in str(caught.value)
    assert "stray.19 ... and 3 more" in str(caught.value) and "stray.20" not in str(caught.value)


def test_a_tensor_stored_twice_is_refused(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(40, 160)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"stores head\.weight more than once"):
        Checkpoint.open(tmp_path, CONFIG)


def test_expert_ids_out_of_range_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["layers.0.ffn.gate.tid2eid"][3, 1] = 4
    checkpoint = Checkpoint.open(write(tmp_path, tensors), CONFIG)
    with pytest.raises(CheckpointError, match="expert ids from 0 to 4, but the config has experts 0 to 3"):
        checkpoint.get("layers.0.ffn.gate.tid2eid")


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (struct.pack("<Q", 2**62) + b"{}", "truncated"),
        (packed(b"{"), "not valid JSON"),
        (packed(b"\xff\xfe"), "not valid JSON"),
        (packed(b"[" * 100_000), "not valid JSON"),
        (packed([1]), "no JSON object"),
        (packed({"x": 3}), "header entry of x"),
        (packed({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "header entry of x"),
        (packed({"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}), "header entry of x"),
        (packed({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"), "header entry of x"),
        (packed({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234"), "header entry of x"),
        (packed({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "x .* stored in 4 bytes"),
        (packed({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "truncated: x should end"),
        (packed({"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"), "x has dtype F64"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path, CONFIG)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_truncated_real_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, random_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is truncated"):
        Checkpoint.open(tmp_path, CONFIG)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, random_tensors()), CONFIG)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match="shorter after it was opened"):
        [checkpoint.get(name) for name in checkpoint.names]


def test_directories_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(tmp_path / "absent", CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never unpickled")
    with pytest.raises(CheckpointError, match="pickled checkpoints"):
        Checkpoint.open(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match="is not a file"):
        Checkpoint.open(write(tmp_path, random_tensors()), CONFIG, tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"norm.weight": "b.safetensors"}}, "b.safetensors, which is not there"),
        ({"weight_map": {"norm.weight": "../a.safetensors"}}, "beside the index"),
        ({"weight_map": {"norm.weight": "/tmp/a.safetensors"}}, "beside the index"),
        ({"weight_map": {"norm.weight": "pytorch_model.bin"}}, "beside the index"),
        ({"weight_map": {"norm.weight": 3}}, "beside the index"),
        ({"weight_map": {"other.weight": "a.safetensors"}}, "puts other.weight in a.safetensors"),
        ({"weight_map": []}, "no object"),
        ({}, "not a safetensors index"),
        ([], "not a safetensors index"),
    ],
)
def test_unusable_indexes_are_refused(index: object, message: str, tmp_path: Path) -> None:
    save_file({"norm.weight": torch.zeros(160)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path, CONFIG)


def test_the_package_reads_without_torch() -> None:
    code = "import sys, trtllm_v4tree.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[1]).returncode == 0
