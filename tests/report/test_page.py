from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text
from run_folders import simulate_run, write_run

from vasuki.base.errors import JobFileError
from vasuki.report import compare, load_runs, write_html
from vasuki.report.canvas import Plot
from vasuki.report.figures import plots_of

ALL = {"makespan", "cost", "price", "timeline", "tail", "kv", "cdf", "copies", "prediction"}
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.images: list[bytes] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action"):
                self.references.append(value or "")
        if tag == "img":
            assert dict(attrs)["alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One card measured, one simulated, with copies and predictions."""
    folder = tmp_path_factory.mktemp("runs")
    simulate_run(folder / "a10", "a10", num_rows=40, parks=True, simulated=False, noise=0.05)
    simulate_run(folder / "a40", "a40", num_rows=40)
    return folder


@pytest.fixture(scope="module")
def plots(runs: Path) -> list[Plot]:
    (workload,) = compare(load_runs([str(runs)])).workloads
    return plots_of(workload)


def words_on(plot: Plot) -> str:
    figure = plot.figure
    texts = [text.get_text() for text in figure.texts]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), *(label.get_text() for label in axes.get_yticklabels())]
        legend = axes.get_legend()
        texts += [text.get_text() for text in legend.get_texts()] if legend else []
    return " ".join(texts)


def test_every_figure_is_there_and_names_its_units(plots: list[Plot]) -> None:
    assert {plot.name for plot in plots} == ALL
    for plot in plots:
        assert plot.figure.axes[-1].get_xlabel(), plot.name
        assert all(axes.has_data() for axes in plot.figure.axes), plot.name
        assert plot.png().startswith(b"\x89PNG")


def test_every_figure_of_a_simulated_run_says_so(plots: list[Plot]) -> None:
    for plot in plots:
        if plot.name == "prediction":  # measured runs alone
            assert "simulated" not in words_on(plot)
        else:
            assert "partly simulated" in words_on(plot), plot.name
            assert "A40 (simulated)" in words_on(plot), plot.name


def test_words_and_legends_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Text] = []
    draw = Text.draw

    def noted(self: Text, renderer: Any) -> None:
        drawn.append(self)
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", noted)
    for gpu in ("a10", "a40"):
        simulate_run(tmp_path / gpu, gpu, num_rows=8, parks=True)
        measured = simulate_run(tmp_path / f"{gpu}-sarathi", gpu, num_rows=8, simulated=False, noise=0.1)
        manifest = json.loads((measured / "manifest.json").read_text())
        manifest["job"]["engine"]["policy"] = "sarathi"
        manifest["cost"]["amount"] = 0.0000224
        (measured / "manifest.json").write_text(json.dumps(manifest))
    (workload,) = compare(load_runs([str(tmp_path)])).workloads
    assert {result.label for result in workload.results} >= {"A10 vasuki", "A40 sarathi"}
    for plot in plots_of(workload):
        drawn.clear()
        plot.png()
        legends = plot.figure.findobj(Legend)
        in_legends = {text for legend in legends for text in legend.get_texts()}
        words = {text for text in drawn if text.get_visible() and text.get_text()} - in_legends
        assert len(words) > 5
        boxes = [(thing, thing.get_window_extent().padded(-1)) for thing in (*words, *legends)]
        for (one, box), (other, other_box) in combinations(boxes, 2):
            assert not box.overlaps(other_box), (plot.name, str(one), str(other))


def test_figures_with_nothing_to_show_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a10", device={"name": "NVIDIA Nameless"})
    (workload,) = compare(load_runs([str(tmp_path)])).workloads
    assert [plot.name for plot in plots_of(workload)] == ["makespan"]


def test_the_page_is_self_contained(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(compare(load_runs([str(runs)])), str(path))
    text = path.read_text()
    page = Page(text)
    assert len(page.references) == len(ALL)
    for reference in page.references:
        assert reference.startswith("data:image/svg+xml;base64,")
        image = base64.b64decode(reference.partition(",")[2]).decode()
        assert not re.findall(r"(?:href|src)=\"(?!#)", image)
        assert "url(http" not in image
    assert not re.search(r"https?://|@import|<script|<link", text)
    assert page.text.index("finish") < page.text.index("makespan")
    assert "A40 (simulated)" in page.text
    assert "summarise on A10 and A40 (partly simulated)" in page.text


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    run = simulate_run(tmp_path / "run", "a40", num_rows=5)
    pages = []
    for name in ("one.html", "two.html"):
        write_html(compare(load_runs([str(run)])), str(tmp_path / name))
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_names_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "run", name="<script>alert(1)</script>")
    path = tmp_path / "report.html"
    write_html(compare(load_runs([str(tmp_path / "run")])), str(path))
    assert "<script" not in path.read_text()


def test_the_terminal_report_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, vasuki.report; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_matplotlib_it_says_what_to_install(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vasuki.report

    monkeypatch.setitem(sys.modules, "vasuki.report.figures", None)
    monkeypatch.delattr(vasuki.report, "figures", raising=False)
    with pytest.raises(JobFileError, match=r"needs matplotlib: pip install 'vasuki\[report\]'"):
        write_html(compare(load_runs([str(runs)])), str(tmp_path / "report.html"))


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", device={})
    with pytest.raises(JobFileError, match="cannot write"):
        write_html(compare(load_runs([str(run)])), str(tmp_path / "missing" / "report.html"))
