"""Random tiny DeepSeek-V4 checkpoints in the original layout (spec sections 1 and 9), one MTP block included.

Parameters are random but not wild: every kind of weight matters for the logits, float32 rounding does not grow, and
trunk and MTP both lean towards "next token = fixed permutation of this token", so that drafts are sometimes accepted.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _config(**changes: Any) -> dict[str, Any]:
    """Config "w16" with fields replaced."""
    base: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 211,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        # An original length of 64 puts the YaRN ramp where short test prompts feel it.
        "rope_scaling": _yarn(factor=16, original=64),
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "compress_ratios": [0, 0, 4, 16, 4, 16, 0],
        "torch_dtype": "float32",
    }
    return base | changes


def _yarn(factor: int, original: int, beta_fast: int = 32) -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast,
        "beta_slow": 1,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "w16": _config(),
    # Published window, ratios, top-k and YaRN.
    "w128": _config(
        sliding_window=128,
        index_topk=512,
        compress_ratios=[0, 0, 4, 128, 4, 128, 0],
        rope_scaling=_yarn(factor=16, original=65536),
        max_position_embeddings=1048576,
    ),
    # Every size differs from "w16"; the layer plan of V4-Pro (no sliding layer in the trunk); a clamp that bites.
    "mixed": _config(
        hidden_size=96,
        num_hidden_layers=5,
        num_attention_heads=8,
        head_dim=16,
        q_lora_rank=48,
        o_groups=4,
        o_lora_rank=8,
        index_head_dim=32,
        index_topk=6,
        n_routed_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=2.5,
        num_hash_layers=0,
        swiglu_limit=1.5,
        hc_sinkhorn_iters=8,
        rms_norm_eps=1e-5,
        compress_ratios=[16, 16, 4, 16, 4, 0],
        rope_scaling=_yarn(factor=8, original=256, beta_fast=16),
        max_position_embeddings=2048,
    ),
}


def write_tiny(directory: Path | str, name: str, seed: int) -> Path:
    """Writes config.json and model.safetensors (float32, original keys) of CONFIGS[name]; returns `directory`."""
    config = CONFIGS[name]
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_file(dict(_Maker(config, seed).tensors()), out / "model.safetensors")
    return out


def pack_experts(directory: Path) -> Path:
    """Stores the routed experts of a checkpoint as random FP4 with scales of about their size (spec section 9); returns `directory`."""
    path, generator = directory / "model.safetensors", torch.Generator().manual_seed(7)
    tensors = load_file(path)
    for name in [name for name in tensors if ".ffn.experts." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
        scale = torch.randint(123, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors[name.removesuffix(".weight") + ".scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, path)
    return directory


class _Maker:
    """Draws the tensors of one checkpoint from one seeded generator."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.hidden: int = config["hidden_size"]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        embed = self._normal(c["vocab_size"], self.hidden)
        follower = torch.randperm(c["vocab_size"], generator=self.generator)
        yield "embed.weight", embed
        yield "head.weight", self._head(embed, follower)
        yield "norm.weight", self._norm(self.hidden)
        yield from self._prefixed("hc_head", self._mhc(c["hc_mult"], scales=1))
        for layer in range(c["num_hidden_layers"]):
            ratio, hashed = c["compress_ratios"][layer], layer < c["num_hash_layers"]
            yield from self._prefixed(f"layers.{layer}.", self._block(ratio, hashed))
        yield from self._prefixed("mtp.0.", self._mtp())

    def _mtp(self) -> Tensors:
        c = self.config
        out = self._block(ratio=0, hashed=False)
        out |= {f"{n}.weight": self._norm(self.hidden) for n in ("enorm", "hnorm", "norm")}
        out["e_proj.weight"] = torch.eye(self.hidden) + self._linear(self.hidden, self.hidden, gain=0.3)
        out["h_proj.weight"] = self._linear(self.hidden, self.hidden, gain=0.5)
        return out | dict(self._prefixed("hc_head", self._mhc(c["hc_mult"], scales=1)))

    def _block(self, ratio: int, hashed: bool) -> Tensors:
        mix = self.config["hc_mult"] * (2 + self.config["hc_mult"])
        out = {"attn_norm.weight": self._norm(self.hidden), "ffn_norm.weight": self._norm(self.hidden)}
        for site in ("hc_attn", "hc_ffn"):
            out |= dict(self._prefixed(site, self._mhc(mix, scales=3)))
        out |= dict(self._prefixed("attn.", self._attention(ratio)))
        return out | dict(self._prefixed("ffn.", self._moe(hashed)))

    def _attention(self, ratio: int) -> Tensors:
        c = self.config
        heads, dim, rank = c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
        groups, group_rank = c["o_groups"], c["o_lora_rank"]
        out = {
            "wq_a.weight": self._linear(rank, self.hidden),
            "q_norm.weight": self._norm(rank),
            "wq_b.weight": self._linear(heads * dim, rank),
            "wkv.weight": self._linear(dim, self.hidden),
            "kv_norm.weight": self._norm(dim),
            "wo_a.weight": self._linear(groups * group_rank, heads * dim // groups),
            "wo_b.weight": self._linear(self.hidden, groups * group_rank, gain=1.5),
            "attn_sink": self._normal(heads),
        }
        if ratio:
            out |= dict(self._prefixed("compressor.", self._compressor(ratio, dim)))
        if ratio == 4:
            out |= dict(self._prefixed("indexer.", self._indexer()))
        return out

    def _indexer(self) -> Tensors:
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        return {
            "wq_b.weight": self._linear(heads * dim, self.config["q_lora_rank"]),
            "weights_proj.weight": self._linear(heads, self.hidden),
            **dict(self._prefixed("compressor.", self._compressor(4, dim))),
        }

    def _compressor(self, ratio: int, dim: int) -> Tensors:
        width = 2 * dim if ratio == 4 else dim
        return {
            "wkv.weight": self._linear(width, self.hidden),
            "wgate.weight": self._linear(width, self.hidden),
            "ape": self._normal(ratio, width),
            "norm.weight": self._norm(dim),
        }

    def _moe(self, hashed: bool) -> Tensors:
        c = self.config
        experts = c["n_routed_experts"]
        # A wide spread of router scores keeps ties of the top-k rare.
        out = {"gate.weight": self._linear(experts, self.hidden, gain=2.0)}
        if hashed:
            out["gate.tid2eid"] = self._hash_table(c["vocab_size"], experts, c["num_experts_per_tok"])
        else:
            out["gate.bias"] = 0.2 * self._normal(experts)
        for name in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
            out |= dict(self._prefixed(f"{name}.", self._expert(c["moe_intermediate_size"])))
        return out

    def _expert(self, inner: int) -> Tensors:
        return {
            "w1.weight": self._linear(inner, self.hidden),
            "w2.weight": self._linear(self.hidden, inner),
            "w3.weight": self._linear(inner, self.hidden),
        }

    def _mhc(self, rows: int, scales: int) -> Tensors:
        width = self.config["hc_mult"] * self.hidden
        return {
            "_fn": self._linear(rows, width),
            "_base": self._normal(rows),
            "_scale": 0.5 + torch.rand(scales, generator=self.generator),
        }

    def _head(self, embed: torch.Tensor, follower: torch.Tensor) -> torch.Tensor:
        """Output rows: half noise, half the embedding of the token that each one is to follow."""
        towards = torch.empty_like(embed)
        towards[follower] = embed
        return (2.0 * towards + 1.5 * self._normal(*embed.shape)) * self.hidden**-0.5

    def _hash_table(self, vocab: int, experts: int, chosen: int) -> torch.Tensor:
        return torch.rand(vocab, experts, generator=self.generator).argsort(dim=-1)[:, :chosen].contiguous()

    def _norm(self, size: int) -> torch.Tensor:
        return 1.0 + 0.2 * self._normal(size)

    def _linear(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return gain * columns**-0.5 * self._normal(rows, columns)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    @staticmethod
    def _prefixed(prefix: str, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        return ((prefix + key, value) for key, value in tensors.items())
