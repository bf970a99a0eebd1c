"""Runs the graphs of an engine: one small interface, one implementation per target.

An executor owns the state pools. `target` and `draft` read them and return results with opaque scratch; `commit` alone writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import contract, native
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.engine_dir import Manifest
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.tables import Feeds
from trtllm_v4tree.sizes import EngineSizes

Scratch = Mapping[str, Any]
_MOST_HELD, _MOST_HELD_BYTES = 32, 4 << 20
"""Sets of results of a graph that are kept, and the size up to which one is."""
_MOST_VALUES, _MOST_VALUE_BYTES = 1024, 32 << 10
"""Values that are remembered, and the size up to which one is."""


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
    """What the round loop needs of a target. The arrays of a result may be written again by the next call of the same graph."""

    config: ModelConfig
    sizes: EngineSizes
    draft_shapes: tuple[tuple[int, int], ...]
    bit_exact: bool
    """Whether a token's results are the same to the bit whatever nodes, sequences and prefill chunks it was computed with."""

    def prepare_draft(self, steps: int, topk: int) -> None: ...

    def target(self, feeds: Feeds) -> StepResult: ...

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult: ...

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None: ...

    def reset(self, slot: int) -> None: ...

    def state(self, name: str) -> NDArray[np.float32]: ...

    def load_state(self, name: str, values: NDArray[np.float32]) -> None: ...


class _Binding:
    """Inputs and outputs of a session in arrays that stay where they are; a table that comes in another array is bound anew.

    Arrays come again, and making ONNX Runtime's value of one is half of a binding: `values` remembers them.
    """

    def __init__(self, session: Any, states: Mapping[str, Any], outputs: Mapping[str, Any], values: _Values) -> None:
        """states, outputs: ONNX Runtime's values."""
        self._session, self._binding, self._values = session, session.io_binding(), values
        self._bound: dict[str, Any] = {}
        for name, value in states.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, tables: Sequence[str], feeds: Mapping[str, Any]) -> None:
        bound = self._bound
        for name in tables:
            array = feeds[name]
            if bound.get(name) is not array:
                whole = np.ascontiguousarray(array)  # the array itself, or a copy that lives until another is bound
                bound[name] = whole
                self._binding.bind_ortvalue_input(name, self._values.of(array) if whole is array else _value(whole))
        self._session.run_with_iobinding(self._binding)


