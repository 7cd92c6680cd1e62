"""The parts of an output folder -> rows, in the order of the input."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vasuki.base.errors import InputError
from vasuki.base.units import plural
from vasuki.io.export.reopened import OpenFiles, Reopened
from vasuki.io.location import Location
from vasuki.io.output.manifest import MANIFEST, read_manifest
from vasuki.io.output.ownership import SUCCESS, is_broken_manifest, labelled_parts
from vasuki.io.output.parts import PartLabel, reading
from vasuki.io.output.rewriting import LabelledPart
from vasuki.io.values import python_values

_BATCH_LINES = 256
_BUFFER_BYTES = 2**18

Line = dict[str, Any]  # of the output, by column
NumberedLine = tuple[int, int, Line]  # row of the input, line within its part


def read_rows(folder: Location) -> Iterator[list[Line]]:
    """Each row of an output, as a list of its samples. Of every part a few lines are in memory.

    Raises:
        InputError: there is no output, or parts are of several jobs or inputs.
        OutputInUse: a file that readers take for a part is not ours.
        UnreadableError: a part cannot be read, or is damaged.
    """
    parts = _parts(folder)
    with closing(OpenFiles()) as files:
        lines = heapq.merge(*(_lines(part, label, files) for part, label in parts), key=lambda line: line[:2])
        for _, samples in groupby(lines, key=lambda line: line[0]):
            yield [values for _, _, values in samples]


def incompleteness(folder: Location) -> str:
    """How many rows an output has, if some of the input's are not there; else empty. Raises as `read_rows` does."""
    parts = _parts(folder)
    rows = np.concatenate([label.rows for _, label in parts])
    file = folder / MANIFEST
    if file.exists() and not is_broken_manifest(file):
        total = read_manifest(file).rows.total
    elif (folder / SUCCESS).exists():
        total = int(rows.max(initial=-1)) + 1
    else:
        return f"{plural(len(rows), 'row')}, and no run has ended there"
    return f"{len(rows):,} of {plural(total, 'row')}" if len(rows) < total else ""


def column_names(folder: Location) -> list[str]:
    """The columns of an output, as its first part has them. Raises as `read_rows` does."""
    first, _ = _parts(folder)[0]
    with reading(first), first.open() as stream:
        return list(pq.read_schema(stream).names)


def _parts(folder: Location) -> list[LabelledPart]:
    """The parts of a folder, which are of one job and hold each row once."""
    parts = list(labelled_parts(folder))
    if not parts:
        raise InputError(f"{folder} has no part-*.parquet; name the output folder of a run")
    (first, known), *others = parts
    for part, label in others:
        if (label.config_hash, label.input_fingerprint) != (known.config_hash, known.input_fingerprint):
            raise InputError(
                f"{part} is of another job or input than {first.name}; move the one that is not wanted away"
            )
    rows = np.concatenate([label.rows for _, label in parts])
    if len(np.unique(rows)) < len(rows):
        raise InputError(
            f"{folder} holds rows twice, as in copies of parts; run its job again, which leaves one of each"
        )
    return parts


def _lines(part: Location, label: PartLabel, files: OpenFiles) -> Iterator[NumberedLine]:
    with reading(part):
        number, index, before = 0, -1, 0
        content = pq.ParquetFile(Reopened(part, files), pre_buffer=False, buffer_size=_BUFFER_BYTES)
        for batch in content.iter_batches(_BATCH_LINES, use_threads=False):
            columns = {name: python_values(batch.column(name)) for name in batch.schema.names}
            for values in zip(*columns.values(), strict=True):
                line = dict(zip(columns, values, strict=True))
                line["error"] = line["error"] or None
                sample = line.get("sample", 0)
                index += number == 0 or sample <= before  # samples of one row follow one another, in their order
                before = sample
                yield int(label.rows[index]), number, line
                number += 1
