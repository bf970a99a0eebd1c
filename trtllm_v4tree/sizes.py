"""Every derived size of an engine, in one place: builder, operators and runtime read it, and it is stored with the engine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import ConfigError

MIN_SEQ_LEN = 3
"""A prompt of one token, the token that its prefill gives, and one of a decode round."""
MIN_PAGE_TOKENS = 256


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of the state pools. Pools are flat row arrays per layer; row 0 is the zero row, then slot 0 or page 0, the bin.

    Units: tokens, rows, slots and pages; no bytes (see `state_bytes_*`).
    """

    max_batch_size: int
    max_seq_len: int
    max_verify_tokens: int
    prefill_chunk: int
    num_pages: int
    page_tokens: int
    window: int
    csa_ratio: int
    hca_ratio: int
    num_layers: int
    num_csa: int
    num_hca: int
    sparse: bool
    has_mtp: bool

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_verify_tokens: int,
        prefill_chunk: int = 128,
        num_pages: int | None = None,
        has_mtp: bool = True,
    ) -> EngineSizes:
        """Sizes for a config; raises ConfigError that names the option and its range."""
        for name, value, least, top in (
            ("max_batch_size", max_batch_size, 1, 1024),
            ("max_seq_len", max_seq_len, MIN_SEQ_LEN, config.max_position_embeddings),
            ("max_verify_tokens", max_verify_tokens, 1, 64),
            ("prefill_chunk", prefill_chunk, 1, 4096),
        ):
            if not least <= value <= top:
                raise ConfigError(f"{name}={value} is out of range: give a value from {least} to {top}.")
        page = math.lcm(MIN_PAGE_TOKENS, config.csa_ratio, config.hca_ratio)
        pages_per_seq = -(-max_seq_len // page)
        total = max_batch_size * pages_per_seq if num_pages is None else num_pages
        if total < pages_per_seq:
            raise ConfigError(
                f"num_pages={total} cannot hold one sequence of max_seq_len={max_seq_len}: give at least {pages_per_seq} pages of {page} tokens."
            )
        return cls(
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_verify_tokens=max_verify_tokens,
            prefill_chunk=prefill_chunk,
            num_pages=total + 1,
            page_tokens=page,
            window=config.sliding_window,
            csa_ratio=config.csa_ratio,
            hca_ratio=config.hca_ratio,
            num_layers=config.num_layers,
            num_csa=len(config.layers_of("csa")),
            num_hca=len(config.layers_of("hca")),
            sparse=bool(config.layers_of("csa")) and max_seq_len // config.csa_ratio > config.index_topk,
            has_mtp=has_mtp,
        )

    @property
    def num_slots(self) -> int:
        """Sequence slots, slot 0 (the bin) included."""
        return self.max_batch_size + 1

    @property
    def max_commit(self) -> int:
        """Most tokens that one commit accepts of a sequence: a verified path or a prefill chunk."""
        return max(self.max_verify_tokens, self.prefill_chunk)

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """Nodes of the passes that plans are optimised for: decode, verify, prefill; ascending, each once."""
        return tuple(sorted({1, self.max_verify_tokens, self.max_commit}))

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_seq_len // self.page_tokens)

    @property
    def window_rows(self) -> int:
        """Rows of one layer's window pool."""
        return 1 + self.num_slots * self.window

    @property
    def csa_page_rows(self) -> int:
        return self.page_tokens // self.csa_ratio

    @property
    def hca_page_rows(self) -> int:
        return self.page_tokens // self.hca_ratio

    @property
    def csa_rows(self) -> int:
        """Rows of one layer's CSA (or indexer) entry pool."""
        return 1 + self.num_pages * self.csa_page_rows

    @property
    def hca_rows(self) -> int:
        return 1 + self.num_pages * self.hca_page_rows

    @property
    def stream_rows(self) -> int:
        """Rows of the pool of accepted streams that the drafter has not read yet."""
        return 1 + self.num_slots * self.max_commit

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineSizes:
        return cls(**data)
