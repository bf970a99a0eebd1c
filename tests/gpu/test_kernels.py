"""Every kernel on a GPU against its float64 reference: the interpreter's tests again, and the sizes of V4-Flash and V4-Pro."""

# ruff: noqa: F401
from __future__ import annotations

import pytest

from tests.plugins import cases
from tests.plugins.test_commit import (
    test_entries_across_pages,
    test_fold,
    test_fold_at_every_phase_of_a_long_window,
    test_fold_of_one_and_of_64_nodes,
    test_fold_of_one_row_is_bit_exact,
    test_window_rows,
)
from tests.plugins.test_grouped_moe import (
    Case,
    any_case,
    poison,
    routing,
    test_256_experts,
    test_a_tokens_bits_do_not_depend_on_the_others,
    test_bits_with_experts_in_fp4,
    test_every_code_of_fp4,
    test_experts_in_fp4,
    test_lines,
    test_more_pairs_than_are_sorted_at_a_time,
    test_other_tiles,
    test_routings,
    test_the_limit_is_one_sided_for_the_gate,
    test_what_is_no_number_stays_none,
)
from tests.plugins.test_grouped_moe import (
    test_sizes as test_experts_of_any_size,
)
from tests.plugins.test_packed_rows import (
    test_a_committed_row_is_the_row_of_the_tree,
    test_commit_moves_bytes,
    test_packing_what_was_unpacked_changes_nothing,
    test_quantiser_against_a_loop,
    test_quantiser_against_torch,
)
from tests.plugins.test_packed_rows import (
    test_full_width as test_packed_rows_at_full_width,
)
from tests.plugins.test_packed_rows import (
    test_one_node_and_64_nodes as test_packed_rows_of_one_and_of_64_nodes,
)
from tests.plugins.test_packed_rows import (
    test_trees_at_page_and_window_boundaries as test_packed_rows_at_page_and_window_boundaries,
)
from tests.plugins.test_tree_attention import (
    check,
    test_chain_and_64_node_tree,
    test_every_phase_of_a_long_window,
    test_full_width,
    test_one_node,
    test_packed_64_nodes,
    test_packed_masks,
    test_phases,
    test_selected_rows_per_node,
    test_splits,
    test_trees_at_page_and_window_boundaries,
)
from tests.plugins.test_tree_index_score import (
    test_64_heads_64_nodes,
    test_one_node_and_nothing_to_score,
    test_phases_and_page_boundaries,
)
from tests.plugins.test_tree_index_score import (
    test_every_phase_of_a_long_window as test_scores_at_every_phase,
)
from tests.plugins.test_tree_pool import (
    test_64_nodes_batched_at_page_boundaries,
    test_csa_at_every_phase,
    test_extreme_scores,
    test_hca_across_the_boundary,
    test_hca_at_every_phase,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("splits", [1, 16])
def test_attention_at_full_width(heads: int, splits: int, dtype: str) -> None:
    """Trees of 1 to 64 nodes of 512-dim heads with every tile that the plugins offer for this chip."""
    import torch
    from v4tree_plugins import aot

    major, minor = torch.cuda.get_device_capability()
    known = [c for c in aot.CAPABILITIES if c <= 10 * major + minor]
    for tile in aot.attention_tiles(dtype, known[-1]):
        shape = {
            "block_m": tile.block_m,
            "block_k": tile.block_k,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        check("csa", dtype, [1030, 129, 0], [8, 1, 16], heads=heads, dim=512, rope=64, splits=splits, **shape)
    check("hca", dtype, [900], [64], heads=heads, dim=512, rope=64, splits=splits, **shape)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_experts_at_full_width(tokens: int, dtype: str) -> None:
    """Experts of V4-Flash's width, 16 of them, with every tile that the plugins offer."""
    from v4tree_plugins import aot

    case = any_case(dtype, tokens, 6, 16, (4096, 2048))
    for tile in aot.expert_tiles(dtype):
        shape = {
            "block_n": tile.block_n,
            "block_k": tile.block_k,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        assert case.error(**shape) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_experts_in_fp4_at_full_width(tokens: int, dtype: str) -> None:
    import numpy as np
    from v4tree_plugins import aot

    case = Case.fp4(dtype, routing("any", tokens, 6, 16, np.random.default_rng(tokens)), 16, (4096, 2048))
    for tile in aot.expert_tiles(dtype, fp4=True):
        shape = {
            "block_n": tile.block_n,
            "block_k": tile.block_k,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        assert case.error(**shape) <= cases.TOLERANCE[dtype]
