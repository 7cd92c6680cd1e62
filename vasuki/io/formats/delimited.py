"""CSV in: the first line names the columns, and every value is text.

"007" stays "007" and a date stays as it was written; settings such as `max_tokens` are read from their text. A row
with too few or too many cells fails by itself. Of columns that are copied to the output, the job may ask that numbers
and dates keep their type.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import logging
import sys
from collections.abc import Collection, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa

from vasuki.base.config import CsvConfig
from vasuki.base.errors import InputError
from vasuki.io.formats.cells import cell_value
from vasuki.io.formats.dialect import SAMPLE_BYTES, Dialect, dialect_of
from vasuki.io.formats.kinds import Kinds
from vasuki.io.formats.sources import Survey
from vasuki.io.formats.text import Malformed, Record, TextSource
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location

log = logging.getLogger(__name__)


class CsvSource(TextSource):
    """A CSV file, and what the job says of how it is written."""

    def __init__(self, location: Location, config: CsvConfig) -> None:
        super().__init__(location)
        self._config = config
        self._usual = "\t" if ".tsv" in location.name.lower() else ","

    def records(self, stream: IO[bytes]) -> Iterator[Record]:
        reader, header = self._begin(stream)
        try:
            for cells in reader:
                if cells:  # a blank line is no row
                    yield Record(sum(map(len, cells)), reader.line_num, partial(_parse, header, cells, reader.line_num))
        except csv.Error as error:
            raise InputError(f"cannot read {self.location}: {error} in line {reader.line_num}") from None

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        digest = hashlib.blake2b(digest_size=16)
        with self._opened() as stream:
            dialect = self._dialect(stream)
            _, header = self._begin(stream)
        if dialect != Dialect(self._usual):
            log.info("%s has %s", self.location, dialect)
        repeated = sorted(name for name in needed if header.count(name) > 1)
        if repeated:
            raise InputError(f"{self.location} has several columns named '{repeated[0]}'")
        kinds = Kinds(stored if self._config.types == "infer" else ())
        num_rows = 0
        with self._opened(digest.update) as stream:
            for record in self.records(stream):
                num_rows += 1
                if (ids is not None or kinds.columns) and (values := self.parse(record, ids)):
                    kinds.see({name: cell_value(values[name]) for name in kinds.columns if name in values})
        types = dict.fromkeys(header, pa.string()) | {name: kinds.type_of(name) for name in kinds.columns}
        return Survey(num_rows, {name: types[name] for name in header}, digest.digest(), kinds.integers)

    def _dialect(self, stream: IO[bytes]) -> Dialect:
        """The dialect of an open file, of which nothing was read."""
        return dialect_of(stream.peek(SAMPLE_BYTES)[:SAMPLE_BYTES], self._config, self._usual)  # type: ignore[attr-defined]

    def _begin(self, stream: IO[bytes]) -> tuple[Any, list[str]]:
        """The reader of an open file's rows, and the names of its columns."""
        csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
        dialect, named = self._dialect(stream), self._config.header
        reader = dialect.reader(io.TextIOWrapper(stream, dialect.encoding, newline=""))
        if named is True:
            header: list[str] = next(reader, [])
            if not header:
                raise InputError(f"{self.location} is empty: a CSV file starts with the names of its columns")
            return reader, header
        first: list[str] = next(reader, [])
        header = list(named) if named else [f"column{index}" for index in range(len(first))]
        return _Again(first, reader), header


class _Again:
    """The rows of a reader, of which the first has been read."""

    def __init__(self, first: list[str], reader: Any) -> None:
        self._rows = itertools.chain([first], reader)
        self._reader = reader

    @property
    def line_num(self) -> int:
        return int(self._reader.line_num)

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows


def _parse(header: list[str], cells: list[str], line: int) -> dict[str, Any]:
    if len(cells) != len(header):
        raise Malformed(f"the row that ends in line {line} has {len(cells)} cells, the header {len(header)}")
    return dict(zip(header, cells, strict=True))
