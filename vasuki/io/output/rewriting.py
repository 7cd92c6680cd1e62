"""Parts that are rewritten with some of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vasuki.base.arrays import Ints
from vasuki.io.location import Location
from vasuki.io.output.answers import with_null_errors
from vasuki.io.output.parts import PartLabel, Totals, once_more, to_parquet

LabelledPart = tuple[Location, PartLabel]


def without_failed(parts: Sequence[LabelledPart]) -> list[LabelledPart]:
    """The parts without the rows that failed in one of their samples or in all. Raises OSError."""
    kept: list[LabelledPart] = []
    for part, label in parts:
        if label.totals.failed:
            table, of_line = read_part(part, label)
            label = keep_rows(part, label, np.setdiff1d(label.rows, of_line[_failed(table)]))
        if len(label.rows):
            kept.append((part, label))
    return kept


def failed_rows(part: Location, label: PartLabel) -> Ints:
    """The rows of a part of which a sample failed."""
    table, of_line = read_part(part, label)
    return np.unique(of_line[_failed(table)])


def succeeded_rows(part: Location, label: PartLabel) -> Ints:
    """The rows of a part of which no sample failed."""
    return np.setdiff1d(label.rows, failed_rows(part, label)) if label.totals.failed else label.rows


def keep_rows(part: Location, label: PartLabel, rows: Ints) -> PartLabel:
    """Rewrite a part with some of its rows, or delete it if there are none. Returns its label. Raises OSError."""
    if not len(rows):
        part.delete()
        return replace(label, rows=rows, totals=Totals())
    table, of_line = read_part(part, label)
    chosen = np.isin(of_line, rows)
    table, of_line = table.filter(pa.array(chosen)), of_line[chosen]
    totals = totals_of(table, of_line)
    contents = label.contents[np.isin(label.rows, rows)] if len(label.contents) else label.contents
    label = replace(label, rows=rows, totals=totals, contents=contents)
    part.write_bytes(to_parquet([table], label))
    return label


def totals_of(lines: Any, of_line: Ints) -> Totals:
    """Of lines of a part, and the rows that they answer."""
    return Totals(
        rows=len(np.unique(of_line)),
        failed=len(np.unique(of_line[_failed(lines)])),
        prompt_tokens=pc.sum(lines["prompt_tokens"]).as_py(),
        output_tokens=pc.sum(lines["output_tokens"]).as_py(),
    )


def read_part(part: Location, label: PartLabel) -> tuple[Any, Ints]:
    """A part's table, and the number of the row that each line answers: lines of one row follow one another."""
    table = with_null_errors(once_more(partial(_table_of, part)).replace_schema_metadata())
    ids = table["id"].to_pylist()
    begins = np.array([index > 0 and ids[index] != ids[index - 1] for index in range(len(ids))], dtype=np.int64)
    return table, label.rows[np.cumsum(begins)]


def _table_of(part: Location) -> Any:
    with part.open() as stream:
        return pq.read_table(stream)


def _failed(table: Any) -> Any:
    """`[lines]` bool: the lines of rows of which a sample failed."""
    return np.asarray(pc.is_valid(table["error"]).combine_chunks())
