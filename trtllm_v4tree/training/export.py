"""Checkpoints in DeepSeek's key layout (bf16), and the proof that the trunk in them is the one transformers computes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trtllm_v4tree.checkpoint import Checkpoint
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import V4TreeError
from trtllm_v4tree.training.model import NanoModel
from trtllm_v4tree.training.state import replace_tensors, replace_text

_KEPT = re.compile(r"(attn_sink|ape|gate\.bias|tid2eid|hc_\w+)$")
_TOLERANCE = 1e-3
_LAYER_TYPES = {
    "swa": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}


class ExportError(V4TreeError):
    """An exported trunk that is not the trained one."""


class Agreement(NamedTuple):
    """Exported trunk against transformers: largest difference and size of a logit, share of equal argmaxes, rows compared."""

    difference: float
    largest: float
    equal: float
    rows: int


def export(model: NanoModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config.json, tokenizer.json, model.safetensors and, as a file of its own, mtp.safetensors (mtp.* alone)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(name, value) for name, value in model.state_dict().items()}
    config = {"architectures": ["DeepseekV4ForCausalLM"], **model.config.to_dict(), "torch_dtype": "bfloat16"}
    replace_text(directory / "config.json", json.dumps(config, indent=1) + "\n")
    replace_text(directory / "tokenizer.json", tokenizer.to_str())
    replace_tensors(directory / "mtp.safetensors", {k: v for k, v in tensors.items() if k.startswith("mtp.")})
    replace_tensors(directory / "model.safetensors", tensors, {"format": "pt"})


def load_model(directory: Path, config: ModelConfig | None = None, mtp_weights: Path | None = None) -> NanoModel:
    """The model of a checkpoint directory, in float32, its drafter from `mtp_weights` if given.

    Raises ConfigError or CheckpointError if it cannot be read.
    """
    config = config or ModelConfig.from_pretrained(directory)
    checkpoint = Checkpoint.open(directory, config, mtp_weights)
    model = NanoModel(config)
    weights = {name: torch.from_numpy(checkpoint.get(name)) for name in checkpoint.names}
    model.load_state_dict(weights, strict=checkpoint.has_mtp)
    return model


@torch.no_grad()
def check_against_transformers(directory: Path, rows: Sequence[Tensor]) -> Agreement:
    """Compares the exported trunk, with sparse selection, with `DeepseekV4ForCausalLM` on token rows [T].

    Raises ExportError if a logit differs by more than 1e-3.
    """
    ours, theirs = load_model(directory).eval(), _transformers_model(directory)
    difference = largest = 0.0
    equal = []
    for row in rows:
        expected = theirs(input_ids=row[None], use_cache=False).logits[0]
        found = ours.logits(ours.trunk_hidden(ours.trunk(row[None], "sparse").streams))
        difference = max(difference, (found - expected).abs().max().item())
        largest = max(largest, expected.abs().max().item())
        equal.append((found.argmax(-1) == expected.argmax(-1)).float().mean().item())
    if not difference <= _TOLERANCE:
        raise ExportError(
            f"the logits of {directory} differ from transformers' by {difference:.1e}, more than {_TOLERANCE:.0e}: "
            "do not use this checkpoint, and report it."
        )
    return Agreement(difference, largest, sum(equal) / len(equal), len(rows))


def _stored(name: str, value: Tensor) -> Tensor:
    return value.clone() if _KEPT.search(name) else value.bfloat16()


def _transformers_model(directory: Path) -> torch.nn.Module:
    """transformers reads the checkpoint as it is, except that a config.json with another HCA ratio than 128 is beyond it."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = ModelConfig.from_pretrained(directory)
    kinds = [_LAYER_TYPES[config.layer_kind(i)] for i in range(config.num_layers)]
    rates = {_LAYER_TYPES["csa"]: config.csa_ratio, _LAYER_TYPES["hca"]: config.hca_ratio}
    fields = {k: v for k, v in config.to_dict().items() if k != "compress_ratios"}
    given = (
        {}
        if config.hca_ratio == 128
        else {"config": DeepseekV4Config(**fields, layer_types=kinds, compress_rates=rates)}
    )
    loader: Any = DeepseekV4ForCausalLM
    model, info = loader.from_pretrained(
        directory,
        **given,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ExportError(f"transformers does not find its tensors in {directory}: {wrong}.")
    return model.eval()
