"""What a training run is asked to do, and the config of the small model that it makes by default."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.training.optimizer import Rates
from trtllm_v4tree.training.state import Plan, RunError

NANO: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 2,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Options:
    """One run. `data` are files, each with how often an epoch repeats it; `start_from` is a checkpoint directory.

    `start_mtp` is a file of mtp.* tensors that replace the checkpoint's; with `freeze_trunk` the drafter learns alone.
    `grow_from` is a checkpoint directory of a shallower model than `config`, which begins as that one (`grow.py`).
    """

    data: Sequence[tuple[Path, int]]
    output_dir: Path
    plan: Plan
    mtp_steps: int = 1
    config: Path | None = None
    start_from: Path | None = None
    start_mtp: Path | None = None
    grow_from: Path | None = None
    freeze_trunk: bool = False
    fresh_drafter: bool = False
    index_topk: int | None = None
    strip: str | None = None
    batch_size: int = 8
    seq_len: int = 512
    seed: int = 0
    rates: Rates = field(default_factory=Rates)
    compute: torch.dtype = torch.bfloat16
    compiled: bool = True
    threads: int = 2
    save_minutes: float = 3.0
    report_steps: int = 10

    def __post_init__(self) -> None:
        if self.freeze_trunk and self.start_from is None:
            raise RunError("a frozen trunk must come from somewhere: give --start_from CHECKPOINT_DIR with it.")
        if (self.start_mtp or self.fresh_drafter) and self.start_from is None:
            raise RunError("there is no drafter to replace: give --start_from CHECKPOINT_DIR, or leave the option out.")
        if self.grow_from and (self.start_from or self.config is None):
            raise RunError("--grow_from needs the --config of the deeper model, and takes the place of --start_from.")

    @property
    def trained(self) -> Path | None:
        """The checkpoint directory that a run begins with, if any; its tokenizer is the run's."""
        return self.start_from or self.grow_from

    @property
    def row_length(self) -> int:
        """Tokens of a training row: the trunk's inputs, and what it and the drafter are to predict behind them."""
        return self.seq_len + 1 + (0 if self.freeze_trunk else self.mtp_steps)

    def identity(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        return {
            "data": [[str(path), repeats] for path, repeats in self.data],
            "mtp_steps": self.mtp_steps,
            "start_from": str(self.start_from) if self.start_from else None,
            "start_mtp": str(self.start_mtp) if self.start_mtp else None,
            "grow_from": str(self.grow_from) if self.grow_from else None,
            "freeze_trunk": self.freeze_trunk,
            "fresh_drafter": self.fresh_drafter,
            "strip": self.strip,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
        }

    def model_config(self) -> ModelConfig:
        """The config of the checkpoint that is started from, else of --config, else NANO; --index_topk overrides it."""
        raw = NANO
        if self.start_from is not None:
            raw = _read_json(self.start_from / "config.json")
        elif self.config is not None:
            raw = _read_json(self.config)
        config = ModelConfig.from_dict(raw if self.index_topk is None else {**raw, "index_topk": self.index_topk})
        if config.num_mtp_layers != 1:
            raise RunError("the config has no drafter: set num_nextn_predict_layers to 1.")
        return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is no readable JSON ({error}): give the config of a DeepSeek-V4 model.") from error
    if not isinstance(raw, dict):
        raise RunError(f"{file} holds a JSON {type(raw).__name__}: a config is an object.")
    return raw
