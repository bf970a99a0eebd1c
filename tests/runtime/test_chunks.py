"""How long a prefill pass may be: fitted lines against numpy, the gap that results, limits, and padding in a pass of several prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_v4tree import LLM
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.chunks import Chunks, Line
from trtllm_v4tree.runtime.engine import Engine
from trtllm_v4tree.runtime.params import SamplingParams

from ..harness import Built

costs = st.floats(0.01, 20.0)


@given(base=costs, slope=st.floats(0.01, 2.0), xs=st.lists(st.integers(1, 256), min_size=8, max_size=60))
def test_a_line_is_that_of_least_squares(base: float, slope: float, xs: list[int]) -> None:
    line, ys = Line(), [base + slope * x for x in xs]
    for x, y in zip(xs, ys, strict=True):
        line.add(x, y)
    if np.var(xs) > 400:
        want = np.polyfit(xs, ys, 1)
        assert line.fit()[1] == pytest.approx(want[0], rel=0.1, abs=0.1 * base / 20)
    assert line.at(float(np.mean(xs))) == pytest.approx(float(np.mean(ys)), rel=0.35)
    assert min(line.fit()) >= 0.0


def test_a_line_forgets_and_shrugs_off_a_hiccup() -> None:
    line = Line()
    for _ in range(100):
        line.add(16, 3.0)
        line.add(32, 5.0)
    line.add(16, 4000.0)
    assert line.at(24) == pytest.approx(4.0, rel=0.1)
    for _ in range(300):
        line.add(16, 6.0)
        line.add(32, 10.0)
    assert line.at(24) == pytest.approx(8.0, rel=0.1)


@given(base=st.floats(0.0, 3.0), slope=costs, round_base=costs, round_slope=costs, decoding=st.integers(1, 16))
def test_the_gap_stays_under_the_stall(
    base: float, slope: float, round_base: float, round_slope: float, decoding: int
) -> None:
    chunks = Chunks(128)
    for n in (8, 16, 40, 128, 64, 24):
        chunks.prefill.add(n, base + slope * n)
    for b in (1, 16, 4, 8, 2):
        chunks.decode.add(b, round_base + round_slope * b)
    got = chunks.tokens(decoding, 6)
    assert got % 4 == 0 and 4 <= got <= 128
    if got > 4:
        assert chunks.prefill.at(got) <= 1.5 * chunks.decode.at(decoding) * 1.001


def test_limits() -> None:
    assert Chunks(128).tokens(0, 6) == 128, "nobody waits"
    assert Chunks(128).tokens(1, 6) == 16 and Chunks(4).tokens(1, 6) == 4, "nothing measured"
    asked = Chunks(128, max_num_tokens=64)
    assert [asked.tokens(b, 6) for b in (0, 1, 4, 16)] == [128, 56, 40, 4]


@pytest.mark.parametrize("value", [-1, True, 1.5, "64", 1 << 21])
def test_a_refused_budget(value: Any, tiny: Callable[[str], Built]) -> None:
    with pytest.raises(RequestError, match="max_num_tokens"):
        LLM(tiny("w16").engine, max_num_tokens=value)


@pytest.mark.parametrize(("mode", "chunk"), [("none", 20), ("s3_k2_d6", 16)])
def test_chunks_shrink_beside_a_stream_and_the_tokens_do_not_change(
    tiny: Callable[[str], Built], mode: str, chunk: int
) -> None:
    built = tiny("w16")
    prompt = np.random.default_rng(0).integers(4, 200, 150).tolist()
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)

    def together(max_num_tokens: int) -> tuple[list[list[int]], list[int]]:
        engine = Engine(built.driver.executor, mode, max_num_tokens=max_num_tokens)
        running = engine.submit([5, 6, 7], params)
        engine.step()
        arrived, taken = engine.submit(prompt, params), [0]
        while not engine.idle:
            engine.step()
            taken.append(arrived.prefilled)
        return [running.output_ids, arrived.output_ids], [n for n in np.diff(taken).tolist() if n]

    (whole, large), (cut, small) = together(1000), together(22)
    assert whole == cut
    assert large == [64, 64, 22]
    assert set(small[:-1]) == {chunk} and sum(small) == 150


def test_padding_counts(tiny: Callable[[str], Built]) -> None:
    """A prompt of 50 tokens and short ones are no pass of 4 x 50: the passes of a chunk of 64 hold 64 nodes at most."""
    engine = Engine(tiny("w16").driver.executor, max_num_tokens=1000)
    asked = [engine.submit([7] * n, SamplingParams(max_tokens=3)) for n in (50, 3, 3, 3)]
    widths = []
    while not engine.idle:
        before = [r.prefilled for r in asked]
        engine.step()
        taken = [r.prefilled - b for r, b in zip(asked, before, strict=True) if r.prefilled > b]
        widths.append(len(taken) * max(taken, default=0))
    assert max(widths) <= 64 and sum(w > 0 for w in widths) == 2


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_other_way_round(tiny: Callable[[str], Built]) -> None:
    """Of two passes one is the long prompt's, while short ones keep coming."""
    engine = Engine(tiny("w16").driver.executor)
    params = SamplingParams(max_tokens=1)
    long = engine.submit([7] * 600, params)
    engine.step()
    steps = 0
    while long.finish_reason is None:
        short = engine.submit([5, 6, 7], params)
        before = steps
        while short.finish_reason is None:
            engine.step()
            steps += 1
        assert steps - before <= 2
    assert steps <= 2 * -(-600 // 64)
