"""A rehearsal of a new engine: it writes text of its own, and what its rounds take and its drafts bring becomes its latency table.

Rounds are timed whole, where they run, in stretches of one kind: graphs called by themselves meet other caches, and the host's part
of a drafted round is several times that of a plain one. The text begins with a token, is sampled for a while as the model would write
it and then greedy: in such text a drafter is followed about as often as in answers to prompts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.calibration import CandidateShape
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.executor import Executor
from trtllm_v4tree.runtime.executors import make_executor
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.policies.base import Candidates, Floats, Lists, Shape, candidates_of
from trtllm_v4tree.runtime.policies.fixed import FixedPolicy
from trtllm_v4tree.runtime.policies.rules import node_chances, path_scores
from trtllm_v4tree.runtime.request import Phase, Request
from trtllm_v4tree.runtime.tree import Ints, Speculation

_BATCHES = (1, 4, 16, 64)
_NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
_TEXTS, _SAMPLED, _GREEDY = 16, 96, 48
"""Texts, how many tokens of each are sampled, and how many then follow: small models repeat themselves in long greedy text."""
_PLAIN_EVERY, _PLAIN_COLD, _PLAIN_ROUNDS, _COLD, _ROUNDS = 8, 3, 9, 1, 3
_PASSES, _ENOUGH_SECONDS = (2, 12), 3.0
Report = Callable[[str, float], None]
_Sizes = TypeVar("_Sizes", bound=tuple[int, ...])


def rehearse_engine(directory: Path, manifest: Manifest, report: Report) -> str:
    """The table of an engine directory as JSON."""
    return rehearse(make_executor(directory, manifest), report).to_json()


def rehearse(executor: Executor, report: Report) -> LatencyTable:
    """Of an executor that serves nobody. A text of the rehearsal fits in one page."""
    largest = min(executor.sizes.max_batch_size, executor.sizes.num_pages - 1)
    batches = [b for b in _BATCHES if b < largest] + [largest]
    report("writing text", 0.0)
    stage, rounds = _Stage(executor), dict[int, list[_Round]]()
    for index, batch in enumerate(batches):
        report(f"timing batch {batch}", index / len(batches))
        rounds[batch] = _rehearse_batch(stage, batch)
    return _table(rounds, executor.draft_shapes, executor.sizes.max_verify_tokens)


class _Arm(FixedPolicy):
    """One draft round, or none, with so many nodes; keeps the last candidates, and how many were verified."""

    def __init__(self, shape: Shape | None, nodes: int) -> None:
        super().__init__(Speculation(*(shape or (0, 1)), nodes))
        self.drafts = shape
        self.last: Candidates | None = None
        self.nodes = 1

    def shape(self, batch: int) -> Shape | None:
        return self.drafts

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        self.last, self.nodes = _rows(candidates, slice(None)), len(kept[0])


class _Round(NamedTuple):
    """Draft round and nodes; milliseconds by phase; texts, which grow on, and where in each the first token of the round is; candidates."""

    shape: Shape | None
    nodes: int
    took: dict[str, float]
    texts: list[list[int]]
    places: list[int]
    candidates: Candidates | None


class _Stage:
    """An engine with as many requests under way as a batch needs, and the texts they go on with."""

    def __init__(self, executor: Executor) -> None:
        self.sizes = executor.sizes
        self.engine = Engine(executor)
        for steps, topk in ((0, 1), *executor.draft_shapes) if self.sizes.has_mtp else ():
            executor.prepare_draft(steps, topk)
        self.requests: list[Request] = []
        self._rng = np.random.default_rng(0)
        firsts = self._rng.integers(0, executor.config.vocab_size, (_TEXTS, 1)).tolist()
        longest = max(1, min(_SAMPLED, self.sizes.max_seq_len // 2))
        params = [SamplingParams(max_tokens=longest, ignore_eos=True, seed=seed) for seed in range(_TEXTS)]
        written = [self.engine.submit(first, own) for first, own in zip(firsts, params, strict=True)]
        while not self.engine.idle:
            self.engine.step()
        self._texts = itertools.cycle([[*r.prompt_ids, *r.output_ids] for r in written])

    def round(self, batch: int, arm: _Arm) -> _Round:
        """A round of a whole batch without prefill."""
        self.engine.policy = arm if self.sizes.has_mtp else None
        while len(self.requests) != batch or any(r.phase is not Phase.DECODE for r in self.requests):
            self._fill(batch)
            self.engine.step(decode=False)  # else the first ones could end before the last one begins
            self.requests = [r for r in self.requests if r.phase is not Phase.FINISHED]
        before, texts = dict(self.engine.clock.seconds), [r.output_ids for r in self.requests]
        places = [len(text) for text in texts]
        self.engine.step()
        self.requests = [r for r in self.requests if r.phase is not Phase.FINISHED]
        took = {phase: 1e3 * (now - before[phase]) for phase, now in self.engine.clock.seconds.items()}
        return _Round(arm.drafts, arm.nodes, took, texts, places, arm.last)

    def _fill(self, batch: int) -> None:
        """Texts go on from somewhere in their second half, so that no two sequences are alike, and for a round at least."""
        while len(self.requests) < batch:
            text = next(self._texts)
            text = text[: min(int(self._rng.integers(len(text) // 2, len(text))) + 1, self.sizes.max_seq_len - 2)]
            greedy = SamplingParams(
                max_tokens=min(_GREEDY, self.sizes.max_seq_len - len(text)), temperature=0.0, ignore_eos=True
            )
            self.requests.append(self.engine.submit(text, greedy))


def _rehearse_batch(stage: _Stage, batch: int) -> list[_Round]:
    """Passes over all kinds of rounds, in another order each time, until enough time went by. Rounds that count."""
    shapes, most = stage.engine.executor.draft_shapes, stage.sizes.max_verify_tokens
    rng, began, rounds = np.random.default_rng(batch), time.perf_counter(), list[_Round]()
    for number in range(_PASSES[1]):
        if number >= _PASSES[0] and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for arm in _arms(shapes, most, number, rng):
            cold, counted = (_COLD, _ROUNDS) if arm.drafts else (_PLAIN_COLD, _PLAIN_ROUNDS)
            rounds += [stage.round(batch, arm) for _ in range(cold + counted)][cold:]
    return rounds


def _arms(shapes: Sequence[Shape], most: int, number: int, rng: np.random.Generator) -> list[_Arm]:
    """One pass: every draft round in some order, with other nodes than in the pass before, and plain decoding between some."""
    arms = [_Arm(None, 1)]
    for place, index in enumerate(rng.permutation(len(shapes)).tolist(), 1):
        nodes = _nodes_of(shapes[index], most)
        arms.append(_Arm(shapes[index], nodes[(index + number) % len(nodes)]))
        if place % _PLAIN_EVERY == 0:
            arms.append(_Arm(None, 1))
    return arms


def _nodes_of(shape: Shape, most: int) -> list[int]:
    most = min(most, 1 + candidates_of(shape))
    return [n for n in _NODES if 1 < n < most] + [most]


def _table(rounds: Mapping[int, list[_Round]], shapes: Sequence[Shape], max_nodes: int) -> LatencyTable:
    """What the host and the commit take longer than in a plain round is counted with the draft."""
    target, draft, overhead = dict[tuple[int, int], float](), dict[tuple[int, int, int], float](), dict[int, float]()
    for batch, own in rounds.items():
        verify, rest = defaultdict(list), defaultdict(list)
        for r in own:
            verify[r.nodes].append(r.took["verify"])
            rest[r.shape].append(sum(r.took.values()) - r.took["verify"])
        overhead[batch], target[batch, 1] = statistics.fmean(rest.pop(None)), statistics.fmean(verify.pop(1))
        target |= {(batch, nodes): ms for (nodes,), ms in _smooth({(n,): ms for n, ms in verify.items()}).items()}
        drafts = _smooth({shape: ms for shape, ms in rest.items() if shape is not None})
        draft |= {(s, k, batch): max(0.0, ms - overhead[batch]) for (s, k), ms in drafts.items()}
    every = [r for own in rounds.values() for r in own]
    return LatencyTable(target, draft, overhead, _chances(every, shapes, max_nodes))


def _smooth(times: Mapping[_Sizes, list[float]]) -> dict[_Sizes, float]:
    """Means, since beside other programs they keep their proportions where medians do not; for each of them the plane through those of
    similar sizes (within an octave or so), since they are noisy."""
    sizes = np.array(list(times), np.float64)
    ms, counts = np.array([statistics.fmean(own) for own in times.values()]), [len(own) for own in times.values()]
    found = {}
    for key, size in zip(times, sizes, strict=True):
        weights = np.sqrt(counts * np.exp(-0.5 * np.square(np.log2(sizes / size)).sum(axis=1)))
        inputs = np.column_stack([np.ones(len(sizes)), sizes - size])
        found[key] = max(
            float(np.linalg.lstsq(inputs * weights[:, None], ms * weights, rcond=None)[0][0]), 0.5 * ms.min()
        )
    return found


def _chances(rounds: list[_Round], shapes: Sequence[Shape], max_nodes: int) -> dict[Shape, list[float]]:
    """How often the text went on as the first, second, .. best node of each draft round has it. A draft round tells of all in it."""
    seen = {shape: np.zeros(min(max_nodes, 1 + candidates_of(shape))) for shape in shapes}
    weight = dict.fromkeys(shapes, 0)
    for r in rounds:
        rows = [row for row, place in enumerate(r.places) if r.shape and len(r.texts[row]) >= place + r.shape[0]]
        if r.shape is None or r.candidates is None or not rows:
            continue
        part = _rows(r.candidates, rows)
        inside = [s for s in shapes if s[0] <= r.shape[0] and s[1] <= r.shape[1]]
        ahead = np.array([r.texts[row][r.places[row] :][: r.shape[0]] for row in rows])
        for shape, chances in zip(
            inside, node_chances(part, _came(part, r.shape, ahead), r.shape, inside, max_nodes), strict=True
        ):
            seen[shape] += len(rows) * chances[: len(seen[shape])]
            weight[shape] += len(rows)
    return {shape: [1.0, *((own[1:] + 0.5) / (weight[shape] + 1)).tolist()] for shape, own in seen.items()}


def _rows(candidates: Candidates, rows: list[int] | slice) -> Candidates:
    """A copy of some rows: an executor may reuse its memory."""
    return Candidates(candidates.parents[rows].copy(), candidates.tokens[rows].copy(), candidates.scores[rows].copy())


def _came(candidates: Candidates, shape: Shape, ahead: Ints) -> Floats:
    """1 where the text goes on with a candidate and all above it, [B, C]; ahead [B, steps]: the tokens that came."""
    same = candidates.tokens == ahead[:, CandidateShape.of(*shape).depth - 1]
    return np.exp(path_scores(candidates.parents, np.where(same, 0.0, -np.inf), shape))
