"""Figures by name, one column for each run, in as many blocks as a terminal has no room for side by side."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from vasuki.base.units import UNKNOWN

NAME_WIDTH, COLUMN_WIDTH = 26, 18

Rows = list[tuple[str, list[str]]]


def terminal_width() -> int:
    """Columns of the terminal, from 60 to 120; 100 where there is none."""
    return min(120, max(60, shutil.get_terminal_size((100, 24)).columns))


def blocks(headings: Sequence[str], rows: Rows, width: int) -> Iterator[str]:
    """Lines of the table, an empty one before each block. Of a block, rows without a figure are left out."""
    column = max([COLUMN_WIDTH, *(len(cell) + 2 for _, cells in rows for cell in cells)])
    abreast = max(1, (width - NAME_WIDTH) // column)
    for first in range(0, len(headings), abreast):
        part = slice(first, first + abreast)
        titles = [textwrap.wrap(heading, column - 2) or [""] for heading in headings[part]]
        height = max(map(len, titles))
        yield ""
        for row in range(height):
            yield _line("", [title[row] if row < len(title) else "" for title in titles], column)
        yield "-" * (NAME_WIDTH + column * len(titles))
        for name, cells in rows:
            if any(cell != UNKNOWN for cell in cells[part]):
                yield _line(name, cells[part], column)


def _line(name: str, cells: Sequence[str], width: int) -> str:
    return (f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of a text, all but the first indented."""
    indent = " " * (len(text) - len(text.lstrip()))
    while len(text) > width:
        cut = text.rfind(" ", len(indent) + 1, width + 1)
        if cut <= 0:
            break
        yield text[:cut]
        text = indent + "  " + text[cut + 1 :].lstrip()
    yield text
