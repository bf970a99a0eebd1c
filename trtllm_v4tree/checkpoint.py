"""Lazy, checked reading of DeepSeek-V4 safetensors; one tensor is in memory at a time and nothing is ever unpickled.

Whatever the layout on disk, tensors are named as DeepSeek names them (spec section 9): `layers.3.attn.wq_a.weight`,
`layers.3.ffn.experts.7.w1.weight`, `mtp.0.e_proj.weight`. Quantised weights are decoded, their `.scale` is not exposed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import CheckpointError

Shape = tuple[int, ...]

FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)

_INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_LISTED = 20
_ITEM_BYTES = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}
_FLOATS = ("F32", "F16", "BF16")
_PACKED_FP4 = ("I8", "U8")
_SCALES = ("F8_E8M0", "U8", "F32")

_BYTES = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)

_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    )
)
_FUSED_EXPERTS = re.compile(r"^(.*\.ffn\.experts)\.(gate_up_proj|down_proj)$")
_DSPARK = re.compile(r"^mtp\.(?:.*(?:main_proj|markov_head|confidence_head)|[1-9]\d*\.)")
_UNUSED_MTP = re.compile(r"^mtp\..*(?:emb.*|head\.weight)$")
_EXPERT_WEIGHT = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$")


class StoredTensor(NamedTuple):
    """Where the bytes of one tensor lie: `shape` as stored, `offset` from the start of the file."""

    path: Path
    dtype: str
    shape: Shape
    offset: int


class Checkpoint:
    """The tensors of one model under canonical names; made by `open`, which has checked every name and shape."""

    def __init__(self, config: ModelConfig, stored: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]) -> None:
        self.config = config
        self._stored = stored
        self._shapes = shapes

    @classmethod
    def open(cls, directory: str | Path, config: ModelConfig, mtp_weights: str | Path | None = None) -> Checkpoint:
        """Read the headers under `directory` and check them against `config`; no weight is read yet.

        `mtp_weights` is a safetensors file of mtp.* tensors only, which replace all mtp.* of the directory.
        Raises CheckpointError for unreadable files, DSpark drafters, and (in one message) for all missing,
        unexpected and misshapen tensors. Without any mtp.* tensor the checkpoint opens with `has_mtp` False.
        """
        directory = Path(directory)
        stored = _canonical(_directory_tensors(directory), str(directory))
        if mtp_weights is not None:
            stored = {name: t for name, t in stored.items() if not name.startswith("mtp.")}
            stored.update(_mtp_tensors(Path(mtp_weights)))
        _refuse_dspark(stored)
        stored = {name: t for name, t in stored.items() if not _UNUSED_MTP.match(name)}
        has_mtp = mtp_weights is not None or any(name.startswith("mtp.") for name in stored)
        if has_mtp and config.num_mtp_layers == 0:
            raise CheckpointError(
                "There are mtp.* tensors but the config says num_nextn_predict_layers 0; set it to 1 to use them."
            )
        shapes = {n: s for n, s in expected_tensors(config).items() if has_mtp or not n.startswith("mtp.")}
        _check_fit(stored, shapes, f"{directory}" if mtp_weights is None else f"{directory} with {mtp_weights}")
        return cls(config, stored, shapes)

    @property
    def has_mtp(self) -> bool:
        """Whether the drafter (spec section 6) is there."""
        return "mtp.0.e_proj.weight" in self._shapes

    @property
    def is_bfloat16_exact(self) -> bool:
        """Whether every matrix of a linear is stored so that bfloat16 holds its values: bfloat16, or FP8 or FP4 with ue8m0 scales."""
        return all(self._is_exact(name) for name, shape in self._shapes.items() if len(shape) == 2 and _is_linear(name))

    def _is_exact(self, name: str) -> bool:
        dtype = self._stored[name].dtype
        return dtype == "BF16" or (dtype not in _FLOATS and self._stored[_scale_name(name)].dtype != "F32")

    def has_fp4_experts(self, drafter: bool) -> bool:
        """Whether every routed expert of the drafter, or of the trunk, is stored in FP4 with ue8m0 scales, as `fp4` reads it."""
        return all(
            self._stored[name].dtype in _PACKED_FP4 and self._stored[_scale_name(name)].dtype != "F32"
            for name in self._shapes
            if _EXPERT_WEIGHT.search(name) and name.startswith("mtp.") == drafter
        )

    def fp4(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes [out, in / 2] of an expert's weight [out, in] as they are stored (spec section 9)."""
        return _read(self._stored[name], np.uint8)

    def fp4_scales(self, name: str) -> npt.NDArray[np.uint8]:
        """Its scales [out, in / 32] as they are stored, 2^(byte - 127); 255 is no number."""
        return _read(self._stored[_scale_name(name)], np.uint8)

    @property
    def names(self) -> tuple[str, ...]:
        """All canonical names, in the order of `expected_tensors`."""
        return tuple(self._shapes)

    def shape(self, name: str) -> Shape:
        """Decoded shape of `name`; KeyError if the model has no such tensor."""
        return self._shapes[name]

    def get(self, name: str) -> npt.NDArray[Any]:
        """Read and decode one tensor: float32 of `shape(name)`, or int64 for `tid2eid`.

        KeyError if the model has no such tensor; CheckpointError if its file changed or an expert id is out of range.
        """
        shape, tensor = self._shapes[name], self._stored[name]
        if name.endswith(".tid2eid"):
            return self._expert_ids(name, tensor)
        if tensor.dtype in _FLOATS:
            return _decode_float(tensor)
        scale = _decode_scale(self._stored[_scale_name(name)])
        if tensor.dtype == "F8_E4M3":
            return _scale_blocks(_E4M3_VALUES[_read(tensor, np.uint8)], scale, FP8_BLOCK)
        return _scale_blocks(_unpack_fp4(_read(tensor, np.uint8), shape), scale, FP4_BLOCK)

    def _expert_ids(self, name: str, tensor: StoredTensor) -> npt.NDArray[np.int64]:
        ids = _read(tensor, np.int64 if tensor.dtype == "I64" else np.int32).astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.config.num_experts:
            raise CheckpointError(
                f"{name} has expert ids from {ids.min()} to {ids.max()}, "
                f"but the config has experts 0 to {self.config.num_experts - 1}; download the checkpoint again."
            )
        return ids


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and name != "embed.weight"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Canonical names and decoded shapes of all tensors of `config` (spec section 9), mtp.* if it has an MTP layer."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes.update(_prefixed(f"layers.{i}.", _block_shapes(config, config.is_hash_layer(i))))
        shapes.update(_prefixed(f"layers.{i}.attn.", _compression_shapes(config, i)))
    shapes["norm.weight"] = (hidden,)
    shapes.update(_hc_shapes("hc_head", config.hc_mult, 1, config))
    shapes["head.weight"] = (config.vocab_size, hidden)
    if config.num_mtp_layers:
        shapes.update(_prefixed("mtp.0.", _mtp_shapes(config)))
    return shapes


