"""Bytes of a DeepSeek-V4 checkpoint as published (FP8 linears, FP4 experts, bf16 and fp32 rest), and of a sequence's cache.

Shapes: spec section 9. Cache formats: spec section 7.1 (584 bytes a packed row, 132 an FP8 indexer key, fp32 compressor state).
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_v4tree.config import LayerKind, ModelConfig

ROW_BYTES, INDEX_BYTES = 584, 132
_BF16, _FP32, _INT64 = 2, 4, 8


def fp8(rows: int, columns: int) -> int:
    """Bytes of an FP8 linear with one e8m0 scale per 128 x 128 block."""
    return rows * columns + -(-rows // 128) * -(-columns // 128)


def fp4(rows: int, columns: int) -> int:
    """Bytes of an FP4 linear with one e8m0 scale per 32 inputs of a row."""
    return rows * columns // 2 + rows * columns // 32


def attention_bytes(c: ModelConfig, kind: LayerKind) -> int:
    """One layer's attention with its compressor and indexer."""
    size, heads, lora = c.hidden_size, c.num_heads * c.head_dim, c.q_lora_rank
    group_in, group_out = heads // c.o_groups, c.o_groups * c.o_lora_rank
    linears = (
        fp8(lora, size) + fp8(heads, lora) + fp8(c.head_dim, size) + fp8(group_out, group_in) + fp8(size, group_out)
    )
    rest = _BF16 * (lora + c.head_dim) + _FP32 * c.num_heads
    if kind == "swa":
        return linears + rest
    if kind == "hca":
        return linears + rest + compressor_bytes(c, c.head_dim, c.hca_ratio, 1)
    indexer = fp8(c.index_n_heads * c.index_head_dim, lora) + _BF16 * c.index_n_heads * size
    compressors = sum(compressor_bytes(c, d, c.csa_ratio, 2) for d in (c.head_dim, c.index_head_dim))
    return linears + rest + indexer + compressors


def compressor_bytes(c: ModelConfig, entry: int, ratio: int, overlap: int) -> int:
    return _FP32 * ratio * overlap * entry + _BF16 * (2 * overlap * entry * c.hidden_size + entry)


def expert_bytes(c: ModelConfig) -> int:
    """One routed expert."""
    inner, size = c.moe_intermediate_size, c.hidden_size
    return 2 * fp4(inner, size) + fp4(size, inner)


def layer_rest_bytes(c: ModelConfig) -> int:
    """Shared expert, router weights, norms and the two hyper-connections of one layer; without bias or hash table."""
    inner, size, m = c.moe_intermediate_size, c.hidden_size, c.hc_mult
    shared = c.num_shared_experts * (2 * fp8(inner, size) + fp8(size, inner))
    site = _FP32 * ((2 + m) * m * m * size + (2 + m) * m + 3)
    return shared + _BF16 * (c.num_experts * size + 2 * size) + 2 * site


def head_bytes(c: ModelConfig) -> int:
    """Output head with its norm and hyper-connection."""
    return _BF16 * (c.vocab_size * c.hidden_size + c.hidden_size) + hc_head_bytes(c)


def hc_head_bytes(c: ModelConfig) -> int:
    return _FP32 * (c.hc_mult * c.hc_mult * c.hidden_size + c.hc_mult + 1)


def mtp_bytes(c: ModelConfig) -> int:
    """The drafter besides its routed experts: one window-only layer, two projections, three norms, its own head mixer."""
    return drafter_bytes(c) + _FP32 * c.num_experts


def drafter_bytes(c: ModelConfig) -> int:
    size = c.hidden_size
    return attention_bytes(c, "swa") + layer_rest_bytes(c) + 2 * fp8(size, size) + 3 * _BF16 * size + hc_head_bytes(c)


def checkpoint_bytes(c: ModelConfig) -> int:
    """All tensors of a published checkpoint, the drafter included."""
    layers = c.num_layers + c.num_mtp_layers
    trunk = sum(attention_bytes(c, c.layer_kind(i)) + layer_rest_bytes(c) for i in range(c.num_layers))
    routing = c.num_hash_layers * _INT64 * c.vocab_size * c.num_experts_per_tok
    bias = _FP32 * c.num_experts * (c.num_layers - c.num_hash_layers)
    embedding = _BF16 * c.vocab_size * c.hidden_size
    experts = layers * c.num_experts * expert_bytes(c)
    return trunk + experts + routing + bias + embedding + head_bytes(c) + c.num_mtp_layers * mtp_bytes(c)


@dataclass(frozen=True)
class CacheBytes:
    """per_token grows with the context; window and state are fixed per sequence (state: raw compressor rows in fp32)."""

    per_token: float
    window: int
    state: int


def cache_bytes(c: ModelConfig) -> CacheBytes:
    """A sequence's cache as serving engines keep it (spec section 7.1)."""
    csa, hca = len(c.layers_of("csa")), len(c.layers_of("hca"))
    csa_state = _FP32 * 2 * c.csa_ratio * 2 * 2 * (c.head_dim + c.index_head_dim)
    hca_state = _FP32 * c.hca_ratio * 2 * c.head_dim
    return CacheBytes(
        csa * (ROW_BYTES + INDEX_BYTES) / c.csa_ratio + hca * ROW_BYTES / c.hca_ratio,
        (c.num_layers + c.num_mtp_layers) * c.sliding_window * ROW_BYTES,
        csa * csa_state + hca * hca_state,
    )
