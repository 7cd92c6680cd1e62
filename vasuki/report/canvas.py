"""The look of figures: colours, dashes and hatches, panels with a title, bars, legends, and axes in fitting units.

Figures can be read in grey and by colour-blind people: what colour tells apart, dashes and hatches tell too. The
colours are Okabe and Ito's. Whatever is simulated says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vasuki.report.job_runs import Result

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (8, 2, 2, 2, 2, 2)),
    (0, (3, 1.5, 1, 1.5, 1, 1.5)),
    (0, (1, 3)),
)
_SIMULATED_HATCH = "///"
_WIDTH_IN = 7.6
_DPI = 100
STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "vasuki",
    "figure.dpi": _DPI,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with its words."""

    name: str  # for a file
    title: str
    caption: str
    figure: Figure

    def svg(self) -> bytes:
        with matplotlib.rc_context(STYLE):
            return _saved(self.figure, "svg", metadata={"Date": None})

    def png(self) -> bytes:
        """Return the figure as PNG at 100 dots an inch."""
        with matplotlib.rc_context(STYLE):
            return _saved(self.figure, "png", dpi=_DPI)


def panels(
    title: str, results: Sequence[Result], num_panels: int, height_in: float, columns: int = 1
) -> tuple[Figure, list[Any]]:
    """A figure with a title, a note of what in it is simulated, and as many axes as asked for, row by row."""
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI)
    head_in = 0.36
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head_in / height_in))
    figure.text(0.01, 1 - 0.06 / height_in, title, fontsize=11, fontweight="bold", va="top")
    if note := _simulated_note(results):
        figure.text(0.99, 1 - 0.08 / height_in, note, fontsize=9, fontstyle="italic", va="top", ha="right")
    grid = list(figure.subplots(-(-num_panels // columns), columns, squeeze=False).flat)
    for axes in grid[num_panels:]:
        figure.delaxes(axes)
    return figure, grid[:num_panels]


def _simulated_note(results: Sequence[Result]) -> str:
    simulated = [result for result in results if result.simulated]
    if not simulated:
        return ""
    return "simulated" if len(simulated) == len(results) else "partly simulated"


def bars(
    axes: Any,
    results: Sequence[Result],
    values: Sequence[float],
    texts: Sequence[str],
    named: bool = True,
    marked: Sequence[float] = (),
) -> list[int]:
    """Horizontal bars, the first run on top, each with its text at the end. Returns their positions.

    Args:
        marked: where marks will be drawn, which the texts keep clear of.
    """
    ends = np.maximum(values, marked) if marked else np.asarray(values)
    positions = list(range(len(results)))
    for index, (result, value, text) in enumerate(zip(results, values, texts, strict=True)):
        axes.barh(
            index,
            value,
            0.55,
            color=COLOURS[index % len(COLOURS)],
            alpha=0.75,
            edgecolor=BLACK,
            linewidth=0.8,
            hatch=_SIMULATED_HATCH if result.simulated else "",
        )
        axes.annotate(text, (ends[index], index), xytext=(8, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.32 * max(ends) if any(ends) else 1.0)
    name_bars(axes, results, named)
    return positions


def name_bars(axes: Any, results: Sequence[Result], named: bool = True) -> None:
    labels = ["\n".join(textwrap.wrap(result.full_label, 22)) if named else "" for result in results]
    axes.set_yticks(range(len(results)), labels)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def bars_height(results: Sequence[Result]) -> float:
    return 1.35 + 0.5 * len(results)


def legend_above(axes: Any) -> None:
    axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), borderpad=0.1)


def legend_below(figure: Figure, axes: Any) -> None:
    """Put the legend below the axes, where no curve can run through it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if max(map(len, labels)) < 30 else 2)


def line_look(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def time_unit(longest_s: float) -> tuple[float, str]:
    """(seconds in the unit, its name)."""
    if longest_s < 180:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")


def byte_unit(most_bytes: float) -> tuple[float, str]:
    return next(
        ((2.0**power, name) for power, name in ((30, "GiB"), (20, "MiB")) if most_bytes >= 2**power), (1024.0, "KiB")
    )


def _saved(figure: Figure, kind: str, **keywords: Any) -> bytes:
    with BytesIO() as buffer:
        figure.savefig(buffer, format=kind, facecolor="white", **keywords)
        return buffer.getvalue()
