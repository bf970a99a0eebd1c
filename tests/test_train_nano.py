"""The training recipe: what it writes is what transformers and the engine's reader understand, and runs can be resumed."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.oracle.reference import Oracle
from trtllm_v4tree.checkpoint import Checkpoint, expected_tensors
from trtllm_v4tree.compiler.build import BuildOptions, build
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.tokenizer import EngineTokenizer
from trtllm_v4tree.training import attention, documents, streams
from trtllm_v4tree.training.batches import ASSISTANT, BOS, EOS, USER, RowBatches, encode_document
from trtllm_v4tree.training.export import check_against_transformers, load_model
from trtllm_v4tree.training.fusion import compile_fusible
from trtllm_v4tree.training.grow import Origin, grown, origins
from trtllm_v4tree.training.losses import DraftPlan, draft_steps, joint_losses
from trtllm_v4tree.training.model import NanoModel
from trtllm_v4tree.training.optimizer import Rates
from trtllm_v4tree.training.options import NANO, Options
from trtllm_v4tree.training.run import Run
from trtllm_v4tree.training.state import Plan, RunError

ROOT = Path(__file__).resolve().parents[1]
TINY = NANO | {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 4, 16, 4, 16, 0],
    "index_n_heads": 16,  # fewer and scores tie at zero, where the choice is arbitrary
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
STEPS, BATCH, LENGTH = 40, 4, 72
QUIET = Console(quiet=True)


def _script(name: str = "train_nano") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "build_scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small corpus of sums and a tiny config."""
    root = tmp_path_factory.mktemp("train")
    draw = random.Random(0)
    names, things = ("Ada", "Ben", "Cleo", "Dan"), ("pears", "books", "coins", "shells")
    with (root / "sums.jsonl").open("w") as file:
        for _ in range(300):
            a, b, name, thing = draw.randrange(90), draw.randrange(90), draw.choice(names), draw.choice(things)
            question = f"{name} has {a} {thing} and finds {b} more {thing}. How many {thing} does {name} have now?"
            record = {"question": question, "answer": f"{name} has {a} + {b} = <<{a}+{b}>>{a + b} {thing} now."}
            file.write(json.dumps(record) + "\n")
    (root / "tiny.json").write_text(json.dumps(TINY))
    return root


@pytest.fixture(scope="module")
def options(workplace: Path) -> Callable[..., Options]:
    """Options for the tiny model; keywords override."""

    def make(name: str, **changes: Any) -> Options:
        given: dict[str, Any] = {
            "data": [(workplace / "sums.jsonl", 1)],
            "output_dir": workplace / name,
            "plan": Plan(STEPS),
            "config": workplace / "tiny.json",
            "strip": "<<[^>]*>>",
            "batch_size": BATCH,
            "seq_len": LENGTH,
            "compute": torch.float32,
            "compiled": False,
            "threads": 1,
        }
        return Options(**{**given, **changes})

    return make


@pytest.fixture(scope="module")
def trained(options: Callable[..., Options]) -> Run:
    """A finished joint run with two drafter steps."""
    run = Run(options("joint", mtp_steps=2, rates=Rates(warmup=5)), QUIET)
    run.train()
    run.check()
    return run


def _log(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory.path / "log.jsonl").read_text().splitlines()]


def _mean_loss(run: Run, rows: int = 4) -> float:
    """Trunk cross entropy on the held-out rows, sparse attention."""
    with torch.no_grad():
        return joint_losses(run.model, run.held_out[:rows], DraftPlan(2), "sparse", 0).trunk.item()


def test_losses_fall_below_those_of_untrained_weights(trained: Run, options: Callable[..., Options]) -> None:
    untrained = Run(options("untrained", mtp_steps=2), QUIET)
    assert _mean_loss(trained) < _mean_loss(untrained) - 1.0
    first, last = (trained._losses(trained.held_out, 0), untrained._losses(trained.held_out, 0))
    assert all(a < b - 0.5 for a, b in zip(first.draft, last.draft, strict=True))


