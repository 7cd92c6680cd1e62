"""The common part of JSON Lines and CSV: files read row by row in plain Python.

Ragged, huge and broken rows are met every day in text, so no row depends on its neighbours and each is parsed only when
somebody wants it. The first pass hashes the content on the way.
"""

from __future__ import annotations

import abc
import csv
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from vasuki.base.errors import InputError, one_line
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block, Survey, refuse_change
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection

_BUFFER_BYTES = 2**20


class Malformed(ValueError):
    """A row that cannot be parsed; the message says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row as it lies in the file."""

    num_bytes: int
    parse: Callable[[], dict[str, Any]]  # values by column; raises Malformed


class TextSource(abc.ABC):
    """A text file of rows."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @abc.abstractmethod
    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        """See `Source.survey`."""

    @abc.abstractmethod
    def records(self, stream: IO[bytes]) -> Iterator[Record]:
        """Every row of the open file, unparsed."""

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        block, num_bytes = _empty_block(columns), 0
        num_rows = 0
        with self._opened() as stream:
            for num_rows, record in enumerate(self.records(stream), 1):
                row = rows.start + num_rows - 1
                if row >= rows.stop or not selection.wants(row):
                    continue
                try:
                    values = record.parse()
                except Malformed as problem:
                    values = {}
                    block.malformed[row] = str(problem)
                block.rows.append(row)
                for name in columns:
                    block.columns[name].append(values.get(name))
                num_bytes += record.num_bytes
                if len(block.rows) == BLOCK_ROWS or num_bytes >= BLOCK_BYTES:
                    yield block
                    block, num_bytes = _empty_block(columns), 0
        if block.rows:
            yield block
        refuse_change(self.location, len(rows), num_rows)

    def parse(self, record: Record, ids: IdHashes | None) -> dict[str, Any] | None:
        """A row's values during the survey; None if malformed, which is fatal only where rows must have an id."""
        try:
            return record.parse()
        except Malformed as problem:
            if ids is not None:
                raise InputError(f"{self.location}: {problem}, so the row has no id") from None
            return None

    @contextmanager
    def _opened(self, observe: Callable[[bytes], None] = lambda data: None) -> Iterator[IO[bytes]]:
        """The unpacked content, with every complaint about the file turned into an InputError that names it."""
        try:
            with self.location.open_stream() as stream:
                yield io.BufferedReader(_Observed(stream, observe), _BUFFER_BYTES)
        except UnicodeDecodeError as error:
            raise InputError(f"{self.location} is not UTF-8 (byte {error.object[error.start]:#04x})") from None
        except (OSError, pa.ArrowException, csv.Error) as error:
            raise InputError(f"cannot read {self.location}: {one_line(error)}") from None


class _Observed(io.RawIOBase):
    """A stream that shows every byte it passes on to an observer."""

    def __init__(self, stream: IO[bytes], observe: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._observe = observe

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._observe(data)
        buffer[: len(data)] = data
        return len(data)


def _empty_block(columns: Sequence[str]) -> Block:
    return Block([], {name: [] for name in columns})
