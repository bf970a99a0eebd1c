"""The grid's plan: every cell covered, blocks interleaved, names refused with a sentence."""

from __future__ import annotations

from collections import Counter

import pytest

from trtllm_v4tree.bench.plan import check_budgets, parse_shape
from trtllm_v4tree.errors import RequestError

from .synthetic import full_plan


def test_default_grid_has_every_configuration_once() -> None:
    plan = full_plan()
    names = plan.speculations()
    assert names[:4] == ["none", "s4_k1_d5", "s3_k2_d5", "s4_k3_d5"]
    assert len(names) == len(set(names)) == 1 + 4 * 3
    assert plan.role("s7_k1_d8") == ("linear", 8)
    assert plan.role("s3_k2_d8") == ("tree", 8)
    assert plan.role("none") == ("plain", 0)
    assert plan.role("auto") == ("other", 0) and plan.role("calibrated_d6") == ("other", 6)
    assert plan.fixed_tree(6) == "s3_k2_d6"


def test_units_use_every_prompt_and_are_full_batches() -> None:
    plan = full_plan(num_prompts=10)
    units = plan.units()
    assert len(units) == 3 * sum(max(4, -(-10 // b)) for b in plan.batch_sizes)
    for batch in plan.batch_sizes:
        used = Counter(p for u in units if u.batch == batch and u.dataset == "mbpp" for p in u.prompts)
        assert set(used) == set(range(10))
        assert all(len(u.prompts) == batch for u in units if u.batch == batch)


def test_a_run_that_stops_has_measured_all_cells_about_equally() -> None:
    plan = full_plan(num_prompts=60)
    half = plan.units()[: len(plan.units()) // 2]
    for batch in plan.batch_sizes:
        for dataset in plan.datasets:
            done = sum((u.batch, u.dataset) == (batch, dataset) for u in half)
            assert abs(done / plan.blocks(batch) - 0.5) <= 0.5 / plan.blocks(batch) + 0.03
    assert {(u.dataset, u.batch) for u in plan.units()[:21]} == {
        (d, b) for d in plan.datasets for b in plan.batch_sizes
    }


def test_every_configuration_takes_every_place_in_the_order() -> None:
    plan = full_plan(num_prompts=26, batch_sizes=(1,))
    units = [u for u in plan.units() if u.dataset == "gsm8k"]
    for name in plan.speculations():
        places = [plan.order(u).index(name) for u in units]
        assert abs(sum(places) / len(places) - (len(plan.speculations()) - 1) / 2) < 1.0


@pytest.mark.parametrize("text", ["", "3_2", "s3k2", "s0_k2", "s3_k0", "auto", "s3_k2_d6"])
def test_bad_shape_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="shape"):
        parse_shape(text)


def test_budget_that_no_shape_fills_is_refused() -> None:
    check_budgets([(3, 2)], [11])
    with pytest.raises(RequestError, match="budget 12"):
        check_budgets([(3, 2)], [12])
