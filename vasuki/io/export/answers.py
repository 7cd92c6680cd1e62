"""The parts of an output folder -> rows, in the order of the input."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vasuki.base.errors import InputError, UnreadableError
from vasuki.io.location import Location
from vasuki.io.output.parts import PART_NAME, read_label
from vasuki.io.values import python_values

_BATCH_LINES = 256

Line = dict[str, Any]  # of the output, by column
NumberedLine = tuple[int, int, Line]  # row of the input, line within its part


def read_rows(folder: Location) -> Iterator[list[Line]]:
    """Each row of an output, as a list of its samples. Of every part a few lines are in memory.

    Raises:
        InputError: there is no output.
        UnreadableError: a part is damaged.
    """
    lines = heapq.merge(*map(_lines, _parts(folder)), key=lambda line: line[:2])
    for _, samples in groupby(lines, key=lambda line: line[0]):
        yield [values for _, _, values in samples]


def column_names(folder: Location) -> list[str]:
    """The columns of an output, as its first part has them. Raises as `read_rows` does."""
    first = _parts(folder)[0]
    try:
        with first.open() as stream:
            return list(pq.read_schema(stream).names)
    except (OSError, ValueError, pa.ArrowException):
        raise UnreadableError(f"{first} is damaged") from None


def _parts(folder: Location) -> list[Location]:
    parts = [file for file in folder.children() if PART_NAME.fullmatch(file.name)]
    if not parts:
        raise InputError(f"{folder} has no part-*.parquet; name the output folder of a run")
    return parts


def _lines(part: Location) -> Iterator[NumberedLine]:
    try:
        label = read_label(part)
        if label is None:
            raise InputError(f"{part} is not a part of vasuki's")
        number, index, last = 0, -1, None
        with part.open() as stream:
            for batch in pq.ParquetFile(stream).iter_batches(_BATCH_LINES):
                columns = {name: python_values(batch.column(name)) for name in batch.schema.names}
                for values in zip(*columns.values(), strict=True):
                    line = dict(zip(columns, values, strict=True))
                    line["error"] = line["error"] or None
                    index += number == 0 or line["id"] != last  # lines of one row follow one another
                    last = line["id"]
                    yield int(label.rows[index]), number, line
                    number += 1
    except (OSError, ValueError, pa.ArrowException):
        raise UnreadableError(f"{part} is damaged; run the job again to compute its rows anew") from None
