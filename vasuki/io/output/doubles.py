"""Rows that two runs have answered, because nothing kept them apart: one answer of each is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vasuki.base.arrays import Ints
from vasuki.base.errors import UnreadableError
from vasuki.io.location import Location
from vasuki.io.output.parts import PartLabel
from vasuki.io.output.rewriting import LabelledPart, keep_rows, read_part

log = logging.getLogger(__name__)


def without_doubles(parts: Sequence[LabelledPart]) -> list[LabelledPart]:
    """The parts, with every row left in the first of them that holds it. The others are rewritten without it, or
    deleted.

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
        label = keep_rows(part, label, own)
        if len(own):
            kept.append((part, label))
    return kept


def _answers(part: Location, label: PartLabel, rows: Ints) -> Any:
    """The lines of some rows. Log-probabilities are left out: their last digit depends on the batch."""
    table, of_line = read_part(part, label)
    names = [name for name in table.column_names if name not in ("logprob", "logprobs")]
    return table.select(names).filter(pa.array(np.isin(of_line, rows))).combine_chunks()
