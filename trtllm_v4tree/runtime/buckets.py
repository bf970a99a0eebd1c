"""Fixed shapes for captured graphs: which sizes a pass is padded to, and how its tables are padded.

A bucket gives a size to every symbol of a graph's contract. Padding is honest: padded sequences use the bin, padded nodes see the sink
alone, padded keys are hidden, padded pooled rows weigh nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.contract import GraphContract, TensorSpec
from trtllm_v4tree.runtime.tables import CSA_NULL, HCA_NULL
from trtllm_v4tree.sizes import EngineSizes

Symbols = Mapping[str, int]
FILLS: dict[str, float] = {
    "node_mask": -np.inf, "csa_mask": -np.inf, "hca_mask": -np.inf, "catchup_mask": -np.inf, "level_mask": -np.inf,
    "csa_pool_table": CSA_NULL, "hca_pool_table": HCA_NULL, "csa_fold_table": CSA_NULL, "hca_fold_table": HCA_NULL,
}  # fmt: skip
"""What padding holds, 0 where not listed: token 0, position 0, slot 0, the zero row."""
WITH_SINK = frozenset(("node_mask", "catchup_mask", "level_mask"))
"""Masks whose first key is the sink, which every node sees."""
LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Bucket:
    """Sizes of the symbols of one graph, as sorted pairs."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> Bucket:
        return cls(tuple(sorted(sizes.items())))

    @property
    def symbols(self) -> dict[str, int]:
        return dict(self.sizes)


def rounded(count: int, most: int) -> int:
    """The next power of two, `most` at the most."""
    assert count <= most, f"{count} is more than {most}"
    return min(1 << max(0, count - 1).bit_length(), most)


def shape_of(dims: tuple[int | str, ...], symbols: Symbols) -> tuple[int, ...]:
    """A contract shape in numbers."""
    return tuple(dim if isinstance(dim, int) else sum(symbols[name] for name in dim.split("+")) for dim in dims)


def symbols_of(spec: GraphContract, feeds: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Sizes of the symbols that the tables of a pass show."""
    found: dict[str, int] = {}
    for tensor in spec.inputs:
        if tensor.role == "table":
            for dim, size in zip(tensor.shape, feeds[tensor.name].shape, strict=True):
                if isinstance(dim, str) and "+" not in dim:
                    found[dim] = size
    return found


def target_bucket(s: EngineSizes, actual: Symbols) -> Bucket:
    """Batch, nodes, wanted logits (one or all) and context, each rounded up; the rest follows from them."""
    nodes = rounded(actual["N"], next(width for width in s.pass_widths if actual["N"] <= width))
    held = max(actual.get("E", 0) * s.csa_ratio, actual.get("F", 0) * s.hca_ratio, 1)
    context = rounded(max(held, min(LEAST_CONTEXT, s.max_seq_len)), s.max_seq_len)
    wanted = {"B": rounded(actual["B"], s.max_batch_size), "N": nodes, "R": 1 if actual["R"] == 1 else nodes}
    return _target_bucket(s, wanted, context)


def _target_bucket(s: EngineSizes, wanted: dict[str, int], context: int) -> Bucket:
    nodes = wanted["N"]

    def ends(ratio: int) -> int:
        """Most nodes of a tree, or of a chain that is wider than any tree, that complete a window."""
        return nodes if nodes <= s.max_verify_tokens else -(-nodes // ratio)

    sizes = {**wanted, "W": s.window}
    if s.num_csa:
        sizes |= {"E": max(1, context // s.csa_ratio), "M": ends(s.csa_ratio)}
    if s.num_hca:
        sizes |= {"F": max(1, context // s.hca_ratio), "Q": ends(s.hca_ratio), "T": 1 + min(s.hca_ratio, nodes)}
    return Bucket.of(**sizes)


def widest_targets(s: EngineSizes) -> Iterator[Bucket]:
    """The largest buckets that passes reach: full batches of trees, and prefill passes of about one chunk of tokens."""
    widths = {rounded(n, s.max_commit) for n in range(1, s.max_commit + 1)} | set(s.pass_widths)
    for batch in {rounded(b, s.max_batch_size) for b in range(1, s.max_batch_size + 1)}:
        for nodes in widths:
            logits = nodes if nodes <= s.max_verify_tokens else 1
            if nodes <= s.max_verify_tokens or batch * nodes <= 4 * s.max_commit:
                yield _target_bucket(s, {"B": batch, "N": nodes, "R": logits}, s.max_seq_len)


def draft_bucket(s: EngineSizes, actual: Symbols, candidates: int) -> Bucket:
    """Batch and accepted rows, rounded up."""
    return _draft_bucket(s, rounded(actual["B"], s.max_batch_size), rounded(actual["S"], s.max_commit), candidates)


def _draft_bucket(s: EngineSizes, batch: int, rows: int, candidates: int) -> Bucket:
    return Bucket.of(B=batch, S=rows, W=s.window, C=candidates)


def widest_draft(s: EngineSizes, candidates: int) -> Bucket:
    return _draft_bucket(s, s.max_batch_size, s.max_commit, candidates)


def pad(tensor: TensorSpec, values: NDArray[Any], actual: Symbols, out: NDArray[Any], padded: Symbols) -> None:
    """Writes a table into its padded form `out`; a dim like `W+N` keeps each part at its padded place."""
    out[...] = FILLS.get(tensor.name, 0)
    if tensor.name in WITH_SINK:
        out[..., 0] = 0
    axes = [_pieces(dim, actual, padded) for dim in tensor.shape]
    for pieces in itertools.product(*axes):
        source, target = tuple(p[0] for p in pieces), tuple(p[1] for p in pieces)
        out[target] = values[source]


def _pieces(dim: int | str, actual: Symbols, padded: Symbols) -> list[tuple[slice, slice]]:
    """Where the parts of an axis come from and go to."""
    if isinstance(dim, int):
        return [(slice(None), slice(None))]
    pieces, source, target = [], 0, 0
    for name in dim.split("+"):
        pieces.append((slice(source, source + actual[name]), slice(target, target + actual[name])))
        source, target = source + actual[name], target + padded[name]
    return pieces


def moved_rows(index: NDArray[np.int64], width: int, padded: int) -> NDArray[np.int64]:
    """Row ids b * width + n of a batch whose sequences are padded to `padded` rows."""
    return index if width in (0, padded) else index // width * padded + index % width
