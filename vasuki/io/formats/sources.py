"""An input file, whatever its format: surveyed once, then read in blocks of rows.

A row that cannot be parsed does not stop a job: it is listed in `Block.malformed` and becomes a failed row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.selection import Selection

BLOCK_ROWS = 1024
BLOCK_BYTES = 8 * 2**20  # of raw input: rows of many megabytes come in smaller blocks


@dataclass(frozen=True, slots=True)
class Survey:
    """The result of one pass over a file's footer (Parquet) or content (text)."""

    num_rows: int
    types: dict[str, Any]  # pyarrow type by column; of a text file those that its values suggest
    digest: bytes  # changes when the content does
    numbers: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # extremes that the columns' types have to hold


@dataclass(slots=True)
class Block:
    """Some rows in input order, as Python values by column. All lists are equally long."""

    rows: list[int]  # numbers within the whole input
    columns: dict[str, list[Any]]
    malformed: dict[int, str] = field(default_factory=dict)  # why a row cannot be used; values it lacks are None
    lines: dict[int, int] = field(default_factory=dict)  # of malformed rows, which have no id but that
    arrived_s: float = 0.0  # when these rows arrived, on the clock of the run

    def ids(self, column: str) -> list[Any]:
        """The values of the id column. A malformed row without one is known by its line."""
        values = zip(self.rows, self.columns[column], strict=True)
        return [self.lines.get(row) if value is None or value == "" else value for row, value in values]


class Source(Protocol):
    """A file of one format."""

    location: Location

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        """Count the rows, find the types, take a fingerprint, and note the ids.

        Args:
            needed: columns the job reads.
            stored: columns of `needed` whose type matters, because they are copied to the output.
            ids: where to note the values of the id column, if there is one.

        Raises:
            InputError: the file is unreadable or corrupt.
            JobFileError: a row has no id.
        """
        ...

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection) -> Iterator[Block]:
        """Read the wanted rows. `rows` are the numbers that the file's rows, as surveyed, have within the input.

        Raises:
            InputError: the file is unreadable, or is not what it was when it was surveyed. No row that came before that
                is another than it was.
        """
        ...
