"""The tables of a round, made by the native library where it was compiled: the same as `tables.py` makes, in a third of the time.

At batch 1 the host's part of a round is mostly tables, in Python a tenth of the round or more. What they hold is said and tested in
`tables.py`; chunks of prompts, which are wider than a tree, come from there too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import native
from trtllm_v4tree.runtime import tables
from trtllm_v4tree.runtime.tables import Feeds, Row, Rows, Sequences, StepTables, Tree
from trtllm_v4tree.runtime.tree import Ints
from trtllm_v4tree.sizes import EngineSizes

_MOST_NODES, _MOST_GIVEN, _MOST_DIMS, _MOST_VIEWS = 64, 4096, 8, 256
_Layout = list[tuple[str, type, tuple[int, ...]]]


class Tables(Protocol):
    """Makes the tables of an engine's rounds. Its arrays hold until it is asked for the next ones of the same kind."""

    def step(self, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables: ...

    def commit(self, step: StepTables, path: Sequence[Sequence[int]], counts: Sequence[int]) -> Feeds: ...

    def draft(
        self, seqs: Sequences, pending: Sequence[int], next_tokens: Sequence[Sequence[int]], steps: int
    ) -> tuple[Feeds, Feeds]: ...


def make_tables(sizes: EngineSizes) -> Tables:
    library = native.tables()
    return PythonTables(sizes) if library is None else NativeTables(sizes, library)


class PythonTables:
    """`tables.py` for one engine."""

    def __init__(self, sizes: EngineSizes) -> None:
        self.sizes = sizes

    def step(self, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
        return tables.step_tables(self.sizes, seqs, tree, logit_nodes)

    def commit(self, step: StepTables, path: Rows, counts: Row) -> Feeds:
        return tables.commit_tables(self.sizes, step, path, counts)

    def draft(self, seqs: Sequences, pending: Row, next_tokens: Rows, steps: int) -> tuple[Feeds, Feeds]:
        return tables.draft_tables(self.sizes, seqs, pending, next_tokens, steps)


class NativeTables:
    """The same from the native library, into buffers of its own that are used again."""

    def __init__(self, sizes: EngineSizes, library: ctypes.CDLL) -> None:
        self.sizes, self._python = sizes, PythonTables(sizes)
        self._kinds = [name for name, layers in (("csa", sizes.num_csa), ("hca", sizes.num_hca)) if layers]
        numbers = _numbers(sizes)
        self._step = _Function(library.v4tree_step_tables, numbers, self._step_layout)
        self._commit = _Function(library.v4tree_commit_tables, numbers, self._commit_layout)
        self._draft = _Function(library.v4tree_draft_tables, numbers, self._draft_layout)

    def step(self, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
        if tree.nodes > _MOST_NODES:
            return self._python.step(seqs, tree, logit_nodes)
        given = _heads(seqs, tree)
        for line in tree.tokens:
            given += line
        feeds = dict(self._step(len(tree.shapes), tree.nodes, given, seqs.pages))
        feeds["logit_nodes"] = logit_nodes
        return StepTables(feeds, seqs, tree, feeds["positions"], {})  # type: ignore[arg-type]

    def commit(self, step: StepTables, path: Sequence[Sequence[int]], counts: Sequence[int]) -> Feeds:
        if step.tree.nodes > _MOST_NODES:
            return self._python.commit(step, path, counts)
        given = [*_heads(step.seqs, step.tree), *counts]
        for line, count in zip(path, counts, strict=True):
            given += line[:count]
        feeds = dict(self._commit(len(counts), step.tree.nodes, given, step.seqs.pages))
        feeds["slots"] = step.feeds["slots"]
        return feeds

    def draft(
        self, seqs: Sequences, pending: Sequence[int], next_tokens: Sequence[Sequence[int]], steps: int
    ) -> tuple[Feeds, Feeds]:
        given = [*seqs.slots, *seqs.lengths, *pending]
        for line, count in zip(next_tokens, pending, strict=True):
            given += line[:count]
        feeds = dict(self._draft(len(pending), steps, given, seqs.pages))
        return feeds, {name: feeds.pop(name) for name in ("mtp_accepted", "mtp_dst")}

    def _step_layout(self, batch: int, nodes: int, dims: Sequence[int]) -> _Layout:
        b, n, (rows, *entries) = batch, nodes, dims
        layout: _Layout = [
            ("token_ids", np.int64, (b, n)),
            ("positions", np.int64, (b, n)),
            ("slots", np.int64, (b,)),
            ("window_rows", np.int64, (b, rows)),
            ("node_mask", np.float32, (b, n, rows + n)),
        ]
        for name in self._kinds:
            held, ends, pooled = entries[:3] if name == "csa" else entries[3:6]
            layout += [
                (f"{name}_rows", np.int64, (b, held)),
                (f"{name}_pool_table", np.int64, (b, ends, pooled)),
                (f"{name}_entry_positions", np.int64, (b, ends)),
                (f"{name}_mask", np.float32, (b, n, held + ends)),
            ]
        return layout

    def _commit_layout(self, batch: int, nodes: int, dims: Sequence[int]) -> _Layout:
        names = ["accepted", "window_dst", *(["stream_dst"] if self.sizes.has_mtp else [])]
        layout: _Layout = [(name, np.int64, (dims[0],)) for name in names]
        for name in self._kinds:
            folded, emitted = dims[1:3] if name == "csa" else dims[3:5]
            layout += [
                (f"{name}_fold_table", np.int64, (batch, 3 if name == "csa" else 1, folded)),
                (f"{name}_emitted", np.int64, (emitted,)),
                (f"{name}_dst", np.int64, (emitted,)),
            ]
        return layout

    def _draft_layout(self, batch: int, steps: int, dims: Sequence[int]) -> _Layout:
        b, (rows, width, read) = batch, dims[:3]
        layout: _Layout = [(name, np.int64, (b, width)) for name in ("stream_rows", "next_tokens", "positions")]
        layout += [("mtp_window_rows", np.int64, (b, rows)), ("catchup_mask", np.float32, (b, width, rows + width))]
        if steps:
            layout += [("last_row", np.int64, (b, 1)), ("root_position", np.int64, (b, 1))]
        if steps > 1:
            layout.append(("level_mask", np.float32, (b, steps - 1, rows + width)))
        return [*layout, ("mtp_accepted", np.int64, (read,)), ("mtp_dst", np.int64, (read,))]


class _Function:
    """One function of the library with its buffers; its arrays are made once for each set of dimensions."""

    def __init__(self, run: Any, numbers: Any, layout: Callable[[int, int, Sequence[int]], _Layout]) -> None:
        self._run, self._numbers, self._layout = run, numbers, layout
        self._given = (ctypes.c_int64 * _MOST_GIVEN)()
        self._dims = (ctypes.c_int64 * _MOST_DIMS)()
        self._room(1 << 16)

    def _room(self, size: int) -> None:
        self._buffer = np.zeros(size // 8 + 1, np.int64)
        self._address, self._size = self._buffer.ctypes.data, size
        self._views: dict[tuple[int, ...], Feeds] = {}

    def __call__(self, batch: int, nodes: int, given: list[int], pages: Ints) -> Feeds:
        if len(given) > len(self._given):
            self._given = (ctypes.c_int64 * (2 * len(given)))()
        self._given[: len(given)] = given  # type: ignore[assignment]
        used = self._call(batch, nodes, pages)
        assert used >= 0, "what is committed is no path of the tree"
        if used > self._size:
            self._room(2 * used)
            self._call(batch, nodes, pages)
        key = (batch, nodes, *self._dims)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._arrays(self._layout(batch, nodes, self._dims[:]))
        return views

    def _call(self, batch: int, nodes: int, pages: Ints) -> int:
        return int(
            self._run(
                self._numbers, batch, nodes, self._given, pages.ctypes.data, self._address, self._size, self._dims
            )
        )

    def _arrays(self, layout: _Layout) -> Feeds:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, dtype, shape in layout:
            arrays[name] = np.ndarray(shape, dtype, self._buffer, offset)
            offset += -(-arrays[name].nbytes // 8) * 8
        return arrays


def _heads(seqs: Sequences, tree: Tree) -> list[int]:
    given = [*seqs.slots, *seqs.lengths]
    for shape in tree.shapes:
        given += shape.parents
    return given


def _numbers(sizes: EngineSizes) -> Any:
    """The engine's sizes as the library takes them."""
    s = sizes
    csa = (s.csa_ratio, s.csa_page_rows) if s.num_csa else (0, 0)
    hca = (s.hca_ratio, s.hca_page_rows) if s.num_hca else (0, 0)
    return (ctypes.c_int64 * 8)(s.window, s.max_commit, int(s.has_mtp), s.pages_per_seq, *csa, *hca)
