"""Runs the graphs of an engine: one small interface, one implementation per target.

An executor owns the state pools. `target` and `draft` read them and return results with opaque scratch; `commit` alone writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import contract
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.network.target import NEGATIVE
from trtllm_v4tree.runtime.tables import Feeds
from trtllm_v4tree.sizes import EngineSizes

Scratch = Mapping[str, Any]


@dataclass(frozen=True)
class StepResult:
    """Logits [B, R, V] and the scratch that a commit may take."""

    logits: NDArray[np.float32]
    scratch: Scratch


@dataclass(frozen=True)
class DraftResult:
    """Candidates by level, [B, C] each (empty without steps), and the drafter's scratch."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32]
    scratch: Scratch


class Executor(Protocol):
    """What the round loop needs of a target."""

    config: ModelConfig
    sizes: EngineSizes
    draft_shapes: tuple[tuple[int, int], ...]

    def prepare_draft(self, steps: int, topk: int) -> None: ...

    def target(self, feeds: Feeds) -> StepResult: ...

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult: ...

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None: ...

    def reset(self, slot: int) -> None: ...

    def state(self, name: str) -> NDArray[np.float32]: ...


class _Graph:
    """One session with its bindings; states are bound once, tables per call."""

    def __init__(self, path: Path, spec: GraphContract, states: Mapping[str, NDArray[np.float32]], threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineFormatError(f"ONNX Runtime cannot load {path} ({error}): build the engine again.") from error
        self.spec = spec
        self.binding = self.session.io_binding()
        self.tables = [t for t in spec.inputs if t.name not in states]
        known = {i.name for i in self.session.get_inputs()}
        self.tables = [t for t in self.tables if t.name in known]
        self.outputs = [o.name for o in self.session.get_outputs()]
        self._held = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in states.items()}
        for name, value in self._held.items():
            if name in known:
                self.binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            if name.removeprefix("new_") in self._held:
                self.binding.bind_ortvalue_output(name, self._held[name.removeprefix("new_")])
        self.results = [name for name in self.outputs if name.removeprefix("new_") not in self._held]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """feeds: a NumPy array or a value of an earlier run per table; returns the results that are not states."""
        binding = self.binding
        for spec in self.tables:
            value = feeds[spec.name]
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(spec.name, np.ascontiguousarray(value))
            else:
                binding.bind_ortvalue_input(spec.name, value)
        for name in self.results:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        values = binding.get_outputs()
        return {name: value for name, value in zip(self.outputs, values, strict=True) if name in self.results}


class OnnxRuntimeExecutor:
    """The embedded default: ONNX Runtime on the CPU. State pools are NumPy arrays; commit binds them as input and output."""

    def __init__(self, directory: Path, manifest: Manifest, threads: int = 0) -> None:
        self.directory, self.manifest, self.threads = directory, manifest, threads
        self.config, self.sizes, self.draft_shapes = manifest.config, manifest.sizes, manifest.draft_shapes
        specs = contract.states(self.config, self.sizes)
        self.states = {t.name: np.zeros(t.shape, np.float32) for t in specs}  # type: ignore[arg-type]
        self._graphs: dict[str, _Graph] = {}
        self._target = self._load("target_step", contract.target_step(self.config, self.sizes))
        self._commit = self._load("commit", contract.commit(self.config, self.sizes))
        self._no_draft = {"mtp_scratch": np.zeros((1, 1, self.config.head_dim), np.float32)}
        self._no_rows = {"mtp_accepted": np.zeros(0, np.int64), "mtp_dst": np.zeros(0, np.int64)}
        for slot in range(self.sizes.num_slots):
            self.reset(slot)

    def _load(self, stem: str, spec: GraphContract) -> _Graph:
        return _Graph(self.directory / f"{stem}.onnx", spec, self.states, self.threads)

    def prepare_draft(self, steps: int, topk: int) -> None:
        """Loads the draft round of this shape; raises EngineFormatError if the engine was built without it."""
        spec = contract.draft_round(self.config, self.sizes, steps, topk)
        if spec.name not in self._graphs:
            self._graphs[spec.name] = self._load(spec.name, spec)

    def target(self, feeds: Feeds) -> StepResult:
        results = self._target.run(feeds)
        return StepResult(results.pop("logits").numpy(), results)

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult:
        name = f"draft_s{steps}_k{topk}" if steps else "draft_catchup"
        results = self._graphs[name].run(feeds)
        if not steps:
            empty = np.zeros((len(feeds["positions"]), 0))
            return DraftResult(empty.astype(np.int64), empty.astype(np.int64), empty.astype(np.float32), results)
        names = ("draft_tokens", "draft_parents", "draft_scores")
        return DraftResult(*(results.pop(n).numpy() for n in names), scratch=results)

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        extra = {} if draft is not None else self._no_rows
        self._commit.run({**step, **(draft or self._no_draft), **extra, **feeds})

    def reset(self, slot: int) -> None:
        """Empties the compressor states of a slot: rows of weight zero."""
        for name, layers in (("csa_state", self.sizes.num_csa), ("idx_state", self.sizes.num_csa), ("hca_state", self.sizes.num_hca)):
            if name in self.states:
                rows = self.states[name].reshape(layers, self.sizes.num_slots, -1, 2, self.states[name].shape[-1] // 2)
                rows[:, slot, :, 0], rows[:, slot, :, 1] = NEGATIVE, 0

    def state(self, name: str) -> NDArray[np.float32]:
        """The live pool (a view)."""
        return self.states[name]
