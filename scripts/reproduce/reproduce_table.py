"""What a reproduced claim gives back: a Markdown table with the paper's figures and ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

Figures = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Options:
    """How large, and from which data."""

    data: Path | None = None  # folder with the traces
    scale: float = 1.0  # of the numbers of requests; the papers' at 1

    def rows(self, full: int, least: int = 8) -> int:
        """Requests to run where the full experiment has `full`."""
        return max(least, round(full * self.scale))


@dataclass(slots=True)
class Table:
    """One claim."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)  # the same as data, one entry for each row

    def add(self, *cells: str, **figures: float | int | str) -> None:
        """A row as it is printed, and as data."""
        assert len(cells) == len(self.header), "a cell for each column"
        self.rows.append(cells)
        self.figures.append({name: _rounded(value) for name, value in figures.items()})

    def markdown(self) -> str:
        """The title and the table."""
        lines = [f"**{self.title}**", "", _line(self.header), _line(["---"] * len(self.header))]
        return "\n".join(lines + [_line(row) for row in self.rows])


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rounded(value: float | int | str) -> float | int | str:
    return float(f"{value:.5g}") if isinstance(value, float) else value
