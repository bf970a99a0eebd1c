"""Drives an executor pass by pass, as the round loop does, and knows which rows of every pool a sequence owns.

Pools start as NaN: only the zero rows and what a commit wrote hold numbers, so reading anything else shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_v4tree import contract
from trtllm_v4tree.runtime import tables
from trtllm_v4tree.runtime.executor import DraftResult, Executor
from trtllm_v4tree.runtime.tree import PAD
from trtllm_v4tree.sizes import EngineSizes

from .oracle.reference import Oracle
from .oracle.trees import path as path_of

Tree = tuple[np.ndarray, np.ndarray]
"""Parents and tokens of one sequence's tree, not padded."""
Pools = dict[str, np.ndarray]
BIN = (0, 0)
"""Slot and page that padded and rejected writes go to."""


@dataclass(frozen=True)
class Held:
    """A sequence: where it lives, its committed tokens, and how many accepted rows the drafter has not read."""

    slot: int
    pages: tuple[int, ...]
    ids: tuple[int, ...] = ()
    pending: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Verified:
    """One target step over `held`: tables, logits [B, N, V] and scratch."""

    held: list[Held]
    trees: list[Tree]
    tables: tables.StepTables
    logits: np.ndarray
    scratch: Any

    def boundaries(self, kind: str | None) -> dict[tuple[int, int], int]:
        """Index of every node that completes a window of this kind, by sequence and node id."""
        return {(at.row, at.node): at.ordinal for at in self.tables.boundaries.get(kind or "", [])}


@dataclass(frozen=True)
class Drafted:
    """One draft round over `held`."""

    read: np.ndarray
    tables: tables.Feeds
    result: DraftResult


@dataclass(frozen=True)
class Built:
    """A checkpoint, its engine, a driver over one executor, and the oracle."""

    name: str
    checkpoint: Path
    engine: Path
    driver: Driver
    oracle: Oracle


def chain_tree(tokens: Iterable[int]) -> Tree:
    ids = np.array(list(tokens), np.int64)
    return np.arange(-1, len(ids) - 1, dtype=np.int64), ids


def leaf_paths(parents: np.ndarray) -> list[list[int]]:
    """Node ids from the root to every leaf."""
    return [path_of(parents, leaf) for leaf in sorted(set(range(len(parents))) - set(parents.tolist()))]


def random_path(rng: np.random.Generator, parents: np.ndarray) -> list[int]:
    """Path to a random leaf, cut at a random node."""
    path = leaf_paths(parents)[int(rng.integers(len(leaf_paths(parents))))]
    return path[: int(rng.integers(1, len(path) + 1))]


