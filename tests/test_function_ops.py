"""The v4tree functions (reference bodies in standard ONNX) give what the ONNX Runtime lowering gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.oracle.tiny import write_tiny
from tests.oracle.trees import random_tree
from trtllm_v4tree import contract, native
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.compiler.ort_ops import OnnxRuntimeOps
from trtllm_v4tree.compiler.weights import WEIGHTS_FILE, WeightPlan
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.network import graphs
from trtllm_v4tree.network.ops import DOMAIN, FunctionOps, V4TreeOps
from trtllm_v4tree.runtime.tables import Sequences, Tree, step_tables
from trtllm_v4tree.runtime.tree import PAD
from trtllm_v4tree.sizes import EngineSizes

Arrays = dict[str, np.ndarray]
TOLERANCE = 3e-5
BATCH, LENGTHS = 2, np.array([21, 66])


def sizes_of(config: ModelConfig) -> EngineSizes:
    return EngineSizes.make(config, max_batch_size=BATCH, max_seq_len=256, max_verify_tokens=16, prefill_chunk=32)


def feeds_of(config: ModelConfig, sizes: EngineSizes, rng: np.random.Generator, nodes: int = 9) -> Arrays:
    """Random states, and a random tree of up to `nodes` behind each of two sequences."""
    drawn = [random_tree(rng, nodes, config.vocab_size) for _ in range(BATCH)]
    width = max(len(parents) for parents, _ in drawn)
    parents, tokens = np.full((BATCH, width), PAD), np.zeros((BATCH, width), np.int64)
    for b, (p, t) in enumerate(drawn):
        parents[b, : len(p)], tokens[b, : len(t)] = p, t
    pages = 1 + np.arange(BATCH * sizes.pages_per_seq).reshape(BATCH, -1)
    sequences = Sequences(np.arange(1, BATCH + 1), LENGTHS, pages)
    all_nodes = np.broadcast_to(np.arange(width), (BATCH, width))
    step = step_tables(sizes, sequences, Tree.make(parents, tokens), np.ascontiguousarray(all_nodes))
    states = {
        t.name: rng.standard_normal([int(d) for d in t.shape]).astype(np.float32)
        for t in contract.states(config, sizes)
    }
    for name in ("window_kv", "csa_entries", "idx_entries", "hca_entries"):
        if name in states:
            states[name][0] = 0
    return {**states, **step.feeds}


def run(model: ir.Model, checkpoint: Checkpoint, directory: Path, feeds: Arrays) -> Arrays:
    return runner(model, checkpoint, directory)(feeds)


def runner(model: ir.Model, checkpoint: Checkpoint, directory: Path) -> Callable[[Arrays], Arrays]:
    directory.mkdir()
    plan = WeightPlan([model])
    plan.write(directory / WEIGHTS_FILE, checkpoint, lambda name, size: None)
    plan.attach(model)
    ir.save(model, directory / "model.onnx")
    options = ort.SessionOptions()
    if native.library() is not None:
        options.register_custom_ops_library(str(native.library()))
    session = ort.InferenceSession(str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]

    def call(feeds: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in known}), strict=True))

    return call


@pytest.mark.parametrize("name", ["w16", "mixed"])
def test_functions_match_the_lowering(name: str, tmp_path: Path) -> None:
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", name, 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    checkpoint, sizes = Checkpoint.open(checkpoint_dir, config, None), sizes_of(config)
    feeds = feeds_of(config, sizes, np.random.default_rng(3))

    def outputs(ops: V4TreeOps, label: str) -> Arrays:
        return run(graphs.target_step(config, sizes, ops), checkpoint, tmp_path / label, feeds)

    functions, lowered = outputs(FunctionOps(), "functions"), outputs(OnnxRuntimeOps(), "lowered")
    assert functions.keys() == lowered.keys()
    for key, want in lowered.items():
        np.testing.assert_allclose(functions[key], want, atol=TOLERANCE, rtol=TOLERANCE, err_msg=key)


def test_every_replaceable_operator_is_a_function(tmp_path: Path) -> None:
    checkpoint_dir = write_tiny(tmp_path / "checkpoint", "w16", 1)
    config = ModelConfig.from_pretrained(checkpoint_dir)
    model = graphs.target_step(config, sizes_of(config), FunctionOps())
    calls = {node.op_type.split("_")[0] for node in model.graph if node.domain == DOMAIN}
    wanted = {"Sinkhorn", "StreamPreMix", "StreamPostMix", "Moe", "TreePool", "TreeAttention"}
    assert calls - {"TreeIndexSelect"} == wanted
    assert {f.name.split("_")[0] for f in model.functions.values()} == calls
