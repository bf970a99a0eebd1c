"""The hyperparameters of one DeepSeek-V4 model, read from config.json and checked; no weights and no graph live here.

Two spellings of config.json are read: DeepSeek's own field names (`compress_ratios`, `num_hash_layers`,
`rope_scaling`) and those that transformers writes (`layer_types`, `mlp_layer_types`, `rope_parameters`).
Sources: spec sections 1 and 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtllm_v4tree.errors import ConfigError

LayerKind = Literal["swa", "csa", "hca"]

MAX_DIM, MAX_COUNT = 1 << 24, 1 << 12
CSA_RATIO = 4
DEFAULT_HCA_RATIO = 128

_INT_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "max_position_embeddings": "max_position_embeddings",
}
_FLOAT_NAMES = {
    "routed_scaling_factor": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "rms_norm_eps",
}
_ONLY_SUPPORTED: dict[str, Any] = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
_LAYER_TYPES: dict[str, LayerKind] = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN of the compressed layers (spec section 4); cos and sin are never scaled (attention factor 1)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.original_max_position_embeddings < 1:
            raise ConfigError(
                f"rope_scaling has factor {self.factor} and original_max_position_embeddings "
                f"{self.original_max_position_embeddings}, but YaRN needs both to be at least 1."
            )
        if not math.inf > self.beta_fast > self.beta_slow > 0:
            raise ConfigError(
                f"rope_scaling has beta_fast {self.beta_fast} and beta_slow {self.beta_slow}, "
                "but YaRN needs beta_fast > beta_slow > 0."
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V4 model; `compress_ratios` has one entry per trunk layer, the MTP layer is always window only.

    Raises ConfigError from every constructor if the values do not describe a model that this package compiles.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    csa_ratio: int
    hca_ratio: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig | None
    max_position_embeddings: int
    num_mtp_layers: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_dims()
        self._check_layers()
        self._check_token_ids()

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read `directory`/config.json; ConfigError if it is missing, is not JSON, or is not a usable V4 config."""
        return cls.from_file(Path(directory) / "config.json")

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """The same of a file of any name."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror or error}); give the directory of a DeepSeek-V4 checkpoint."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); download or write it again.") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, but a config is a JSON object.")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from a parsed config.json with DeepSeek's or transformers' field names."""
        _check_model_type(raw)
        _check_supported(raw)
        _check_present(raw)
        values: dict[str, Any] = {field: _int(raw, name) for field, name in _INT_NAMES.items() if name in raw}
        values.update({field: _float(raw, name) for field, name in _FLOAT_NAMES.items() if name in raw})
        values.setdefault("num_shared_experts", 1)
        csa_ratio, hca_ratio = _read_ratios(raw)
        rope_theta, compress_rope_theta, yarn = _read_rope(raw)
        return cls(
            **values,
            rope_head_dim=_read_rope_head_dim(raw),
            compress_ratios=_read_compress_ratios(raw, csa_ratio, hca_ratio),
            csa_ratio=csa_ratio,
            hca_ratio=hca_ratio,
            num_hash_layers=_read_num_hash_layers(raw),
            rope_theta=rope_theta,
            compress_rope_theta=compress_rope_theta,
            yarn=yarn,
            num_mtp_layers=_int(raw, "num_nextn_predict_layers", default=1),
            bos_token_id=_int(raw, "bos_token_id", default=0),
            eos_token_ids=_read_eos(raw),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready config.json with DeepSeek's field names; `from_dict(to_dict())` gives an equal config."""
        raw: dict[str, Any] = {"model_type": "deepseek_v4", **_ONLY_SUPPORTED}
        raw.update({name: getattr(self, field) for field, name in (_INT_NAMES | _FLOAT_NAMES).items()})
        raw["qk_rope_head_dim"] = self.rope_head_dim
        raw["compress_ratios"] = [*self.compress_ratios, *[0] * self.num_mtp_layers]
        raw["compress_rate_csa"] = self.csa_ratio
        raw["compress_rate_hca"] = self.hca_ratio
        raw["num_hash_layers"] = self.num_hash_layers
        raw["rope_theta"] = self.rope_theta
        raw["compress_rope_theta"] = self.compress_rope_theta
        raw["rope_scaling"] = None if self.yarn is None else _yarn_to_dict(self.yarn)
        raw["num_nextn_predict_layers"] = self.num_mtp_layers
        raw["bos_token_id"] = self.bos_token_id
        raw["eos_token_id"] = list(self.eos_token_ids)
        return raw

    def layer_kind(self, layer: int) -> LayerKind:
        """Attention kind of trunk layer `layer`: "swa" window only, "csa" with indexer, "hca" without."""
        ratio = self.compress_ratios[layer]
        if ratio == 0:
            return "swa"
        return "csa" if ratio == self.csa_ratio else "hca"

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Trunk layers of one kind, ascending."""
        return tuple(i for i in range(self.num_layers) if self.layer_kind(i) == kind)

    def is_hash_layer(self, layer: int) -> bool:
        """Whether trunk layer `layer` routes by token id (`tid2eid`) instead of by score (spec section 5.2)."""
        return layer < self.num_hash_layers

    def _check_sizes(self) -> None:
        positive = _INT_NAMES | _FLOAT_NAMES
        bad = [name for field, name in positive.items() if not 0 < getattr(self, field) < math.inf]
        if bad:
            raise ConfigError(f"{', '.join(bad)} must be positive and finite; correct the config.")
        if not (1 < self.rope_theta < math.inf and 1 < self.compress_rope_theta < math.inf):
            raise ConfigError(
                f"rope_theta is {self.rope_theta} and compress_rope_theta {self.compress_rope_theta}, "
                "but both must be finite and above 1."
            )
        huge = [name for field, name in _INT_NAMES.items() if getattr(self, field) > MAX_DIM]
        if huge:
            raise ConfigError(f"{', '.join(huge)} must be at most {MAX_DIM}; correct the config.")
        if max(self.num_experts, self.num_layers) > MAX_COUNT:
            raise ConfigError(
                f"n_routed_experts is {self.num_experts} and num_hidden_layers {self.num_layers}, but both must be at most {MAX_COUNT}."
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but there are only {self.num_experts} experts."
            )

    def _check_dims(self) -> None:
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.rope_head_dim}, but it must be even and at least 2.")
        limit = min(self.head_dim, self.index_head_dim)
        if self.rope_head_dim > limit:
            raise ConfigError(
                f"qk_rope_head_dim is {self.rope_head_dim}, but it must not exceed head_dim {self.head_dim} "
                f"nor index_head_dim {self.index_head_dim}."
            )
        if self.num_heads % self.o_groups:
            raise ConfigError(f"o_groups is {self.o_groups}, but it must divide the {self.num_heads} attention heads.")

    def _check_layers(self) -> None:
        if self.csa_ratio != CSA_RATIO:
            raise ConfigError(
                f"The CSA compress ratio is {self.csa_ratio}, but the overlapping compressor is defined for 4 only."
            )
        if self.hca_ratio < 2 or self.hca_ratio == self.csa_ratio:
            raise ConfigError(f"The HCA compress ratio is {self.hca_ratio}, but it must be at least 2 and not 4.")
        if len(self.compress_ratios) != self.num_layers:
            raise ConfigError(
                f"compress_ratios has {len(self.compress_ratios)} entries for {self.num_layers} trunk layers; "
                "give one entry per layer."
            )
        bad = sorted(set(self.compress_ratios) - {0, self.csa_ratio, self.hca_ratio})
        if bad:
            raise ConfigError(
                f"compress_ratios has {bad}, but a layer's ratio is 0, {self.csa_ratio} or {self.hca_ratio}."
            )
        if not 0 <= self.num_hash_layers <= self.num_layers:
            raise ConfigError(
                f"num_hash_layers is {self.num_hash_layers}, but it must be 0 to {self.num_layers} (the trunk layers)."
            )
        if self.num_mtp_layers not in (0, 1):
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_mtp_layers}, but only 0 or 1 is supported "
                "(DSpark drafters with several blocks are a different module)."
            )

    def _check_token_ids(self) -> None:
        for token in (self.bos_token_id, *self.eos_token_ids):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"A bos or eos token id is {token}, but ids must be 0 to {self.vocab_size - 1} (vocab_size - 1)."
                )


def rope_inv_freq(config: ModelConfig, compressed: bool) -> npt.NDArray[np.float64]:
    """Angular frequencies of the rope pairs, float64 [rope_head_dim // 2] (spec section 4).

    `compressed` selects the base and YaRN of CSA and HCA layers; False gives those of window-only layers and MTP.
    """
    dim = config.rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    freq = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if not compressed or config.yarn is None:
        return freq
    ramp = _yarn_ramp(config.yarn, base, dim)
    return freq / config.yarn.factor * ramp + freq * (1.0 - ramp)


def _yarn_ramp(yarn: YarnConfig, base: float, dim: int) -> npt.NDArray[np.float64]:
    """Share of interpolation per pair, float64 [dim // 2]: 0 keeps the frequency, 1 divides it by the factor."""

    def pair_of(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2.0 * math.pi)) / (2.0 * math.log(base))

    low = float(max(math.floor(pair_of(yarn.beta_fast)), 0))
    high = float(min(math.ceil(pair_of(yarn.beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    return np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)


def _check_model_type(raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type == "deepseek_v41":
        raise ConfigError(
            "model_type is deepseek_v41, whose architecture differs from DeepSeek-V4; only deepseek_v4 is supported."
        )
    if model_type != "deepseek_v4":
        raise ConfigError(f"model_type is {model_type!r}, but only deepseek_v4 is supported.")


def _check_supported(raw: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY_SUPPORTED.items():
        value = raw.get(name)
        if value is not None and value != allowed:
            raise ConfigError(f"{name} is {value!r}, but only {allowed!r} is supported.")


def _check_present(raw: Mapping[str, Any]) -> None:
    """Both spellings share these names, so anything absent is reported at once."""
    required = [name for name in (*_INT_NAMES.values(), *_FLOAT_NAMES.values()) if name != "n_shared_experts"]
    missing = [name for name in required if name not in raw]
    if "layer_types" not in raw and "compress_ratios" not in raw:
        missing.append("compress_ratios (or layer_types)")
    if "mlp_layer_types" not in raw and "num_hash_layers" not in raw:
        missing.append("num_hash_layers (or mlp_layer_types)")
    if missing:
        raise ConfigError(f"The config lacks {', '.join(missing)}; a deepseek_v4 config.json carries all of them.")


def _int(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}, but it must be an integer.")
    return value


def _float(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}, but it must be a number.")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{name} does not fit a float; give a smaller number.") from error


def _list(raw: Mapping[str, Any], name: str) -> list[Any]:
    value = raw[name]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}, but it must be a list.")
    return list(value)


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}, but it must be an object or null.")
    return value


def _int_list(raw: Mapping[str, Any], name: str) -> list[int]:
    values = _list(raw, name)
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ConfigError(f"{name} is {values!r}, but it must be a list of integers.")
    return values


def _read_ratios(raw: Mapping[str, Any]) -> tuple[int, int]:
    """(csa, hca): explicit rates first, else the one ratio of `compress_ratios` besides 0 and 4, else 4 and 128."""
    rates = _object(raw, "compress_rates")
    csa = _int(rates, "compressed_sparse_attention", default=CSA_RATIO)
    csa = _int(raw, "compress_rate_csa", default=csa)
    hca = _int(rates, "heavily_compressed_attention", default=_hca_of_ratios(raw))
    return csa, _int(raw, "compress_rate_hca", default=hca)


def _hca_of_ratios(raw: Mapping[str, Any]) -> int:
    if raw.get("compress_ratios") is None:
        return DEFAULT_HCA_RATIO
    others = sorted(set(_int_list(raw, "compress_ratios")) - {0, CSA_RATIO})
    if len(others) > 1:
        raise ConfigError(f"compress_ratios has {others} besides 0 and 4, but all HCA layers must share one ratio.")
    return others[0] if others else DEFAULT_HCA_RATIO


def _read_compress_ratios(raw: Mapping[str, Any], csa_ratio: int, hca_ratio: int) -> tuple[int, ...]:
    """One ratio per trunk layer; entries after the trunk are MTP layers and must be 0."""
    num_layers = _int(raw, "num_hidden_layers")
    if raw.get("layer_types") is not None:
        return _ratios_of_layer_types(_list(raw, "layer_types"), csa_ratio, hca_ratio)
    ratios = _int_list(raw, "compress_ratios")
    if any(ratios[num_layers:]):
        raise ConfigError(
            f"compress_ratios has {ratios[num_layers:]} after the {num_layers} trunk layers, "
            "but the MTP layer is window only (0)."
        )
    return tuple(ratios[:num_layers])


def _ratios_of_layer_types(types: list[Any], csa_ratio: int, hca_ratio: int) -> tuple[int, ...]:
    by_kind = {"swa": 0, "csa": csa_ratio, "hca": hca_ratio}
    unknown = sorted({str(t) for t in types if str(t) not in _LAYER_TYPES})
    if unknown:
        raise ConfigError(f"layer_types has {', '.join(unknown)}, but only {', '.join(_LAYER_TYPES)} are known.")
    return tuple(by_kind[_LAYER_TYPES[t]] for t in types)


def _read_num_hash_layers(raw: Mapping[str, Any]) -> int:
    if raw.get("mlp_layer_types") is None:
        return min(_int(raw, "num_hash_layers"), _int(raw, "num_hidden_layers"))
    types = _list(raw, "mlp_layer_types")
    count = types.count("hash_moe")
    if types != ["hash_moe"] * count + ["moe"] * (_int(raw, "num_hidden_layers") - count):
        raise ConfigError("mlp_layer_types must be some hash_moe followed by moe, one entry per trunk layer.")
    return count


def _read_rope_head_dim(raw: Mapping[str, Any]) -> int:
    """`qk_rope_head_dim`, or head_dim times every `partial_rotary_factor` in the config, which must agree."""
    head_dim = _int(raw, "head_dim")
    nested = [_object(_object(raw, "rope_parameters"), label) for label in ("main", "compress")]
    factors = [_float(d, "partial_rotary_factor") for d in (raw, *nested) if d.get("partial_rotary_factor") is not None]
    sizes = [head_dim * factor for factor in factors]
    if raw.get("qk_rope_head_dim") is not None:
        sizes.insert(0, float(_int(raw, "qk_rope_head_dim")))
    if not sizes:
        raise ConfigError("The config lacks qk_rope_head_dim (or partial_rotary_factor); give one of them.")
    size = round(sizes[0]) if math.isfinite(sizes[0]) else 0
    if not all(math.isclose(other, size, abs_tol=1e-3) for other in sizes):
        raise ConfigError(
            f"qk_rope_head_dim and partial_rotary_factor * head_dim give rope sizes {sizes}; "
            "they must be the same integer."
        )
    return size


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, float, YarnConfig | None]:
    """(rope_theta, compress_rope_theta, yarn) from flat fields or from transformers' {main, compress}."""
    parameters = _object(raw, "rope_parameters")
    main, compress = _object(parameters, "main"), _object(parameters, "compress")
    if not (main and compress):
        main, compress = {}, parameters or _object(raw, "rope_scaling")
        compress = {key: value for key, value in compress.items() if key != "rope_theta"}
    _check_rope(main, compress)
    theta = _float(main, "rope_theta", default=_float(raw, "rope_theta", default=10000.0))
    compress_theta = _float(compress, "rope_theta", default=_float(raw, "compress_rope_theta", default=160000.0))
    return theta, compress_theta, _read_yarn(compress) if _rope_type(compress) == "yarn" else None


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_rope(main: Mapping[str, Any], compress: Mapping[str, Any]) -> None:
    if _rope_type(main) != "default":
        raise ConfigError(f"The main rope type is {_rope_type(main)!r}, but window-only layers use plain rope.")
    if _rope_type(compress) not in ("default", "yarn"):
        raise ConfigError(f"The rope_scaling type is {_rope_type(compress)!r}, but only yarn (or none) is supported.")
    if compress.get("attention_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"rope_scaling has attention_factor {compress['attention_factor']!r}, "
            "but DeepSeek-V4 never scales cos and sin (1.0)."
        )
    if compress.get("truncate", True) is not True:
        raise ConfigError("rope_scaling has truncate false, but DeepSeek-V4 rounds the YaRN range (true).")


def _read_yarn(rope: Mapping[str, Any]) -> YarnConfig:
    return YarnConfig(
        factor=_float(rope, "factor"),
        original_max_position_embeddings=_int(rope, "original_max_position_embeddings"),
        beta_fast=_float(rope, "beta_fast", default=32.0),
        beta_slow=_float(rope, "beta_slow", default=1.0),
    )


def _yarn_to_dict(yarn: YarnConfig) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def _read_eos(raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id", 1)
    if value is None:
        return ()
    return tuple(_int_list({"eos_token_id": value if isinstance(value, list | tuple) else [value]}, "eos_token_id"))
