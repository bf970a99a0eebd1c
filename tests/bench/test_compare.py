"""`v4tree compare`: its figures by hand, an engine beside itself, a changed layer found, and the shipped model beside transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trtllm_v4tree import LLM, SamplingParams
from trtllm_v4tree.bench.lockstep import Comparison, Difference, Place, difference
from trtllm_v4tree.cli.main import status_of
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.contract import NULL_SCORE
from trtllm_v4tree.runtime.executor import Executor, Scratch, StepResult
from trtllm_v4tree.runtime.tables import Feeds

from ..harness import Built
from ..oracle.reference import Oracle
from ..test_cli import Ran, refused

PROMPT = ("--prompt_token_ids", "0,2,17,5,9,33,2,8", "--max_tokens", "12")


def arrays(*values: Any) -> list[np.ndarray]:
    return [np.array(v, np.float32) for v in values]


# ---------------------------------------------------------------- figures


def test_figures_by_hand() -> None:
    found = difference(*arrays([3.0, 4.0], [3.0, 4.5]))
    assert (found.calls, found.values, found.max_abs, found.max_rel) == (1, 2, 0.5, 0.125)
    assert found.norm_ratio == pytest.approx(math.hypot(3, 4.5) / 5)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))


@pytest.mark.parametrize(
    ("x", "y", "agrees"),
    [
        ([1.0, NULL_SCORE], [1.0, NULL_SCORE], True),
        ([1.0, -np.inf], [1.0, -np.inf], True),
        ([1.0, -np.inf], [1.0, 0.0], False),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([np.nan], [np.nan], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 0.0], [0.0, 1e-9], False),
        ([], [], True),
    ],
)
def test_values_that_are_none(x: list[float], y: list[float], agrees: bool) -> None:
    """No value in both is left out; in one of them it is a difference, and so is a NaN."""
    found = difference(*arrays(x, y))
    assert found.agrees(1e-4) == agrees
    assert not agrees or (found.max_abs, found.cosine, found.norm_ratio) in (
        (0.0, pytest.approx(1.0), 1.0),
        (0.0, 1.0, 1.0),
    )


def test_integers_are_counted() -> None:
    found = difference(np.array([1, 2, 3]), np.array([1, 5, 4]))
    assert (found.values, found.unequal, found.agrees(1.0)) == (3, 2, False)


def test_the_worst_call_counts() -> None:
    merged = Difference(1, 4, 0, 0.5, 0.1, 0.9, 1.2) + Difference(1, 4, 1, 0.2, 0.3, 0.99, 0.5)
    assert merged == Difference(2, 8, 1, 0.5, 0.3, 0.9, 0.5)


# ---------------------------------------------------------------- engines


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    capfd.readouterr()
    return Ran(status_of(["compare", *map(str, arguments)]), *capfd.readouterr())


@pytest.mark.parametrize("speculation", ["none", "s3_k3_d6"])
def test_an_engine_is_like_itself(
    speculation: str, tiny: Callable[[str], Built], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every output of every graph that ran, and every state that a commit wrote, without any difference."""
    engine = tiny("w16").engine
    shutil.copytree(engine, tmp_path / "copy")
    pair = ("--engine_dir", engine, "--other_engine_dir", tmp_path / "copy")
    ran = run(capfd, *pair, *PROMPT, "--speculation", speculation, "--threads", 1, "--rtol", 0, "--json")
    assert (ran.status, ran.err) == (0, "")
    facts = json.loads(ran.out)
    assert facts["agree"]
    assert all(o["max_abs"] == o["unequal"] == 0 for o in facts["outputs"])
    seen = {o["graph"] for o in facts["outputs"]}
    drafts = {"draft_s3_k3"} if speculation != "none" else set()
    assert {"target_step", "commit"} | drafts <= seen
    written = {o["output"] for o in facts["outputs"] if o["graph"] == "commit" and o["values"]}
    assert {"window_kv", "csa_state", "csa_entries", "idx_state", "hca_state"} <= written
    layers = [o["layer"] for o in facts["outputs"] if o["output"] == "csa_raw"]
    assert layers == [2, 4]


