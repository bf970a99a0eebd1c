"""The interface of every policy, and what passes through it. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.tree import Ints

Floats = NDArray[np.float64]
Lists = Sequence[Sequence[int]]
Shape = tuple[int, int]
"""A draft round: steps and topk."""


class Candidates(NamedTuple):
    """A draft round's candidates by level, [B, C]: parent candidate (-1 root), token, cumulative log-probability."""

    parents: Ints
    tokens: Ints
    scores: NDArray[np.floating]


class Choice(NamedTuple):
    """What to verify: the `budgets[b]` best nodes (root included) by `scores` [B, C], which never rise from parent to child."""

    scores: NDArray[np.floating]
    budgets: Ints


class Policy(Protocol):
    """`shape` is asked before a draft round, `choose` after it, `observe` after acceptance; no tree has more than `max_nodes`."""

    max_nodes: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every draft round it may ask for."""
        ...

    def shape(self, batch: int) -> Shape | None:
        """The draft round for `batch` sequences, None for a plain step."""
        ...

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        """`rooms` [B]: most nodes that each sequence may still verify."""
        ...

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        """kept [B][N]: candidate of each verified node (-1 root, -2 padding); visited: which nodes were accepted."""
        ...


def candidates_of(shape: Shape) -> int:
    """How many candidates a draft round proposes per sequence: K, then K x K on each further level."""
    steps, topk = shape
    return topk + (steps - 1) * topk * topk
