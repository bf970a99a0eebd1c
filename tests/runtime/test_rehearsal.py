"""The rehearsal of a new engine: its table against counts and times made by hand, and on a small engine from end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree.compiler.build import build
from trtllm_v4tree.errors import ConfigError
from trtllm_v4tree.runtime import rehearsal
from trtllm_v4tree.runtime.executor import OnnxRuntimeExecutor
from trtllm_v4tree.runtime.policies.base import candidates_of
from trtllm_v4tree.runtime.rehearsal import _chances, _Round, _rows, _table, rehearse
from trtllm_v4tree.sizes import MIN_SEQ_LEN

from ..conftest import OPTIONS
from ..harness import Built
from .test_policy_rules import random_round

SHAPES = ((1, 1), (3, 2), (2, 2))


def rounds(count: int, batch: int = 3) -> list[_Round]:
    """Draft rounds of s3_k2 with few different tokens, and texts that follow them sometimes; one text ends early."""
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        drafted = random_round(rng, (3, 2), batch)
        drafted = drafted._replace(tokens=np.tile([5, 6, 5, 6, 5, 6, 5, 6, 5, 6], (batch, 1)))
        texts = [rng.integers(5, 8, 9).tolist() for _ in range(batch)]
        made.append(_Round((3, 2), 4, {"verify": 1.0}, texts, [2, 4, 7][:batch], drafted))
    return made


def test_chances_are_how_often_the_text_went_on_as_the_best_nodes_have_it() -> None:
    many = rounds(200)
    counted, weight = np.zeros(4), 0
    for r in many:
        assert r.candidates is not None
        for row, text in enumerate(r.texts[:2]):
            up, weight = r.candidates.parents[row], weight + 1
            ahead, came = text[r.places[row] :], {-1: 0}
            for c, token in enumerate(r.candidates.tokens[row].tolist()):
                depth = came.get(int(up[c]))
                if depth is not None and token == ahead[depth]:
                    came[c] = depth + 1
            best = np.argsort(-r.candidates.scores[row])[:3].tolist()
            counted[1:] += [c in came for c in best]
    found = _chances(many, SHAPES, 4)
    assert found[3, 2][0] == 1.0
    np.testing.assert_allclose(found[3, 2][1:], (counted[1:] + 0.5) / (weight + 1))
    assert [len(found[s]) for s in SHAPES] == [2, 4, 4]


def test_times_are_means_and_noise_is_smoothed() -> None:
    """Rounds of 0.5 + 0.1 ms per node, drafts of 0.2 ms a step; the host takes 0.2 ms, and 0.3 ms more beside a draft."""
    one, rng = rounds(1, 1)[0], np.random.default_rng(3)
    shapes = [(s, k) for s in range(1, 8) for k in (1, 2, 3)]

    def took(shape: tuple[int, int] | None, nodes: int, host: float) -> list[_Round]:
        phases = [{"verify": (0.5 + 0.1 * nodes) * x, "host": host * x} for x in rng.gamma(4.0, 0.25, 400)]
        return [one._replace(shape=shape, nodes=nodes, took=own, candidates=None) for own in phases]

    drafted = [took(shape, nodes, 0.5 + 0.2 * shape[0]) for shape in shapes for nodes in (2, 4, 8)]
    table = _table({1: list(itertools.chain(took(None, 1, 0.2), *drafted))}, shapes, 8)
    for nodes in (2, 4, 8):
        assert table.target_ms(1, nodes) == pytest.approx(0.5 + 0.1 * nodes, rel=0.06)
    for steps, topk in shapes:
        assert table.draft_ms(steps, topk, 1) == pytest.approx(0.3 + 0.2 * steps, rel=0.15)


def test_a_copy_of_rows_stays_as_it_is() -> None:
    drafted = random_round(np.random.default_rng(1), (2, 2), 3)
    kept, scores = _rows(drafted, slice(None)), drafted.scores.copy()
    drafted.scores[:] = 0.0
    np.testing.assert_array_equal(kept.scores, scores)


def test_an_engine_is_timed_by_batch_and_leaves_nothing_behind(
    tiny: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_PASSES", (1, 1))
    executor = tiny("w16").driver.executor
    said: list[str] = []
    table = rehearse(executor, lambda line, done: said.append(line))
    sizes, shapes = executor.sizes, executor.draft_shapes
    assert said[0] == "writing text" and said[-1] == f"timing batch {sizes.max_batch_size}"
    assert {b for b, n in table.target if n == 1} == set(table.overhead) == {1, sizes.max_batch_size}
    assert set(table.draft) == {(*shape, b) for shape in shapes for b in table.overhead}
    assert min(*table.target.values(), *table.overhead.values()) > 0
    for shape, own in table.chances.items():
        assert len(own) == min(sizes.max_verify_tokens, 1 + candidates_of(shape)) and own[0] == 1.0
        assert all(0 < p <= 1 for p in own)


def test_a_batch_that_takes_many_prefill_passes(
    tiny: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences decode at once, however long the first ones wait for the last."""
    monkeypatch.setattr(rehearsal, "_PASSES", (1, 1))
    options = replace(OPTIONS, max_batch_size=12, prefill_chunk=8, draft_shapes=((3, 2),))
    manifest = build(tiny("w16").checkpoint, tmp_path / "engine", options)
    executor = OnnxRuntimeExecutor(tmp_path / "engine", manifest, threads=1)
    assert set(rehearse(executor, lambda line, done: None).overhead) == {1, 4, 12}


def test_the_shortest_sequences(tiny: Callable[[str], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode round a sequence is enough; where there is none, nothing is built."""
    monkeypatch.setattr(rehearsal, "_PASSES", (1, 1))
    options = replace(OPTIONS, max_batch_size=2, max_seq_len=MIN_SEQ_LEN, draft_shapes=((1, 1),))
    manifest = build(tiny("w16").checkpoint, tmp_path / "engine", options)
    table = rehearse(OnnxRuntimeExecutor(tmp_path / "engine", manifest, threads=1), lambda line, done: None)
    assert set(table.overhead) == {1, 2}
    with pytest.raises(ConfigError, match="max_seq_len=2 is out of range: give a value from 3"):
        build(tiny("w16").checkpoint, tmp_path / "other", replace(options, max_seq_len=MIN_SEQ_LEN - 1))
