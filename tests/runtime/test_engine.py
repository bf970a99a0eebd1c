"""The round loop over a tiny engine: same tokens in every mode and batch, cancel in every phase, pools balanced, limits refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.params import SamplingParams
from trtllm_v4tree.runtime.policies.base import Candidates, Choice
from trtllm_v4tree.runtime.policies.fixed import FixedPolicy
from trtllm_v4tree.runtime.policies.names import ADAPTIVE
from trtllm_v4tree.runtime.request import Phase, Request
from trtllm_v4tree.runtime.tree import Speculation

from ..harness import Built
from .test_policy_rules import usual

SHAPES = ((1, 1), (3, 2), (4, 1), (3, 3))
MODES = ("s1_k1_d2", "s4_k1_d5", "s3_k2_d6", "s3_k3_d8", *ADAPTIVE, "auto_d4")


@pytest.fixture
def w16(tiny: Callable[[str], Built]) -> Built:
    return tiny("w16")


def table() -> LatencyTable:
    """A made-up table under which drafting pays and wide passes cost more."""
    batches, nodes = (1, 2, 4), (1, 2, 4, 8, 16)
    return LatencyTable(
        {(b, n): b * (1 + 0.1 * n) for b in batches for n in nodes},
        {(s, k, b): 0.05 * s * k * b for s, k in SHAPES for b in batches},
        dict.fromkeys(batches, 0.1),
        usual(SHAPES),
    )


def engine_of(built: Built, speculation: str = "none", **options: object) -> Engine:
    return Engine(built.driver.executor, speculation, latency=table(), **options)  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0, longest: int = 150) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 200, int(n)).tolist() for n in rng.integers(1, longest, count)]


def run(engine: Engine, asked: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    requests = [engine.submit(p, each) for p, each in zip(asked, params, strict=True)]
    while not engine.idle:
        engine.step()
    return requests


def balanced(engine: Engine) -> bool:
    free = engine.pools
    return not free.slots.taken and not free.pages.taken and engine.idle


def mixed_params(count: int, max_tokens: int = 40) -> list[SamplingParams]:
    """Greedy, sampled, truncated, penalised and min_tokens requests in turn."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.9, "min_tokens": 20},
    )
    return [SamplingParams(max_tokens=max_tokens, seed=i, **kinds[i % len(kinds)]) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_plain_decoding_alone(w16: Built, mode: str) -> None:
    asked, params = prompts(7), mixed_params(7)
    plain = engine_of(w16)
    alone = [run(plain, [p], [each])[0].output_ids for p, each in zip(asked, params, strict=True)]
    together = run(engine_of(w16, mode), asked, params)
    assert [r.output_ids for r in together] == alone


def test_accepted_length_counts_tokens_per_pass(w16: Built) -> None:
    request = run(
        engine_of(w16, "s3_k3_d8"), prompts(1), [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)]
    )[0]
    assert request.metrics.round_tokens == 59  # the first token came from the prefill
    assert request.metrics.accepted_by_depth[0] == request.metrics.rounds
    assert sum(request.metrics.accepted_by_depth) == request.metrics.round_tokens
    assert 1.0 < request.metrics.accepted_length <= 4.0


@pytest.mark.parametrize("mode", ("none", "s3_k3_d8"))
def test_cancel_in_every_phase_frees_slot_and_pages(w16: Built, mode: str) -> None:
    engine = engine_of(w16, mode)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    neighbour = engine.submit(prompts(1, seed=5)[0], params)
    for phase in (Phase.QUEUED, Phase.PREFILL, Phase.DECODE):
        victim = engine.submit([7] * 150, params)
        steps = 0
        while victim.phase is not phase:
            engine.step()
            steps += 1
            assert steps < 60  # a chunk may have 4 tokens only
        engine.cancel(victim)
        deltas = engine.step()
        assert [d.finish_reason for d in deltas if d.request is victim] == ["cancelled"]
        assert victim.phase is Phase.FINISHED
        assert engine.pools.slots.taken <= {neighbour.slot}
    while not engine.idle:
        engine.step()
    assert balanced(engine)
    assert neighbour.output_ids == run(engine_of(w16), [neighbour.prompt_ids], [params])[0].output_ids


def test_more_requests_than_slots_wait_and_all_finish(w16: Built) -> None:
    engine = engine_of(w16, "s3_k2_d6")
    asked = prompts(13, seed=2, longest=90)
    requests = run(
        engine, asked, [SamplingParams(max_tokens=5 + i, temperature=0.0, ignore_eos=True) for i in range(13)]
    )
    assert [len(r.output_ids) for r in requests] == [5 + i for i in range(13)]
    assert balanced(engine)