class Driver:
    """Sequences over one executor; the state is the executor's."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.config, self.sizes = executor, executor.config, executor.sizes
        self.specs = {t.name: t for t in contract.states(self.config, self.sizes)}

    def start(self, rng: np.random.Generator, count: int) -> list[Held]:
        """Poisons every pool and opens `count` empty sequences in random slots with shuffled pages."""
        s = self.sizes
        slots = 1 + rng.permutation(s.max_batch_size)[:count]
        pages = 1 + rng.permutation(s.num_pages - 1)[: count * s.pages_per_seq].reshape(count, -1)
        self.poison([])
        for slot in slots:
            self.executor.reset(int(slot))
        return [Held(int(a), tuple(map(int, b))) for a, b in zip(slots, pages, strict=True)]

    def verify(self, held: list[Held], trees: list[Tree]) -> Verified:
        """Logits of every node; trees are padded to the widest."""
        width = max(len(parents) for parents, _ in trees)
        parents, tokens = np.full((len(held), width), PAD, np.int64), np.zeros((len(held), width), np.int64)
        for b, (own, ids) in enumerate(trees):
            parents[b, : len(own)], tokens[b, : len(ids)] = own, ids
        nodes = np.broadcast_to(np.arange(width), parents.shape)
        step = tables.step_tables(self.sizes, self._sequences(held, width), tables.Tree.make(parents, tokens), nodes)
        result = self.executor.target(step.feeds)
        return Verified(held, trees, step, result.logits, result.scratch)

    def draft(self, held: list[Held], roots: Sequence[int], steps: int = 0, topk: int = 1) -> Drafted:
        """The drafter over the pending rows; `roots` are the tokens that follow the committed ones."""
        pending = np.array([h.pending for h in held])
        following = np.zeros((len(held), int(pending.max())), np.int64)
        for b, (h, root) in enumerate(zip(held, roots, strict=True)):
            following[b, : h.pending] = [*h.ids[h.length - h.pending + 1 :], int(root)][: h.pending]
        feeds, kept = tables.draft_tables(self.sizes, self._sequences(held, 0), pending, following, steps)
        self.executor.prepare_draft(steps, topk)
        return Drafted(kept["mtp_accepted"], kept, self.executor.draft(steps, topk, feeds))

    def commit(
        self,
        done: Verified,
        paths: list[list[int]],
        drafted: Drafted | None = None,
        keep: Sequence[int] | None = None,
        behind: bool = False,
    ) -> list[Held]:
        """Commits the first `keep` nodes (all without it) of every path, and the rows the drafter read.

        behind: the drafter has not read the pending streams, so new ones go behind them; otherwise those are dropped.
        """
        counts = np.array([len(p) for p in paths] if keep is None else keep)
        path = np.full((len(paths), max(1, *map(len, paths))), -1, np.int64)
        for b, nodes in enumerate(paths):
            path[b, : len(nodes)] = nodes
        unread = np.array([h.pending if behind else 0 for h in done.held])
        feeds = tables.commit_tables(self.sizes, done.tables, path, counts)
        if drafted is not None:
            feeds |= drafted.tables
        self.executor.commit(done.scratch, drafted and drafted.result.scratch, feeds)
        out = []
        for b, (h, (_, tokens)) in enumerate(zip(done.held, done.trees, strict=True)):
            new = tuple(int(tokens[n]) for n in paths[b][: counts[b]])
            out.append(replace(h, ids=h.ids + new, pending=int(unread[b]) + len(new)))
        return out

    def advance(
        self,
        held: list[Held],
        trees: list[Tree],
        paths: list[list[int]],
        poisoned: bool = False,
        beside: Sequence[Held] = (),
    ) -> list[Held]:
        """One round without proposals: catch-up of the drafter, verify, commit.

        Poisoned: all that neither the batch nor `beside` owns is NaN, and so is the scratch of rejected nodes.
        """
        if poisoned:
            self.poison([*held, *beside])
        roots = [int(tokens[0]) if len(tokens) else 0 for _, tokens in trees]
        drafted = self.draft(held, roots) if any(h.pending for h in held) else None
        done = self.verify(held, trees)
        if poisoned:
            done, drafted = self.poison_scratch(done, paths, [len(p) for p in paths]), self.poison_drafter(drafted)
        return self.commit(done, paths, drafted)

    def prefill(
        self, held: Held, ids: Sequence[int], chunks: Sequence[int], poisoned: bool = False, beside: Sequence[Held] = ()
    ) -> Held:
        """Commits `ids` in chunks of the given sizes, the last size repeated."""
        done, sizes = 0, list(chunks)
        while done < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            tree = chain_tree(ids[done : done + size])
            [held] = self.advance([held], [tree], [list(range(len(tree[0])))], poisoned, beside)
            done += size
        return held

    def _sequences(self, held: list[Held], new: int) -> tables.Sequences:
        """Page tables hold only the pages that `new` more tokens need; the others are the bin."""
        pages = np.array([h.pages for h in held])
        needed = np.array([-(-(h.length + new) // self.sizes.page_tokens) for h in held])
        pages = np.where(np.arange(pages.shape[1]) < needed[:, None], pages, BIN[1])
        return tables.Sequences(np.array([h.slot for h in held]), np.array([h.length for h in held]), pages)

    # What a sequence owns.

    def save(self) -> Pools:
        return {name: self.executor.state(name).copy() for name in self.specs}

    def restore(self, pools: Pools) -> None:
        for name, pool in pools.items():
            self.executor.state(name)[...] = pool

    def read(self, held: Held) -> Pools:
        """What later passes may read of a sequence: [layers, positions or entries or pending rows or 1, ...]."""
        owned = owned_rows(self.sizes, self.specs, held)
        return {name: self.executor.state(name)[rows] for name, rows in owned.items()}

    def poison(self, held: list[Held]) -> None:
        """NaN in every row of every pool that no sequence of `held` owns, the bin included; zero rows are zero."""
        owned = [owned_rows(self.sizes, self.specs, h) for h in held]
        for name in self.specs:
            pool = self.executor.state(name)
            fresh = np.full_like(pool, np.nan)
            fresh[zero_rows(self.sizes, name)] = 0
            for rows in owned:
                fresh[rows[name]] = pool[rows[name]]
            pool[...] = fresh

    def poison_scratch(self, done: Verified, paths: list[list[int]], keep: Sequence[int]) -> Verified:
        """Scratch with NaN in everything that is not of an accepted node."""
        real = np.zeros(done.tables.tree.parents.shape, bool)
        for b, (nodes, count) in enumerate(zip(paths, keep, strict=True)):
            real[b, nodes[:count]] = True
        scratch = {name: as_array(value) for name, value in done.scratch.items()}
        for spec in contract.commit(self.config, self.sizes).inputs:
            if spec.role == "scratch" and spec.name != "mtp_scratch":
                axis = spec.shape.index("B")
                rows = np.moveaxis(scratch[spec.name], (axis, axis + 1), (0, 1))
                kind = {"M": "csa", "Q": "hca"}.get(str(spec.shape[axis + 1]))
                kept = real if kind is None else np.zeros(rows.shape[:2], bool)
                for (b, node), index in done.boundaries(kind).items():
                    kept[b, index] = real[b, node]
                rows[~kept] = np.nan
        return replace(done, scratch=scratch)

    def poison_drafter(self, drafted: Drafted | None) -> Drafted | None:
        """The same for the drafter's rows: NaN where no row was pending."""
        if drafted is None:
            return None
        rows = {name: as_array(value) for name, value in drafted.result.scratch.items()}
        flat = rows["mtp_scratch"].reshape(-1, rows["mtp_scratch"].shape[-1])
        flat[np.setdiff1d(np.arange(len(flat)), drafted.read)] = np.nan
        return replace(drafted, result=replace(drafted.result, scratch=rows))


