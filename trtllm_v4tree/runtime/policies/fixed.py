"""Policies that need no timing: a fixed shape, a fixed budget with calibrated scores, the draft's entropy, recent accepted lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.policies.base import Candidates, Choice, Floats, Lists, Shape, candidates_of
from trtllm_v4tree.runtime.policies.judge import Judge
from trtllm_v4tree.runtime.policies.rules import entropy, limited, nearest
from trtllm_v4tree.runtime.tree import Ints, Speculation

_DEEP, _WIDE = 7, 3
_MEMORY = 0.2


class FixedPolicy:
    """Always the shape it was given (the paper's)."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.shapes = ((speculation.steps, speculation.topk),)
        self.max_nodes = speculation.budget

    def shape(self, batch: int) -> Shape | None:
        return self.shapes[0]

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        return Choice(candidates.scores, np.minimum(rooms, self.speculation.budget))

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        return None


class CalibratedPolicy:
    """The most accepted tokens that D verified nodes can give, whatever the draft costs: deep and wide, the best nodes calibrated."""

    def __init__(self, shapes: Sequence[Shape], max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.shapes = (nearest(shapes, min(_DEEP, max_nodes - 1), _WIDE),)
        self._judge = Judge()

    def shape(self, batch: int) -> Shape | None:
        return self.shapes[0]

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        return Choice(self._judge.judge(candidates, self.shapes[0]).scores, np.minimum(rooms, self.max_nodes))

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        self._judge.learn(candidates, kept, visited.paths)


class EntropyPolicy:
    """Depth and width from the draft's entropy (as SAGE): sure drafts are followed far and narrow, unsure ones near and wide.

    The entropy of the first level, as a share h of its largest value, sets each sequence's tree: depth 1 + (1 - h) (steps - 1), width
    1 + h (topk - 1). The running mean of h sets the next draft round in the same way.
    """

    def __init__(self, shapes: Sequence[Shape], max_nodes: int) -> None:
        self.shapes, self.max_nodes = tuple(shapes), max_nodes
        self._steps = min(max(s for s, _ in shapes), max_nodes - 1)
        self._topk = max(k for _, k in shapes)
        self._mean = 0.5
        self._current: Shape = self.shapes[0]

    def shape(self, batch: int) -> Shape | None:
        steps = round(1 + (1 - self._mean) * (self._steps - 1))
        self._current = nearest(self.shapes, steps, round(1 + self._mean * (self._topk - 1)))
        return self._current

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        share = self._shares(candidates.scores[:, : self._current[1]].astype(np.float64))
        self._mean += _MEMORY * (float(share.mean()) - self._mean)
        depths = np.rint(1 + (1 - share) * (self._steps - 1)).astype(np.int64)
        widths = np.rint(1 + share * (self._topk - 1)).astype(np.int64)
        scores, nodes = limited(candidates, self._current, depths, widths)
        return Choice(scores, np.minimum(np.minimum(rooms, self.max_nodes), nodes))

    def _shares(self, first: Floats) -> Floats:
        """Entropy of the first level [B, K] over the most that K + 1 outcomes can have: [B]."""
        return np.clip(entropy(first) / math.log(first.shape[1] + 1), 0.0, 1.0)

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        return None


class RecentPolicy:
    """Depth and width from recent accepted lengths (as ADT-Tree): one level deeper than the mean, the narrower the deeper.

    The draft round has 1 + the mean number of drafted tokens accepted per pass, rounded up, and the width that fits `max_nodes` into
    that depth.
    """

    def __init__(self, shapes: Sequence[Shape], max_nodes: int) -> None:
        self.shapes, self.max_nodes = tuple(shapes), max_nodes
        self._mean = 1.5
        self._current: Shape = self.shapes[0]

    def shape(self, batch: int) -> Shape | None:
        steps = min(1 + math.ceil(self._mean), self.max_nodes - 1)
        topk = max(1, round((self.max_nodes - 1) / steps))
        self._current = nearest(self.shapes, steps, topk)
        return self._current

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        most = min(self.max_nodes, 1 + candidates_of(self._current))
        return Choice(candidates.scores, np.minimum(rooms, most))

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        self._mean += _MEMORY * (float(np.mean(visited.counts)) - 1 - self._mean)
