"""The executor of TensorRT engines: states and buffers allocated once, graphs captured per bucket, commit kernels by node ids.

Behind the same interface as the CPU's. A call copies its tables in once and its results out once; a commit copies nothing out.
Results and scratch are valid until the next call of the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree import contract
from trtllm_v4tree.contract import TensorSpec
from trtllm_v4tree.engine_dir import FoldKind, Manifest, fold_kinds, read_kernels
from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.buckets import (
    FILLS,
    Bucket,
    draft_bucket,
    moved_rows,
    target_bucket,
    widest_draft,
    widest_targets,
)
from trtllm_v4tree.runtime.device import Device, aligned
from trtllm_v4tree.runtime.executor import DraftResult, Scratch, StepResult
from trtllm_v4tree.runtime.policies.base import candidates_of
from trtllm_v4tree.runtime.stage import DTYPES, DeviceScratch, Place, Stage
from trtllm_v4tree.runtime.tables import Feeds

SCATTER_BLOCK, FOLD_WIDTH = 512, 128
"""Columns that one program scatters and channels of one fold program, as the kernels were compiled."""
Ints = NDArray[np.int64]


class TensorRtExecutor:
    """Raises EngineFormatError for an engine of another chip or one whose plans do not load."""

    bit_exact = False

    def __init__(self, directory: Path, manifest: Manifest, device: Device) -> None:
        if manifest.compute_capabilities != (device.capability,):
            raise EngineFormatError(
                f"{directory} was built for {', '.join(manifest.compute_capabilities)} and the GPU here is {device.capability}: "
                "build the engine on this machine."
            )
        self.directory, self.manifest, self.device = directory, manifest, device
        self.config, self.sizes, self.draft_shapes = manifest.config, manifest.sizes, manifest.draft_shapes
        self._specs = {t.name: t for t in self._typed("commit").inputs if t.role == "state"}
        self._pools = {name: device.allocate(_bytes(spec)) for name, spec in self._specs.items()}
        for name, spec in self._specs.items():
            device.clear(self._pools[name], _bytes(spec))
        self._commit = _Commit(self)
        self._folds = fold_kinds(self.config, self.sizes)
        self._null = {kind.name: self._null_rows(kind) for kind in self._folds}
        for slot in range(self.sizes.num_slots):
            self.reset(slot)
        s = self.sizes
        self._target = self._stage(
            "target_step", lambda actual: target_bucket(s, actual), list(widest_targets(s)), self._profile
        )
        self._drafts: dict[tuple[int, int], Stage] = {}

    def _typed(self, stem: str) -> contract.GraphContract:
        return next(spec for spec in self.manifest.contracts() if spec.name == stem)

    def _stage(self, stem: str, choose: Any, widest: list[Bucket], profile: Any) -> Stage:
        path = self.directory / f"{stem}.plan"
        return Stage(self.device, path, self._typed(stem), self._pools, choose, widest, profile)

    def _profile(self, bucket: Bucket) -> int:
        """The narrowest of the plan's profiles (decode, verify, prefill) that takes the bucket."""
        nodes = bucket.symbols["N"]
        return next(i for i, width in enumerate(self.sizes.pass_widths) if nodes <= width)

    def prepare_draft(self, steps: int, topk: int) -> None:
        """Loads the draft round of this shape; raises EngineFormatError if the engine was built without it."""
        if (steps, topk) in self._drafts:
            return
        stem = f"draft_s{steps}_k{topk}" if steps else "draft_catchup"
        if f"{stem}.plan" not in self.manifest.files:
            raise EngineFormatError(f"{self.directory} has no {stem}.plan: build the engine with --draft_shapes.")
        s, count = self.sizes, candidates_of((steps, topk)) if steps else 0
        self._drafts[steps, topk] = self._stage(
            stem, lambda actual: draft_bucket(s, actual, count), [widest_draft(s, count)], lambda bucket: 0
        )

    def target(self, feeds: Feeds) -> StepResult:
        results, scratch = self._target.call(feeds)
        return StepResult(results["logits"], scratch)

    def draft(self, steps: int, topk: int, feeds: Feeds) -> DraftResult:
        results, scratch = self._drafts[steps, topk].call(feeds)
        if not steps:
            empty = np.zeros((len(feeds["positions"]), 0))
            return DraftResult(empty.astype(np.int64), empty.astype(np.int64), empty.astype(np.float32), scratch)
        tokens, parents, scores = (results[f"draft_{part}"] for part in ("tokens", "parents", "scores"))
        return DraftResult(tokens, parents, scores, scratch)

    def commit(self, step: Scratch, draft: Scratch | None, feeds: Feeds) -> None:
        """Scratch of another executor is brought to the device first."""
        own = step if isinstance(step, DeviceScratch) else self._target.adopt(step)
        if draft is not None and not isinstance(draft, DeviceScratch):
            draft = next(iter(self._drafts.values())).adopt(draft)
        self._commit.run(own, draft, feeds)

    def _null_rows(self, kind: FoldKind) -> int:
        """Address of the states of an empty slot: rows of weight zero."""
        rows = np.zeros((kind.states, 2, kind.dim), np.float32)
        rows[:, 0] = contract.NULL_SCORE
        at = self.device.allocate(rows.nbytes)
        self.device.upload(at, rows.reshape(-1).view(np.uint8))
        return at

    def reset(self, slot: int) -> None:
        """Empties the compressor states of a slot."""
        for kind in self._folds:
            size = kind.states * 2 * kind.dim * 4
            for layer in range(kind.layers):
                at = self._pools[f"{kind.name}_state"] + (layer * self.sizes.num_slots + slot) * size
                self.device.copy(at, self._null[kind.name], size)

    def state(self, name: str) -> NDArray[np.float32]:
        """A copy of a pool."""
        spec = self._specs[name]
        raw = np.empty(_bytes(spec), np.uint8)
        self.device.download(raw, self._pools[name])
        return raw.view(DTYPES[spec.dtype]).reshape(_shape(spec)).astype(np.float32)

    def load_state(self, name: str, values: NDArray[np.float32]) -> None:
        """Replaces a pool."""
        spec = self._specs[name]
        data = np.ascontiguousarray(values.reshape(_shape(spec)).astype(DTYPES[spec.dtype]))
        self.device.upload(self._pools[name], data.reshape(-1).view(np.uint8))


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(int(dim) for dim in spec.shape)


