"""Closed formulas of what an engine keeps (state bytes per token and per sequence, scratch bytes per node) and of what a checkpoint stores."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from trtllm_v4tree.checkpoint import FP4_BLOCK, FP8_BLOCK, Shape, expected_tensors
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

_FP32 = 4
_PACKED_BLOCK = 64
_PACKED_ALIGN = 8


@dataclass(frozen=True)
class CacheFormat:
    """How rows are kept: `value_bytes` per value, or with `packed` rows of FP8 values with bf16 rope dims and scales (spec 7.1).

    `index_bits` are the bits of a value of an indexer key; a key below 16 bits has one fp32 scale. Compressor states and raw rows
    are fp32 in every format.
    """

    name: str
    value_bytes: int
    index_bits: int
    packed: bool = False

    def row(self, config: ModelConfig) -> int:
        """Bytes of a window row or entry [head_dim]: packed 448 fp8 + 64 bf16 + 7 scales + 1 pad = 584 in the published models."""
        if not self.packed:
            return self.value_bytes * config.head_dim
        plain = config.head_dim - config.rope_head_dim
        scales = -(-plain // _PACKED_BLOCK)
        size = plain + self.value_bytes * config.rope_head_dim + scales
        return -(-size // _PACKED_ALIGN) * _PACKED_ALIGN

    def index_key(self, config: ModelConfig) -> int:
        """Bytes of an indexer key [index_head_dim]."""
        scale = _FP32 if self.index_bits < 16 else 0
        return config.index_head_dim * self.index_bits // 8 + scale


FLOAT32 = CacheFormat("float32", 4, 32)
FORMATS = (
    FLOAT32,
    CacheFormat("bfloat16", 2, 16),
    CacheFormat("packed FP8", 2, 8, packed=True),
    CacheFormat("packed FP8, FP4 index", 2, 4, packed=True),
)
"""What engines keep today is float32; the others are what it would be in formats that serving engines use."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state and scratch.

    per_token: compressed entries, which grow with the context. per_sequence: window rings, compressor states, and what
    the drafter has not read. per_node: scratch of one verified node; per_csa_boundary and per_hca_boundary come on top
    where a node completes a window. per_drafter_row: scratch of one accepted row that a draft round reads.
    """

    per_token: float
    per_sequence: int
    per_node: int
    per_csa_boundary: int
    per_hca_boundary: int
    per_drafter_row: int


def state_bytes(config: ModelConfig, sizes: EngineSizes, cache: CacheFormat = FLOAT32) -> StateBytes:
    """d = head_dim, di = index_head_dim, L layers of which C CSA and H HCA, W window, m streams of D; row and key as in `cache`.

    per_token = C (row + key) / csa_ratio + H row / hca_ratio; di and key count only where the engine selects (sparse).
    per_sequence = (L + mtp) W row + states + mtp max_commit m D value.
    per_node = L row + 4 (C 4 (d + di) + H 2 d) + m D value.
    per_drafter_row = mtp row.
    """
    s, mtp, row = sizes, int(sizes.has_mtp), cache.row(config)
    streams = cache.value_bytes * config.hc_mult * config.hidden_size
    csa, hca = _entry_bytes(config, sizes, cache)
    csa_floats, hca_floats = _entry_floats(config, sizes)
    return StateBytes(
        per_token=csa / s.csa_ratio + hca / s.hca_ratio,
        per_sequence=window_bytes(config, sizes, cache)
        + compressor_bytes(config, sizes)
        + mtp * s.max_commit * streams,
        per_node=s.num_layers * row + _FP32 * (4 * csa_floats + 2 * hca_floats) + streams,
        per_csa_boundary=csa,
        per_hca_boundary=hca,
        per_drafter_row=mtp * row,
    )


def window_bytes(config: ModelConfig, sizes: EngineSizes, cache: CacheFormat = FLOAT32) -> int:
    """Window rings of one sequence, the drafter's included: (L + mtp) W row."""
    return (sizes.num_layers + int(sizes.has_mtp)) * sizes.window * cache.row(config)


