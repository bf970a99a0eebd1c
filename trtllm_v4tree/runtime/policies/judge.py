"""Judges a draft round by calibrated scores, and learns from what became of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trtllm_v4tree.runtime.calibration import Calibration, CandidateShape
from trtllm_v4tree.runtime.policies.base import Candidates, Floats, Lists, Shape
from trtllm_v4tree.runtime.policies.rules import local_scores, path_scores
from trtllm_v4tree.runtime.tree import Ints


class Judged(NamedTuple):
    """Calibrated log-probability that a candidate and all above it are accepted, and the probability itself: [B, C] each."""

    scores: Floats
    probabilities: Floats


class Judge:
    """Calibration of one drafter, and the round under judgement."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._shape = CandidateShape.of(1, 1)
        self._local = np.zeros((0, 0))

    def judge(self, candidates: Candidates, shape: Shape) -> Judged:
        self._shape, self._local = CandidateShape.of(*shape), local_scores(candidates)
        scores = path_scores(candidates.parents, self.calibration.scores(self._local, self._shape), shape)
        return Judged(scores, np.exp(scores))

    def learn(self, candidates: Candidates, kept: Lists, paths: Lists) -> None:
        """kept [B][N]: candidate of each verified node; paths [B]: accepted nodes."""
        self.calibration.update(self._local, self._shape, *met(candidates.parents, kept, paths))


def met(parents: Ints, kept: Lists, paths: Lists) -> tuple[list[int], list[int], list[bool]]:
    """Verified candidates whose parent was accepted: sequence, candidate, and whether it was accepted itself, [X] each.

    parents [B, C]; kept [B][N]: candidate of each node; paths [B]: accepted nodes.
    """
    rows: list[int] = []
    found: list[int] = []
    hits: list[bool] = []
    for row, (up, nodes, path) in enumerate(zip(parents.tolist(), kept, paths, strict=True)):
        accepted = {nodes[node] for node in path}  # the root is candidate -1, as the parents have it
        reached = [c for c in nodes if c >= 0 and up[c] in accepted]
        rows += [row] * len(reached)
        found += reached
        hits += [c in accepted for c in reached]
    return rows, found, hits