class _Values:
    """ONNX Runtime's values of arrays; those of small arrays are remembered, and the arrays with them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[NDArray[Any], Any]] = {}

    def of(self, array: NDArray[Any]) -> Any:
        """array: contiguous; its memory is used where it lies."""
        known = self._known.get(id(array))
        if known is not None:  # what is remembered lives, so no other array has its number
            return known[1]
        if len(self._known) >= _MOST_VALUES:
            self._known.clear()
        value = _value(array)
        if array.nbytes <= _MOST_VALUE_BYTES:
            self._known[id(array)] = (array, value)
        return value


class _Results:
    """Arrays that the results of a graph are written to again whenever they have the same shapes, bound once for each set of shapes. That
    saves a copy of the results and most of the cost of a call (30 of 370 us for a pass over one node).

    A set is laid out as soon as its shapes are known, from the tables and, for what these do not say, from the first results.
    """

    def __init__(self, session: Any, spec: GraphContract, states: Mapping[str, Any], tables: Sequence[str]) -> None:
        self._session, self._states, self._outputs = session, states, spec.outputs
        symbols = {dim for t in spec.outputs for dim in t.shape if isinstance(dim, str)}
        places = {dim: (t.name, axis) for t in spec.inputs if t.name in tables for axis, dim in enumerate(t.shape)}
        self._axes = {dim: places[dim] for dim in sorted(symbols & places.keys())}
        self._known: dict[str, int] = {}
        self._missing, self._values = symbols - places.keys(), _Values()
        self._sets: dict[tuple[int, ...], tuple[_Binding, dict[str, Any]]] = {}
        self._arrays: dict[tuple[str, tuple[int, ...]], tuple[NDArray[Any], Any]] = {}

    def of(self, tables: Mapping[str, Any]) -> tuple[_Binding, dict[str, Any]] | None:
        """The binding for a call and what it writes; None where a set is not known yet or would be large."""
        key = tuple([tables[name].shape[axis] for name, axis in self._axes.values()])
        found = self._sets.get(key)
        return self._lay_out(key) if found is None and not self._missing else found

    def learn(self, results: Mapping[str, Any]) -> None:
        """Of the first results: the sizes that no table has are the same in all."""
        for tensor in self._outputs:
            self._known.update(
                {d: n for d, n in zip(tensor.shape, results[tensor.name].shape, strict=True) if d in self._missing}
            )
        self._missing = set()

    def _lay_out(self, key: tuple[int, ...]) -> tuple[_Binding, dict[str, Any]] | None:
        sizes = {**self._known, **dict(zip(self._axes, key, strict=True))}
        shapes = {t: tuple(sizes[d] if isinstance(d, str) else d for d in t.shape) for t in self._outputs}
        if sum(math.prod(shape) * np.dtype(t.dtype).itemsize for t, shape in shapes.items()) > _MOST_HELD_BYTES:
            return None
        if len(self._sets) >= _MOST_HELD:
            self._sets.clear()
            self._arrays.clear()
        held = {t.name: self._array(t.name, shape, t.dtype) for t, shape in shapes.items()}
        written = {name: value for name, (_, value) in held.items()}
        binding = _Binding(self._session, self._states, written, self._values)
        self._sets[key] = (binding, {name: array for name, (array, _) in held.items()})
        return self._sets[key]

    def _array(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[NDArray[Any], Any]:
        """A result of one shape has one array in all sets."""
        if (name, shape) not in self._arrays:
            array = np.zeros(shape, dtype)
            self._arrays[name, shape] = (array, _value(array))
        return self._arrays[name, shape]


def _value(array: NDArray[Any]) -> Any:
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_numpy(array)


class _Graph:
    """One session. A graph that writes states has them bound once, in place; any other returns its results, with `reuse` in arrays that
    are written again (`_Results`).

    Idle threads of a session that `spins` wait for the next operator on the core, where they keep other sessions' threads off it.
    """

    def __init__(
        self, path: Path, spec: GraphContract, states: Mapping[str, NDArray[np.float32]], threads: int, spins: bool, reuse: bool
    ) -> None:  # fmt: skip
        import onnxruntime as ort

        options = ort.SessionOptions()
        if native.library() is not None:
            options.register_custom_ops_library(str(native.library()))
        options.intra_op_num_threads = threads
        if not spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # what fails raises, and the caller reports it
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = str(error).split(" : ")[-1].strip().rstrip(".")
            raise EngineFormatError(f"ONNX Runtime cannot load {path} ({reason}): build the engine again.") from error
        _check_contract(path, self.session, spec)
        known = {i.name for i in self.session.get_inputs()}
        self.tables = [t.name for t in spec.inputs if t.name not in states and t.name in known]
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.states = {name: array for name, array in states.items() if name in known}
        self._in_place = self._states_in_place()
        values = {name: _value(array) for name, array in self.states.items()} if reuse else {}
        self._reused = _Results(self.session, spec, values, self.tables) if reuse and self._in_place is None else None

    def _states_in_place(self) -> _Binding | None:
        """States as input and output of one binding, if the graph writes them."""
        names = {name: name.removeprefix("new_") for name in self.outputs}
        written = {name: self.states[state] for name, state in names.items() if state in self.states}
        assert len(written) in (0, len(names)), "a graph writes states or returns results, not both"
        if not written:
            return None
        values = {name: _value(array) for name, array in self.states.items()}
        return _Binding(self.session, values, {name: _value(array) for name, array in written.items()}, _Values())

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """feeds: an array per table; returns the results by name, none if the graph writes states."""
        if self._in_place is not None:
            self._in_place.run(self.tables, feeds)
            return {}
        held = self._reused.of(feeds) if self._reused is not None else None
        if held is not None:
            held[0].run(self.tables, feeds)
            return dict(held[1])
        tables = {name: np.ascontiguousarray(feeds[name]) for name in self.tables}
        results = dict(zip(self.outputs, self.session.run(self.outputs, {**self.states, **tables}), strict=True))
        if self._reused is not None:
            self._reused.learn(results)
        return results


def _check_contract(path: Path, session: Any, spec: GraphContract) -> None:
    """EngineFormatError unless names, dtypes and fixed dimensions of the graph are those of its contract."""
    states = {t.name for t in spec.inputs if t.role == "state"}
    wanted = {t.name: t for t in spec.inputs} | {
        f"new_{t.name}" if t.name in states else t.name: t for t in spec.outputs
    }
    values = [*session.get_inputs(), *session.get_outputs()]
    dtypes = {"float32": "tensor(float)", "int64": "tensor(int64)"}
    missing = {t.name for t in spec.inputs} ^ {i.name for i in session.get_inputs()}
    wrong = sorted(missing) + [
        v.name
        for v in values
        if v.name not in wanted
        or v.type != dtypes[wanted[v.name].dtype]
        or len(v.shape) != len(wanted[v.name].shape)
        or any(isinstance(d, int) and d != got for d, got in zip(wanted[v.name].shape, v.shape, strict=True))
    ]
    if wrong:
        raise EngineFormatError(
            f"{path} is not the graph that engine.json describes ({wrong[0]} differs): build the engine again."
        )


class OnnxRuntimeExecutor:
    """The embedded default: ONNX Runtime on the CPU. State pools are NumPy arrays; commit binds them as input and output.

    With `reuse_results` the arrays of a result may be written again by the next call of the same graph.
    """

    def __init__(self, directory: Path, manifest: Manifest, threads: int = 0, reuse_results: bool = False) -> None:
        self.directory, self.manifest, self.threads, self._reuse = directory, manifest, threads, reuse_results
        self.config, self.sizes, self.draft_shapes = manifest.config, manifest.sizes, manifest.draft_shapes
        self.bit_exact = manifest.cpu_kernels == "native"
        if manifest.cpu_kernels == "native" and native.library() is None:
            raise EngineFormatError(
                f"{directory} was built for the native operators, which this installation lacks: install trtllm_v4tree where a "
                "C++ compiler is, or build the engine with --cpu_kernels onnxruntime."
            )
        native.set_num_threads(threads)
        specs = contract.states(self.config, self.sizes)
        self.states = {t.name: np.zeros([int(d) for d in t.shape], np.float32) for t in specs}
        self._graphs: dict[str, _Graph] = {}
        self._target = self._load("target_step", contract.target_step(self.config, self.sizes))
        self._commit = self._load("commit", contract.commit(self.config, self.sizes))
        self._no_draft = {"mtp_scratch": np.zeros((1, 1, self.config.head_dim), np.float32)}
        self._no_rows = {"mtp_accepted": np.zeros(0, np.int64), "mtp_dst": np.zeros(0, np.int64)}
        for slot in range(self.sizes.num_slots):
            self.reset(slot)

    def _load(self, stem: str, spec: GraphContract) -> _Graph:
        """Only the target step's threads spin: a pool that does beside it doubled the time of a step after a draft round.

        Native operators have threads of their own, one set for all graphs, so their graphs need none of ONNX Runtime's.
        """
        threads = 1 if stem == "commit" or self.manifest.cpu_kernels == "native" else self.threads
        return _Graph(self.directory / f"{stem}.onnx", spec, self.states, threads, stem == "target_step", self._reuse)

    def prepare_draft(self, steps: int, topk: int) -> None:
        """Loads the draft round of this shape; raises EngineFormatError if the engine was built without it."""
        spec = contract.draft_round(self.config, self.sizes, steps, topk)
        if spec.name not in self._graphs:
            self._graphs[spec.name] = self._load(spec.name, spec)

    def target(self, feeds: Feeds) -> StepResult:
        results = self._target.run(feeds)
        return StepResult(results.pop("logits"), results)

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult:
        name = f"draft_s{steps}_k{topk}" if steps else "draft_catchup"
        results = self._graphs[name].run(feeds)
        if not steps:
            empty = np.zeros((len(feeds["positions"]), 0))
            return DraftResult(empty.astype(np.int64), empty.astype(np.int64), empty.astype(np.float32), results)
        tokens, parents, scores = (results.pop(f"draft_{part}") for part in ("tokens", "parents", "scores"))
        return DraftResult(tokens, parents, scores, results)

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        extra = {} if draft is not None else self._no_rows
        self._commit.run({**step, **(draft or self._no_draft), **extra, **feeds})

    def reset(self, slot: int) -> None:
        """Empties the compressor states of a slot: rows of weight zero."""
        for name, layers in (
            ("csa_state", self.sizes.num_csa),
            ("idx_state", self.sizes.num_csa),
            ("hca_state", self.sizes.num_hca),
        ):
            if name in self.states:
                rows = self.states[name].reshape(layers, self.sizes.num_slots, -1, 2, self.states[name].shape[-1] // 2)
                rows[:, slot, :, 0], rows[:, slot, :, 1] = contract.NULL_SCORE, 0

    def state(self, name: str) -> NDArray[np.float32]:
        """The live pool (a view)."""
        return self.states[name]

    def load_state(self, name: str, values: NDArray[np.float32]) -> None:
        """Replaces a pool."""
        if values is not self.states[name]:
            self.states[name][...] = values