def _prefixed(prefix: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {prefix + name: shape for name, shape in shapes.items()}


def _block_shapes(config: ModelConfig, hashed: bool) -> dict[str, Shape]:
    """One decoder block without its compressor: hyper-connections, norms, attention, MoE."""
    mix = (2 + config.hc_mult) * config.hc_mult
    return {
        **_hc_shapes("hc_attn", mix, 3, config),
        "attn_norm.weight": (config.hidden_size,),
        **_prefixed("attn.", _attention_shapes(config)),
        **_hc_shapes("hc_ffn", mix, 3, config),
        "ffn_norm.weight": (config.hidden_size,),
        **_prefixed("ffn.", _moe_shapes(config, hashed)),
    }


def _hc_shapes(name: str, mix: int, scales: int, config: ModelConfig) -> dict[str, Shape]:
    return {
        f"{name}_fn": (mix, config.hc_mult * config.hidden_size),
        f"{name}_base": (mix,),
        f"{name}_scale": (scales,),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    o_rank = config.o_groups * config.o_lora_rank
    return {
        "attn_sink": (heads,),
        "wq_a.weight": (config.q_lora_rank, hidden),
        "q_norm.weight": (config.q_lora_rank,),
        "wq_b.weight": (heads * dim, config.q_lora_rank),
        "wkv.weight": (dim, hidden),
        "kv_norm.weight": (dim,),
        "wo_a.weight": (o_rank, heads * dim // config.o_groups),
        "wo_b.weight": (hidden, o_rank),
    }


def _compression_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Compressor of a CSA or HCA layer and indexer of a CSA layer (spec sections 2.1 and 3); empty for SWA."""
    kind = config.layer_kind(layer)
    if kind == "swa":
        return {}
    if kind == "hca":
        return _compressor_shapes("compressor.", config.hca_ratio, config.head_dim, config.head_dim, config)
    dim = config.index_head_dim
    return {
        **_compressor_shapes("compressor.", config.csa_ratio, 2 * config.head_dim, config.head_dim, config),
        "indexer.wq_b.weight": (config.index_n_heads * dim, config.q_lora_rank),
        "indexer.weights_proj.weight": (config.index_n_heads, config.hidden_size),
        **_compressor_shapes("indexer.compressor.", config.csa_ratio, 2 * dim, dim, config),
    }


def _compressor_shapes(prefix: str, ratio: int, rows: int, entry: int, config: ModelConfig) -> dict[str, Shape]:
    return {
        f"{prefix}ape": (ratio, rows),
        f"{prefix}wkv.weight": (rows, config.hidden_size),
        f"{prefix}wgate.weight": (rows, config.hidden_size),
        f"{prefix}norm.weight": (entry,),
    }


def _moe_shapes(config: ModelConfig, hashed: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"gate.weight": (config.num_experts, config.hidden_size)}
    if hashed:
        shapes["gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["gate.bias"] = (config.num_experts,)
    for expert in (*(f"experts.{e}" for e in range(config.num_experts)), "shared_experts"):
        shapes[f"{expert}.w1.weight"] = (config.moe_intermediate_size, config.hidden_size)
        shapes[f"{expert}.w2.weight"] = (config.hidden_size, config.moe_intermediate_size)
        shapes[f"{expert}.w3.weight"] = (config.moe_intermediate_size, config.hidden_size)
    return shapes


def _mtp_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "e_proj.weight": (hidden, hidden),
        "h_proj.weight": (hidden, hidden),
        **_block_shapes(config, hashed=False),
        "norm.weight": (hidden,),
        **_hc_shapes("hc_head", config.hc_mult, 1, config),
    }


def _directory_tensors(directory: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Stored (name, tensor) pairs of model.safetensors, else of the index's shards, else of all *.safetensors."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the one that holds config.json and *.safetensors.")
    single, index = directory / "model.safetensors", directory / _INDEX_NAME
    if single.exists():
        return iter(_read_header(single).items())
    if index.exists():
        return _indexed_tensors(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} has no *.safetensors file; pickled checkpoints (.bin, .pt) are not read, convert them first."
        )
    return (pair for path in files for pair in _read_header(path).items())


def _indexed_tensors(index: Path) -> Iterator[tuple[str, StoredTensor]]:
    shards: dict[str, list[str]] = {}
    for name, file in _weight_map(index).items():
        shards.setdefault(file, []).append(name)
    for file, names in sorted(shards.items()):
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"{index} names the shard {file}, which is not there; download it again.")
        header = _read_header(path)
        absent = [name for name in names if name not in header]
        if absent:
            raise CheckpointError(f"{index} puts {_listing(absent)} in {file}, which has no such tensor.")
        yield from ((name, header[name]) for name in names)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index with a weight_map ({error!r}).") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has a weight_map that is no object of tensor name to file name.")
    for file in weight_map.values():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise CheckpointError(
                f"{index} names the shard {file!r}, but a shard is a *.safetensors file beside the index."
            )
    return weight_map


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one safetensors file, with every offset checked against the file's size."""
    text, size = _header_bytes(path)
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a safetensors header that is not valid JSON; download it again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a safetensors header that is no JSON object; download it again.")
    header.pop("__metadata__", None)
    return {name: _stored_tensor(path, name, entry, 8 + len(text), size) for name, entry in header.items()}


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON header of a safetensors file, whose length is a little-endian u64 in front, and the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length <= size and length <= _MAX_HEADER_BYTES:
                return file.read(length), size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    raise CheckpointError(
        f"{path} is no safetensors file or is truncated: it announces a header of {length} bytes "
        f"(at most {_MAX_HEADER_BYTES}) and has {size} bytes in all; download it again."
    )


def _stored_tensor(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    dtype, shape, begin, end = _entry_fields(path, name, entry)
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {name} has dtype {dtype}, but only {', '.join(_ITEM_BYTES)} are read; convert the checkpoint."
        )
    if data + end > size:
        raise CheckpointError(
            f"{path} is truncated: {name} should end at byte {data + end}, but the file has {size}; download it again."
        )
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise CheckpointError(f"{path} is corrupt: {name} ({dtype} {list(shape)}) is stored in {end - begin} bytes.")
    return StoredTensor(path, dtype, shape, data + begin)


def _entry_fields(path: Path, name: str, entry: Any) -> tuple[str, Shape, int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        dtype, shape, begin, end = None, (), 0, -1
    counts = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in counts) or begin > end:
        raise CheckpointError(f"{path} is corrupt: the header entry of {name} is not a dtype, a shape and two offsets.")
    return dtype, shape, begin, end


def _canonical(tensors: Iterable[tuple[str, StoredTensor]], source: str) -> dict[str, StoredTensor]:
    """Rename to DeepSeek's names and split fused experts; CheckpointError if two stored tensors share a name."""
    stored: dict[str, StoredTensor] = {}
    twice: list[str] = []
    for original, tensor in tensors:
        for name, part in _split_experts(_canonical_name(original), tensor):
            if name in stored:
                twice.append(name)
            stored[name] = part
    if twice:
        raise CheckpointError(f"{source} stores {_listing(twice)} more than once; keep one file of each tensor.")
    return stored


def _canonical_name(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _split_experts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Split transformers' gate_up_proj [E, 2*inter, D] and down_proj [E, D, inter] into w1, w3 and w2 per expert."""
    match = _FUSED_EXPERTS.match(name)
    if match is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    leaves = ("w1", "w3") if match[2] == "gate_up_proj" else ("w2",)
    experts, rows, columns = tensor.shape[0], tensor.shape[1] // len(leaves), tensor.shape[2]
    part_bytes = rows * columns * _ITEM_BYTES[tensor.dtype]
    expert_bytes = tensor.shape[1] * columns * _ITEM_BYTES[tensor.dtype]
    for e in range(experts):
        for k, leaf in enumerate(leaves):
            offset = tensor.offset + e * expert_bytes + k * part_bytes
            yield f"{match[1]}.{e}.{leaf}.weight", tensor._replace(shape=(rows, columns), offset=offset)


def _mtp_tensors(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; give a safetensors file of mtp.* tensors.")
    stored = _canonical(_read_header(path).items(), str(path))
    others = [name for name in stored if not name.startswith("mtp.")]
    if others:
        raise CheckpointError(f"{path} has {_listing(others)}, but a file of MTP weights holds mtp.* tensors only.")
    return stored


def _refuse_dspark(stored: Iterable[str]) -> None:
    found = next((name for name in stored if _DSPARK.match(name)), None)
    if found is not None:
        raise CheckpointError(
            f"{found} belongs to a DSpark drafter (as in the -DSpark and -0731 checkpoints), which is not supported; "
            "use a checkpoint with the classic MTP module, or give MTP weights for this trunk."
        )


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _check_fit(stored: Mapping[str, StoredTensor], shapes: Mapping[str, Shape], source: str) -> None:
    """Raise one CheckpointError for everything that is missing, unexpected or of a wrong shape or dtype."""
    needed = {name: (shape, _dtypes_of(name)) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name not in stored:
            continue
        if stored[name].dtype == "F8_E4M3" and len(shape) == 2:
            needed[_scale_name(name)] = (_blocks(shape, FP8_BLOCK), _SCALES)
        if stored[name].dtype in _PACKED_FP4 and _EXPERT_WEIGHT.search(name):
            needed[name] = ((shape[0], -(-shape[1] // 2)), _PACKED_FP4)
            needed[_scale_name(name)] = (_blocks(shape, FP4_BLOCK), _SCALES)
    wrong = [
        f"{name} is {stored[name].dtype} {list(stored[name].shape)}, expected {'/'.join(dtypes)} {list(shape)}"
        for name, (shape, dtypes) in needed.items()
        if name in stored and (stored[name].shape != shape or stored[name].dtype not in dtypes)
    ]
    problems = {
        "missing": [name for name in needed if name not in stored],
        "unexpected": [name for name in stored if name not in needed],
        "wrong": wrong,
    }
    if any(problems.values()):
        shown = "; ".join(f"{len(found)} {kind}: {_listing(found)}" for kind, found in problems.items() if found)
        raise CheckpointError(f"The tensors of {source} do not fit the config: {shown}.")


def _dtypes_of(name: str) -> tuple[str, ...]:
    if name.endswith(".tid2eid"):
        return ("I64", "I32")
    if _EXPERT_WEIGHT.search(name):
        return (*_FLOATS, "F8_E4M3", "I8")
    return (*_FLOATS, "F8_E4M3") if re.search(r"\.(w\w+|[eh]_proj)\.weight$", name) else _FLOATS


def _blocks(shape: Shape, block: tuple[int, int]) -> Shape:
    return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" ... and {more} more" if more > 0 else "")


def _read(tensor: StoredTensor, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The stored values of `tensor`, shaped as stored; CheckpointError if the file shrank since it was opened."""
    count = math.prod(tensor.shape)
    try:
        values = np.fromfile(tensor.path, dtype=dtype, count=count, offset=tensor.offset)
    except OSError as error:
        raise CheckpointError(f"{tensor.path} cannot be read ({error.strerror or error}).") from error
    if values.size != count:
        raise CheckpointError(f"{tensor.path} became shorter after it was opened; open the checkpoint again.")
    return values.reshape(tensor.shape)


def _decode_float(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype == "F32":
        return _read(tensor, np.float32)
    if tensor.dtype == "F16":
        return _read(tensor, np.float16).astype(np.float32)
    return (_read(tensor, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _decode_scale(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """Block scales [blocks_out, blocks_in]: e8m0 bytes mean 2^(byte - 127)."""
    return _read(tensor, np.float32) if tensor.dtype == "F32" else _E8M0_VALUES[_read(tensor, np.uint8)]


def _unpack_fp4(packed: npt.NDArray[np.uint8], shape: Shape) -> npt.NDArray[np.float32]:
    """[out, in / 2] bytes to [out, in] e2m1 values; the low nibble is the even input (spec section 9)."""
    values = np.empty((*packed.shape, 2), dtype=np.float32)
    values[..., 0] = _E2M1_VALUES[packed & 15]
    values[..., 1] = _E2M1_VALUES[packed >> 4]
    return values.reshape(packed.shape[0], -1)[:, : shape[1]]


def _scale_blocks(
    values: npt.NDArray[np.float32], scale: npt.NDArray[np.float32], block: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Multiply [out, in] values by the scale of their block, in place; border blocks may be partial."""
    rows, columns = values.shape
    values *= scale.repeat(block[0], axis=0)[:rows].repeat(block[1], axis=1)[:, :columns]
    return values
