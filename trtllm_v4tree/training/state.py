"""A training run on disk: its plan, its log and its resumable state. Files are replaced whole, and nothing is pickled.

`state.safetensors` holds the weights, the optimizers' state and, as JSON in its header, where the run stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trtllm_v4tree.errors import InputError
from trtllm_v4tree.training.model import NanoModel
from trtllm_v4tree.training.optimizer import Optimizers


class RunError(InputError):
    """A run directory that cannot be used."""


@dataclass(frozen=True)
class Plan:
    """How long a run lasts: steps, or minutes of processor time per thread; whichever ends first. 0 means no limit."""

    steps: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.minutes < 0 or not (self.steps or self.minutes):
            raise RunError(
                f"a run of {self.steps} steps and {self.minutes} minutes has no end: make one of them positive."
            )

    def progress(self, step: int, minutes: float) -> float:
        """Share of the run that is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        return min(1.0, max(by_steps, minutes / self.minutes if self.minutes else 0.0))


@dataclass(frozen=True)
class Standing:
    """Where a run stands: steps done, processor minutes used, and the options that must not change on the way."""

    step: int
    minutes: float
    identity: dict[str, Any]


class RunDirectory:
    """The files of one run under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path} cannot be made a directory ({error.strerror or error}): give another.") from error

    @property
    def state_file(self) -> Path:
        return self.path / "state.safetensors"

    def write_plan(self, plan: Plan) -> None:
        """`plan.json`, which may be edited while the run goes on."""
        replace_text(self.path / "plan.json", json.dumps(asdict(plan), indent=1) + "\n")

    def read_plan(self) -> Plan:
        """Raises RunError if somebody left an unusable plan."""
        file = self.path / "plan.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            return Plan(int(raw.get("steps", 0)), float(raw.get("minutes", 0)))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f'{file} is not a plan ({error}): write {{"steps": N, "minutes": M}}.') from error

    def log(self, entry: Mapping[str, Any]) -> None:
        """Appends one line of figures to `log.jsonl`."""
        with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, model: NanoModel, optimizers: Optimizers, standing: Standing) -> None:
        """Replaces the state as a whole."""
        tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
        tensors |= {f"optimizer/{key}": value for key, value in optimizers.tensors().items()}
        replace_tensors(self.state_file, tensors, {"standing": json.dumps(asdict(standing))})

    def restore(self, model: NanoModel, optimizers: Optimizers, identity: Mapping[str, Any]) -> Standing | None:
        """Loads the state into model and optimizers; None if there is none.

        Raises RunError if the state is unreadable or belongs to a run with another `identity`.
        """
        if not self.state_file.exists():
            return None
        try:
            with safe_open(self.state_file, "pt") as file:
                standing = Standing(**json.loads(file.metadata()["standing"]))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.state_file} is no training state ({error}): remove it to start anew.") from error
        _check_identity(self.path, standing.identity, identity)
        model.load_state_dict(_under("model/", tensors))
        optimizers.load(_under("optimizer/", tensors))
        return standing


def replace_text(path: Path, text: str) -> None:
    """Writes `path` so that a reader finds the old text or the new, never a part."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def replace_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """The same for a safetensors file."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(save({name: value.detach().contiguous() for name, value in tensors.items()}, metadata))
    os.replace(beside, path)


def _check_identity(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if different:
        raise RunError(
            f"{path} holds a run with another {', '.join(different)}: give the same options to go on, or another directory."
        )


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
