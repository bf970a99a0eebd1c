"""Mixture of experts of the training model (spec section 5.2): hash or score routing, rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.training.attention import Linear

_SEGMENT = 128
"""Rows per expert are filled up to multiples of this: a product of a new size costs oneDNN a new kernel."""


class Gate(nn.Module):
    """Router: `tid2eid` [V, k] fixes the experts of a token in hash layers, else `bias` [E] evens out their load."""

    tid2eid: Tensor
    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        super().__init__()
        self.config, self.hashed = config, hashed
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * config.hidden_size**-0.5)
        if hashed:
            order = torch.rand(config.vocab_size, config.num_experts).argsort(-1)
            self.register_buffer("tid2eid", order[:, : config.num_experts_per_tok].contiguous())
        else:
            self.register_buffer("bias", torch.zeros(config.num_experts))
            self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D], tokens [N] -> expert ids [N, k] and their weights, float32 [N, k]."""
        score = F.softplus(F.linear(x.float(), self.weight)).sqrt()
        if self.hashed:
            experts = self.tid2eid[tokens]
        else:
            experts = (score.detach() + self.bias).topk(self.config.num_experts_per_tok, -1).indices
            self._count(experts)
        share = score.gather(1, experts)
        return experts, share / (share.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor

    def _count(self, experts: Tensor) -> None:
        if self.training:
            self.load += experts.flatten().bincount(minlength=self.config.num_experts)

    def rebalance(self, rate: float) -> None:
        """Raises the bias of experts with less than the mean load by `rate`, lowers the others, and forgets the load."""
        if not self.hashed:
            self.bias += rate * torch.sign(self.load.mean() - self.load)
            self.load.zero_()


class Expert(nn.Module):
    """w2(silu(min(w1 x, limit)) * clamp(w3 x, limit))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1, self.w3 = Linear(hidden, inner), Linear(hidden, inner)
        self.w2 = Linear(inner, hidden, gain=(2 * config.num_layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [R, D] -> [R, D]."""
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        return self.w2(F.silu(gate) * up)


class Moe(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        super().__init__()
        self.gate = Gate(config, hashed)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))
        self.shared_experts = Expert(config)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [N, D], tokens [N] -> [N, D]."""
        experts, weights = self.gate(x, tokens)
        place, ends = _places(experts, len(self.experts))
        rows = x.new_zeros(ends[-1], x.shape[1]).index_copy(0, place, x.repeat_interleave(experts.shape[1], 0))
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        done = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(sizes), strict=True)])
        routed = done.index_select(0, place).view(*experts.shape, -1)
        return (routed * weights[..., None]).sum(1).to(x.dtype) + self.shared_experts(x)


def _places(experts: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Row of every (token, choice) when rows are sorted by expert, [N k], and where each expert's padded rows end."""
    flat = experts.flatten()
    load = flat.bincount(minlength=count)
    padded = (load + _SEGMENT - 1) // _SEGMENT * _SEGMENT
    shift = (padded.cumsum(0) - padded) - (load.cumsum(0) - load)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(flat)) + shift[flat[order]]
    return place, padded.cumsum(0).tolist()