def as_array(value: Any) -> np.ndarray:
    """A copy of a scratch tensor."""
    return np.array(value if isinstance(value, np.ndarray) else value.numpy())


def stride(sizes: EngineSizes, name: str) -> tuple[int, int]:
    """Layers of a pool and rows of each layer."""
    s = sizes
    kind = name.split("_")[0]
    layers = {"csa": s.num_csa, "idx": s.num_csa, "hca": s.num_hca, "window": s.num_layers}.get(kind, 1)
    if name.endswith("_state"):
        return layers, s.num_slots
    rows = {"csa": s.csa_rows, "idx": s.csa_rows, "hca": s.hca_rows, "streams": s.stream_rows}.get(kind, s.window_rows)
    return layers, rows


def zero_rows(sizes: EngineSizes, name: str) -> np.ndarray:
    """The first row of every layer, but of state pools, which have none."""
    layers, rows = stride(sizes, name)
    return np.arange(0 if name.endswith("_state") else layers) * rows


def bin_rows(sizes: EngineSizes, name: str) -> np.ndarray:
    """Rows of slot 0 or page 0 in every layer."""
    s = sizes
    layers, rows = stride(sizes, name)
    kind = name.split("_")[0]
    if name.endswith("_state"):
        first, count = 0, 1
    else:
        per_page = {"csa": s.csa_page_rows, "idx": s.csa_page_rows, "hca": s.hca_page_rows, "streams": s.max_commit}
        first, count = 1, per_page.get(kind, s.window)
    return (np.arange(layers)[:, None] * rows + first + np.arange(count)).ravel()


def owned_rows(sizes: EngineSizes, names: Iterable[str], held: Held) -> dict[str, np.ndarray]:
    """Rows [layers, n] of every pool that hold what later passes may read of a sequence, in logical order."""
    out = {}
    for name in names:
        layers, rows = stride(sizes, name)
        own = np.array(_own_rows(sizes, name, held), np.int64)
        out[name] = np.arange(layers)[:, None] * rows + own
    return out


def window_held(sizes: EngineSizes, length: int) -> range:
    """Positions of a ring that a new row at `length` may see."""
    return range(max(0, length - sizes.window + 1), length)


def _own_rows(sizes: EngineSizes, name: str, held: Held) -> list[int]:
    """The same within one layer."""
    s = sizes
    if name.endswith("_state"):
        return [held.slot]
    if name == "streams":
        pending = range(held.length - held.pending, held.length)
        return [1 + held.slot * s.max_commit + p % s.max_commit for p in pending]
    if name in ("window_kv", "mtp_window_kv"):
        seen = window_held(s, held.length - (held.pending if name == "mtp_window_kv" else 0))
        return [1 + held.slot * s.window + p % s.window for p in seen]
    ratio, per_page = (s.hca_ratio, s.hca_page_rows) if name.startswith("hca") else (s.csa_ratio, s.csa_page_rows)
    return [1 + held.pages[w // per_page] * per_page + w % per_page for w in range(held.length // ratio)]
