"""DeepSeek-V4 trunk and drafter (MTP) for training; parameter names are DeepSeek's checkpoint keys (spec section 9).

B sequences of T tokens; streams are [B T, m, D] float32, products run in the model's `compute` data type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.training.attention import Attention, IndexMode, Linear, Norm
from trtllm_v4tree.training.chain import ChainRows, attend_chain
from trtllm_v4tree.training.experts import Moe
from trtllm_v4tree.training.streams import (
    StreamRules,
    merge_streams,
    new_head_site,
    new_site,
    read_streams,
    site_of,
    write_streams,
)


class TrunkRows(NamedTuple):
    """Trunk forward: streams [B T, m, D] after the last layer, and the sum of the indexers' losses (0 if unused)."""

    streams: Tensor
    index_loss: Tensor


class Block(nn.Module):
    """One decoder layer: attention, then experts, each read from and written to the streams."""

    def __init__(self, config: ModelConfig, ratio: int, hashed: bool, number: int) -> None:
        super().__init__()
        self.rules = StreamRules(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
        self.attn, self.ffn = Attention(config, ratio), Moe(config, hashed)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        for site, own in (("hc_attn", 2 * number), ("hc_ffn", 2 * number + 1)):
            new_site(self, site, config.hc_mult, config.hidden_size, own)

    def forward(
        self, x: Tensor, tokens: Tensor, compute: torch.dtype, index: IndexMode = "off", chain: ChainRows | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Streams and tokens [B, T] -> (streams, window rows [B, T, d], indexer loss or None).

        With `chain` the tokens are one step of draft chains instead of sequences.
        """
        u, post, comb = read_streams(x, site_of(self, "hc_attn"), self.attn_norm.weight, self.rules)
        u = u.to(compute).view(*tokens.shape, -1)
        if chain is None:
            out, rows, loss = self.attn(u, index)
        else:
            (out, rows), loss = attend_chain(self.attn, u, chain), None
        x = write_streams(x, out.flatten(0, 1), post, comb)
        u, post, comb = read_streams(x, site_of(self, "hc_ffn"), self.ffn_norm.weight, self.rules)
        return write_streams(x, self.ffn(u.to(compute), tokens.flatten()), post, comb), rows, loss


class Drafter(Block):
    """The MTP module (spec section 6); embedding and head are the trunk's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, ratio=0, hashed=False, number=config.num_layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = Norm(hidden, eps), Norm(hidden, eps), Norm(hidden, eps)
        self.e_proj, self.h_proj = Linear(hidden, hidden), Linear(hidden, hidden)
        new_head_site(self, "hc_head", config.hc_mult, hidden)

    def enter(self, streams: Tensor, embedded: Tensor, compute: torch.dtype) -> Tensor:
        """Streams [N, m, D] of the row before and the embedded next token [N, D] -> the block's streams."""
        past = self.h_proj(self.hnorm(streams).to(compute))
        return past.float() + self.e_proj(self.enorm(embedded).to(compute)).float()[:, None]

    def hidden(self, streams: Tensor) -> Tensor:
        """Streams [N, m, D] -> normed input of the output head [N, D]."""
        return merge_streams(streams, site_of(self, "hc_head"), self.norm.weight, self.rules)


class NanoModel(nn.Module):
    """Trunk, shared embedding and head, and one drafter under `mtp.0`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.compute = config, torch.float32
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(*shape, _weight=0.5 * torch.randn(shape))
        self.layers = nn.ModuleList(
            Block(config, ratio, config.is_hash_layer(i), i) for i, ratio in enumerate(config.compress_ratios)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        new_head_site(self, "hc_head", config.hc_mult, config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = nn.ModuleList([Drafter(config)])

    @property
    def drafter(self) -> Drafter:
        drafter = self.mtp[0]
        assert isinstance(drafter, Drafter)
        return drafter

    def trunk(self, tokens: Tensor, index: IndexMode = "off") -> TrunkRows:
        """All positions of tokens [B, T]."""
        x = self.embed(tokens.flatten())[:, None].repeat(1, self.config.hc_mult, 1)
        losses = x.new_zeros(())
        for layer in self.layers:
            x, _, loss = layer(x, tokens, self.compute, index)
            losses = losses if loss is None else losses + loss
        return TrunkRows(x, losses)

    def trunk_hidden(self, streams: Tensor) -> Tensor:
        """Trunk streams [N, m, D] -> normed input of the output head [N, D]."""
        rules = StreamRules(self.config.rms_norm_eps, self.config.hc_eps, self.config.hc_sinkhorn_iters)
        return merge_streams(streams, site_of(self, "hc_head"), self.norm.weight, rules)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden [N, D] -> logits [N, V] in the compute data type."""
        return self.head(hidden.to(self.compute))

    def draft(self, streams: Tensor, next_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """First drafter step on every row: trunk streams [B T, m, D], t_{i+1} [B, T] -> (streams, window rows [B, T, d])."""
        entered = self.drafter.enter(streams, self.embed(next_tokens.flatten()), self.compute)
        x, rows, _ = self.drafter(entered, next_tokens, self.compute)
        return x, rows

    def draft_again(self, streams: Tensor, tokens: Tensor, chain: ChainRows) -> tuple[Tensor, Tensor]:
        """One more step of B x S chains: own streams [B S, m, D], tokens [B, S] -> (streams, window rows [B, S, d])."""
        entered = self.drafter.enter(streams, self.embed(tokens.flatten()), self.compute)
        x, rows, _ = self.drafter(entered, tokens, self.compute, chain=chain)
        return x, rows
