"""Parquet files in: footers tell everything but the rows, and only the columns asked for are read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vasuki.base.errors import InputError
from vasuki.io.formats.content import Content, SeenFile, pieces_of
from vasuki.io.formats.decoded import Piece, blocks_of, note_ids, refuse_repeated, slices
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block, Survey
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.plain import plain, plain_type
from vasuki.io.selection import EVERY_ROW, Selection

_PAGE_BUFFER_BYTES = 2**20  # pages are read through a buffer of this size, so a row group is never held whole
_FOOTER = -1  # its place, for what is noted of the content: that of each chunk is in it
_FOOTER_BYTES = 8  # the footer's length and the magic number, at the end of the file
_DICTIONARY_PAGE = 2
_MOST_DICTIONARY_BYTES = 2**28  # usual writers end a dictionary at 1 MiB
_INDEX_BYTES = 8  # of a row, with its levels, in a chunk whose pages name entries of its dictionary alone
_WORST_BYTES = 2**26  # of a batch in which every row holds the whole of a dictionary
_MOST_EMPTY_VALUES, _MOST_VALUES_A_BYTE = 2**24, 64


class ParquetSource:
    """A Parquet file."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._content = Content(location)

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        with self._opened() as (stream, footer, metadata):
            schema = metadata.schema.to_arrow_schema()
            refuse_repeated(schema.names, needed, self.location)
            _refuse_encrypted(stream, footer, metadata, [name for name in needed if name in schema.names])
            digest = self._digest(stream, footer, metadata, needed)
            if ids is not None and ids.column in schema.names:
                for group in range(metadata.num_row_groups):
                    note_ids(self._pieces(stream, metadata, group, [ids.column]), ids)
            types = {field.name: plain_type(field.type) for field in schema}
            numbers = {name: _extremes(metadata, name, types[name]) for name in stored if name in types}
            return Survey(metadata.num_rows, types, digest, numbers)

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        first_row = rows.start
        with self._opened() as (stream, _, metadata):
            for group in range(metadata.num_row_groups):
                num_rows = metadata.row_group(group).num_rows
                if len(selection.positions(first_row, num_rows)):
                    pieces = self._pieces(stream, metadata, group, columns)
                    yield from blocks_of(pieces, columns, first_row, selection)
                first_row += num_rows

    def _pieces(self, stream: Any, metadata: Any, group: int, columns: Sequence[str]) -> Iterator[Piece]:
        """Record batches of one row group, small enough to be decoded, of plain types.

        Texts that lie in a dictionary alone are left there until batches are cut by what they really hold. Where only
        some do, batches are so short that the longest entry may be in every row.
        """
        row_group = metadata.row_group(group)
        if not row_group.num_rows:
            return
        encoded, row_bytes, worst_bytes = [], 0.0, 0
        chunks = list(_chunks(metadata, group, columns))
        for chunk in chunks:
            self._refuse_absurd(chunk)
            row_bytes += chunk.total_uncompressed_size / row_group.num_rows
            if dictionary_bytes := _dictionary_bytes(stream, chunk):
                if dictionary_bytes > _MOST_DICTIONARY_BYTES:
                    raise InputError(
                        f"{self.location}: the dictionary of column '{chunk.path_in_schema}' takes "
                        f"{dictionary_bytes:,} bytes; write it without dictionaries"
                    )
                if chunk.total_uncompressed_size - dictionary_bytes <= _INDEX_BYTES * chunk.num_values:
                    encoded.append(chunk.path_in_schema)
                else:
                    worst_bytes += dictionary_bytes
        most_rows = min(BLOCK_BYTES / max(row_bytes, 1), _WORST_BYTES / max(worst_bytes, 1), BLOCK_ROWS)
        seen = SeenFile(stream, self._content, [_stretch(chunk, stream.size()) for chunk in chunks])
        file = pq.ParquetFile(
            seen, metadata=metadata, pre_buffer=False, buffer_size=_PAGE_BUFFER_BYTES, read_dictionary=encoded
        )
        batches = file.iter_batches(
            max(1, int(most_rows)), row_groups=[group], columns=list(columns), use_threads=False
        )
        for batch in batches:
            for piece, num_bytes in slices(batch, BLOCK_BYTES):
                for index, name in enumerate(piece.schema.names):
                    piece = piece.set_column(index, name, plain(piece.column(index)))
                yield piece, num_bytes

    def _refuse_absurd(self, chunk: Any) -> None:
        """Nulls and empty lists take hardly a bit on disk, but some bytes each in memory."""
        if chunk.num_values > max(_MOST_EMPTY_VALUES, _MOST_VALUES_A_BYTE * chunk.total_uncompressed_size):
            raise InputError(
                f"{self.location}: column '{chunk.path_in_schema}' claims {chunk.num_values:,} values in "
                f"{chunk.total_uncompressed_size:,} bytes"
            )

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, bytes, Any]]:
        """The open file, its footer and what that says, with every complaint about it turned into an InputError that
        names it."""
        try:
            with self.location.open() as stream:
                size = stream.size()
                footer_bytes = int.from_bytes(stream.read_at(4, max(0, size - _FOOTER_BYTES)), "little") + _FOOTER_BYTES
                footer = bytes(stream.read_at(min(footer_bytes, size), max(0, size - footer_bytes)))
                metadata = pq.read_metadata(pa.BufferReader(footer))
                self._content.see(_FOOTER, footer)
                yield stream, footer, metadata
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot read {self.location} as Parquet: {_first_line(error)}") from None

    def _digest(self, stream: Any, footer: bytes, metadata: Any, needed: Collection[str]) -> bytes:
        """Hash of the footer (schema, counts, offsets, statistics) and of all pages of the columns that are needed.

        Times of change are left out on purpose: a copy of the same table on the next machine continues the job.
        """
        digest = hashlib.blake2b(footer, digest_size=16)
        for group in range(metadata.num_row_groups):
            for chunk in _chunks(metadata, group, needed):
                for place in pieces_of(*_stretch(chunk, stream.size())):
                    piece = bytes(stream.read_at(len(place), place.start))
                    self._content.see(place.start, piece)
                    digest.update(piece)
        return digest.digest()


