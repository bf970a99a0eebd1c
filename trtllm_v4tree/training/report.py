"""What a run shows and keeps of its figures: a progress bar on a terminal, lines elsewhere, and always `log.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trtllm_v4tree.training.state import RunDirectory, Standing

_SMOOTHING = 0.95


class Reporter:
    """Smooths the figures of the steps and shows every `interval`-th; a context manager around the steps."""

    def __init__(self, console: Console, directory: RunDirectory, interval: int) -> None:
        self._console, self._directory, self._interval = console, directory, interval
        self._averages: dict[str, float] = {}
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:5.1f} %"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.stop()

    def step(self, figures: Mapping[str, float], standing: Standing, share: float) -> None:
        """Takes in one step's figures; `share` of the run is done."""
        for name, value in figures.items():
            self._averages[name] = _SMOOTHING * self._averages.get(name, value) + (1 - _SMOOTHING) * value
        self._bar.update(self._task, completed=share, description=shown(self._averages))
        if standing.step % self._interval:
            return
        place = {"step": standing.step, "minutes": standing.minutes, "share": share}
        self._directory.log({**place, "losses": self._averages})
        if not self._console.is_terminal:
            self._console.print(f"{100 * share:5.1f} %  step {standing.step}  {shown(self._averages)}")

    def held_out(self, figures: Mapping[str, float], standing: Standing) -> None:
        """The figures of the held-out rows at a save."""
        self._directory.log({"step": standing.step, "minutes": standing.minutes, "held_out": dict(figures)})
        self._console.print(f"step {standing.step}: held out {shown(figures)}")


def shown(figures: Mapping[str, float]) -> str:
    """`name value` pairs in one line."""
    return "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
