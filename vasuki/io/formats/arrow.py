"""Arrow IPC files in: the stream, as `datasets` saves tables, and the file format, which is Feather's second version.

A file of the latter is a stream between a magic number and a footer (Arrow columnar format, IPC file format), so both
are read from front to back. A record batch is held whole, as its writer made it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vasuki.base.errors import InputError, one_line
from vasuki.io.formats.content import PIECE_BYTES, Content, SeenStream
from vasuki.io.formats.decoded import Piece, blocks_of, note_ids, refuse_repeated, slices
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block, Survey
from vasuki.io.ids import IdHashes
from vasuki.io.location import Location
from vasuki.io.plain import plain, plain_type
from vasuki.io.selection import EVERY_ROW, Selection

_MAGIC, _OLD_MAGIC = b"ARROW1\0\0", b"FEA1"


class ArrowSource:
    """An Arrow IPC file, of either format."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._content = Content(location)

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        digest = hashlib.blake2b(digest_size=16)
        extremes: dict[str, tuple[Any, ...]] = {}
        num_rows = 0
        with self._opened(digest.update) as (stream, reader):
            schema = reader.schema
            refuse_repeated(schema.names, needed, self.location)
            types = {field.name: plain_type(field.type) for field in schema}
            integers = [name for name in stored if name in types and pa.types.is_integer(types[name])]
            for batch in reader:
                batch.validate(full=True)
                num_rows += batch.num_rows
                if ids is not None and ids.column in types:
                    note_ids(_pieces(batch, [ids.column]), ids)
                for name in integers:
                    extremes[name] = _with_extremes(plain(batch.column(name)), extremes.get(name, ()))
            while stream.read(PIECE_BYTES):  # the footer
                pass
        return Survey(num_rows, types, digest.digest(), extremes)

    def blocks(self, columns: Sequence[str], rows: range, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        with self._opened(lambda piece: None) as (_, reader):
            pieces = (piece for batch in reader for piece in _pieces(batch, columns))
            yield from blocks_of(pieces, columns, rows.start, selection)

    @contextmanager
    def _opened(self, observe: Callable[[bytes], None]) -> Iterator[tuple[Any, Any]]:
        """The file behind its magic number, and a reader of its record batches. What is wrong becomes an InputError."""
        try:
            with self.location.open_stream() as file:
                buffered = io.BufferedReader(SeenStream(file, self._content, observe), PIECE_BYTES)
                start = buffered.peek(len(_MAGIC))
                if start.startswith(_OLD_MAGIC):
                    raise InputError(f"{self.location} is of Feather's first version; write it with the second")
                if start.startswith(_MAGIC):
                    buffered.read(len(_MAGIC))
                yield buffered, pa.ipc.open_stream(pa.PythonFile(buffered, mode="r"))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self.location} as Arrow: {one_line(error)}") from None
        except MemoryError:
            raise InputError(f"cannot read {self.location} as Arrow: a batch claims more than memory holds") from None


def _pieces(batch: Any, columns: Sequence[str]) -> Iterator[Piece]:
    """The columns of a record batch, in pieces that are small once they are decoded."""
    own = batch.select(list(columns))
    for index, name in enumerate(columns):
        own = own.set_column(index, name, plain(own.column(index)))
    for start in range(0, own.num_rows, BLOCK_ROWS):
        yield from slices(own.slice(start, BLOCK_ROWS), BLOCK_BYTES)


def _with_extremes(array: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    found = pc.min_max(array)
    both = [*before, *(value for value in (found["min"].as_py(), found["max"].as_py()) if value is not None)]
    return (min(both), max(both)) if both else ()
