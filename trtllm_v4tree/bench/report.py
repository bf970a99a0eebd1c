"""`report.html`, self-contained, and its pictures as PNG. Needs the extra `bench` (matplotlib, jinja2)."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_v4tree.bench import paper
from trtllm_v4tree.bench.page import PAGE
from trtllm_v4tree.bench.results import Cell, Results, write_whole
from trtllm_v4tree.bench.stats import Estimate
from trtllm_v4tree.bench.verdicts import paragraph, verdicts, why
from trtllm_v4tree.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEEDED = ("matplotlib", "jinja2")


class MissingExtra(InputError):
    """The packages for drawing are not installed."""


def check_installed(needed: tuple[str, ...] = _NEEDED) -> None:
    """MissingExtra unless the packages of the extra `bench` are there."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"the report needs {' and '.join(missing)}: install with `pip install 'trtllm_v4tree[bench]'`."
        )


def write_report(results: Results, directory: Path) -> Path:
    """Draws every picture, writes the PNGs and `report.html`, and returns the page's path; DiskError if that fails."""
    check_installed()
    from trtllm_v4tree.bench.figures import PICTURES, styled

    pictures = []
    with styled():
        for name, (caption, draw) in PICTURES.items():
            if name == "policies" and not results.others():
                continue
            png, svg = rendered(draw, results)
            write_whole(directory / f"{name}.png", png)
            pictures.append({"name": name, "caption": caption, "svg": svg})
    page = directory / "report.html"
    write_whole(page, _page(results, pictures).encode())
    return page


def rendered(draw: Callable[..., Figure], *arguments: Any) -> tuple[bytes, str]:
    """(PNG, inline SVG) of one picture."""
    figure = draw(*arguments)
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=144)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return png.getvalue(), inline_svg(svg.getvalue().decode(), draw.__name__)


def inline_svg(text: str, prefix: str) -> str:
    """An SVG element for a page: without XML header, ids of its own, at most its own width."""
    text = text[text.index("<svg") :]
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return re.sub(r'width="([\d.]+pt)" height="[\d.]+pt"', r'role="img" style="max-width: \1"', text, count=1)


def render_page(template: str, **values: Any) -> str:
    """A page from a template, with everything that is not marked safe escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["estimate"] = estimate_text
    return environment.from_string(template).render(**values)


def estimate_text(e: Estimate | None, digits: int = 2) -> str:
    """`1.08 (1.02 to 1.13)`, without the interval where there is none, and a dash for nothing."""
    if e is None:
        return "–"
    interval = f" ({e.low:.{digits}f} to {e.high:.{digits}f})" if e.has_interval else ""
    return f"{e.value:.{digits}f}{interval}"


def _page(results: Results, pictures: list[dict[str, str]]) -> str:
    return render_page(
        PAGE,
        results=results,
        pictures=pictures,
        paragraph=paragraph(results),
        verdicts=verdicts(results),
        why=why(results),
        headline=_headline(results),
        best=_best_of_all(results),
        others=_others(results),
        source=paper.SOURCE,
        loaded=_loaded(results.about),
    )


def _headline(results: Results) -> list[tuple[str, str]]:
    """(figure, what it is): the few numbers at the top of the page."""
    fixed = [c for c in results.fixed_cells() if c.to_linear and c.to_plain]
    if not fixed:
        return []
    fastest = max(results.cells, key=lambda c: c.to_plain.value if c.to_plain else 0.0)
    won = sum(c.to_linear.value >= 1 for c in fixed if c.to_linear)
    gains = [g.gain.value for g in results.fixed_gains()]
    assert fastest.to_plain
    return [
        (f"{sum(gains) / len(gains):+.1%}", "accepted length, tree over linear, mean"),
        (f"{won} of {len(fixed)}", "cells where the tree is at least as fast as linear"),
        (
            f"{fastest.to_plain.value:.2f}x",
            f"plain decoding at best: {fastest.speculation}, {fastest.dataset}, batch {fastest.batch}",
        ),
    ]


def _best_of_all(results: Results) -> list[tuple[str, int, str, Estimate]]:
    """(data set, batch, fastest speculation, ratio to plain): what to use, apart from the shape fixed before looking."""
    rows = []
    for dataset in results.datasets:
        for batch in results.batch_sizes:
            cells = [c for c in results.cells if (c.dataset, c.batch) == (dataset, batch) and c.to_plain]
            best = max(cells, key=lambda c: c.to_plain.value if c.to_plain else 0.0, default=None)
            if best is not None and best.to_plain:
                name = best.speculation if best.to_plain.value >= 1 else f"plain (next: {best.speculation})"
                rows.append((dataset, batch, name, best.to_plain))
    return rows


def _others(results: Results) -> list[tuple[Cell, float]]:
    """Cells of `auto` and the like with their ratio to the fastest fixed choice, plain included."""
    shares = [(c, results.share_of_fastest(c)) for c in results.cells if c.kind == "other"]
    return [(cell, share) for cell, share in shares if share is not None]


def _loaded(about: dict[str, Any]) -> str:
    """A warning if other programs were running, else nothing."""
    loads = [load for load in about.get("load_average", []) if load is not None]
    cores = about["machine"]["cores"] or 1
    if max(loads, default=0.0) <= cores + 1:
        return ""
    return f"The machine had a load of {max(loads):.1f} on {cores} cores: other programs took part of it, so read the timings with care."
