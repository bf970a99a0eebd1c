"""The engine directory: manifest, one ONNX file per graph, shared weights, tokenizer. Written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import ConfigError, EngineFormatError
from trtllm_v4tree.sizes import EngineSizes

FORMAT_VERSION = 1
MANIFEST = "engine.json"


@dataclass(frozen=True)
class Manifest:
    """What an engine is: `files` maps each file name to its SHA-256, `draft_shapes` lists the (steps, topk) graphs present."""

    target: str
    dtype: str
    config: ModelConfig
    sizes: EngineSizes
    draft_shapes: tuple[tuple[int, int], ...]
    files: dict[str, str]
    built_with: dict[str, str]

    def to_json(self) -> str:
        data = {
            "format_version": FORMAT_VERSION,
            "target": self.target,
            "dtype": self.dtype,
            "config": self.config.to_dict(),
            "sizes": self.sizes.to_dict(),
            "draft_shapes": [list(s) for s in self.draft_shapes],
            "files": self.files,
            "built_with": self.built_with,
        }
        return json.dumps(data, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads and checks `engine.json`; raises EngineFormatError in one sentence."""
        data = _manifest_data(directory)
        try:
            return cls(
                target=data["target"],
                dtype=data["dtype"],
                config=ModelConfig.from_dict(data["config"]),
                sizes=EngineSizes.from_dict(data["sizes"]),
                draft_shapes=tuple((int(a), int(b)) for a, b in data["draft_shapes"]),
                files=dict(data["files"]),
                built_with=dict(data["built_with"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFormatError(
                f"{directory / MANIFEST} is damaged ({error}): build the engine again with `v4tree build`."
            ) from error

    def verify(self, directory: Path) -> None:
        """Compares every file with its hash."""
        for name, expected in self.files.items():
            path = directory / name
            if Path(name).name != name or not path.is_file():
                raise EngineFormatError(f"{directory} lacks the file {name!r}: build the engine again with `v4tree build`.")
            if sha256(path) != expected:
                raise EngineFormatError(
                    f"{path} does not match the hash in {MANIFEST}: it was changed or damaged; build the engine again."
                )


def _manifest_data(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise EngineFormatError(f"No engine directory {directory}: build one with `v4tree build --output_dir {directory}`.")
    if not path.is_file():
        raise EngineFormatError(f"{directory} is not an engine directory (no {MANIFEST}): give the output_dir of `v4tree build`.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EngineFormatError(f"{path} is not valid JSON ({error}): build the engine again.") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise EngineFormatError(
            f"{directory} has engine format {version}, this version reads format {FORMAT_VERSION}: build the engine again."
        )
    return data


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(output_dir: Path) -> Iterator[Path]:
    """A scratch directory beside `output_dir` that takes its place when the block ends well and vanishes when it does not.

    An existing engine is replaced; any other non-empty directory or file is refused.
    """
    _check_replaceable(output_dir)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.building-", dir=output_dir.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        _swap(scratch, output_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_replaceable(output_dir: Path) -> None:
    if not output_dir.exists():
        return
    if not output_dir.is_dir() or (any(output_dir.iterdir()) and not (output_dir / MANIFEST).is_file()):
        raise ConfigError(
            f"output_dir {output_dir} exists and is not an engine: give a new or empty directory, or an engine to replace."
        )


def _swap(scratch: Path, output_dir: Path) -> None:
    if not output_dir.exists():
        os.rename(scratch, output_dir)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.old-", dir=output_dir.parent))
    os.rename(output_dir, old / "engine")
    try:
        os.rename(scratch, output_dir)
    except OSError:
        os.rename(old / "engine", output_dir)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