def _refuse_encrypted(stream: Any, footer: bytes, metadata: Any, columns: list[str]) -> None:
    """Raises OSError for a column that is encrypted: reading it does, while looking at its chunk ends the process.

    A file with such columns has a signature behind its metadata (Parquet Modular Encryption, plaintext footer mode).
    """
    if columns and metadata.num_row_groups and len(footer) - _FOOTER_BYTES > metadata.serialized_size:
        file = pq.ParquetFile(stream, metadata=metadata, pre_buffer=False)
        next(file.iter_batches(1, row_groups=[0], columns=columns, use_threads=False), None)


def _chunks(metadata: Any, group: int, columns: Collection[str]) -> Iterator[Any]:
    """What a row group has of some columns: one chunk each, and of a nested one a chunk for each leaf.

    Other chunks are left alone: to look at one that is encrypted ends the process.
    """
    row_group = metadata.row_group(group)
    for index in range(row_group.num_columns):
        path = metadata.schema.column(index).path
        if path in columns or path.split(".")[0] in columns:
            yield row_group.column(index)


def _dictionary_bytes(stream: Any, chunk: Any) -> int:
    """How large a chunk's dictionary of texts is, unpacked: by the header of its page, which is what will be obeyed.

    A page's header is a Thrift struct in compact form (Apache Parquet format, PageHeader), whose first two fields are
    the kind of page and the size: a byte each that announces the field, and a zigzag varint. 0 if there is none.
    """
    if chunk.physical_type != "BYTE_ARRAY" or not any("DICTIONARY" in encoding for encoding in chunk.encodings):
        return 0
    header = io.BytesIO(stream.read_at(16, _start(chunk)))
    kind, num_bytes = _thrift_integer(header), _thrift_integer(header)
    return num_bytes if kind == _DICTIONARY_PAGE else 0


def _stretch(chunk: Any, file_bytes: int) -> tuple[int, int]:
    """Where a chunk lies in its file: start and end."""
    return _start(chunk), min(_start(chunk) + chunk.total_compressed_size, file_bytes)


def _start(chunk: Any) -> int:
    """Where a chunk's first page begins. Some writers do not say where its dictionary lies: it comes first."""
    return int(min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))


def _thrift_integer(header: io.BytesIO) -> int:
    """The next field of a struct; -1 if it is no integer, or not the field that comes next."""
    if header.read(1) != b"\x15":  # one further than the last field, of 32 bits
        return -1
    value = shift = 0
    while byte := header.read(1):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
    return value >> 1 ^ -(value & 1)


def _extremes(metadata: Any, name: str, arrow_type: Any) -> tuple[Any, ...]:
    """The least and the greatest integer of a column, by its statistics or, where it has none, by its type. Of decimals
    zero, which has a place among decimals only."""
    if pa.types.is_decimal(arrow_type):
        return (Decimal(0),)
    if not pa.types.is_integer(arrow_type):
        return ()
    fields = metadata.schema.to_arrow_schema()
    column = sum(_leaves(fields.types[index]) for index in range(fields.get_field_index(name)))
    chunks = (metadata.row_group(group).column(column) for group in range(metadata.num_row_groups))
    found = [chunk.statistics for chunk in chunks]
    found = [statistics for statistics in found if statistics is None or statistics.num_values]  # not of nulls alone
    if any(statistics is None or not statistics.has_min_max for statistics in found):
        limits = np.iinfo(str(arrow_type))  # older pyarrow asks pandas for more
        return int(limits.min), int(limits.max)
    return tuple(value for statistics in found for value in (statistics.min, statistics.max))


def _leaves(kind: Any) -> int:
    """How many columns of a Parquet file a field of this type takes. A leaf's path alone does not tell a struct's field
    from a column with a dot in its name."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields)) or 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