def compressor_bytes(config: ModelConfig, sizes: EngineSizes) -> int:
    """Compressor states of one sequence, pseudo-rows in fp32: 4 (C 3 2 (d + di) + H 2 d)."""
    csa, hca = _entry_floats(config, sizes)
    return _FP32 * (6 * csa + 2 * hca)


def raw_compressor_bytes(config: ModelConfig) -> int:
    """The same as raw rows of the open windows, as other engines keep it (spec 2.4): two fp32 buffers per compressor."""
    c = config
    csa = 2 * c.csa_ratio * 2 * (c.head_dim + c.index_head_dim)
    return _FP32 * 2 * (len(c.layers_of("csa")) * csa + len(c.layers_of("hca")) * c.hca_ratio * c.head_dim)


def pool_bytes(config: ModelConfig, sizes: EngineSizes, cache: CacheFormat = FLOAT32) -> int:
    """All state pools: every page and slot, the bins included, and one zero row per layer of each row pool."""
    s, held, mtp = sizes, state_bytes(config, sizes, cache), int(sizes.has_mtp)
    streams = cache.value_bytes * config.hc_mult * config.hidden_size
    zero_rows = (s.num_layers + mtp) * cache.row(config) + sum(_entry_bytes(config, sizes, cache)) + mtp * streams
    paged = s.num_pages * round(s.page_tokens * held.per_token)
    return paged + s.num_slots * held.per_sequence + zero_rows


def _entry_bytes(config: ModelConfig, sizes: EngineSizes, cache: CacheFormat) -> tuple[int, int]:
    """Bytes of one CSA entry (with the indexer's) and one HCA entry, over all layers of the kind."""
    row, key = cache.row(config), cache.index_key(config) if sizes.sparse else 0
    return sizes.num_csa * (row + key), sizes.num_hca * row


def _entry_floats(config: ModelConfig, sizes: EngineSizes) -> tuple[int, int]:
    """Values of the same entries."""
    index = config.index_head_dim if sizes.sparse else 0
    return sizes.num_csa * (config.head_dim + index), sizes.num_hca * config.head_dim


@dataclass(frozen=True)
class Stored:
    """Tensors of one kind in a checkpoint, and their bytes."""

    tensors: int
    num_bytes: int


_FP4_WEIGHT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_FP8_WEIGHT = re.compile(r"(\.(attn|indexer)\.w(q_a|q_b|kv|o_a|o_b)|\.shared_experts\.w[123]|\.[eh]_proj)\.weight$")
_FP32_TENSOR = re.compile(r"(hc_\w+|\.attn_sink|\.ape|\.gate\.bias)$")


def checkpoint_bytes(config: ModelConfig) -> dict[str, Stored]:
    """What a checkpoint as published stores (spec 9), by kind: FP4 experts, FP8 linears, the ue8m0 scales of both, bf16, fp32, int64."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, shape in expected_tensors(config).items():
        for kind, size in _stored_as(name, shape):
            found[kind].append(size)
    return {kind: Stored(len(sizes), sum(sizes)) for kind, sizes in sorted(found.items())}


def num_parameters(config: ModelConfig) -> tuple[int, int]:
    """Values of the trunk's and of the drafter's tensors; hash tables are not counted."""
    counts = {False: 0, True: 0}
    for name, shape in expected_tensors(config).items():
        if not name.endswith(".tid2eid"):
            counts[name.startswith("mtp.")] += math.prod(shape)
    return counts[False], counts[True]


def _stored_as(name: str, shape: Shape) -> list[tuple[str, int]]:
    """(kind, bytes) of a tensor, and of its scales if it has some."""
    count = math.prod(shape)
    if _FP4_WEIGHT.search(name):
        return [("fp4", count // 2), ("ue8m0", _num_blocks(shape, FP4_BLOCK))]
    if _FP8_WEIGHT.search(name):
        return [("fp8", count), ("ue8m0", _num_blocks(shape, FP8_BLOCK))]
    if name.endswith(".tid2eid"):
        return [("int64", 8 * count)]
    return [("fp32", _FP32 * count)] if _FP32_TENSOR.search(name) else [("bf16", 2 * count)]


def _num_blocks(shape: Shape, block: tuple[int, int]) -> int:
    return -(-shape[0] // block[0]) * -(-shape[1] // block[1])