def _bytes(spec: TensorSpec) -> int:
    return int(np.prod(_shape(spec), dtype=np.int64)) * DTYPES[spec.dtype].itemsize


class _Commit:
    """Launches the commit kernels: accepted rows into pools, accepted rows folded into open windows."""

    def __init__(self, executor: TensorRtExecutor) -> None:
        self.sizes, self.device, self.pools = executor.sizes, executor.device, executor._pools
        self.specs = executor._specs
        self.folds = fold_kinds(executor.config, executor.sizes)
        codes = read_kernels(executor.directory)
        missing = [name for name in ("scatter_rows", *(f"fold_{k.name}" for k in self.folds)) if name not in codes]
        if missing:
            raise EngineFormatError(f"{executor.directory} lacks the kernel {missing[0]}: build the engine again.")
        self.kernels = {name: self.device.kernel(code) for name, code in codes.items()}
        most = self._most_bytes()
        self.staging, self.at = self.device.pinned(most), self.device.allocate(most)

    def _most_bytes(self) -> int:
        """Tables of the widest commit: every node of a full batch accepted."""
        s = self.sizes
        tokens = s.max_batch_size * s.max_commit
        lists = 10 * aligned(8 * tokens)
        folds = sum(aligned(8 * s.max_batch_size * k.states * (1 + s.max_commit)) for k in self.folds)
        return lists + folds

    def run(self, step: DeviceScratch, draft: DeviceScratch | None, feeds: Feeds) -> None:
        """feeds: as of the contract `commit`; row ids count unpadded rows."""
        at = self._upload(self._tables(step, draft, feeds))
        layers = self.sizes.num_layers
        self._scatter("window_kv", step, "window_scratch", at, "accepted", "window_dst", layers)
        for kind in self.folds:
            table = "csa" if kind.name == "idx" else kind.name
            branch, emitted, target = f"{kind.name}_branch", f"{table}_emitted", f"{table}_dst"
            self._fold(kind, step, at, table)
            self._scatter(f"{kind.name}_entries", step, branch, at, emitted, target, kind.layers)
        if self.sizes.has_mtp:
            self._scatter("streams", step, "streams_scratch", at, "accepted", "stream_dst", 1)
        if draft is not None:
            self._scatter("mtp_window_kv", draft, "mtp_scratch", at, "mtp_accepted", "mtp_dst", 1)

    def _tables(self, step: DeviceScratch, draft: DeviceScratch | None, feeds: Feeds) -> dict[str, Ints]:
        """Row ids of padded scratch; slots and folds of a padded batch, the bin for what is padded."""
        sides = {"accepted": (step, "N"), "csa_emitted": (step, "M"), "hca_emitted": (step, "Q")}
        if draft is not None:
            sides["mtp_accepted"] = (draft, "S")
        batch, tables = step.padded["B"], {}
        for name, values in feeds.items():
            if name in sides:
                scratch, symbol = sides[name]
                values = moved_rows(values, scratch.actual[symbol], scratch.padded[symbol])  # type: ignore[arg-type]
            elif name == "slots" or name.endswith("_fold_table"):
                wide = np.full((batch, *values.shape[1:]), FILLS.get(name, 0), np.int64)
                wide[: len(values)] = values
                values = wide
            tables[name] = values
        return tables  # type: ignore[return-value]

    def _upload(self, tables: Mapping[str, Ints]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Address and shape of every table, after one copy."""
        placed, end = {}, 0
        for name, values in tables.items():
            place = Place(end, values.shape, DTYPES["int64"])
            place.view(self.staging)[...] = values
            placed[name] = self.at + end, values.shape
            end += aligned(place.size)
        self.device.upload(self.at, self.staging[:end])
        return placed

    def _scatter(
        self, pool: str, scratch: DeviceScratch, name: str, at: Mapping[str, tuple[int, tuple[int, ...]]],
        source: str, target: str, layers: int,
    ) -> None:  # fmt: skip
        """pool[layer, target] = scratch[layer, source]."""
        (count,), place = at[source][1], scratch.places[name]
        if not count:
            return
        rows, width = _shape(self.specs[pool])
        per_layer = int(np.prod(place.shape, dtype=np.int64)) // (layers * width)
        self.kernels["scatter_rows"](
            (count, layers, -(-width // SCATTER_BLOCK)),
            scratch.address(name), at[source][0], self.pools[pool], at[target][0],
            np.int32(per_layer), np.int32(rows // layers), np.int32(width),
        )  # fmt: skip

    def _fold(
        self, kind: FoldKind, step: DeviceScratch, at: Mapping[str, tuple[int, tuple[int, ...]]], table: str
    ) -> None:
        """Accepted raw rows into the open windows of the batch; a padded sequence folds nothing into the bin."""
        address, (batch, _, rows) = at[f"{table}_fold_table"]
        place = step.places[f"{kind.name}_raw"]
        raw_rows = place.shape[2] * place.shape[3] // (2 * kind.dim)
        self.kernels[f"fold_{kind.name}"](
            (batch, kind.layers, kind.dim // min(FOLD_WIDTH, kind.dim)),
            self.pools[f"{kind.name}_state"], at["slots"][0], step.address(f"{kind.name}_raw"), address,
            np.int32(raw_rows), np.int32(self.sizes.num_slots), np.int32(rows),
        )  # fmt: skip