def test_the_checkpoint_has_deepseeks_keys_shapes_and_types(trained: Run) -> None:
    config = ModelConfig.from_pretrained(trained.checkpoint_dir)
    assert config == trained.config and config.index_topk == 4
    assert set(Checkpoint.open(trained.checkpoint_dir, config).names) == set(expected_tensors(config))
    stored = load_file(trained.checkpoint_dir / "model.safetensors")
    kept = {name for name, value in stored.items() if value.dtype == torch.float32}
    assert all(name.endswith(("attn_sink", "ape", "gate.bias", "_fn", "_base", "_scale")) for name in kept)
    assert {value.dtype for name, value in stored.items() if name not in kept} == {torch.bfloat16, torch.int64}


def test_the_exported_trunk_and_drafter_are_the_oracles(trained: Run) -> None:
    oracle, model = Oracle(trained.checkpoint_dir), load_model(trained.checkpoint_dir).eval()
    row = trained.held_out[0]
    ids = row.tolist()
    with torch.no_grad():
        rows = model.trunk(row[None, :60], "sparse")
        np.testing.assert_allclose(rows.streams, oracle.streams(ids[:60]), rtol=0, atol=5e-5)
        np.testing.assert_allclose(
            model.logits(model.trunk_hidden(rows.streams)), oracle.logits(ids[:60]), rtol=0, atol=5e-5
        )
        for step, starts, logits in draft_steps(model, rows.streams, row[None, 1:], DraftPlan(4), phase=2):
            for i in {2, 30, 58} & set(starts.tolist()):
                found = logits[starts.tolist().index(i)]
                chain = oracle.mtp_chain_logits(ids[: i + 2], ids[i + 2 : i + 1 + step])
                np.testing.assert_allclose(found, chain[-1], rtol=0, atol=5e-5)


def test_every_file_of_a_checkpoint_can_be_read_as_the_config_can(trained: Run) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in trained.checkpoint_dir.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes


