"""Attention of the drafter's later steps: each row belongs to a draft chain that began at some row of the sequence.

Step j (from 1) of the chain that began at row i sits at position i + j - 1. It sees the true rows up to i inside the window of
its position, and its own chain's rows of steps 2 .. j (spec section 6).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_v4tree.training import attention


class ChainRows(NamedTuple):
    """S chains in each of B sequences: start rows [S], true window rows [B, T, d], own rows of the steps from 2 on [B, S, d]."""

    starts: Tensor
    true: Tensor
    own: tuple[Tensor, ...]

    @property
    def positions(self) -> Tensor:
        """Positions of the next step's rows, [S]."""
        return self.starts + len(self.own) + 1


def attend_chain(layer: attention.Attention, x: Tensor, chain: ChainRows) -> tuple[Tensor, Tensor]:
    """x [B, S, D] -> (output [B, S, D], this step's window rows [B, S, d])."""
    positions = chain.positions
    q = layer.queries(layer.q_norm(layer.wq_a(x)), positions)
    row = layer.rows(x, positions)
    own = torch.stack([*chain.own, row], 2)
    scale = layer.dim**-0.5
    near = torch.bmm(q.flatten(1, 2), chain.true.transpose(1, 2)).view(*q.shape[:3], -1).float() * scale
    near = near + _true_mask(chain, layer.window)[:, None]
    far = torch.matmul(q, own.transpose(2, 3)).float() * scale
    near, far = attention.sink_softmax(near, far, layer.attn_sink)
    values = torch.bmm(near.to(q.dtype).flatten(1, 2), chain.true).view_as(q) + torch.matmul(far.to(q.dtype), own)
    return layer.output(values, positions), row


def _true_mask(chain: ChainRows, window: int) -> Tensor:
    """Additive [S, T]: true rows up to the chain's start that lie in the window of the chain's position."""
    row = torch.arange(chain.true.shape[1])[None]
    allowed = (row <= chain.starts[:, None]) & (chain.positions[:, None] - row < window)
    return torch.zeros(allowed.shape).masked_fill(~allowed, attention.NEVER)
