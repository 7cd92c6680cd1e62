"""Parquet files in: footers tell everything but the rows, and only the columns asked for are read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vasuki.base.errors import InputError
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block, Survey, refuse_change
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection
from vasuki.io.values import python_values

_PAGE_BUFFER_BYTES = 2**20  # pages are read through a buffer of this size, so a row group is never held whole
_FOOTER_BYTES = 8  # the footer's length and the magic number, at the end of the file
_SAMPLES, _SAMPLE_BYTES = 64, 16 * 2**10


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A Parquet file."""

    location: Location

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        with self._opened() as file:
            schema = file.schema_arrow
            repeated = sorted(name for name in needed if schema.names.count(name) > 1)
            if repeated:
                raise InputError(f"{self.location} has several columns named '{repeated[0]}'")
            if ids is not None and ids.column in schema.names:
                for group in range(file.num_row_groups):
                    for batch in self._batches(file, group, [ids.column]):
                        for value in python_values(batch.column(ids.column)):
                            ids.add(value)
            types = {field.name: field.type for field in schema}
            numbers = {name: _extremes(file, name, types[name]) for name in stored if name in types}
            return Survey(file.metadata.num_rows, types, self._digest(), numbers)

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        first_row = rows.start
        with self._opened() as file:
            refuse_change(self.location, len(rows), file.metadata.num_rows)
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if len(selection.positions(first_row, num_rows)):
                    yield from self._group_blocks(file, group, columns, first_row, selection)
                first_row += num_rows

    def _group_blocks(
        self, file: Any, group: int, columns: Sequence[str], first_row: int, selection: Selection
    ) -> Iterator[Block]:
        for batch in self._batches(file, group, columns):
            positions = selection.positions(first_row, batch.num_rows)
            rows = [first_row + int(position) for position in positions]
            first_row += batch.num_rows
            if not rows:
                continue
            if len(rows) < batch.num_rows:
                batch = batch.take(pa.array(positions))
            yield Block(rows, {name: python_values(batch.column(name)) for name in columns})

    def _batches(self, file: Any, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of one row group, small enough that long rows do not fill the memory."""
        metadata = file.metadata.row_group(group)
        if not metadata.num_rows:
            return
        row_bytes = sum(
            chunk.total_uncompressed_size
            for chunk in map(metadata.column, range(metadata.num_columns))
            if chunk.path_in_schema.split(".")[0] in columns or chunk.path_in_schema in columns
        ) / metadata.num_rows  # fmt: skip
        batch_rows = max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / max(row_bytes, 1))))
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=list(columns), use_threads=False)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, with every complaint about it turned into an InputError that names it."""
        try:
            with self.location.open() as stream:
                yield pq.ParquetFile(stream, buffer_size=_PAGE_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot read {self.location} as Parquet: {_first_line(error)}") from None

    def _digest(self) -> bytes:
        """Hash of size, footer (schema, counts, offsets, statistics) and samples spread over the file.

        Files of up to 1 MiB are hashed whole. Times of change are left out on purpose: a copy of the same table on the
        next machine continues the job.
        """
        with self.location.open() as stream:
            size = stream.size()
            digest = hashlib.blake2b(str(size).encode(), digest_size=16)
            footer_bytes = int.from_bytes(stream.read_at(4, size - _FOOTER_BYTES), "little") + _FOOTER_BYTES
            digest.update(stream.read_at(footer_bytes, size - footer_bytes))
            stride = max(_SAMPLE_BYTES, size // _SAMPLES)
            for offset in range(0, size, stride):
                digest.update(stream.read_at(_SAMPLE_BYTES, offset))
            return digest.digest()


def _extremes(file: Any, name: str, arrow_type: Any) -> tuple[Any, ...]:
    """The least and the greatest integer of a column, by its statistics or, where it has none, by its type. Of decimals
    zero, which has a place among decimals only."""
    if pa.types.is_decimal(arrow_type):
        return (Decimal(0),)
    if not pa.types.is_integer(arrow_type):
        return ()
    column = next(index for index in range(len(file.schema)) if file.schema.column(index).path == name)
    chunks = (file.metadata.row_group(group).column(column) for group in range(file.num_row_groups))
    found = [chunk.statistics for chunk in chunks]
    found = [statistics for statistics in found if statistics is None or statistics.num_values]  # not of nulls alone
    if any(statistics is None or not statistics.has_min_max for statistics in found):
        limits = np.iinfo(arrow_type.to_pandas_dtype())
        return int(limits.min), int(limits.max)
    return tuple(value for statistics in found for value in (statistics.min, statistics.max))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
