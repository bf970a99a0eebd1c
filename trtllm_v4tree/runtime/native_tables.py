"""The tables of a round, made by the native library where it was compiled: the same as `tables.py` makes, in a fifth of the time.

At batch 1 the host's part of a round is mostly tables, in Python a tenth of the round or more. What they hold is said and tested in
`tables.py`; chunks of prompts, which are wider than a tree, come from there too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import native
from trtllm_v4tree.runtime import tables
from trtllm_v4tree.runtime.tables import Feeds, Row, Rows, Sequences, StepTables, Tree
from trtllm_v4tree.runtime.tree import Ints
from trtllm_v4tree.sizes import EngineSizes

_MOST_NODES, _MOST_GIVEN, _MOST_DIMS, _MOST_KNOWN = 64, 4096, 8, 4096
_GRID = 512
"""Bytes: where an array may begin, as in `tables.cc`."""
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

    def __init__(self, sizes: EngineSizes, library: ctypes.PyDLL) -> None:
        self.sizes, self._python = sizes, PythonTables(sizes)
        self._kinds = [name for name, layers in (("csa", sizes.num_csa), ("hca", sizes.num_hca)) if layers]
        numbers = _numbers(sizes)
        self._step = _Function(library.v4tree_step_tables, numbers, self._step_parts())
        self._commit = _Function(library.v4tree_commit_tables, numbers, self._commit_parts())
        self._draft = _Function(library.v4tree_draft_tables, numbers, self._draft_parts())

    def step(self, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
        if tree.nodes > _MOST_NODES:
            return self._python.step(seqs, tree, logit_nodes)
        given = _heads(seqs, tree)
        for line in tree.tokens:
            given += line
        feeds = self._step(len(tree.shapes), tree.nodes, given, seqs.pages)
        feeds["logit_nodes"] = logit_nodes
        return StepTables(feeds, seqs, tree, feeds["positions"], {})  # type: ignore[arg-type]

    def commit(self, step: StepTables, path: Sequence[Sequence[int]], counts: Sequence[int]) -> Feeds:
        if step.tree.nodes > _MOST_NODES:
            return self._python.commit(step, path, counts)
        given = [*_heads(step.seqs, step.tree), *counts]
        for line, count in zip(path, counts, strict=True):
            given += line[:count]
        feeds = self._commit(len(counts), step.tree.nodes, given, step.seqs.pages)
        feeds["slots"] = step.feeds["slots"]
        return feeds

    def draft(
        self, seqs: Sequences, pending: Sequence[int], next_tokens: Sequence[Sequence[int]], steps: int
    ) -> tuple[Feeds, Feeds]:
        given = [*seqs.slots, *seqs.lengths, *pending]
        for line, count in zip(next_tokens, pending, strict=True):
            given += line[:count]
        feeds = self._draft(len(pending), steps, given, seqs.pages)
        return feeds, {name: feeds.pop(name) for name in ("mtp_accepted", "mtp_dst")}

    def _step_parts(self) -> list[_Part]:
        def nodes(b: int, n: int, rows: int) -> _Layout:
            return [
                ("token_ids", np.int64, (b, n)),
                ("positions", np.int64, (b, n)),
                ("slots", np.int64, (b,)),
                ("window_rows", np.int64, (b, rows)),
                ("node_mask", np.float32, (b, n, rows + n)),
            ]

        def entries(kind: str, b: int, n: int, held: int, ends: int, pooled: int) -> _Layout:
            return [
                (f"{kind}_rows", np.int64, (b, held)),
                (f"{kind}_pool_table", np.int64, (b, ends, pooled)),
                (f"{kind}_entry_positions", np.int64, (b, ends)),
                (f"{kind}_mask", np.float32, (b, n, held + ends)),
            ]

        places = {"csa": slice(1, 4), "hca": slice(4, 7)}
        return [_Part(slice(0, 1), nodes), *(_Part(places[k], partial(entries, k)) for k in self._kinds)]

    def _commit_parts(self) -> list[_Part]:
        def rows(b: int, n: int, accepted: int) -> _Layout:
            names = ["accepted", "window_dst", *(["stream_dst"] if self.sizes.has_mtp else [])]
            return [(name, np.int64, (accepted,)) for name in names]

        def folds(kind: str, b: int, n: int, folded: int, emitted: int) -> _Layout:
            return [
                (f"{kind}_fold_table", np.int64, (b, 3 if kind == "csa" else 1, folded)),
                (f"{kind}_emitted", np.int64, (emitted,)),
                (f"{kind}_dst", np.int64, (emitted,)),
            ]

        places = {"csa": slice(1, 3), "hca": slice(3, 5)}
        return [_Part(slice(0, 1), rows), *(_Part(places[k], partial(folds, k)) for k in self._kinds)]

    def _draft_parts(self) -> list[_Part]:
        def all_of_them(b: int, steps: int, rows: int, width: int, read: int) -> _Layout:
            layout: _Layout = [(name, np.int64, (b, width)) for name in ("stream_rows", "next_tokens", "positions")]
            layout += [("mtp_window_rows", np.int64, (b, rows)), ("catchup_mask", np.float32, (b, width, rows + width))]
            if steps:
                layout += [("last_row", np.int64, (b, 1)), ("root_position", np.int64, (b, 1))]
            if steps > 1:
                layout.append(("level_mask", np.float32, (b, steps - 1, rows + width)))
            return [*layout, ("mtp_accepted", np.int64, (read,)), ("mtp_dst", np.int64, (read,))]

        return [_Part(slice(0, 3), all_of_them)]


class _Part(NamedTuple):
    """Arrays that lie together: which of the dimensions they depend on, and their layout by batch, nodes (steps) and these."""

    dims: slice
    layout: Callable[..., _Layout]


class _Function:
    """One function of the library with its buffers. An array is made once for each place and shape, so that a graph to which it is bound
    finds it again: binding one anew takes a microsecond."""

    def __init__(self, run: Any, numbers: Any, parts: list[_Part]) -> None:
        self._run, self._numbers, self._parts = run, numbers, parts
        self._given = (ctypes.c_int64 * _MOST_GIVEN)()
        self._dims = (ctypes.c_int64 * _MOST_DIMS)()
        self._room(1 << 16)

    def _room(self, size: int) -> None:
        self._buffer = np.zeros(size // 8 + 1, np.int64)
        self._address, self._size = self._buffer.ctypes.data, size
        self._known: dict[tuple[int, ...], tuple[Feeds, int]] = {}
        self._arrays: dict[tuple[str, tuple[int, ...], int], NDArray[Any]] = {}

    def __call__(self, batch: int, nodes: int, given: list[int], pages: Ints) -> Feeds:
        """Fresh dictionary of arrays."""
        if len(given) > len(self._given):
            self._given = (ctypes.c_int64 * (2 * len(given)))()
        self._given[: len(given)] = given  # type: ignore[assignment]
        used = self._call(batch, nodes, pages)
        assert used >= 0, "what is committed is no path of the tree"
        if used > self._size:
            self._room(2 * used)
            self._call(batch, nodes, pages)
        feeds: Feeds = {}
        dims, offset = self._dims[:], 0
        for number, part in enumerate(self._parts):
            key = (number, offset, batch, nodes, *dims[part.dims])
            known = self._known.get(key)
            if known is None:
                known = self._make(key, part.layout(batch, nodes, *dims[part.dims]), offset)
            feeds.update(known[0])
            offset = known[1]
        return feeds

    def _call(self, batch: int, nodes: int, pages: Ints) -> int:
        return int(
            self._run(
                self._numbers, batch, nodes, self._given, pages.ctypes.data, self._address, self._size, self._dims
            )
        )

    def _make(self, key: tuple[int, ...], layout: _Layout, offset: int) -> tuple[Feeds, int]:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._arrays.clear()
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in layout:
            place = (name, shape, offset)
            if place not in self._arrays:
                self._arrays[place] = np.ndarray(shape, dtype, self._buffer, offset)
            arrays[name] = self._arrays[place]
            offset += max(1, -(-arrays[name].nbytes // _GRID)) * _GRID
        self._known[key] = (arrays, offset)
        return self._known[key]


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
