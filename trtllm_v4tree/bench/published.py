"""The published configurations, in DeepSeek's field names (spec section 1)."""

from __future__ import annotations

from typing import Any

from trtllm_v4tree.config import ModelConfig

_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FLASH = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}
_PRO = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}
NAMES = ("flash", "pro")


def published(name: str) -> ModelConfig:
    """DeepSeek-V4-Flash or -Pro."""
    return ModelConfig.from_dict(_COMMON | {"flash": _FLASH, "pro": _PRO}[name])
