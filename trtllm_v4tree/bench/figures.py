"""The pictures of a report, drawn with matplotlib: one function per picture, `Results` in, figure out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_v4tree.bench import paper
from trtllm_v4tree.bench.results import DECODE_PHASES, Acceptance, Cell, Gain, Results
from trtllm_v4tree.bench.stats import Estimate, mean_of
from trtllm_v4tree.bench.verdicts import mean_gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any colour vision, and each line has its own marker besides.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#767676",
)  # fmt: skip
LINEAR, TREE, BEST, PAPER = BLUE, VERMILION, GREEN, BLACK
_FEW_WALKS = 20
_SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (PURPLE, "v"), (SKY, "^"), (VERMILION, "P"))
PHASE_COLOURS = dict(zip(DECODE_PHASES, (SKY, BLUE, GREEN, ORANGE, GREY), strict=True))
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 110,
    "svg.fonttype": "path",
    "svg.hashsalt": "v4tree",
}


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A row of `count` axes, each `width` x `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False, **options)
    return figure, list(axes[0])


def styled() -> Any:
    """Context in which pictures are drawn."""
    from matplotlib import rc_context

    return rc_context(_STYLE)


# ------------------------------------------------------------------ accepted length


def accepted_length(results: Results) -> Figure:
    """Accepted length against D, one panel per data set: chain, fixed tree, best tree, the paper at D=8."""
    figure, axes = panels(len(results.datasets), 4.2, 4.0, sharey=True)
    for axis, dataset in zip(axes, results.datasets, strict=True):
        gains = [g for g in results.fixed_gains() if g.dataset == dataset]
        _line(axis, [g.budget for g in gains], [g.linear for g in gains], LINEAR, "o", "linear")
        _line(axis, [g.budget for g in gains], [g.tree for g in gains], TREE, "s", "tree, fixed shape")
        _best_line(axis, results, dataset)
        if dataset in paper.ACCEPTED_D8:
            linear, tree = paper.ACCEPTED_D8[dataset]
            axis.plot([8], [linear], "o", mfc="white", mec=LINEAR, mew=2, ms=9, label="paper, linear", clip_on=False)
            axis.plot([8], [tree], "s", mfc="white", mec=TREE, mew=2, ms=9, label="paper, tree", clip_on=False)
        _budget_axis(axis, results, dataset)
    axes[0].set_ylabel("accepted length (tokens per pass)")
    _legend_below(figure, axes)
    return figure


def _best_line(axis: Axes, results: Results, dataset: str) -> None:
    best = [b for b in (_best_gain(results, dataset, d) for d in results.budgets) if b is not None]
    if any(not b.fixed for b in best):
        axis.plot(
            [b.budget for b in best], [b.tree.value for b in best], "D:", color=BEST, ms=5, label="best of all shapes"
        )


def _best_gain(results: Results, dataset: str, budget: int) -> Gain | None:
    found = [g for g in results.gains if g.dataset == dataset and g.budget == budget]
    return max(found, key=lambda g: g.tree.value, default=None)


def relative_gain(results: Results) -> Figure:
    """Gain in accepted length of the fixed tree over the chain against D, per data set, with mean and the paper's mean."""
    figure, [axis] = panels(1, 7.6, 4.4)
    for dataset, (colour, marker) in zip(results.datasets, _SERIES * 9, strict=False):
        gains = [g for g in results.fixed_gains() if g.dataset == dataset]
        _line(axis, [g.budget for g in gains], [_percent(g.gain) for g in gains], colour, marker, dataset)
    means = [100 * mean_gain(results, d) for d in results.budgets]
    axis.plot(results.budgets, means, "-", color=BLACK, lw=2.5, label="mean")
    theirs = [d for d in results.budgets if d in paper.MEAN_GAIN]
    published = [100 * paper.MEAN_GAIN[d] for d in theirs]
    axis.plot(theirs, published, "--*", color=BLACK, ms=11, mfc="white", label="mean in the paper")
    axis.axhline(0, color=GREY, lw=1)
    _budget_axis(axis, results, "")
    axis.set_ylabel("gain in accepted length, %")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _percent(e: Estimate) -> Estimate:
    return Estimate(100 * e.value, 100 * e.low, 100 * e.high)


