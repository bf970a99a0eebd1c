"""The picture of a profile: shares of the time on the left, median and p99 of each phase on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trtllm_v4tree.bench.figures import PHASE_COLOURS, PURPLE, ink, panels
from trtllm_v4tree.bench.profile import PhaseRow
from trtllm_v4tree.bench.tracer import RANGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {**PHASE_COLOURS, "prefill": PURPLE}
_MARKERS = ("o", "s", "D", "^", "v", "P")


def phases(rows: Sequence[PhaseRow]) -> Figure:
    """One bar per speculation on the left; on the right one line per speculation and phase from median to p99."""
    names = list(dict.fromkeys(r.speculation for r in rows))
    figure, [left, right] = panels(2, 6.2, 2.2 + 0.5 * len(names) + 0.25 * len(names) * len(RANGES) / 2)
    _shares(left, rows, names)
    _spans(right, rows, names)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _shares(axis: Axes, rows: Sequence[PhaseRow], names: Sequence[str]) -> None:
    share = {(r.speculation, r.phase): 100 * r.share for r in rows}
    left = np.zeros(len(names))
    for phase in RANGES:
        widths = np.array([share.get((n, phase), 0.0) for n in names])
        axis.barh(np.arange(len(names)), widths, 0.7, left, color=_COLOURS[phase], edgecolor="white", label=phase)
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 6:
                axis.text(
                    start + width / 2,
                    y,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=ink(_COLOURS[phase]),
                )
        left += widths
    axis.set_yticks(np.arange(len(names)), labels=list(names))
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("share of the time, %")


def _spans(axis: Axes, rows: Sequence[PhaseRow], names: Sequence[str]) -> None:
    """Phases from top to bottom, the speculations of a phase side by side; filled: median, hollow: p99."""
    step = 0.8 / max(1, len(names))
    for row in rows:
        index = names.index(row.speculation)
        y = RANGES.index(row.phase) - 0.4 + step * (index + 0.5)
        colour, marker = _COLOURS[row.phase], _MARKERS[index % len(_MARKERS)]
        axis.plot([row.median_ms, row.p99_ms], [y, y], "-", color=colour, lw=2)
        axis.plot([row.median_ms], [y], marker, color=colour, ms=7)
        axis.plot([row.p99_ms], [y], marker, mfc="white", mec=colour, mew=1.8, ms=7)
    for index, name in enumerate(names):
        axis.plot([], [], _MARKERS[index % len(_MARKERS)], color="#444444", label=name)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(RANGES)), labels=list(RANGES))
    axis.set_ylim(len(RANGES) - 0.5, -0.5)
    axis.set_xlabel("milliseconds: filled median, hollow p99")
    axis.legend(loc="best", fontsize=9)
