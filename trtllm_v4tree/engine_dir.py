"""The engine directory: manifest, one file per graph (ONNX with shared weights, or a plan), tokenizer. Written whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtllm_v4tree import contract
from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.contract import GraphContract
from trtllm_v4tree.errors import ConfigError, EngineFormatError, V4TreeError
from trtllm_v4tree.sizes import EngineSizes

FORMAT_VERSION = 9
MANIFEST = "engine.json"
LATENCY_FILE = "latency.json"
WEIGHTS_FILE = "weights.safetensors"
COMMIT_KERNELS = "commit.json"
PLAN_TARGETS = ("tensorrt-rtx", "tensorrt")
"""Targets whose graphs are plans: compiled ahead of time for compute capabilities, weights inside."""
_CHOSEN_SIZES = ("max_batch_size", "max_seq_len", "max_verify_tokens", "prefill_chunk", "num_pages")

Shapes = tuple[tuple[int, int], ...]
_T = TypeVar("_T")


def graph_stems(has_mtp: bool, draft_shapes: Shapes) -> list[str]:
    """File stems of an engine's graphs; a draft shape is (steps, topk)."""
    drafts = ["draft_catchup", *(f"draft_s{steps}_k{topk}" for steps, topk in draft_shapes)]
    return ["target_step", "commit", *(drafts if has_mtp else [])]


def graph_files(target: str, stems: list[str]) -> list[str]:
    """Files that hold the graphs of an engine; none for a target that this version does not know."""
    if target in PLAN_TARGETS:
        kernels = {"commit"} if target == "tensorrt" else set()
        return [COMMIT_KERNELS if stem in kernels else f"{stem}.plan" for stem in stems]
    return [WEIGHTS_FILE, *(f"{stem}.onnx" for stem in stems)] if target == "onnxruntime" else []


@dataclass(frozen=True)
class KernelCode:
    """A compiled kernel: entry name, threads of a block, bytes of shared memory, machine code."""

    entry: str
    threads: int
    shared: int
    code: bytes


@dataclass(frozen=True)
class FoldKind:
    """A compressor whose open windows a commit folds: csa, idx or hca; layers, states of a slot, channels."""

    name: str
    layers: int
    states: int
    dim: int


def fold_kinds(config: ModelConfig, sizes: EngineSizes) -> list[FoldKind]:
    """The compressors of an engine."""
    csa = FoldKind("csa", sizes.num_csa, 3, config.head_dim)
    idx = FoldKind("idx", sizes.num_csa if sizes.sparse else 0, 3, config.index_head_dim)
    return [kind for kind in (csa, idx, FoldKind("hca", sizes.num_hca, 1, config.head_dim)) if kind.layers]


def kernels_to_json(kernels: dict[str, KernelCode]) -> str:
    """The content of `commit.json`; machine code in base64."""
    fields = {name: dataclasses.asdict(kernel) for name, kernel in kernels.items()}
    return json.dumps({name: {**f, "code": base64.b64encode(f["code"]).decode()} for name, f in fields.items()})


