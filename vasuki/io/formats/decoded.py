"""How large a batch of Arrow data becomes as Python values, and how to cut it before it does.

A column may hold a text of megabytes once, in a dictionary, and name it in every row: on disk and in Arrow that costs
four bytes a row, in Python the whole text each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vasuki.base.arrays import Ints
from vasuki.base.errors import InputError
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.selection import Selection
from vasuki.io.values import plain_values

_VALUE_BYTES = 16  # of a number, or around a text
Piece = tuple[Any, int]  # a record batch, and about how many bytes it takes, decoded
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def slices(batch: Any, most_bytes: int) -> Iterator[tuple[Any, int]]:
    """A record batch in pieces of at most `most_bytes` decoded, or of one larger row. Each comes with its bytes."""
    zeros = np.zeros(batch.num_rows, dtype=np.int64)
    ends = np.cumsum(sum((row_bytes(column) for column in batch.columns), zeros))
    start = before = 0
    while start < batch.num_rows:
        stop = max(start + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
        yield batch.slice(start, stop - start), int(ends[stop - 1]) - before
        start, before = stop, int(ends[stop - 1])


def refuse_repeated(names: Sequence[str], needed: Iterable[str], location: Location) -> None:
    """Raises InputError where a column that the job reads is there more than once."""
    repeated = sorted(name for name in needed if names.count(name) > 1)
    if repeated:
        raise InputError(f"{location} has several columns named '{repeated[0]}'")


def note_ids(pieces: Iterable[Piece], ids: IdHashes) -> None:
    """Note the values of the id column. Raises JobFileError for a row without one."""
    for piece, _ in pieces:
        for value in plain_values(piece.column(ids.column)):
            ids.add(value)


def blocks_of(pieces: Iterable[Piece], columns: Sequence[str], first_row: int, selection: Selection) -> Iterator[Block]:
    """The wanted rows of some pieces, put together to blocks. `first_row` is the number of the first."""
    block, num_bytes = Block([], {name: [] for name in columns}), 0
    for piece, piece_bytes in pieces:
        positions = selection.positions(first_row, piece.num_rows)
        rows = [first_row + int(position) for position in positions]
        first_row += piece.num_rows
        if not rows:
            continue
        if len(rows) < piece.num_rows:
            piece = piece.take(pa.array(positions))
        if block.rows and (len(block.rows) + len(rows) > BLOCK_ROWS or num_bytes + piece_bytes > BLOCK_BYTES):
            yield block
            block, num_bytes = Block([], {name: [] for name in columns}), 0
        block.rows += rows
        for name in columns:
            block.columns[name] += plain_values(piece.column(name))
        num_bytes += piece_bytes
    if block.rows:
        yield block


def row_bytes(array: Any) -> Ints:
    """About how many bytes each value of an Arrow array takes, decoded. int64 [len(array)]."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return row_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        of_entry = np.append(row_bytes(array.dictionary), _VALUE_BYTES)  # nulls take the last
        return np.asarray(of_entry[_numbers(array.indices, len(array.dictionary))])
    if pa.types.is_struct(kind):
        fields = (row_bytes(field) for field in array.flatten())
        return np.asarray(sum(fields, np.full(len(array), _VALUE_BYTES, dtype=np.int64)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        before = np.append(0, np.cumsum(row_bytes(array.values)))
        offsets = _numbers(array.offsets)
        return np.asarray(before[offsets[1:]] - before[offsets[:-1]] + _VALUE_BYTES)
    if pa.types.is_fixed_size_list(kind) and kind.list_size:
        own = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return np.asarray(row_bytes(own).reshape(len(array), kind.list_size).sum(axis=1) + _VALUE_BYTES)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array, kind = array.cast(pa.large_binary()), pa.large_binary()
    if any(is_kind(kind) for is_kind in _TEXTS):
        return _numbers(pc.binary_length(array)) + _VALUE_BYTES
    width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
    return np.full(len(array), width + _VALUE_BYTES, dtype=np.int64)


def _numbers(array: Any, null: int = 0) -> Ints:
    filled = array.fill_null(null) if array.null_count else array
    return np.asarray(np.from_dlpack(filled), dtype=np.int64)  # numpy alone would ask pyarrow, which imports pandas
