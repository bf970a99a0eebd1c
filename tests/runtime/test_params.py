"""Every bad value is refused with the field's name, the value and what is allowed."""

import math
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.params import SamplingParams

BAD: list[tuple[str, Any]] = [
    *[("max_tokens", v) for v in (0, -1, 1.5, "8", True, None)],
    *[("min_tokens", v) for v in (-1, 65, 0.5, None)],
    *[("temperature", v) for v in (-0.1, math.nan, math.inf, "1", True, None)],
    *[("top_k", v) for v in (-1, 1.0, None, False)],
    *[("top_p", v) for v in (0.0, -0.5, 1.01, math.nan, None)],
    *[("min_p", v) for v in (-0.01, 1.01, math.nan, None)],
    *[("repetition_penalty", v) for v in (0.0, -1.0, math.nan, math.inf)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.inf)],
    *[("seed", v) for v in (-1, 2**63, 1.0, True)],
    *[("stop", v) for v in ("", ["a", ""], ["a", 1], b"a", None, 3)],
    *[("stop_token_ids", v) for v in ([-1], ["1"], [1.0], [True], "12", None, 5)],
    *[("bad_words", v) for v in ("", ["a", ""], ["a", 1], b"a", None, 3, "x" * 257, ["x"] * 257, "\ud800")],
    *[("bad_words_list", v) for v in ([5], [[]], [[-1]], [[True]], ["12"], "12", None, [[1] * 257], [[1]] * 257)],
    *[("ignore_eos", v) for v in (1, None, "false")],
    *[("logprobs", v) for v in (-1, 21, 1.0, True)],
    *[("include_stop_str_in_output", v) for v in (0, None)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} must be ") and repr(value)[:200] in message and len(message) < 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("min_tokens", 64),
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", np.int64(5)),
        ("top_p", 1),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("seed", 2**63 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_limits_are_legal(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_stops_are_stored_as_tuples() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    params = SamplingParams(stop=["ab", "c"], stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("ab", "c"), (3, 4))
    assert params == SamplingParams(stop=("ab", "c"), stop_token_ids=(3, 4)) and hash(params)


def test_bad_words_are_stored_as_tuples() -> None:
    params = SamplingParams(bad_words="ab", bad_words_list=[[1], np.array([2, 3]).tolist()])
    assert (params.bad_words, params.bad_words_list) == (("ab",), ((1,), (2, 3))) and hash(params)
    assert params.has_bad_words and not SamplingParams().has_bad_words


def test_defaults_sample_without_penalties() -> None:
    params = SamplingParams()
    assert not params.is_greedy and not params.has_penalties
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(frequency_penalty=0.1).has_penalties
