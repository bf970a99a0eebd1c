"""Closed formulas of what an engine keeps: state bytes per token and per sequence, scratch bytes per node (fp32 CPU layout)."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

_FP32 = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state and scratch.

    per_token: compressed entries, which grow with the context. per_sequence: window rings, compressor states, and what the
    drafter has not read. per_node: scratch of one verified node; per_csa_boundary and per_hca_boundary come on top where a node
    completes a window.
    """

    per_token: float
    per_sequence: int
    per_node: int
    per_csa_boundary: int
    per_hca_boundary: int


def state_bytes(config: ModelConfig, sizes: EngineSizes) -> StateBytes:
    """d = head_dim, di = index_head_dim, L layers of which C CSA and H HCA, W window, m streams of D.

    per_token = 4 (C (d + di) / csa_ratio + H d / hca_ratio); di counts only where the engine selects (sparse).
    per_sequence = 4 ((L + mtp) W d + C 3 2 (d + di) + H 2 d + mtp max_commit m D).
    per_node = 4 (L d + C 4 (d + di) + H 2 d + m D).
    """
    c, s = config, sizes
    d, mtp = c.head_dim, int(s.has_mtp)
    di = c.index_head_dim if s.sparse else 0
    streams = c.hc_mult * c.hidden_size
    compressed = s.num_csa * (d + di)
    return StateBytes(
        per_token=_FP32 * (compressed / s.csa_ratio + s.num_hca * d / s.hca_ratio),
        per_sequence=_FP32
        * ((s.num_layers + mtp) * s.window * d + 6 * compressed + 2 * s.num_hca * d + mtp * s.max_commit * streams),
        per_node=_FP32 * (s.num_layers * d + 4 * compressed + 2 * s.num_hca * d + streams),
        per_csa_boundary=_FP32 * compressed,
        per_hca_boundary=_FP32 * s.num_hca * d,
    )
