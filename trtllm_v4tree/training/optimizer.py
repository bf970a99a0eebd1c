"""Muon for the matrices inside the blocks, AdamW for everything else, and a learning rate that ends at zero."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from trtllm_v4tree.training.model import NanoModel

_MATRIX = re.compile(r"\.(w\w+|[eh]_proj)\.weight$")
_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")


class Rates(NamedTuple):
    """Peak learning rates, steps of warm-up, and the share of the run over which they fall linearly to zero."""

    muon: float = 5e-3
    adamw: float = 3e-3
    indexer: float = 5e-3
    warmup: int = 60
    tail: float = 0.7

    def factor(self, step: int, progress: float) -> float:
        """Share of the peak at `step`, when `progress` (0 to 1) of the run is done."""
        return min(1.0, (step + 1) / self.warmup, max(0.0, 1 - progress) / self.tail)


class Optimizers:
    """Both optimizers over the trainable parameters of a model, as one.

    The indexer learns from a loss of its own that reaches nothing else, so its rate is its own as well.
    """

    def __init__(self, model: NanoModel, rates: Rates) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._muon = torch.optim.Muon(
            self._groups(True, rates.muon, rates.indexer), weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(
            self._groups(False, rates.adamw, rates.indexer), betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )

    def step(self, factor: float, clip: float = 1.0) -> float:
        """One update with every rate at `factor` of its peak; returns the norm of the gradient before clipping."""
        norm = nn.utils.clip_grad_norm_(self._named.values(), clip)
        for optimizer in (self._muon, self._adamw):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad()
        return norm.item()

    def _groups(self, matrix: bool, peak: float, indexer_peak: float) -> list[dict[str, Any]]:
        """Parameter groups of one optimizer, empty ones left out."""
        groups: list[dict[str, Any]] = []
        for indexer, rate in ((False, peak), (True, indexer_peak)):
            members = [p for n, p in self._named.items() if is_matrix(n) == matrix and (".indexer." in n) == indexer]
            groups += [{"params": members, "peak": rate}] if members else []
        return groups

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state of every updated parameter as `{parameter}/{entry}`."""
        return {
            f"{name}/{entry}": self._optimizer(name).state[p][entry]
            for name, p in self._named.items()
            for entry in _STATE
            if entry in self._optimizer(name).state.get(p, {})
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `tensors` gave."""
        for key, value in tensors.items():
            name, entry = key.rsplit("/", 1)
            self._optimizer(name).state[self._named[name]][entry] = value.clone()

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        return self._muon if is_matrix(name) else self._adamw


def is_matrix(name: str) -> bool:
    """Whether Muon updates the parameter `name`: a projection inside a block, not the shared head."""
    return bool(_MATRIX.search(name))
