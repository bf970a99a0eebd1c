"""Closed formulas of what an engine keeps: state bytes per token and per sequence, scratch bytes per node (fp32)."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

_FP32 = 4


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


def state_bytes(config: ModelConfig, sizes: EngineSizes) -> StateBytes:
    """d = head_dim, di = index_head_dim, L layers of which C CSA and H HCA, W window, m streams of D.

    per_token = 4 (C (d + di) / csa_ratio + H d / hca_ratio); di counts only where the engine selects (sparse).
    per_sequence = 4 ((L + mtp) W d + C 3 2 (d + di) + H 2 d + mtp max_commit m D).
    per_node = 4 (L d + C 4 (d + di) + H 2 d + m D).
    per_drafter_row = 4 mtp d.
    """
    s, d, mtp = sizes, config.head_dim, int(sizes.has_mtp)
    streams = config.hc_mult * config.hidden_size
    csa, hca = _entry_floats(config, sizes)
    rings = (s.num_layers + mtp) * s.window * d
    return StateBytes(
        per_token=_FP32 * (csa / s.csa_ratio + hca / s.hca_ratio),
        per_sequence=_FP32 * (rings + 6 * csa + 2 * hca + mtp * s.max_commit * streams),
        per_node=_FP32 * (s.num_layers * d + 4 * csa + 2 * hca + streams),
        per_csa_boundary=_FP32 * csa,
        per_hca_boundary=_FP32 * hca,
        per_drafter_row=_FP32 * mtp * d,
    )


def pool_bytes(config: ModelConfig, sizes: EngineSizes) -> int:
    """All state pools: every page and slot, the bins included, and one zero row per layer of each row pool."""
    s, held, mtp = sizes, state_bytes(config, sizes), int(sizes.has_mtp)
    rings = (s.num_layers + mtp) * config.head_dim
    zero_rows = rings + sum(_entry_floats(config, sizes)) + mtp * config.hc_mult * config.hidden_size
    paged = s.num_pages * round(s.page_tokens * held.per_token)
    return paged + s.num_slots * held.per_sequence + _FP32 * zero_rows


def _entry_floats(config: ModelConfig, sizes: EngineSizes) -> tuple[int, int]:
    """Floats of one CSA entry (with the indexer's) and one HCA entry, over all layers of the kind."""
    index = config.index_head_dim if sizes.sparse else 0
    return sizes.num_csa * (config.head_dim + index), sizes.num_hca * config.head_dim
