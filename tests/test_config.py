"""ModelConfig against transformers' config class, rope buffers and the published values of spec section 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from trtllm_v4tree.config import ModelConfig, YarnConfig, rope_inv_freq
from trtllm_v4tree.errors import ConfigError

_PLACES = [
    Path(__file__).resolve().parents[1] / "models" / "v4-nano",
    Path(__file__).resolve().parents[2] / "shared" / "models" / "v4-nano",
]
NANO = next((place for place in _PLACES if place.is_dir()), None)

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO_LAYOUT: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}


def flash(**changes: Any) -> dict[str, Any]:
    return {**FLASH, **changes}


def as_saved_by_transformers(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    DeepseekV4Config(**json.loads(json.dumps(raw))).save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def test_flash_layers_match_the_published_counts() -> None:
    config = ModelConfig.from_dict(FLASH)
    assert config.layers_of("swa") == (0, 1)
    assert config.layers_of("csa") == tuple(range(2, 43, 2))
    assert config.layers_of("hca") == tuple(range(3, 42, 2))
    assert [config.is_hash_layer(i) for i in range(5)] == [True, True, True, False, False]
    assert (config.num_mtp_layers, config.bos_token_id, config.eos_token_ids) == (1, 0, (1,))
    assert config.yarn == YarnConfig(16.0, 65536, 32.0, 1.0)


def test_pro_has_no_plain_window_layer() -> None:
    config = ModelConfig.from_dict(flash(**PRO_LAYOUT))
    assert [len(config.layers_of(kind)) for kind in ("swa", "csa", "hca")] == [0, 30, 31]
    assert config.layer_kind(0) == "hca" and config.layer_kind(60) == "csa"


@pytest.mark.parametrize("changes", [{}, PRO_LAYOUT, {"rope_scaling": None}, {"eos_token_id": [1, 7]}])
def test_transformers_spelling_gives_the_same_config(changes: dict[str, Any], tmp_path: Path) -> None:
    raw = flash(**changes)
    saved = as_saved_by_transformers(raw, tmp_path)
    assert "compress_ratios" not in saved and "num_hash_layers" not in saved
    assert ModelConfig.from_dict(saved) == ModelConfig.from_dict(raw)


def test_custom_window_and_hca_ratio_of_tiny_transformers_configs(tmp_path: Path) -> None:
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    raw = flash(num_hidden_layers=3, sliding_window=16, layer_types=types, mlp_layer_types=["hash_moe", "moe", "moe"])
    raw["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    for dropped in ("compress_ratios", "num_hash_layers"):
        del raw[dropped]
    config = ModelConfig.from_dict(as_saved_by_transformers(raw, tmp_path))
    assert (config.sliding_window, config.compress_ratios, config.num_hash_layers) == (16, (0, 4, 16), 1)
    assert ModelConfig.from_dict({**FLASH, **config.to_dict()}) == config


def test_custom_hca_ratio_in_original_spelling() -> None:
    config = ModelConfig.from_dict(flash(num_hidden_layers=4, compress_ratios=[0, 4, 16, 16, 0]))
    assert (config.hca_ratio, config.compress_ratios) == (16, (0, 4, 16, 16))
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("changes", [{}, PRO_LAYOUT, {"rope_scaling": None}, {"num_nextn_predict_layers": 0}])
def test_to_dict_round_trips_through_json_and_files(changes: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_dict(flash(**changes))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_pretrained(tmp_path) == config


def test_to_dict_is_a_config_that_transformers_reads(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(FLASH)
    assert ModelConfig.from_dict(as_saved_by_transformers(config.to_dict(), tmp_path)) == config


@pytest.mark.skipif(NANO is None, reason="v4-nano is neither in models/ nor in shared/models/")
def test_nano() -> None:
    assert NANO is not None
    config = ModelConfig.from_pretrained(NANO)
    assert config.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert (config.rope_head_dim, config.num_hash_layers, config.num_mtp_layers) == (16, 2, 1)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"head_dim": 64, "qk_rope_head_dim": 16},
        {"head_dim": 32, "qk_rope_head_dim": 8, "compress_rope_theta": 40000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4, "beta_fast": 8}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 6}},
    ],
)
def test_rope_matches_transformers(changes: dict[str, Any], compressed: bool) -> None:
    raw = flash(**changes)
    rotary = DeepseekV4RotaryEmbedding(DeepseekV4Config(**json.loads(json.dumps(raw))))
    reference = rotary.get_buffer("compress_inv_freq" if compressed else "main_inv_freq").numpy()
    freq = rope_inv_freq(ModelConfig.from_dict(raw), compressed)
    assert freq.dtype == np.float64
    np.testing.assert_allclose(freq, reference, rtol=1e-6)


def test_yarn_range_of_the_published_values() -> None:
    config = ModelConfig.from_dict(FLASH)
    plain = 160000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = plain / rope_inv_freq(config, compressed=True)
    assert np.flatnonzero(ratio > 1 + 1e-9)[0] == 16
    assert np.flatnonzero(ratio > 16 - 1e-9)[0] == 25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41, whose architecture differs"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3', but only deepseek_v4"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 64, 0]}, r"\[64, 128\] besides 0 and 4"),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 4]}, r"\[4\] after the 43 trunk layers"),
        ({"compress_ratios": [0, 4]}, "2 entries for 43 trunk layers"),
        ({"compress_ratios": [0, "4"]}, "list of integers"),
        ({"compress_ratios": None}, "must be a list"),
        ({"compress_rate_csa": 8}, "CSA compress ratio is 8"),
        ({"compress_rate_hca": 4}, "HCA compress ratio is 4"),
        ({"compress_rate_hca": 64}, r"\[128\], but a layer's ratio is 0, 4 or 64"),
        ({"layer_types": ["full_attention"]}, "layer_types has full_attention"),
        ({"layer_types": [["nested"]]}, "layer_types has"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, "some hash_moe followed by moe"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', but it must be an integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit must be positive and finite"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be positive and finite"),
        ({"hc_eps": None}, "hc_eps is None, but it must be a number"),
        ({"rope_theta": 1.0}, "above 1"),
        ({"num_experts_per_tok": 257}, "only 256 experts"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"qk_rope_head_dim": 192}, "must not exceed head_dim 512 nor index_head_dim 128"),
        ({"partial_rotary_factor": 0.5}, "must be the same integer"),
        ({"o_groups": 7}, "must divide the 64 attention heads"),
        ({"num_nextn_predict_layers": 3}, "DSpark"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1"),
        ({"eos_token_id": 129280}, "0 to 129279"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings is None"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "factor": float("nan")}}, "factor nan"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "beta_fast": 0.5}}, "beta_fast > beta_slow"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "attention_factor": 1.27}}, "attention_factor 1.27"),
        ({"rope_scaling": "yarn"}, "must be an object or null"),
    ],
)
def test_unusable_configs_are_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dict(flash(**changes))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_all_absent_fields_are_named_at_once() -> None:
    raw = {name: value for name, value in FLASH.items() if name not in ("o_groups", "swiglu_limit", "compress_ratios")}
    with pytest.raises(ConfigError, match=r"lacks o_groups, swiglu_limit, compress_ratios \(or layer_types\)"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[1]", "JSON list"), ("{}", "model_type")]
)
def test_unreadable_config_files(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_pretrained(tmp_path)
