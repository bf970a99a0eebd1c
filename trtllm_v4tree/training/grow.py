"""A deeper model that starts out computing what a trained shallower one computes; it may have fewer routed experts.

An added layer copies the trained layer of its kind before it, with zero output projections and streams that are left alone, so it
changes nothing until it is trained (block expansion as in LLaMA Pro, arXiv 2401.02415, for hyper-connections). With fewer experts
the most loaded ones stay, so this part is not exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.training.state import RunError

_LEFT_ALONE = 8.0
"""Logit of a stream to itself where an added layer mixes streams: about 0.1 % comes from the others."""
_OUTPUTS = ("attn.wo_b.weight", "w2.weight")

Tensors = dict[str, Tensor]


class Origin(NamedTuple):
    """Where a layer comes from: the number of the trained layer, and whether it is an added copy of it."""

    layer: int
    added: bool


def grown(source: Mapping[str, Tensor], trained: ModelConfig, wanted: ModelConfig) -> Tensors:
    """State of a model of config `wanted` from that of one of config `trained`.

    Raises RunError unless they differ in their layers and number of routed experts alone.
    """
    _check(trained, wanted)
    kept = {name: value for name, value in source.items() if not name.startswith(("layers.", "mtp."))}
    for number, origin in enumerate(origins(trained, wanted)):
        layer = _under(f"layers.{origin.layer}.", source)
        if wanted.is_hash_layer(number) != trained.is_hash_layer(origin.layer):
            raise RunError(f"layer {number} is routed in another way than the layer of its kind: keep num_hash_layers.")
        part = _quiet(layer, wanted.hc_mult) if origin.added else layer
        kept |= {f"layers.{number}.{k}": v for k, v in _fewer_experts(part, wanted.num_experts).items()}
    drafter = _under("mtp.0.", source)
    return kept | {f"mtp.0.{k}": v for k, v in _fewer_experts(drafter, wanted.num_experts).items()}


def origins(trained: ModelConfig, wanted: ModelConfig) -> list[Origin]:
    """Of every wanted layer: the trained layers of a kind are spread evenly over the wanted ones of that kind."""
    found: list[Origin | None] = [None] * wanted.num_layers
    for kind in ("swa", "csa", "hca"):
        old, new = trained.layers_of(kind), wanted.layers_of(kind)
        if bool(old) != bool(new) or len(new) < len(old):
            raise RunError(f"there are {len(old)} trained {kind} layers and {len(new)} wanted: none can be left out.")
        places = [i * len(new) // len(old) for i in range(len(old))]
        for i, number in enumerate(new):
            before = max(k for k, place in enumerate(places) if place <= i)
            found[number] = Origin(old[before], added=i not in places)
    layers = [origin for origin in found if origin is not None]
    order = [origin.layer for origin in layers if not origin.added]
    if order != sorted(order):
        raise RunError(
            "the trained layers would change their order: give compress_ratios that repeat the trained pattern."
        )
    return layers


def _check(trained: ModelConfig, wanted: ModelConfig) -> None:
    free = {"num_hidden_layers", "compress_ratios", "n_routed_experts", "num_nextn_predict_layers", "index_topk"}
    old, new = trained.to_dict(), wanted.to_dict()
    different = sorted(name for name in old.keys() | new.keys() if name not in free and old.get(name) != new.get(name))
    if different:
        raise RunError(
            f"the config differs from the trained one in {', '.join(different)}: only layers and experts can change."
        )
    if wanted.num_experts > trained.num_experts:
        raise RunError(
            f"{wanted.num_experts} experts are wanted and {trained.num_experts} are there: experts are not added."
        )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _quiet(layer: Mapping[str, Tensor], m: int) -> Tensors:
    """The layer with nothing to write: zero outputs, and each stream goes on as it is."""
    changed = {name: torch.zeros_like(value) if name.endswith(_OUTPUTS) else value for name, value in layer.items()}
    for site in ("hc_attn", "hc_ffn"):
        alone = _LEFT_ALONE * torch.eye(m).flatten()
        changed[f"{site}_base"] = torch.cat([layer[f"{site}_base"][: 2 * m], alone])
    return changed


def _fewer_experts(layer: Mapping[str, Tensor], count: int) -> Tensors:
    """The layer with its `count` most loaded experts: those with the lowest bias, or any where a table routes."""
    total = len(layer["ffn.gate.weight"])
    if count == total:
        return dict(layer)
    bias = layer.get("ffn.gate.bias")
    kept = list(range(count)) if bias is None else sorted(bias.argsort(stable=True)[:count].tolist())
    changed = {name: value for name, value in layer.items() if not name.startswith(("ffn.experts.", "ffn.gate."))}
    changed["ffn.gate.weight"] = layer["ffn.gate.weight"][kept]
    if bias is None:
        changed["ffn.gate.tid2eid"] = _narrowed(layer["ffn.gate.tid2eid"], count)
    else:
        changed["ffn.gate.bias"] = bias[kept]
    for new, old in enumerate(kept):
        changed |= {f"ffn.experts.{new}.{name}": value for name, value in _under(f"ffn.experts.{old}.", layer).items()}
    return changed


def _narrowed(table: Tensor, count: int) -> Tensor:
    """Expert ids [V, k] below `count`, distinct in every row; ids that are below and distinct stay."""
    table = table % count
    for column in range(1, table.shape[1]):
        for _ in range(count):
            taken = (table[:, :column] == table[:, column, None]).any(1)
            table[:, column] = torch.where(taken, (table[:, column] + 1) % count, table[:, column])
    return table
