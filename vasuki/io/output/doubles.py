"""Rows that two runs have answered, because nothing kept them apart: one answer of each is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vasuki.base.arrays import Ints
from vasuki.base.errors import UnreadableError
from vasuki.io.location import Location
from vasuki.io.output.parts import PartLabel, Totals, to_parquet

LabelledPart = tuple[Location, PartLabel]

log = logging.getLogger(__name__)


def without_doubles(parts: Sequence[LabelledPart]) -> list[LabelledPart]:
    """The parts, with every row left in the first of them that holds it. The others are written anew, or deleted.

    Raises:
        UnreadableError: a row has two answers.
        OSError: a part cannot be read or written.
    """
    rows = np.concatenate([label.rows for _, label in parts]) if parts else np.empty(0, dtype=np.int64)
    if len(np.unique(rows)) == len(rows):
        return list(parts)
    kept: list[LabelledPart] = []
    for part, label in parts:
        double = [np.intersect1d(label.rows, other.rows) for _, other in kept]
        for (earlier, other), same in zip(kept, double, strict=True):
            if len(same) and not _answers(part, label, same).equals(_answers(earlier, other, same)):
                raise UnreadableError(
                    f"{part} overlaps with {earlier}: row {same[0]} has two answers; run with --fresh"
                )
        own = np.setdiff1d(label.rows, np.concatenate(double)) if double else label.rows
        if len(own) == len(label.rows):
            kept.append((part, label))
            continue
        log.warning("%s: %d rows are in other parts too, with equal answers", part, len(label.rows) - len(own))
        if len(own):
            kept.append((part, _keep(part, label, own)))
        else:
            part.delete()
    return kept


def _keep(part: Location, label: PartLabel, rows: Ints) -> PartLabel:
    """Write a part anew with some of its rows."""
    table, of_line = _read(part, label)
    chosen = np.isin(of_line, rows)
    table, of_line = table.filter(pa.array(chosen)), of_line[chosen]
    failed = np.asarray(pc.not_equal(table["error"], "").combine_chunks())
    totals = Totals(
        rows=len(rows),
        failed=len(np.unique(of_line[failed])),
        prompt_tokens=pc.sum(table["prompt_tokens"]).as_py(),
        output_tokens=pc.sum(table["output_tokens"]).as_py(),
    )
    label = replace(label, rows=rows, totals=totals)
    part.write_bytes(to_parquet(table, label))
    return label


def _answers(part: Location, label: PartLabel, rows: Ints) -> Any:
    """The lines of some rows. Sums of log-probabilities are left out: their last digit depends on the batch."""
    table, of_line = _read(part, label)
    names = [name for name in table.column_names if name != "logprob"]
    return table.select(names).filter(pa.array(np.isin(of_line, rows))).combine_chunks()


def _read(part: Location, label: PartLabel) -> tuple[Any, Ints]:
    """A part's table, and the number of the row that each line answers: lines of one row follow one another."""
    with part.open() as stream:
        table = pq.read_table(stream).replace_schema_metadata()
    ids = table["id"].to_pylist()
    begins = np.array([index > 0 and ids[index] != ids[index - 1] for index in range(len(ids))], dtype=np.int64)
    return table, label.rows[np.cumsum(begins)]