def test_a_long_prompt_does_not_stall_running_streams_for_more_than_one_chunk(w16: Built) -> None:
    engine = engine_of(w16, "s3_k2_d6")
    stream = engine.submit(prompts(1)[0], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    while stream.phase is not Phase.DECODE:
        engine.step()
    late = engine.submit([9] * 400, SamplingParams(max_tokens=1, temperature=0.0))
    while late.finish_reason is None:
        before = late.prefilled
        deltas = engine.step()
        assert late.prefilled - before <= engine.sizes.prefill_chunk
        assert any(d.request is stream and d.token_ids for d in deltas)
    engine.cancel(stream)
    engine.step()
    assert balanced(engine)


def test_context_limit_shrinks_the_tree_and_finishes_with_length(w16: Built) -> None:
    limit = w16.driver.executor.sizes.max_seq_len
    asked = [5] * (limit - 3)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    for mode in ("none", "s3_k3_d8"):
        request = run(engine_of(w16, mode), [asked], [params])[0]
        assert (len(request.output_ids), request.finish_reason) == (3, "length")


def test_stop_token_in_the_middle_of_an_accepted_run_ends_the_output(w16: Built) -> None:
    asked, free = prompts(1, seed=3), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    whole = run(engine_of(w16), asked, [free])[0].output_ids
    for stop in dict.fromkeys(whole[3:40:7]):
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
        cut = whole[: whole.index(stop) + 1]
        for mode in ("none", "s4_k1_d5", "s3_k3_d8"):
            request = run(engine_of(w16, mode), asked, [params])[0]
            assert (request.output_ids, request.finish_reason, request.stop_reason) == (cut, "stop", stop)


def test_logprobs_are_those_of_plain_decoding(w16: Built) -> None:
    asked = prompts(2, seed=4)
    params = [SamplingParams(max_tokens=30, temperature=0.0, logprobs=3, ignore_eos=True)] * 2
    plain, tree = (run(engine_of(w16, mode), asked, params) for mode in ("none", "s3_k3_d8"))
    for a, b in zip(plain, tree, strict=True):
        assert len(b.logprobs) == len(b.output_ids)
        np.testing.assert_allclose([x.chosen for x in b.logprobs], [x.chosen for x in a.logprobs], atol=2e-4)
        assert [[t for t, _ in x.top] for x in b.logprobs] == [[t for t, _ in x.top] for x in a.logprobs]


def test_deterministic_mode_makes_undecided_choices_again(w16: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin that leaves many choices undecided the tokens are still those of plain decoding."""
    from trtllm_v4tree.runtime import sampling

    monkeypatch.setattr(sampling, "LOGIT_MARGIN", 0.5)
    monkeypatch.setattr(w16.driver.executor, "bit_exact", False)
    asked, params = prompts(3, seed=6, longest=40), mixed_params(3, max_tokens=25)
    expected = [r.output_ids for r in run(engine_of(w16), asked, params)]
    restarted: list[str] = []
    plain_restart = Request.restart
    monkeypatch.setattr(Request, "restart", lambda self: (restarted.append(self.id), plain_restart(self)))
    for mode in ("none", "s3_k3_d8"):
        got = run(engine_of(w16, mode, deterministic=True), asked, params)
        assert [r.output_ids for r in got] == expected
    assert restarted


@pytest.mark.parametrize(
    ("ids", "word"),
    [([], "empty"), ([1, 999999], "token 1"), ([-1], "token 0"), ([True], "token 0"), ([1.5], "token 0")],
)
def test_bad_prompts_are_refused(w16: Built, ids: list[int], word: str) -> None:
    engine = engine_of(w16)
    for _ in range(2):
        with pytest.raises(RequestError, match=word):
            engine.submit(ids, SamplingParams())
    assert balanced(engine)


def test_prompt_longer_than_the_context_is_refused(w16: Built) -> None:
    engine = engine_of(w16)
    with pytest.raises(RequestError, match="max_seq_len"):
        engine.submit([5] * engine.sizes.max_seq_len, SamplingParams())


def test_full_queue_is_refused(w16: Built) -> None:
    engine = engine_of(w16, max_queue=2)
    for _ in range(2):
        engine.submit([5], SamplingParams())
    with pytest.raises(RequestError, match="queue is full"):
        engine.submit([5], SamplingParams())


@pytest.mark.parametrize("name", ["fast", "s0_k1_d2", "s3_k2_d99", "s3_k2_d1", "s7_k2_d4", "s3_k1_d17", ""])
def test_unknown_speculation_is_refused(w16: Built, name: str) -> None:
    with pytest.raises(RequestError):
        engine_of(w16, name)


class _Drafting(FixedPolicy):
    """Drafts from a round on and verifies roots alone; keeps the candidates by tokens emitted so far."""

    def __init__(self, first: int) -> None:
        super().__init__(Speculation(3, 2, 6))
        self.round, self.first = 0, first
        self.seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def shape(self, batch: int) -> tuple[int, int] | None:
        self.round += 1
        return self.shapes[0] if self.round > self.first else None

    def choose(self, candidates: Candidates, rooms: np.ndarray) -> Choice:
        self.seen[self.round] = (candidates.tokens, candidates.scores)
        return Choice(candidates.scores, np.ones_like(rooms))


@pytest.mark.parametrize("asked", prompts(3, seed=5))
def test_a_drafter_that_has_not_read_for_long_proposes_the_same(asked: list[int], w16: Built) -> None:
    """Only the newest rows are kept for it, as many as its window sees; plain decoding reads none of them meanwhile."""
    params = [SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)]
    seen = []
    for first in (0, 80):
        engine = engine_of(w16, "s3_k2_d6")
        engine.policy = policy = _Drafting(first)
        run(engine, [asked], params)
        seen.append(policy.seen)
    assert max(seen[1]) > 90
    for number, (tokens, scores) in seen[1].items():
        np.testing.assert_array_equal(tokens, seen[0][number][0])
        np.testing.assert_allclose(scores, seen[0][number][1], atol=2e-4)