def _line(axis: Axes, x: Sequence[int], estimates: Sequence[Estimate], colour: str, marker: str, label: str) -> None:
    """A line with bars for the 95 % intervals."""
    y = np.array([e.value for e in estimates])
    bars = np.abs(np.array([[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]))
    axis.errorbar(x, y, bars if len(y) else None, color=colour, marker=marker, ms=6, lw=1.8, capsize=3, label=label)


def _budget_axis(axis: Axes, results: Results, title: str) -> None:
    axis.set_xticks(results.budgets)
    axis.margins(x=0.12)
    axis.set_xlabel("verified tokens D")
    axis.set_title(title)


def _legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend of all that the panels show."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    names = sorted(entries, key=lambda name: ("paper" in name, "best" in name))
    figure.legend([entries[n] for n in names], names, loc="outside lower center", ncols=min(len(names), 5))


# ------------------------------------------------------------------ throughput


def tree_over_linear(results: Results) -> Figure:
    return _heat_maps(results, lambda c: c.to_linear, "tokens/s of the fixed tree over linear")


def tree_over_plain(results: Results) -> Figure:
    return _heat_maps(results, lambda c: c.to_plain, "tokens/s of the fixed tree over plain decoding")


def _heat_maps(results: Results, of: Callable[[Cell], Estimate | None], label: str) -> Figure:
    """D x batch, one panel per data set and one for their mean. An asterisk: the 95 % interval does not include 1."""
    titles = [*results.datasets, "mean"] if len(results.datasets) > 1 else results.datasets
    grids = [_grid(results, d, of) for d in results.datasets]
    values = [np.array([[e.value if e else np.nan for e in row] for row in g]) for g in grids]
    shown = [*values, np.nanmean(values, axis=0)] if len(values) > 1 else values
    reach = max(0.05, float(np.nanmax(np.abs(np.log(np.concatenate(shown)))))) if values else 1.0
    figure, axes = panels(
        len(titles), 0.9 + 0.62 * len(results.budgets), 1.7 + 0.42 * len(results.batch_sizes), sharey=True
    )
    for i, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        marks = grids[i] if i < len(grids) else None
        image = _heat(axis, results, shown[i], marks, reach, title)
    axes[0].set_ylabel("batch size")
    _ratio_bar(figure, image, axes, label, reach)
    return figure


def _ratio_bar(figure: Figure, image: Any, axes: Sequence[Axes], label: str, reach: float) -> None:
    """Colour bar on a logarithmic scale, labelled with ratios."""
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    ticks = np.linspace(-reach, reach, 5)
    bar.set_ticks(list(ticks), labels=[f"{np.exp(t):.2f}" for t in ticks])
    bar.set_label(label.replace(" over ", "\nover ", 1), fontsize=9.5)


def _grid(results: Results, dataset: str, of: Callable[[Cell], Estimate | None]) -> list[list[Estimate | None]]:
    cells = {(c.batch, c.budget): of(c) for c in results.fixed_cells() if c.dataset == dataset}
    return [[cells.get((b, d)) for d in results.budgets] for b in results.batch_sizes]


def _heat(
    axis: Axes, results: Results, values: Any, marks: list[list[Estimate | None]] | None, reach: float, title: str
) -> Any:
    image = axis.imshow(np.log(values), cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        e = marks[row][column] if marks else None
        sure = e is not None and e.has_interval and not e.low <= 1 <= e.high
        text = f"{value:.2f}{'*' if sure else ''}"
        axis.text(
            column, row, text, ha="center", va="center", color=ink(image.cmap(image.norm(np.log(value)))), fontsize=9.5
        )
    axis.set_xticks(range(len(results.budgets)), labels=[str(d) for d in results.budgets])
    axis.set_yticks(range(len(results.batch_sizes)), labels=[str(b) for b in results.batch_sizes])
    axis.grid(False)
    axis.tick_params(length=0)
    axis.set_xlabel("D")
    axis.set_title(title)
    return image


def ink(colour: Any) -> str:
    """Black or white, whichever stands out more on a colour (contrast as in WCAG 2)."""
    from matplotlib.colors import to_rgb

    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "black" if float(linear @ [0.2126, 0.7152, 0.0722]) > 0.179 else "white"


# ------------------------------------------------------------------ acceptance by depth and rank


def acceptance_by_depth(results: Results) -> Figure:
    """Of the passes that came to a depth, the share that goes on by child rank, for the tree and the chain of the largest D."""
    from matplotlib.ticker import MaxNLocator

    budget = max(results.budgets)
    figure, axes = panels(len(results.datasets), 4.2, 4.0, sharey=True)
    for axis, dataset in zip(axes, results.datasets, strict=True):
        by_name = {a.speculation: a for a in results.acceptance if a.dataset == dataset}
        tree, linear = by_name.get(results.fixed_name(budget) or ""), by_name.get(f"s{budget - 1}_k1_d{budget}")
        if tree is not None:
            _rank_bars(axis, tree)
        if linear is not None:
            shares = [sum(row) for row in shares_by_rank(linear)]
            axis.plot(range(1, len(shares) + 1), shares, "o--", color=BLACK, label="linear")
        axis.set_title(dataset)
        axis.set_xlabel("draft depth")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("accepted, of those that got so far")
    _legend_below(figure, axes)
    return figure


def _rank_bars(axis: Axes, acceptance: Acceptance) -> None:
    shares = shares_by_rank(acceptance)
    width = max((len(row) for row in shares), default=0)
    bottom = np.zeros(len(shares))
    colours = (VERMILION, ORANGE, "#F0E442", GREY)
    for rank in range(width):
        heights = np.array([row[rank] if rank < len(row) else 0.0 for row in shares])
        label = f"tree, child {rank + 1}"
        axis.bar(
            np.arange(1, len(shares) + 1),
            heights,
            0.7,
            bottom,
            color=colours[min(rank, 3)],
            edgecolor="white",
            label=label,
        )
        bottom += heights


def shares_by_rank(acceptance: Acceptance) -> list[list[float]]:
    """Accepted at (depth, rank) over the walks that had come to that depth: [depth][rank], each row sums to at most 1.

    Depths to which fewer than 20 walks came are left out.
    """
    came, shares = acceptance.walks, []
    for row in acceptance.accepted:
        if came < _FEW_WALKS:
            break
        shares.append([count / came for count in row])
        came = sum(row)
    return shares


# ------------------------------------------------------------------ where the time goes


def round_time(results: Results) -> Figure:
    """Milliseconds of a round by phase, mean over data sets: plain, linear and tree of the largest D, over batch sizes."""
    budget = max(results.budgets)
    names = [n for n in ("none", f"s{budget - 1}_k1_d{budget}", results.fixed_name(budget)) if n]
    labels = dict(zip(names, ("plain", "linear", "tree"), strict=False))
    figure, axes = panels(len(names), 4.2, 4.2)
    for axis, name in zip(axes, names, strict=True):
        _phase_bars(axis, results, name)
        axis.set_title(f"{labels[name]} ({name})" if name != "none" else "plain")
        axis.set_xlabel("batch size")
    axes[0].set_ylabel("share of a round, %")
    _legend_below(figure, axes)
    return figure


def _phase_bars(axis: Axes, results: Results, name: str) -> None:
    """Shares stacked to 100 %; milliseconds of the round above."""
    at = np.arange(len(results.batch_sizes))
    mean = {p: np.array([_phase_ms(results, name, b, p) for b in results.batch_sizes]) for p in DECODE_PHASES}
    total, bottom = sum(mean.values()), np.zeros(len(at))
    for phase, ms in mean.items():
        heights = 100 * ms / np.maximum(total, 1e-9)
        axis.bar(at, heights, 0.8, bottom, color=PHASE_COLOURS[phase], edgecolor="white", label=phase)
        bottom += heights
    for x, ms in zip(at, np.asarray(total), strict=True):
        axis.text(x, 101, f"{ms:.3g}", ha="center", va="bottom", fontsize=8.5)
    axis.text(-0.02, 1.0, "ms", transform=axis.transAxes, ha="right", va="top", fontsize=8.5)
    axis.set_xticks(at, labels=[str(b) for b in results.batch_sizes])
    axis.set_ylim(0, 108)
    axis.set_yticks([0, 25, 50, 75, 100])
    axis.grid(axis="x", visible=False)


def _phase_ms(results: Results, name: str, batch: int, phase: str) -> float:
    return mean_of([c.phases[phase] for c in results.cells if c.speculation == name and c.batch == batch])


def round_cost(results: Results) -> Figure:
    """A round of the fixed tree in plain steps, against the batch, beside the accepted length that it buys."""
    figure, [axis] = panels(1, 7.6, 4.4)
    at = np.arange(len(results.batch_sizes))
    for budget, (colour, marker) in zip(results.budgets, _SERIES * 9, strict=False):
        name = results.fixed_name(budget)
        if name is None:
            continue
        costs = [_cost(results, name, b) for b in results.batch_sizes]
        axis.plot(at, costs, "-", color=colour, marker=marker, label=f"cost, D={budget}")
        length = mean_of([c.accepted_length.value for c in results.cells if c.speculation == name])
        axis.axhline(length, color=colour, ls=":", lw=1.6, label=f"accepted, D={budget}")
    axis.set_xticks(at, labels=[str(b) for b in results.batch_sizes])
    axis.set_xlabel("batch size")
    axis.set_ylabel("round cost in plain steps; accepted length")
    axis.set_title("A tree pays where its cost is below its accepted length")
    axis.set_ylim(
        0, 1.08 * max(float(np.max(line.get_ydata())) for line in axis.get_lines()) if axis.get_lines() else 1
    )
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _cost(results: Results, name: str, batch: int) -> float:
    ratios = []
    for dataset in results.datasets:
        tree, plain = results.cell(dataset, batch, name), results.cell(dataset, batch, "none")
        if tree is not None and plain is not None:
            ratios.append(tree.round_ms.value / plain.round_ms.value)
    return mean_of(ratios)


# ------------------------------------------------------------------ policies


def policies(results: Results) -> Figure:
    """Speed of `auto` and the like over the fastest of plain, chains and trees, against the batch: one panel per data set."""
    figure, axes = panels(len(results.datasets), 4.2, 4.0, sharey=True)
    at = np.arange(len(results.batch_sizes))
    for axis, dataset in zip(axes, results.datasets, strict=True):
        for name, (colour, marker) in zip(results.others(), _SERIES * 9, strict=False):
            cells = [results.cell(dataset, b, name) for b in results.batch_sizes]
            shares = [results.share_of_fastest(c) if c else None for c in cells]
            y = np.array([np.nan if s is None else s for s in shares])
            axis.plot(at, y, "-", color=colour, marker=marker, lw=2.6 if name == "auto" else 1.5, label=name)
        plain = [_plain_share(results, dataset, b) for b in results.batch_sizes]
        axis.plot(at, plain, ":", color=BLACK, label="plain decoding")
        axis.axhline(1, color=GREY, lw=1)
        axis.set_xticks(at, labels=[str(b) for b in results.batch_sizes])
        axis.set_xlabel("batch size")
        axis.set_title(dataset)
    axes[0].set_ylabel("speed over the fastest fixed choice")
    _legend_below(figure, axes)
    return figure


def _plain_share(results: Results, dataset: str, batch: int) -> float:
    ratios = [
        c.to_plain.value
        for c in results.cells
        if (c.dataset, c.batch) == (dataset, batch) and c.kind in ("linear", "tree") and c.to_plain
    ]
    return 1 / max([1.0, *ratios])


PICTURES: dict[str, tuple[str, Callable[[Results], Figure]]] = {
    "accepted_length": (
        "Accepted length against D. Bars: 95 % intervals over prompts. Hollow: the paper.",
        accepted_length,
    ),
    "relative_gain": ("Gain in accepted length of the fixed tree over the chain of the same D.", relative_gain),
    "tree_over_linear": (
        "Throughput of the fixed tree over the chain. *: the 95 % interval excludes 1.",
        tree_over_linear,
    ),
    "tree_over_plain": (
        "Throughput of the fixed tree over plain decoding. *: the 95 % interval excludes 1.",
        tree_over_plain,
    ),
    "policies": (
        "Policies that adapt themselves, against the fastest of plain, chains and trees, which is known only afterwards.",
        policies,
    ),
    "acceptance_by_depth": ("Acceptance by depth and child rank at the largest D.", acceptance_by_depth),
    "round_time": ("Where the time of a round goes; above each bar its milliseconds.", round_time),
    "round_cost": ("What a round costs and what it brings.", round_cost),
}
"""Name -> caption and drawing function, in the order of the page."""
