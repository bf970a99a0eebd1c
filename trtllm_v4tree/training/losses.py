"""What is minimised: next-token loss of the trunk, and the drafter's loss on its first step or on several of its own steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_v4tree.training.attention import IndexMode
from trtllm_v4tree.training.chain import ChainRows
from trtllm_v4tree.training.model import NanoModel


class DraftPlan(NamedTuple):
    """How the drafter learns: `steps` of its own output, the later ones from every `stride`-th row."""

    steps: int
    stride: int = 4


class Losses(NamedTuple):
    """Means over rows: trunk cross entropy, indexer KL, and the drafter's loss and argmax agreement per step."""

    trunk: Tensor
    indexer: Tensor
    draft: tuple[Tensor, ...]
    agreement: tuple[Tensor, ...]

    def by_name(self) -> dict[str, float]:
        """For people: trunk, index, draft1 .., agree1 .. as numbers."""
        named = {"trunk": self.trunk, "indexer": self.indexer}
        named |= {f"draft{step}": loss for step, loss in enumerate(self.draft, 1)}
        named |= {f"agree{step}": share for step, share in enumerate(self.agreement, 1)}
        return {name: value.item() for name, value in named.items()}


def joint_losses(model: NanoModel, tokens: Tensor, plan: DraftPlan, index: IndexMode, phase: int) -> Losses:
    """Trunk and drafter on text: tokens [B, T + 1 + plan.steps]; `phase` picks the rows that chains start from.

    Drafter row i of step j is scored by cross entropy with the text's t_{i+j+1}.
    """
    length = tokens.shape[1] - 1 - plan.steps
    rows = model.trunk(tokens[:, :length], index)
    logits = model.logits(model.trunk_hidden(rows.streams)).float()
    trunk = F.cross_entropy(logits, tokens[:, 1 : length + 1].flatten())
    draft, agreement = [], []
    for step, starts, drafted in draft_steps(model, rows.streams, tokens[:, 1:], plan, phase):
        wanted = tokens[:, starts + step + 1].flatten()
        draft.append(F.cross_entropy(drafted, wanted))
        agreement.append((drafted.argmax(-1) == wanted).float().mean())
    return Losses(trunk, rows.index_loss, tuple(draft), tuple(agreement))


def distil_losses(model: NanoModel, tokens: Tensor, plan: DraftPlan, phase: int) -> Losses:
    """The drafter alone: KL from the frozen trunk's distribution of the same token. tokens [B, T + 1 + plan.steps]."""
    with torch.no_grad():
        rows = model.trunk(tokens[:, :-1], "sparse")
        teacher = model.logits(model.trunk_hidden(rows.streams)).float().log_softmax(-1)
        trunk = F.nll_loss(teacher, tokens[:, 1:].flatten())
    batch, length = tokens.shape[0], tokens.shape[1] - 1 - plan.steps
    teacher = teacher.view(batch, -1, teacher.shape[-1])
    streams = rows.streams.unflatten(0, (batch, -1))[:, :length].flatten(0, 1)
    draft, agreement = [], []
    for step, starts, drafted in draft_steps(model, streams, tokens[:, 1:], plan, phase):
        wanted = teacher[:, starts + step].flatten(0, 1)
        draft.append(F.kl_div(drafted.log_softmax(-1), wanted, reduction="batchmean", log_target=True))
        agreement.append((drafted.argmax(-1) == wanted.argmax(-1)).float().mean())
    return Losses(trunk, rows.index_loss, tuple(draft), tuple(agreement))


def draft_steps(
    model: NanoModel, streams: Tensor, following: Tensor, plan: DraftPlan, phase: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (step, start rows [S], logits float32 [B S, V]) of the drafter, step 1 on all rows.

    streams [B T, m, D] of the trunk; `following` [B, >= T + steps - 1] are the tokens t_1, t_2, ...
    """
    batch = following.shape[0]
    length = streams.shape[0] // batch
    streams, true = model.draft(streams, following[:, :length])
    yield 1, torch.arange(length), model.logits(model.drafter.hidden(streams)).float()
    starts = torch.arange(phase % plan.stride, length, plan.stride)
    streams = streams.unflatten(0, (batch, length))[:, starts].flatten(0, 1)
    chain = ChainRows(starts, true, ())
    for step in range(2, plan.steps + 1):
        streams, row = model.draft_again(streams, following[:, starts + step - 1], chain)
        chain = chain._replace(own=(*chain.own, row))
        yield step, starts, model.logits(model.drafter.hidden(streams)).float()