def test_a_changed_layer_is_found(
    tiny: Callable[[str], Built], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One weight of layer 3 is 1 % larger: nothing before it differs, its window rows do, and the command says so."""
    built = tiny("w16")
    checkpoint = Path(shutil.copytree(built.checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["layers.3.attn.kv_norm.weight"] *= 1.01
    save_file(tensors, checkpoint / "model.safetensors")
    build(
        checkpoint,
        tmp_path / "engine",
        BuildOptions(max_batch_size=4, max_seq_len=640, prefill_chunk=64, draft_shapes=((1, 1),)),
    )
    pair = ("--engine_dir", built.engine, "--other_engine_dir", tmp_path / "engine", *PROMPT, "--threads", 1)
    ran = run(capfd, *pair, "--json")
    assert ran.status == 1
    facts = json.loads(ran.out)
    worst = {o["layer"]: o["max_rel"] for o in facts["outputs"] if o["output"] == "window_scratch"}
    assert not facts["agree"]
    assert max(worst[layer] for layer in range(3)) == 0
    assert worst[3] == pytest.approx(0.01, rel=1e-3)
    shown = run(capfd, *pair, "--layers")
    assert shown.status == 1
    assert "differs" in shown.out and "disagree" in shown.out


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--prompt_token_ids", "1", "--speculation", "s4_k1_d5"), ("s4_k1",)),
        (("--prompt_token_ids", "1", "--rtol", "-1"), ("rtol", "1e-4")),
        ((), ("exactly one of --prompt",)),
        (("--prompt_token_ids", "999"), ("999",)),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    fragments: tuple[str, ...],
    tiny: Callable[[str], Built],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A draft round that only one of them has is refused as one that none has."""
    built = tiny("w16")
    build(
        built.checkpoint,
        tmp_path / "e",
        BuildOptions(max_batch_size=4, max_seq_len=640, prefill_chunk=64, draft_shapes=((1, 1),)),
    )
    refused(run(capfd, "--engine_dir", built.engine, "--other_engine_dir", tmp_path / "e", *arguments), *fragments)


def test_other_limits_are_refused(
    tiny: Callable[[str], Built], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    built = tiny("w16")
    build(built.checkpoint, tmp_path / "e", BuildOptions(max_batch_size=2, max_seq_len=300, draft_shapes=((1, 1),)))
    ran = run(capfd, "--engine_dir", built.engine, "--other_engine_dir", tmp_path / "e", *PROMPT)
    refused(ran, "differ in their limits (max_batch_size, max_seq_len", "build both")


def test_polygraphy_agrees(tiny: Callable[[str], Built], capfd: pytest.CaptureFixture[str]) -> None:
    """Its comparator passes what ours does, and fails what ours does."""
    pytest.importorskip("polygraphy")
    from trtllm_v4tree.bench.second_opinion import SecondOpinion

    opinion, place = SecondOpinion(), Place("commit", "hca_state", None)
    for x, y in (([1.0, NULL_SCORE], [1.0, NULL_SCORE]), ([100.0, 1.0], [100.009, 1.0]), ([100.0, 1.0], [100.0, 1.1])):
        opinion.watch(place, *arrays(x, y))
    assert opinion.agreed(1e-4) == (2, 3)
    engine = tiny("w16").engine
    pair = ("--engine_dir", engine, "--other_engine_dir", engine, *PROMPT, "--polygraphy", "--json")
    facts = json.loads(run(capfd, *pair).out)
    assert facts["agree"]
    assert facts["polygraphy"]["passed"] == facts["polygraphy"]["outputs"] > 100


def test_without_polygraphy(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polygraphy", None)
    ran = run(capfd, "--engine_dir", tmp_path, "--other_engine_dir", tmp_path, *PROMPT, "--polygraphy")
    refused(ran, "not installed", "pip install 'polygraphy>=0.53'")


# ---------------------------------------------------------------- the oracle


class BesideOracle:
    """The executor of a decode of one sequence: transformers runs every path of every pass from its first token."""

    def __init__(self, inner: Executor, oracle: Oracle, comparison: Comparison) -> None:
        self._inner, self._oracle, self._comparison = inner, oracle, comparison
        self.ids: list[int] = []
        self._tokens = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def target(self, feeds: Feeds) -> StepResult:
        result = self._inner.target(feeds)
        self._tokens = feeds["token_ids"][0]
        assert feeds["positions"][0, 0] == len(self.ids)
        rows = self._oracle.tree(self.ids, self._parents(feeds), self._tokens.tolist())
        got = {"logits": result.logits[0], "streams_scratch": result.scratch["streams_scratch"][0]}
        want = {
            "logits": rows.logits[feeds["logit_nodes"][0]],
            "streams_scratch": rows.streams.reshape(len(self._tokens), -1),
        }
        self._comparison.add("target_step", want, got)
        return result

    def _parents(self, feeds: Feeds) -> list[int]:
        """Of every node the one it sees at the position before its own."""
        positions, count = feeds["positions"][0], len(self._tokens)
        seen = feeds["node_mask"][0, :, -count:] == 0
        found = [np.flatnonzero(seen[n] & (positions == positions[n] - 1)) for n in range(count)]
        return [int(nodes[0]) if len(nodes) else -1 for nodes in found]

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        self.ids += self._tokens[feeds["accepted"]].tolist()
        self._inner.commit(step, draft, feeds)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["none", "s3_k3_d6"])
def test_the_shipped_model_beside_transformers(speculation: str, nano: Built) -> None:
    """Every pass of a decode: prompt, trees, rejected branches; logits and streams of every node."""
    llm = LLM(nano.engine, threads=1)
    comparison = Comparison(llm.manifest.config)
    beside = BesideOracle(llm.engine.executor, nano.oracle, comparison)
    llm.engine.executor = beside
    llm.set_speculation(speculation)
    prompt = [0, 2, 705, 3, 88, 1204, 17]
    [out] = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    )
    assert beside.ids == [*prompt, *out.outputs[0].token_ids][: len(beside.ids)]
    assert len(beside.ids) >= len(prompt) + 23
    for found in comparison.found.values():
        assert found.values > 10_000
        assert found.max_rel <= 1e-4
        assert found.cosine > 1 - 1e-8
        assert abs(found.norm_ratio - 1) < 1e-4
