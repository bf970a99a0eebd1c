"""Speculation names to policies: what an engine allows, and one sentence for what it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.auto import AutoPolicy
from trtllm_v4tree.runtime.policies.base import Policy, Shape
from trtllm_v4tree.runtime.policies.fixed import CalibratedPolicy, EntropyPolicy, FixedPolicy, RecentPolicy
from trtllm_v4tree.runtime.policies.measured import BestFirstPolicy, SharedBudgetPolicy
from trtllm_v4tree.runtime.tree import Speculation, parse_speculation
from trtllm_v4tree.sizes import EngineSizes

_DEFAULT_NODES = 8
_ADAPTIVE = re.compile(r"([a-z][a-z_]*?)(?:_d([0-9]{1,3}))?")


class _Kind(NamedTuple):
    """What it does, whether it needs the latency table of the build, and how it is made from shapes, nodes, table and clock."""

    summary: str
    measured: bool
    make: Callable[[tuple[Shape, ...], int, LatencyTable | None, Mapping[str, float]], Policy]


ADAPTIVE: dict[str, _Kind] = {
    "auto": _Kind("most tokens per second, plain decoding included", True, lambda s, n, t, c: AutoPolicy(s, n, _need(t), c)),
    "best_first": _Kind(
        "by path confidence until a node costs more than it brings", True, lambda s, n, t, c: BestFirstPolicy(s, n, _need(t))
    ),
    "shared_budget": _Kind(
        "nodes of all sequences compete for one measured budget", True, lambda s, n, t, c: SharedBudgetPolicy(s, n, _need(t))
    ),
    "entropy": _Kind("depth and width from the draft's entropy", False, lambda s, n, t, c: EntropyPolicy(s, n)),
    "recent_length": _Kind(
        "depth and width from recent accepted lengths", False, lambda s, n, t, c: RecentPolicy(s, n)
    ),
    "calibrated": _Kind("the D best nodes by calibrated scores", False, lambda s, n, t, c: CalibratedPolicy(s, n)),
}  # fmt: skip
"""Policies that adapt themselves, by name; `NAME_dD` caps the nodes of a tree at D."""


def _need(table: LatencyTable | None) -> LatencyTable:
    assert table is not None
    return table


def make_policy(
    name: str,
    sizes: EngineSizes,
    shapes: tuple[Shape, ...],
    latency: LatencyTable | None,
    seconds: Mapping[str, float] | None = None,
) -> Policy | None:
    """The policy of a speculation name, None for plain decoding; RequestError with what this engine allows.

    seconds: running sums of the engine's clock by phase, for policies that learn from it.
    """
    if not isinstance(name, str):
        raise RequestError(f"speculation is {name!r}: {_allowed()}.")
    adaptive = parse_adaptive(name)
    if adaptive is None:
        spec = check_speculation(name, sizes, shapes)
        return None if spec is None else FixedPolicy(spec)
    kind, budget = ADAPTIVE[adaptive[0]], adaptive[1]
    if not sizes.has_mtp or not shapes:
        raise RequestError(f"speculation {name!r} needs a drafter, and this engine has none: use none.")
    _check_budget(name, budget or 2, sizes)
    if kind.measured and latency is None:
        raise RequestError(
            f"speculation {name!r} needs the latency table of the build: build again without --no_latency_table."
        )
    default = sizes.max_verify_tokens if kind.measured else min(_DEFAULT_NODES, sizes.max_verify_tokens)
    return kind.make(shapes, budget or default, latency, seconds or {})


def parse_adaptive(name: str) -> tuple[str, int | None] | None:
    """`NAME` or `NAME_dD` of an adaptive policy -> (name, cap on nodes or None); None for any other name."""
    match = _ADAPTIVE.fullmatch(name)
    if match is None or match[1] not in ADAPTIVE:
        return None
    return match[1], int(match[2]) if match[2] else None


def check_speculation(name: str, sizes: EngineSizes, shapes: tuple[Shape, ...]) -> Speculation | None:
    """The parsed `none` or `sN_kK_dD`, or RequestError with what this engine allows."""
    if name != "none" and not re.fullmatch(r"s\d+_k\d+_d\d+", name):
        raise RequestError(f"speculation {name!r:.60} is unknown: {_allowed()}.")
    spec = parse_speculation(name)
    if spec is None:
        return None
    if not sizes.has_mtp:
        raise RequestError(f"speculation {name!r} needs a drafter, and the checkpoint had no mtp tensors: use none.")
    _check_budget(name, spec.budget, sizes)
    if (spec.steps, spec.topk) not in shapes:
        built = ", ".join(f"s{s}_k{k}" for s, k in shapes)
        raise RequestError(
            f"speculation {name!r} needs the draft round s{spec.steps}_k{spec.topk}, and the engine was built with {built}: "
            f"use one of these or build with --draft_shapes s{spec.steps}_k{spec.topk}."
        )
    return spec


def _check_budget(name: str, budget: int, sizes: EngineSizes) -> None:
    if budget < 2:
        raise RequestError(f"speculation {name!r} drafts nothing: d starts at 2 (the root is counted).")
    if budget > sizes.max_verify_tokens:
        raise RequestError(
            f"speculation {name!r} verifies {budget} tokens and the engine at most {sizes.max_verify_tokens}: "
            f"use d{sizes.max_verify_tokens} or less, or build with a larger --max_verify_tokens."
        )


def _allowed() -> str:
    return f"use none, {', '.join(ADAPTIVE)} (or NAME_dD), or sN_kK_dD, for example s4_k3_d8 (tree) or s7_k1_d8 (chain)"