def read_kernels(directory: Path) -> dict[str, KernelCode]:
    """Reads `commit.json`; raises EngineFormatError for one that is damaged."""
    path = directory / COMMIT_KERNELS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {name: KernelCode(**{**f, "code": base64.b64decode(f["code"])}) for name, f in data.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineFormatError(f"{path} is damaged ({error}): build the engine again.") from error


@dataclass(frozen=True)
class Manifest:
    """What an engine is: `files` maps each file name to its SHA-256, `draft_shapes` lists the (steps, topk) graphs.

    `compute_capabilities` are those that every plan holds code for, e.g. SM89; empty for a target without plans.
    `cpu_kernels` are the operators of target onnxruntime, native or onnxruntime; empty for another target.
    `draft_vocab_size` is how many tokens the drafter may propose; 0 in a manifest without one means all.
    """

    target: str
    dtype: str
    draft_dtype: str
    config: ModelConfig
    sizes: EngineSizes
    draft_shapes: Shapes
    files: dict[str, str]
    built_with: dict[str, str]
    compute_capabilities: tuple[str, ...] = ()
    cpu_kernels: str = "onnxruntime"
    draft_vocab_size: int = 0

    def contracts(self) -> list[GraphContract]:
        """Inputs and outputs of every graph, in the order of `graph_stems`; plans have activations of the engine's dtype."""
        graphs = [contract.target_step(self.config, self.sizes), contract.commit(self.config, self.sizes)]
        rounds = ((0, 1), *self.draft_shapes) if self.sizes.has_mtp else ()
        graphs += [contract.draft_round(self.config, self.sizes, *shape) for shape in rounds]
        return [contract.typed(graph, self.dtype) for graph in graphs] if self.target in PLAN_TARGETS else graphs

    def to_json(self) -> str:
        """With plans also what they are for and their bindings: a plan cannot be read without its compiler's runtime."""
        data = {
            "format_version": FORMAT_VERSION,
            "target": self.target,
            "dtype": self.dtype,
            "draft_dtype": self.draft_dtype,
            "draft_vocab_size": self.draft_vocab_size,
            "cpu_kernels": self.cpu_kernels,
            "config": self.config.to_dict(),
            "sizes": self.sizes.to_dict(),
            "draft_shapes": [list(s) for s in self.draft_shapes],
            "files": self.files,
            "built_with": self.built_with,
        }
        if self.target in PLAN_TARGETS:
            data["compute_capabilities"] = list(self.compute_capabilities)
            data["contract"] = [_bindings(graph) for graph in self.contracts()]
        return json.dumps(data, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads and checks `engine.json`; raises EngineFormatError in one sentence."""
        data = _manifest_data(directory)
        try:
            return _parsed(data)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise EngineFormatError(
                f"{directory / MANIFEST} is damaged ({reason}): build the engine again with `v4tree build`."
            ) from error

    def verify(self, directory: Path) -> None:
        """Compares every file with its hash; raises EngineFormatError for one that is missing or differs."""
        for name, expected in self.files.items():
            path = directory / name
            if not path.is_file():
                raise EngineFormatError(f"{directory} lacks the file {name}: build the engine again.")
            if _readable_hash(path) != expected:
                raise EngineFormatError(
                    f"{path} does not match the hash in {MANIFEST}: it was changed or damaged; build the engine again."
                )


def _bindings(graph: GraphContract) -> dict[str, Any]:
    """A contract under the names that the plan binds: a state that a graph writes leaves it as `new_<state>`."""
    states = {tensor.name for tensor in graph.inputs}
    data = dataclasses.asdict(graph)
    for tensor in data["outputs"]:
        tensor["name"] = f"new_{tensor['name']}" if tensor["name"] in states else tensor["name"]
    return data


def _manifest_data(directory: Path) -> dict[str, Any]:
    """The object in `engine.json`, of this format version."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise EngineFormatError(
            f"No engine directory {directory}: build one with `v4tree build --output_dir {directory}`."
        )
    if not path.is_file():
        raise EngineFormatError(
            f"{directory} is not an engine directory (no {MANIFEST}): give the output_dir of `v4tree build`."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineFormatError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise EngineFormatError(f"{path} is not valid JSON ({error}): build the engine again.") from error
    if not isinstance(data, dict):
        raise EngineFormatError(f"{path} is not a JSON object: build the engine again.")
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        remedy = "update trtllm_v4tree, or build the engine again" if newer else "build the engine again"
        raise EngineFormatError(
            f"{directory} has engine format {version}, this version reads format {FORMAT_VERSION}: {remedy}."
        )
    return data


def _parsed(data: dict[str, Any]) -> Manifest:
    """Raises ValueError with what is wrong."""
    target = _get(data, "target", str)
    config = ModelConfig.from_dict(_get(data, "config", dict))
    sizes = _parsed_sizes(config, _get(data, "sizes", dict))
    shapes = _parsed_shapes(_get(data, "draft_shapes", list))
    files = _texts(data, "files")
    _check_files(files, graph_files(target, graph_stems(sizes.has_mtp, shapes)))
    manifest = Manifest(
        target=target,
        dtype=_get(data, "dtype", str),
        draft_dtype=_get(data, "draft_dtype", str),
        config=config,
        sizes=sizes,
        draft_shapes=shapes,
        files=files,
        built_with=_texts(data, "built_with"),
        compute_capabilities=_parsed_capabilities(data) if target in PLAN_TARGETS else (),
        cpu_kernels=_get(data, "cpu_kernels", str),
        draft_vocab_size=_parsed_draft_vocab(data, config),
    )
    if target in PLAN_TARGETS and data.get("contract") != json.loads(manifest.to_json())["contract"]:
        raise ValueError("contract does not follow from config and sizes")
    return manifest


def _parsed_draft_vocab(data: dict[str, Any], config: ModelConfig) -> int:
    size = _get({"draft_vocab_size": 0, **data}, "draft_vocab_size", int)
    if not 0 <= size <= config.vocab_size:
        raise ValueError(f"draft_vocab_size is {size}, not 0 to {config.vocab_size}")
    return size


def _get(data: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = data.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is {_clipped(value)}, not {_KINDS[kind]}")
    return value


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


def _texts(data: dict[str, Any], name: str) -> dict[str, str]:
    values = _get(data, name, dict)
    return {key: _get(values, key, str) for key in values}


def _parsed_sizes(config: ModelConfig, data: dict[str, Any]) -> EngineSizes:
    """Derives the sizes again from those that were chosen; what was stored must be equal."""
    chosen = {name: _get(data, name, int) for name in _CHOSEN_SIZES}
    chosen["num_pages"] -= 1
    sizes = EngineSizes.make(config, **chosen, has_mtp=_get(data, "has_mtp", bool))
    if sizes.to_dict() != data:
        raise ValueError("sizes do not follow from config and the chosen limits")
    return sizes


def _parsed_shapes(values: list[Any]) -> Shapes:
    for shape in values:
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n >= 1 for n in shape):
            raise ValueError(f"draft_shapes has {_clipped(shape)}, not [steps, topk]")
    return tuple((steps, topk) for steps, topk in values)


def _parsed_capabilities(data: dict[str, Any]) -> tuple[str, ...]:
    names = _get(data, "compute_capabilities", list)
    if not names or not all(isinstance(name, str) and re.fullmatch(r"SM[0-9]{2,3}", name) for name in names):
        raise ValueError(f"compute_capabilities is {_clipped(names)}, not names such as SM89")
    return tuple(names)


def _check_files(files: dict[str, str], required: list[str]) -> None:
    for name in files:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"files has {_clipped(name)}, which is no plain file name")
    missing = [name for name in required if name not in files]
    if missing:
        raise ValueError(f"files lacks {', '.join(missing)}")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _readable_hash(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise EngineFormatError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error


@contextlib.contextmanager
def replacing(output_dir: Path) -> Iterator[Path]:
    """A scratch directory beside `output_dir` that takes its place when the block ends well and vanishes if it fails.

    An existing engine is replaced; any other non-empty directory or file is refused with ConfigError. V4TreeError if
    the disk fails later on: `output_dir` is then as it was.
    """
    final = _checked_output(output_dir)
    made = [p for p in final.parents if not p.exists()]
    scratch = final.parent / f".{final.name}.building-{secrets.token_hex(4)}"
    try:
        _make(scratch, output_dir)
        yield scratch
        _swap(scratch, final)
    except OSError as error:
        raise V4TreeError(
            f"the engine cannot be written to {output_dir} ({error.strerror or error}): "
            "nothing was changed; free space or give another --output_dir."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not os.path.exists(final):
            _remove_empty(made)


def _checked_output(output_dir: Path) -> Path:
    """Where links lead to; ConfigError unless it is free, empty, or an engine and nothing else."""
    try:
        final = output_dir.resolve()
        nearest = next(path for path in (final, *final.parents) if path.exists())
        others = [p.name for p in final.iterdir() if p.name not in _engine_files(final)] if nearest == final else []
    except NotADirectoryError:
        nearest, others = final, []
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"output_dir {output_dir} cannot be used ({reason}): give another directory.") from error
    if not nearest.is_dir():
        raise ConfigError(f"output_dir {output_dir}: {nearest} is a file; give a directory.")
    if others:
        raise ConfigError(
            f"output_dir {output_dir} has {_clipped(min(others))}, which is not part of an engine: "
            "give a new or empty directory, or an engine to replace."
        )
    return final


def _engine_files(directory: Path) -> set[str]:
    """Names that belong to the engine of any format version in `directory`; empty if there is none."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {MANIFEST, *files}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return set()


def _make(scratch: Path, output_dir: Path) -> None:
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(mode=0o755)
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir} cannot be made ({error.strerror}): give a directory where you may write."
        ) from error


def _swap(scratch: Path, final: Path) -> None:
    """Renames. Interrupted at any point, `final` is the old engine or the new one."""
    if not final.exists() or not any(final.iterdir()):
        os.rename(scratch, final)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent))
    try:
        os.rename(final, aside / "engine")
        os.rename(scratch, final)
    finally:
        if not final.exists():
            os.rename(aside / "engine", final)
        shutil.rmtree(aside, ignore_errors=True)


def _remove_empty(directories: list[Path]) -> None:
    """Innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
