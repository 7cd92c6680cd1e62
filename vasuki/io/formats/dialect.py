"""How a CSV file is written: what separates its cells, what quotes them, and in which encoding.

What the job leaves to us is read off the first lines, and only where they leave no doubt: a mark of UTF-16, one
separator alone that cuts most lines into as many cells as the header.
"""

from __future__ import annotations

import codecs
import csv
import io
from dataclasses import dataclass
from typing import Any

from vasuki.base.config import CsvConfig

SAMPLE_BYTES = 2**16
_SAMPLE_ROWS = 20
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The rules by which one file is cut into rows and cells."""

    delimiter: str = ","
    quote: str = '"'  # empty: nothing is quoted
    encoding: str = "utf-8-sig"

    def reader(self, lines: Any) -> Any:
        """A `csv.reader` of decoded lines."""
        if not self.quote:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote, strict=True)

    def __str__(self) -> str:
        marks = {'"': "double quotes", "'": "single quotes", "": "no quotes"}
        return (
            f"{_DELIMITERS.get(self.delimiter, repr(self.delimiter))} between cells, "
            f"{marks.get(self.quote, repr(self.quote))}, {self.encoding.removesuffix('-sig')}"
        )


def dialect_of(start: bytes, config: CsvConfig, usual: str) -> Dialect:
    """The dialect of a file by its first bytes, where the job does not say it.

    Args:
        start: some `SAMPLE_BYTES`, or all.
        config: what the job says.
        usual: the delimiter of a file that may be read with several.

    Raises:
        UnicodeDecodeError: the bytes are not in that encoding.
    """
    encoding = config.encoding
    if encoding == "auto":
        encoding = "utf-16" if start.startswith(_UTF_16_MARKS) else "utf-8"
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"
    text = codecs.getincrementaldecoder(encoding)().decode(start)
    if config.delimiter != "auto":
        return Dialect(config.delimiter, config.quote, encoding)
    found = [Dialect(delimiter, config.quote, encoding) for delimiter in _DELIMITERS]
    fitting = [dialect for dialect in found if _fits(text, dialect, len(start) < SAMPLE_BYTES)]
    return fitting[0] if len(fitting) == 1 else Dialect(usual, config.quote, encoding)


def _fits(text: str, dialect: Dialect, whole: bool) -> bool:
    """Whether the header has several cells, and most of the lines behind it have as many."""
    widths = [len(cells) for cells in _first_rows(text, dialect, whole)]
    return bool(widths) and widths[0] > 1 and 2 * widths.count(widths[0]) > len(widths)


def _first_rows(text: str, dialect: Dialect, whole: bool) -> list[list[str]]:
    """The first rows, but for the last of a text that is cut; those before one that breaks the rules of quotes."""
    found: list[list[str]] = []
    try:
        for cells in dialect.reader(io.StringIO(text, newline="")):
            if len(found) > _SAMPLE_ROWS:
                return found
            found += [cells] if cells else []
    except csv.Error:
        return found
    return found if whole else found[:-1]
