"""The closed formulas are the bytes that an engine really holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtllm_v4tree import contract
from trtllm_v4tree.accounting import pool_bytes, state_bytes
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.sizes import EngineSizes

from .harness import Built, as_array, chain_tree, stride
from .oracle.tiny import CONFIGS

PAGED = ("csa_entries", "idx_entries", "hca_entries")
FLASH = ModelConfig.from_dict(
    CONFIGS["w128"]
    | {"hidden_size": 4096, "head_dim": 512, "index_head_dim": 128, "qk_rope_head_dim": 64, "num_attention_heads": 64}
)


def sizes_of(config: ModelConfig, max_seq_len: int = 1000, has_mtp: bool = True) -> EngineSizes:
    return EngineSizes.make(
        config, max_batch_size=3, max_seq_len=max_seq_len, max_verify_tokens=8, num_pages=7, has_mtp=has_mtp
    )


def test_pools_of_an_engine(built: Built) -> None:
    """Live arrays: without zero rows, slot pools are per_sequence a slot and page pools per_token a token."""
    sizes, executor = built.driver.sizes, built.driver.executor
    held = state_bytes(built.driver.config, sizes)
    paged = slotted = total = 0
    for name in built.driver.specs:
        array = executor.state(name)
        layers, _ = stride(sizes, name)
        zero = 0 if name.endswith("_state") else layers * array[0].nbytes
        total += array.nbytes
        paged += (array.nbytes - zero) if name in PAGED else 0
        slotted += (array.nbytes - zero) if name not in PAGED else 0
    assert paged == sizes.num_pages * sizes.page_tokens * held.per_token
    assert slotted == sizes.num_slots * held.per_sequence
    assert total == pool_bytes(built.driver.config, sizes)


@pytest.mark.parametrize("has_mtp", [True, False])
@pytest.mark.parametrize("max_seq_len", [15, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_pools_by_the_contract(name: str, max_seq_len: int, has_mtp: bool) -> None:
    """With and without selection and drafter."""
    config = ModelConfig.from_dict(CONFIGS[name])
    sizes = sizes_of(config, max_seq_len, has_mtp)
    shapes = [[int(d) for d in t.shape] for t in contract.states(config, sizes)]
    assert pool_bytes(config, sizes) == 4 * sum(int(np.prod(shape)) for shape in shapes)


def test_scratch_of_a_step(built: Built) -> None:
    """N nodes of a real step, some of them boundaries, and the drafter's rows."""
    driver, sizes = built.driver, built.driver.sizes
    held = state_bytes(driver.config, sizes)
    [seq] = driver.start(np.random.default_rng(0), 1)
    seq = driver.prefill(seq, [3, 1, 4, 1, 5], [5])
    for nodes in (1, 7, 16):
        scratch = driver.verify([seq], [chain_tree(range(nodes))]).scratch
        arrays = {name: as_array(value) for name, value in scratch.items()}
        csa, hca = (arrays[f"{kind}_branch"].shape[2] for kind in ("csa", "hca"))
        assert csa >= len([p for p in range(5, 5 + nodes) if p % sizes.csa_ratio == sizes.csa_ratio - 1])
        formula = nodes * held.per_node + csa * held.per_csa_boundary + hca * held.per_hca_boundary
        assert sum(array.nbytes for array in arrays.values()) == formula
    drafted = driver.draft([seq], [1])
    assert as_array(drafted.result.scratch["mtp_scratch"]).nbytes == 5 * held.per_drafter_row


def test_flash_sized_layers() -> None:
    """By hand, for two CSA and two HCA layers of head_dim 512, whose open window is (score, value): 4 KiB."""
    held = state_bytes(FLASH, sizes_of(FLASH))
    assert held.per_token == 4 * (2 * 512 / 4 + 2 * 512 / 128)
    assert held.per_hca_boundary == 2 * 512 * 4
    without_hca = replace(sizes_of(FLASH), num_hca=0)
    assert held.per_sequence - state_bytes(FLASH, without_hca).per_sequence == 2 * 4096


def test_inspect_reads_the_same_sizes(tiny: Callable[[str], Built], tmp_path: Path) -> None:
    """The bytes of a stored engine are those of its sizes."""
    from trtllm_v4tree.engine_dir import Manifest

    built = tiny("w16")
    manifest = Manifest.read(built.engine)
    assert state_bytes(manifest.config, manifest.sizes) == state_bytes(built.driver.config, built.driver.sizes)
