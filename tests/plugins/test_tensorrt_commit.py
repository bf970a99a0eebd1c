"""The commit kernels as the GPU executor launches them: interpreted on the executor's own arguments, and compiled for a chip."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_device import FakeDevice
from tests.harness import bin_rows
from tests.oracle.tiny import write_tiny
from tests.plugins.test_aot import run_module
from tests.runtime.test_tensorrt_executor import poison, texts, write_engine
from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.runtime.tensorrt_executor import TensorRtExecutor
from trtllm_v4tree.sizes import EngineSizes


class Interpreted(FakeDevice):
    """Runs the real kernels, by Triton's interpreter, on the arguments and grid that the executor gave."""

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(self.array(address, shape, dtype))

    def _scatter(self, constants: dict[str, Any], grid: tuple[int, int, int], *arguments: int) -> None:
        from v4tree_plugins.commit import scatter_rows_kernel

        (scratch, source, pool, target), (rows, pool_rows, width) = arguments[:4], arguments[4:]
        count, layers, _ = grid
        dtype = np.dtype(constants["dtype"])
        scatter_rows_kernel[grid](
            self._tensor(scratch, (layers * rows * width,), dtype), self._tensor(source, (count,), np.int64),
            self._tensor(pool, (layers * pool_rows * width,), dtype), self._tensor(target, (count,), np.int64),
            rows, pool_rows, width, BLOCK=constants["BLOCK"],
        )  # fmt: skip

    def _fold(self, constants: dict[str, Any], grid: tuple[int, int, int], *arguments: int) -> None:
        from v4tree_plugins.commit import fold_kernel

        (state, slots, raw, table), (raw_rows, per_layer, length) = arguments[:4], arguments[4:]
        batch, layers, _ = grid
        states, wide = constants["STATES"], 2 * constants["DIM"]
        fold_kernel[grid](
            self._tensor(state, (layers * per_layer * states * wide,), np.float32), self._tensor(slots, (batch,), np.int64),
            self._tensor(raw, (layers * batch * raw_rows * wide,), np.dtype(constants["dtype"])),
            self._tensor(table, (batch * states * length,), np.int64), raw_rows, per_layer, length,
            DIM=constants["DIM"], STATES=states, BLOCK=4, WIDTH=constants["WIDTH"],
        )  # fmt: skip


def test_real_kernels_commit_what_the_stand_ins_do(tmp_path: Path) -> None:
    """Same text and same states after prefills, draft rounds and commits of a padded batch; the bin, which many rows go to, aside."""
    checkpoint = write_tiny(tmp_path / "checkpoint", "w16", seed=1)
    config = ModelConfig.from_pretrained(checkpoint)
    sizes = EngineSizes.make(config, max_batch_size=4, max_seq_len=640, max_verify_tokens=16, prefill_chunk=64)
    assert Checkpoint.open(checkpoint, config, None).has_mtp
    built: Any = SimpleNamespace(checkpoint=checkpoint, driver=SimpleNamespace(config=config, sizes=sizes))
    manifest = write_engine(built, tmp_path / "engine", "float32")
    executors = [TensorRtExecutor(tmp_path / "engine", manifest, device) for device in (FakeDevice(), Interpreted())]
    outputs = []
    for executor in executors:
        poison(executor)
        outputs.append(texts(executor, "s3_k2_d6", tokens=8))
    assert outputs[0] == outputs[1]
    for name in executors[0]._pools:
        want, got = (np.delete(executor.state(name), bin_rows(sizes, name), axis=0) for executor in executors)
        assert (np.isnan(want) == np.isnan(got)).all(), name
        assert np.nanmax(np.abs(got - want)) <= 1e-4 * np.nanmax(np.abs(want[np.abs(want) < 1e29])), name


@pytest.mark.compile
@pytest.mark.parametrize("capability", ["SM80", "SM90", "SM100", "SM120"])
def test_commit_kernels_compile(capability: str) -> None:
    found = json.loads(run_module("tests.plugins.commit_report", capability, "bfloat16").splitlines()[-1])
    assert list(found) == ["scatter_rows", "fold_csa", "fold_idx", "fold_hca"]
    for name, (entry, threads, shared, elf) in found.items():
        assert entry.startswith(name.split("_")[0]) and threads == 128 and shared <= 48 * 1024 and elf
