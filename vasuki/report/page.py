"""A comparison as one HTML file: figures, style and words are inside, and nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from types import ModuleType
from typing import TYPE_CHECKING

from vasuki.base.errors import JobFileError, one_line
from vasuki.base.units import listing
from vasuki.io.location import Location
from vasuki.report.comparison import Comparison
from vasuki.report.job_runs import JobRuns, Result
from vasuki.report.table import figures_of, overview_of
from vasuki.report.words import answer, caveats, paper_metric

if TYPE_CHECKING:
    from vasuki.report.canvas import Plot

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 52rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; }
.answer { border-left: 4px solid #0072B2; background: #f2f7fb; padding: .6rem 1rem; }
.answer p { margin: .4rem 0; } .answer p:first-child { font-size: 1.15rem; font-weight: 600; }
.caveats { border-left: 4px solid #E69F00; background: #fdf7ea; padding: .3rem 1rem; margin-top: .6rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: pre; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 2px solid #666; white-space: normal; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; } figcaption { font-size: .9rem; color: #444; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.2rem; }
@media print { body { margin: 0; max-width: none; } figure, tr { break-inside: avoid; } }
"""

_GLOSSARY = {
    "makespan": "From the first row read to the last row durable.",
    "lower bound": "The least time that the cost model allows for these rows, in any order and with steps of any "
    "kind, on a machine as fast as this one was. The rest is all that better planning could save.",
    "datasheet bound": "The least time that the card's datasheet allows for these rows, whatever the schedule.",
    "tokens": "Prompt and output tokens of the finished rows. Those computed again, after preemption or a break, cost "
    "time, but are not counted as work.",
    "cost": "Paid hours times the price of an hour, loading of the model included.",
    "QPS / ($/FP32 GFLOP/W)": "The cost metric of the Vasuki paper (section 3.2): rows a second over dollars per FP32 "
    "gigaflop per watt (A10 12, A40 52). Higher is better. Nobody is billed by it.",
    "energy": "Where a run recorded none, the limit is the board's power limit over all paid hours.",
    "tail": "The end of the run, from when fewer than half of the mean number of sequences were in a step.",
}


def write_html(comparison: Comparison, path: str) -> None:
    """Write the page of a comparison.

    Raises:
        JobFileError: matplotlib is not installed, or the file cannot be written.
    """
    figures = _figures()
    names = listing([workload.name for workload in comparison.workloads])
    cards = listing(sorted({result.run.gpu for workload in comparison.workloads for result in workload.results}))
    body = [f"<h1>{escape(names)} on {escape(cards)}{_how(comparison)}</h1>"]
    if overview := overview_of(comparison):
        body.append(_box("answer", overview))
    several = len(comparison.workloads) > 1
    for workload in comparison.workloads:
        body += _workload_parts(workload, figures.plots_of(workload), several)
    _write(path, f"{names}: cost report", [*body, *_glossary()])


def _figures() -> ModuleType:
    try:
        from vasuki.report import figures
    except ImportError:
        raise JobFileError("the HTML report needs matplotlib: pip install 'vasuki[report]'") from None
    return figures


def _how(comparison: Comparison) -> str:
    simulated = [result.simulated for workload in comparison.workloads for result in workload.results]
    return " (simulated)" if all(simulated) else " (partly simulated)" if any(simulated) else ""


def _workload_parts(workload: JobRuns, plots: Sequence[Plot], named: bool) -> Iterable[str]:
    if named:
        yield f"<h2>{escape(workload.name)}</h2>"
    yield _box("answer", answer(workload))
    if notes := caveats(workload):
        yield _box("caveats", notes)
    headings = ["", *(result.label for result in workload.results)]
    yield _table(headings, [[name, *cells] for name, cells in figures_of(workload.results)])
    if note := paper_metric(workload):
        yield f"<p>{escape(note)}</p>"
    yield from map(_figure, plots)
    yield "<h3>Where this comes from</h3>"
    yield _table(["run", "folder", "ended (UTC)", "config", "vasuki"], [_origin(result) for result in workload.results])


def _origin(result: Result) -> list[str]:
    run = result.run
    ended = f"{run.finished_at:%Y-%m-%d %H:%M}"
    version = run.manifest.versions.get("vasuki", "-")
    return [result.full_label, str(run.place), ended, run.manifest.config_hash or "-", version]


def _glossary() -> list[str]:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in _GLOSSARY.items())
    return ["<h2>What the words mean</h2>", f"<dl>{terms}</dl>"]


def _box(kind: str, sentences: Iterable[str]) -> str:
    return f'<div class="{kind}">' + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences) + "</div>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figure(plot: Plot) -> str:
    """An SVG image in the page itself; as an image, its ids cannot clash with other images'."""
    data = base64.b64encode(plot.svg()).decode()
    alt = escape(f"{plot.title}. {plot.caption}")
    caption = escape(plot.caption)
    return (
        f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _write(path: str, title: str, body: Iterable[str]) -> None:
    page = "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )
    try:
        Location.parse(path).write_bytes(page.encode())
    except (OSError, ValueError) as error:
        raise JobFileError(f"cannot write {path}: {one_line(error)}") from None
