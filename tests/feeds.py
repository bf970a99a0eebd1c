"""Inputs of a target step and of a draft round: two sequences at different phases over random states."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from trtllm_v4tree import contract
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.runtime.tables import Sequences, Tree, draft_tables, step_tables
from trtllm_v4tree.sizes import EngineSizes

Arrays = dict[str, np.ndarray]
NUMPY: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int64": np.int64,
}  # fmt: skip


def _states(config: ModelConfig, s: EngineSizes, rng: np.random.Generator) -> Arrays:
    return {
        spec.name: rng.standard_normal([int(d) for d in spec.shape]).astype(np.float32)
        for spec in contract.states(config, s)
    }


def _sequences(s: EngineSizes) -> Sequences:
    pages = 1 + np.arange(2 * s.pages_per_seq).reshape(2, -1)
    return Sequences(np.array([1, 2]), np.array([126, 261]), pages)


def random_feeds(config: ModelConfig, s: EngineSizes) -> Arrays:
    """A pass of two trees over random states."""
    rng = np.random.default_rng(0)
    parents = np.array([[-1, 0, 0, 1, 3, 4], [-1, 0, 1, 2, 3, 4]])
    tree = Tree.make(parents, rng.integers(0, config.vocab_size, (2, 6)))
    return {**step_tables(s, _sequences(s), tree, np.zeros((2, 1), np.int64)).feeds, **_states(config, s, rng)}


def random_draft_feeds(config: ModelConfig, s: EngineSizes, steps: int) -> Arrays:
    """A draft round of `steps` levels behind two and three accepted rows."""
    rng = np.random.default_rng(1)
    following = rng.integers(0, config.vocab_size, (2, 3))
    feeds, _ = draft_tables(s, _sequences(s), np.array([2, 3]), following, steps)
    return {**feeds, **_states(config, s, rng)}


def as_typed(feeds: Arrays, spec: GraphContract) -> Arrays:
    """The inputs of a contract, in its types."""
    return {t.name: feeds[t.name].astype(NUMPY[t.dtype]) for t in spec.inputs}
