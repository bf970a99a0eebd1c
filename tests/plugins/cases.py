"""Cases for the kernels: tables of random trees over a committed batch, and pools in which every row that no table names is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtllm_v4tree.runtime.tables import Sequences, StepTables, Tree, step_tables
from trtllm_v4tree.runtime.tree import PAD
from trtllm_v4tree.sizes import EngineSizes

DEVICE = "cpu"
"""Where the operands live; `tests/gpu` runs the same tests with cuda."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}


def sizes(max_seq_len: int, batch: int) -> EngineSizes:
    """Two CSA and two HCA layers, paged."""
    return EngineSizes(
        max_batch_size=batch, max_seq_len=max_seq_len, max_verify_tokens=64, prefill_chunk=64,
        num_pages=batch * -(-max_seq_len // 256) + 1, page_tokens=256, window=128, csa_ratio=4, hca_ratio=128,
        num_layers=4, num_csa=2, num_hca=2, sparse=True, has_mtp=False,
    )  # fmt: skip


def random_parents(rng: np.random.Generator, nodes: int, shape: str) -> np.ndarray:
    """Parents of one tree: any earlier node, or the one before (`chain`)."""
    if shape == "chain":
        return np.arange(-1, nodes - 1)
    return np.array([-1] + [int(rng.integers(max(0, i - 6), i)) for i in range(1, nodes)])


def random_step(seed: int, lengths: list[int], nodes: list[int], shape: str = "tree") -> tuple[EngineSizes, StepTables]:
    """Tables of a pass over one tree per sequence; trees are padded to the largest."""
    rng = np.random.default_rng(seed)
    b, n = len(lengths), max(nodes)
    s = sizes(max(lengths) + 256, b)
    parents = np.full((b, n), PAD)
    for i, count in enumerate(nodes):
        parents[i, :count] = random_parents(rng, count, shape)
    pages = 1 + rng.permutation(s.num_pages - 1)[: b * s.pages_per_seq].reshape(b, -1)
    seqs = Sequences(1 + rng.permutation(b), np.array(lengths), pages)
    tree = Tree.make(parents, rng.integers(0, 100, (b, n)))
    return s, step_tables(s, seqs, tree, np.zeros((b, 1), np.int64))


def real_nodes(step: StepTables) -> np.ndarray:
    """[B, N]: true where a node is no padding."""
    return step.tree.parents != PAD


def real_boundaries(step: StepTables, kind: str) -> np.ndarray:
    """[B, M]: true where a boundary node is no padding."""
    out = np.zeros(step.feeds[f"{kind}_entry_positions"].shape, bool)
    for row, index, *_ in step.boundaries[kind]:
        out[row, index] = True
    return out


@dataclass
class Draws:
    """Random tensors in a dtype, and the same rounded values in float64 for the reference."""

    dtype: torch.dtype
    rng: np.random.Generator

    def tensor(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = self.rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
        return torch.from_numpy(values).to(DEVICE, self.dtype)

    def pool(self, rows: int, named: np.ndarray, *width: int) -> torch.Tensor:
        """[rows, *width], NaN but for the rows that a table names; row 0 is zero."""
        out = torch.full((rows, *width), float("nan"), dtype=self.dtype, device=DEVICE)
        keep = to_torch(np.unique(named))
        out[keep] = self.tensor(len(keep), *width)
        out[0] = 0
        return out


def f64(x: torch.Tensor) -> np.ndarray:
    return x.cpu().to(torch.float64).numpy()


def rotation(positions: np.ndarray, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 cos and sin [.., rope / 2]."""
    angle = positions[..., None] * (1e4 ** (-np.arange(rope // 2) / (rope // 2)))
    return tuple(torch.from_numpy(f(angle).astype(np.float32)).to(DEVICE) for f in (np.cos, np.sin))  # type: ignore[return-value]


def relative_error(got: torch.Tensor, want: np.ndarray) -> float:
    """Largest error over the largest magnitude; NaN anywhere counts as infinite."""
    if not want.size:
        return 0.0
    error = np.abs(f64(got) - want).max() / max(np.abs(want).max(), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Tables and masks as the engine gets them."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
