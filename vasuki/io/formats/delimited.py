"""CSV in: the first line names the columns, and every value is text.

"007" stays "007" and a date stays as it was written; settings such as `max_tokens` are read from their text. A row
with too few or too many cells fails by itself. A file that ends in .tsv is separated by tabs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
from collections.abc import Collection, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa

from vasuki.base.errors import InputError
from vasuki.io.formats.sources import Survey
from vasuki.io.formats.text import Malformed, Record, TextSource
from vasuki.io.ids import IdHashes


class CsvSource(TextSource):
    """A CSV file with a header."""

    def records(self, stream: IO[bytes]) -> Iterator[Record]:
        reader = self._reader(stream)
        header = self._header(reader)
        try:
            for cells in reader:
                if cells:  # a blank line is no row
                    yield Record(sum(map(len, cells)), reader.line_num, partial(_parse, header, cells, reader.line_num))
        except csv.Error as error:
            raise InputError(f"cannot read {self.location}: {error} in line {reader.line_num}") from None

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        with self._opened() as stream:
            header = self._header(self._reader(stream))
        repeated = sorted(name for name in needed if header.count(name) > 1)
        if repeated:
            raise InputError(f"{self.location} has several columns named '{repeated[0]}'")
        digest = hashlib.blake2b(digest_size=16)
        num_rows = 0
        with self._opened(digest.update) as stream:
            for record in self.records(stream):
                num_rows += 1
                if ids is not None:
                    self.parse(record, ids)
        return Survey(num_rows, dict.fromkeys(header, pa.string()), digest.digest())

    def _reader(self, stream: IO[bytes]) -> Any:
        csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
        delimiter = "\t" if ".tsv" in self.location.name else ","
        return csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)

    def _header(self, reader: Any) -> list[str]:
        header: list[str] = next(reader, [])
        if not header:
            raise InputError(f"{self.location} is empty: a CSV file starts with the names of its columns")
        return header


def _parse(header: list[str], cells: list[str], line: int) -> dict[str, Any]:
    if len(cells) != len(header):
        raise Malformed(f"the row that ends in line {line} has {len(cells)} cells, the header {len(header)}")
    return dict(zip(header, cells, strict=True))
