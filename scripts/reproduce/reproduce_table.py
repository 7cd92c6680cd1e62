"""What a reproduced claim gives: rows of figures, the paper's beside ours, that are printed as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]  # numbers and words


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and from which data."""

    data: Path | None = None  # folder with the traces
    scale: float = 1.0  # of the numbers of requests; the papers' at 1

    def rows(self, full: int, least: int = 8) -> int:
        """Requests to run where the full experiment has `full`."""
        return max(least, round(full * self.scale))


Claim = Callable[[Options], Iterable[Figures]]  # the first line of its docstring is a title


def rounded(rows: Iterable[Figures]) -> list[Figures]:
    """The same with five digits."""
    return [
        {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]


def title(claim: Claim) -> str:
    """What it is about."""
    return (claim.__doc__ or "").strip().partition("\n")[0]


def markdown(rows: Iterable[Figures]) -> str:
    """A table with a column for each name, in the order in which they come; no row needs to have all."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return lines(names, ([written(row.get(name, "")) for name in names] for row in rows))


def lines(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table of texts."""
    header = list(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def written(value: float | int | str) -> str:
    """Four digits of a fraction; all of a count."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"
