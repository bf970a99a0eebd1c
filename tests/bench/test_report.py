"""The page: self-contained, complete, escaped; and what is said when it cannot be drawn."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trtllm_v4tree.bench.report import MissingExtra, check_installed, inline_svg, write_report
from trtllm_v4tree.bench.results import summarise
from trtllm_v4tree.bench.verdicts import verdicts

from .synthetic import full_plan, samples

ABOUT = {
    "machine": {"processor": "a <b> chip", "cores": 2},
    "versions": {"python": "3.11"},
    "engine": {"target": "onnxruntime", "dtype": "float32"},
    "settings": {},
    "command": ["v4tree", "bench", "--dataset", "<x>"],
    "date": "today",
    "load_average": [9.0, 1.0],
    "seconds": 1.0,
}


_LINKS = ("src", "href", "xlink:href")


class _Checker(HTMLParser):
    """Collects what the page would load from elsewhere, and checks that elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loaded += [v for k, v in attributes if k in _LINKS and v and not v.startswith(("#", "data:"))]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_self_contained_and_complete(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from trtllm_v4tree.bench.figures import PICTURES

    plan = full_plan(batch_sizes=(1, 4), budgets=(5, 8), num_prompts=4, others=("s2_k2_d4",))
    results = summarise(samples(plan), plan, ABOUT, False)
    page = write_report(results, tmp_path).read_text()
    checker = _Checker()
    checker.feed(page)
    assert not checker.loaded and not checker.open
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "policies" in PICTURES
    for name in PICTURES:
        assert f'id="{name}"' in page
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for verdict in verdicts(results):
        assert verdict.claim in page
    assert "Other speculations against" in page and page.count("<td>s2_k2_d4</td>") >= 2 * 3 * 2
    assert "a &lt;b&gt; chip" in page and "&lt;x&gt;" in page
    assert "not finished" in page and "load of 9.0" in page


def test_one_data_set_one_batch_one_budget_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = full_plan(datasets=("mine",), batch_sizes=(2,), budgets=(6,), num_prompts=2, min_blocks=1)
    assert write_report(summarise(samples(plan), plan, ABOUT, True), tmp_path).is_file()


def test_missing_packages_are_one_sentence_with_the_command() -> None:
    with pytest.raises(MissingExtra, match=r"needs no_such_package: .*pip install 'trtllm_v4tree\[bench\]'"):
        check_installed(("no_such_package",))


def test_ids_of_pictures_cannot_collide() -> None:
    text = '<?xml?><svg width="10pt" height="5pt"><g id="a"/><use xlink:href="#a" clip-path="url(#a)"/></svg>'
    made = inline_svg(text, "p")
    assert made.startswith("<svg") and 'id="p-a"' in made and 'href="#p-a"' in made and "url(#p-a)" in made