def test_the_check_notices_a_trunk_that_is_not_transformers(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_against_transformers(trained.checkpoint_dir, [trained.held_out[0]])
    assert found.difference < 1e-4 < 1 < found.largest and found.equal == 1
    assert "transformers" in _log(trained)[-1]
    monkeypatch.setattr(streams, "sinkhorn", lambda logits, rules: logits.softmax(1))
    with pytest.raises(Exception, match="differ from transformers"):
        check_against_transformers(trained.checkpoint_dir, [trained.held_out[0]])


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(options: Callable[..., Options]) -> None:
    whole, first = (Run(options(name, plan=Plan(12)), QUIET) for name in ("whole", "parts"))
    whole.train()
    for _ in zip(range(5), first.steps(), strict=False):
        pass
    assert first.standing.step == 5
    first.save()
    second = Run(options("parts", plan=Plan(12)), QUIET)
    assert second.standing.step == 5
    second.train()
    ends = [load_file(run.directory.state_file) for run in (whole, second)]
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(
            ends[1][name], value, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_plan_may_be_shortened_on_the_way(options: Callable[..., Options]) -> None:
    run = Run(options("shortened"), QUIET)
    for _ in run.steps():
        if run.standing.step == 3:
            run.directory.write_plan(Plan(steps=6))
    assert run.standing.step == 6


@pytest.mark.parametrize("steps", [1, 4])
def test_a_frozen_trunk_stays_and_its_drafter_learns(trained: Run, options: Callable[..., Options], steps: int) -> None:
    changes = {"start_from": trained.checkpoint_dir, "freeze_trunk": True, "fresh_drafter": True, "mtp_steps": steps}
    run = Run(options(f"drafter{steps}", plan=Plan(25), rates=Rates(warmup=3), **changes), QUIET)
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert all(after[f"draft{k}"] < before[f"draft{k}"] - 0.2 for k in range(1, steps + 1))
    old, new = (load_file(where / "model.safetensors") for where in (trained.checkpoint_dir, run.checkpoint_dir))
    assert all(torch.equal(old[name], new[name]) for name in old if not name.startswith("mtp."))
    assert any(not torch.equal(old[name], new[name]) for name in old if name.startswith("mtp."))
    mtp = run.checkpoint_dir / "mtp.safetensors"
    assert Checkpoint.open(trained.checkpoint_dir, run.config, mtp).has_mtp
    swapped = load_model(trained.checkpoint_dir, run.config, mtp)
    assert torch.equal(swapped.drafter.e_proj.weight, load_model(run.checkpoint_dir).drafter.e_proj.weight)


def test_the_indexer_learns_what_dense_attention_looks_at(trained: Run) -> None:
    torch.manual_seed(1)
    model, rows = NanoModel(trained.config), trained.held_out[:4, :-3]
    weights = {k: v for k, v in load_model(trained.checkpoint_dir).state_dict().items() if ".indexer." not in k}
    model.load_state_dict(weights, strict=False)
    chosen = [p for name, p in model.named_parameters() if ".indexer." in name]
    learner = torch.optim.AdamW(chosen, lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model.trunk(rows, "dense").index_loss
        learner.zero_grad()
        loss.backward()
        learner.step()
        losses.append(loss.item())
    assert 0 < losses[-1] < 0.5 * losses[0]
    others = [p.grad for name, p in model.named_parameters() if ".indexer." not in name]
    assert all(grad is None for grad in others), "the indexer's loss must not bend the model"


def test_selection_keeps_the_best_visible_entries() -> None:
    scores = torch.randn(2, 40, 10) + attention._entry_mask(40, 10, 4)
    allowed = attention._select(scores, 3)
    for b in range(2):
        for t in range(40):
            visible = range((t + 1) // 4)
            best = sorted(visible, key=lambda w, b=b, t=t: -scores[b, t, w].item())[:3]
            assert {w for w in range(10) if allowed[b, t, w] == 0} == set(best)


def test_documents_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\nand another\n\n\nsecond part\n")
    (tmp_path / "b.jsonl").write_text(
        '{"instruction": "Say it", "input": "x", "response": "x\\r\\nx\u2028"}\n\n{"text": "Sum", "code": "a<<1>>+b"}\n{"text": "alone"}\n'
    )
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "left open"}]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": turns}]))
    read = [d for name in ("a.txt", "b.jsonl", "c.json") for d in documents.read_documents(tmp_path / name, "<<.*?>>")]
    assert [d.text or d.turns for d in read] == [
        "one line\nand another",
        "second part",
        (("Say it\nx", "x\nx"),),
        (("Sum", "a+b"),),
        "alone",
        (("q", "a"),),
    ]


def test_prompts_are_encoded_as_the_engine_encodes_them(trained: Run) -> None:
    document = documents.Document((("How many pears?", "Three."), ("And now?", "Four.")))
    ids = encode_document(trained.tokenizer, document)
    assert ids[0] == BOS and ids.count(USER) == ids.count(ASSISTANT) == ids.count(EOS) == 2
    engine = EngineTokenizer(trained.checkpoint_dir / "tokenizer.json")
    asked = engine.chat([("user", "How many pears?")])
    assert ids[: len(asked)] == asked
    assert trained.config.bos_token_id == BOS and trained.config.eos_token_ids == (EOS,)


def test_batches_depend_on_seed_and_step_alone() -> None:
    ids = [[0, *range(n, n + 9)] for n in range(1, 60)]
    one, other = RowBatches(ids, 24, 3, seed=1), RowBatches(ids, 24, 3, seed=1)
    late = other.batch(40)
    assert torch.equal(late, one.batch(40)) and one.epochs > 2 and torch.equal(other.batch(2), one.batch(2))
    assert not torch.equal(RowBatches(ids, 24, 3, seed=2).batch(2), one.batch(2))
    assert (late[:, 0] == 0).all() and late.shape == (3, 24)


def test_rates_warm_up_and_end_at_zero() -> None:
    rates = Rates(warmup=10, tail=0.5)
    assert rates.factor(0, 0.0) == 0.1 and rates.factor(9, 0.1) == 1.0 == rates.factor(50, 0.5)
    assert rates.factor(50, 0.75) == 0.5 and rates.factor(99, 1.0) == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_functions_give_the_same_losses_and_gradients(trained: Run) -> None:
    model, rows = trained.model.train(), trained.held_out[:2]
    results = []
    for compiled in (False, True):
        assert compile_fusible(compiled) == compiled
        losses = joint_losses(model, rows, DraftPlan(2), "dense", 0)
        (losses.trunk + sum(losses.draft) + losses.indexer).backward()
        results.append(
            (losses.by_name(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
        model.zero_grad()
    compile_fusible(False)
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-5)
    for name, grad in results[0][1].items():
        torch.testing.assert_close(
            results[1][1][name], grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


DEEPER = TINY | {"num_hidden_layers": 10, "compress_ratios": [0, 0, 4, 16, 4, 16, 4, 16, 4, 16, 0]}


def _grown(trained: Run, wanted: ModelConfig) -> NanoModel:
    model = NanoModel(wanted).eval()
    model.load_state_dict(grown(load_model(trained.checkpoint_dir).state_dict(), trained.config, wanted))
    return model


def test_a_grown_model_begins_as_the_one_it_comes_from(trained: Run) -> None:
    wanted = ModelConfig.from_dict(DEEPER)
    old, new = load_model(trained.checkpoint_dir).eval(), _grown(trained, wanted)
    tokens = trained.held_out[:4, :-1]
    with torch.no_grad():
        before, after = (m.logits(m.trunk_hidden(m.trunk(tokens, "sparse").streams)) for m in (old, new))
    divergence = torch.nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean() < 2e-3
    assert torch.equal(old.drafter.e_proj.weight, new.drafter.e_proj.weight)


def test_every_added_layer_of_a_grown_model_can_learn(trained: Run) -> None:
    model = _grown(trained, ModelConfig.from_dict(DEEPER))
    joint_losses(model, trained.held_out[:2], DraftPlan(1), "sparse", 0).trunk.backward()
    for layer in model.layers:
        for name in ("attn.wo_b", "ffn.shared_experts.w2"):
            grad = layer.get_submodule(name).weight.grad
            assert grad is not None and grad.abs().max() > 0


def test_trained_layers_are_spread_over_the_deeper_model() -> None:
    shallow, deep = (ModelConfig.from_dict(raw) for raw in (TINY, DEEPER))
    copies = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
    assert origins(shallow, deep) == [Origin(*c) for c in [*copies, (4, False), (5, False), (4, True), (5, True)]]
    assert not any(origin.added for origin in origins(shallow, shallow))


def test_a_grown_model_may_keep_the_most_loaded_experts_alone(trained: Run) -> None:
    source = load_model(trained.checkpoint_dir).state_dict()
    source["layers.3.ffn.gate.bias"] = torch.tensor([0.3, -0.1, 0.2, -0.2])
    state = grown(source, trained.config, ModelConfig.from_dict(DEEPER | {"n_routed_experts": 3}))
    for new, old in enumerate((1, 2, 3)):
        assert torch.equal(
            state[f"layers.3.ffn.experts.{new}.w1.weight"], source[f"layers.3.ffn.experts.{old}.w1.weight"]
        )
    assert "layers.3.ffn.experts.3.w1.weight" not in state
    assert torch.equal(state["layers.3.ffn.gate.weight"], source["layers.3.ffn.gate.weight"][1:])
    table = state["layers.0.ffn.gate.tid2eid"]
    assert table.max() == 2 and (table[:, 0] != table[:, 1]).all()
    kept = (source["layers.0.ffn.gate.tid2eid"] < 3).all(1)
    assert torch.equal(table[kept], source["layers.0.ffn.gate.tid2eid"][kept])


def test_a_grown_run_trains_and_exports_what_transformers_computes(
    trained: Run, options: Callable[..., Options], workplace: Path
) -> None:
    (workplace / "deeper.json").write_text(json.dumps(DEEPER | {"n_routed_experts": 3}))
    changes = {"grow_from": trained.checkpoint_dir, "config": workplace / "deeper.json"}
    run = Run(options("grown", plan=Plan(3), rates=Rates(1e-3, 1e-3, 1e-3, warmup=1), **changes), QUIET)
    run.train()
    run.check()
    assert len(load_model(run.checkpoint_dir).layers) == 10


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 64}, "differs from the trained one in hidden_size"),
        ({"n_routed_experts": 8}, "experts are not added"),
        ({"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 16, 4, 0]}, "none can be left out"),
        ({"num_hidden_layers": 7, "compress_ratios": [0, 0, 16, 4, 16, 4, 16, 0]}, "would change their order"),
        ({"num_hash_layers": 1}, "differs from the trained one in num_hash_layers"),
    ],
)
def test_a_model_that_cannot_be_grown_says_why(trained: Run, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RunError, match=complaint):
        grown(load_model(trained.checkpoint_dir).state_dict(), trained.config, ModelConfig.from_dict(DEEPER | changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["--data", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--data", "empty.txt"], "holds no text"),
        (["--data", "broken.jsonl"], "neither JSON nor JSON lines"),
        (["--data", "fields.jsonl"], "record 1 of .* has no usable fields"),
        (["--config", "nowhere.json"], "no readable JSON"),
        (["--config", "sums.jsonl"], "no readable JSON"),
        (["--config", "big.json"], "words for a vocabulary of 4096"),
        (["--seq_len", "100000"], "fewer than the 100002 tokens"),
        (["--freeze_trunk"], "a frozen trunk must come from somewhere"),
        (["--fresh_drafter"], "no drafter to replace"),
        (["--start_from", "nowhere"], "no readable JSON"),
        (["--grow_from", "nowhere"], "nowhere"),
        (["--grow_from", "nowhere", "--start_from", "nowhere"], "takes the place of --start_from"),
        (["--mtp_steps", "0"], "mtp.steps"),
        (["--compute", "int3"], "bfloat16 or float32"),
        (["--strip", "("], "no regular expression"),
        (["--colour", "red"], "--colour"),
        (["--output_dir", "sums.jsonl"], "cannot be made a directory"),
    ],
)
def test_bad_input_is_one_sentence_and_status_two(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(workplace)
    for name, text in (("empty.txt", "\n \n"), ("broken.jsonl", '{"a"'), ("fields.jsonl", '{"a": 1}')):
        Path(name).write_text(text)
    Path("big.json").write_text(json.dumps(NANO))
    option, *value = changes
    given = {"--data": "sums.jsonl", "--output_dir": "bad", "--config": "tiny.json", "--steps": "1", "--threads": "1"}
    arguments = [part for name, text in given.items() if name != option for part in (name, text)]
    script = _script()
    assert script.status_of([*arguments, "--no-compiled", option, *value]) == 2
    shown = capsys.readouterr().err.strip()
    assert len(shown.splitlines()) == 1 and re.search(complaint, shown)


def test_another_run_in_the_directory_is_refused(trained: Run, options: Callable[..., Options]) -> None:
    with pytest.raises(RunError, match="another mtp_steps, seed"):
        Run(options("joint", mtp_steps=1, seed=5), QUIET)


def test_a_damaged_state_is_refused(options: Callable[..., Options]) -> None:
    given = options("damaged")
    given.output_dir.mkdir()
    (given.output_dir / "state.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(RunError, match="is no training state"):
        Run(given, QUIET)


def test_the_command_trains_stops_on_a_signal_and_goes_on(workplace: Path) -> None:
    command = [
        *(sys.executable, "build_scripts/train_nano.py", "--data", f"{workplace / 'sums.jsonl'}*2", "--output_dir"),
        *(str(workplace / "command"), "--config", str(workplace / "tiny.json"), "--seq_len", "64", "--batch_size", "2"),
        *("--no-compiled", "--compute", "float32", "--threads", "1", "--strip", "<<.*?>>"),
    ]
    first = subprocess.Popen([*command, "--steps", "100000"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    assert any("step 10 " in line for line in first.stderr)
    first.terminate()
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 1 and "the same command goes on" in said
    log = (workplace / "command" / "log.jsonl").read_text().splitlines()
    done = json.loads(log[-1])["step"]
    second = subprocess.run([*command, "--steps", str(done + 2)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert f"from step {done} on" in second.stderr and "trunk equals transformers" in second.stderr
    assert Path(second.stdout.strip(), "model.safetensors").exists()


def test_an_engine_of_the_checkpoint_answers_training_questions(
    trained: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, answers = workplace / "engine", workplace / "answers.jsonl"
    build(trained.checkpoint_dir, engine, BuildOptions(max_batch_size=2, max_seq_len=256, draft_shapes=((1, 1),)))
    arguments = ["--engine_dir", engine, "--data", workplace / "sums.jsonl", "--output", answers, "--limit", 3]
    monkeypatch.setattr(sys, "argv", ["answers", *map(str, [*arguments, "--max_tokens", 20, "--batch_size", 2])])
    assert _script("train_nano_answers").main() == 0
    read = documents.read_documents(answers)
    asked = {d.turns[0][0] for d in documents.read_documents(workplace / "sums.jsonl")}
    assert 1 <= len(read) <= 3 and all(d.turns[0][0] in asked and d.turns[0][1] for d in read)
