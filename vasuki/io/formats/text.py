"""The common part of JSON Lines and CSV: files read row by row in plain Python.

Ragged, huge and broken rows are met every day in text, so no row depends on its neighbours and each is parsed only when
somebody wants it. The first pass hashes the content on the way.
"""

from __future__ import annotations

import abc
import csv
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vasuki.base.errors import InputError, one_line
from vasuki.io.formats.content import PIECE_BYTES, Content, SeenStream
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block, Survey
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection


class Malformed(ValueError):
    """A row that cannot be used; the message says why.

    Args:
        message: why.
        values: what could be read of it all the same, such as its id.
    """

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


@dataclass(frozen=True, slots=True)
class Record:
    """A row as it lies in the file."""

    num_bytes: int
    line: int  # in which it ends, from 1
    parse: Callable[[], dict[str, Any]]  # values by column; raises Malformed


class TextSource(abc.ABC):
    """A text file of rows."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._content = Content(location)

    @abc.abstractmethod
    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        """See `Source.survey`."""

    @abc.abstractmethod
    def records(self, stream: io.BufferedReader) -> Iterator[Record]:
        """Every row of the open file, unparsed."""

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        block, num_bytes = _empty_block(columns), 0
        with self._opened() as stream:
            for row, record in enumerate(self.records(stream), rows.start):
                if not selection.wants(row):
                    continue
                try:
                    values = record.parse()
                except Malformed as problem:
                    values = problem.values
                    block.malformed[row] = str(problem)
                    block.lines[row] = record.line
                block.rows.append(row)
                for name in columns:
                    block.columns[name].append(values.get(name))
                num_bytes += record.num_bytes
                if len(block.rows) == BLOCK_ROWS or num_bytes >= BLOCK_BYTES:
                    yield block
                    block, num_bytes = _empty_block(columns), 0
        if block.rows:
            yield block

    def parse(self, record: Record, ids: IdHashes | None) -> Mapping[str, Any] | None:
        """A row's values during the survey, whose id is noted; None if malformed."""
        try:
            values = record.parse()
        except Malformed as problem:
            if ids is not None:
                ids.add(problem.values.get(ids.column), line=record.line)
            return None
        if ids is not None:
            ids.add(values.get(ids.column))
        return values

    @contextmanager
    def _opened(self, observe: Callable[[bytes], None] = lambda data: None) -> Iterator[io.BufferedReader]:
        """The unpacked content, with every complaint about the file turned into an InputError that names it."""
        try:
            with self.location.open_stream() as stream:
                yield io.BufferedReader(SeenStream(stream, self._content, observe), PIECE_BYTES)
        except UnicodeError as error:
            what = f"{self.location} cannot be decoded: {error}"
            if isinstance(error, UnicodeDecodeError):
                what = f"{self.location} is not {error.encoding.upper()} (byte {error.object[error.start]:#04x})"
            raise InputError(f"{what}; input.csv.encoding says what it is, such as cp1252") from None
        except (OSError, pa.ArrowException, csv.Error) as error:
            raise InputError(f"cannot read {self.location}: {one_line(error)}") from None


def _empty_block(columns: Sequence[str]) -> Block:
    return Block([], {name: [] for name in columns})
