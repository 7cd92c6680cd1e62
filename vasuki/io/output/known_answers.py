"""Rows that need not be computed, as their answers are known: those of rows with the same content, in this input or,
with `input.unchanged: reuse`, in what an earlier run over another state of the input has left.

They are copied once all others are there. A run that is killed before has lost nothing: the next one finds the same
rows in the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted
from vasuki.base.units import plural
from vasuki.io.input.contents import Contents
from vasuki.io.input.tables import InputTable, stored_text
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.parts import Totals
from vasuki.io.output.rewriting import LabelledPart, failed_rows, read_part
from vasuki.io.selection import Selection, Shard

log = logging.getLogger(__name__)

_MOST_ROWS = 2**15  # that are copied in one go, each of which reads the parts that hold their answers
OF_THIS_INPUT = -1  # in place of an earlier part


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """Of a run.

    Args:
        contents: of the input.
        is_known: `[num_rows]`, rows that are not computed.
        parts: of earlier states of the input.
        part_of: `[num_rows]`, which of them has the answer, or OF_THIS_INPUT.
        row_of: `[num_rows]`, of which row there the answer is.
    """

    contents: Contents
    is_known: NDArray[np.bool_]
    parts: list[LabelledPart]
    part_of: Ints
    row_of: Ints

    @classmethod
    def of(
        cls, table: InputTable, job: JobConfig, shard: Shard, done: NDArray[np.bool_], earlier: list[LabelledPart]
    ) -> KnownAnswers:
        """Read the input, and find them.

        Args:
            table: the input.
            job: whose it is.
            shard: of which the run is.
            done: `[num_rows]`, rows that have an answer.
            earlier: parts of other states of the input, with what their rows asked for.
        """
        contents = Contents.of(table, job, shard)
        part_of = np.full(table.num_rows, OF_THIS_INPUT)
        row_of = np.arange(table.num_rows)
        is_known = np.zeros(table.num_rows, np.bool_)
        for index, (part, label) in enumerate(earlier):
            order = np.argsort(label.contents)
            at = np.searchsorted(label.contents, contents.hashes, sorter=order)
            line = order[np.minimum(at, len(order) - 1)]
            is_here = contents.is_known & ~done & ~is_known & (label.contents[line] == contents.hashes)
            if label.totals.failed:
                is_here &= ~np.isin(label.rows[line], failed_rows(part, label))
            part_of[is_here], row_of[is_here] = index, label.rows[line[is_here]]
            is_known |= is_here
        reused = int(is_known.sum())
        if job.input.computes_equal_rows_once:
            originals = contents.originals(done | is_known)
            is_copy = (originals != row_of) & ~done & ~is_known
            part_of[is_copy], row_of[is_copy] = part_of[originals[is_copy]], row_of[originals[is_copy]]
            is_known |= is_copy
        if reused:
            log.info("%s unchanged: the answers of an earlier run are taken", plural(reused, "row is", "rows are"))
        if copied := int(is_known.sum()) - reused:
            log.info("%s others: their answers are computed once", plural(copied, "row equals", "rows equal"))
        return cls(contents, is_known, earlier, part_of, row_of)

    @property
    def count(self) -> int:
        return int(self.is_known.sum())

    def write(
        self, table: InputTable, folder: OutputFolder, schema: pa.Schema, should_stop: Callable[[], bool]
    ) -> Iterator[Totals]:
        """Copy the answers, once all others are in the folder, piece by piece. Raises Interrupted."""
        own = folder.answered_parts()
        for ids, carried in self._pieces(table):
            if should_stop():
                raise Interrupted("stopped by a signal while answers of equal rows were copied")
            rows = np.array(sorted(ids), np.int64)
            copied = [_copied(*each) for each in self._sources(rows, own)]
            if not copied:
                continue
            lines = pa.concat_tables([lines for lines, _ in copied]).unify_dictionaries()
            of_line = np.concatenate([of_line for _, of_line in copied])
            order = np.argsort(of_line, kind="stable")
            lines, of_line = lines.take(order), of_line[order]
            for name, of_rows in {"id": ids, **carried}.items():
                own_values = pa.array(
                    [_stored(of_rows[row], schema.field(name).type) for row in of_line.tolist()],
                    schema.field(name).type,
                )
                lines = lines.set_column(lines.column_names.index(name), schema.field(name), own_values)
            yield folder.add_copies(lines, of_line)

    def _pieces(self, table: InputTable) -> Iterator[tuple[dict[int, Any], dict[str, dict[int, Any]]]]:
        """Ids of the rows that are copied, and what is carried along with them, by row: all that is kept of a block."""
        ids: dict[int, Any] = {}
        carried: dict[str, dict[int, Any]] = {name: {} for name in table.carried_types}
        for block in table.blocks(Selection(left_out=~self.is_known)):
            ids |= zip(block.rows, table.ids(block), strict=True)
            for name, values in table.carried(block).items():
                carried[name] |= zip(block.rows, values, strict=True)
            if len(ids) >= _MOST_ROWS:
                yield ids, carried
                ids, carried = {}, {name: {} for name in carried}
        if ids:
            yield ids, carried

    def _sources(self, rows: Ints, own: list[LabelledPart]) -> Iterator[tuple[LabelledPart, Ints, Ints]]:
        """The parts that have answers of some rows: which of those, and of which rows there."""
        for part in np.unique(self.part_of[rows]).tolist():
            wanted = rows[self.part_of[rows] == part]
            if part != OF_THIS_INPUT:
                yield self.parts[part], wanted, self.row_of[wanted]
                continue
            for labelled in own:
                here = wanted[np.isin(self.row_of[wanted], labelled[1].rows)]
                if len(here):
                    yield labelled, here, self.row_of[here]


def _copied(labelled: LabelledPart, rows: Ints, sources: Ints) -> tuple[Any, Ints]:
    """The lines of a part that answer some of its rows, and which rows they answer now."""
    table, of_line = read_part(*labelled)
    begin, end = np.searchsorted(of_line, sources), np.searchsorted(of_line, sources, side="right")
    counts = end - begin
    lines = np.repeat(begin - np.concatenate([[0], counts.cumsum()[:-1]]), counts) + np.arange(counts.sum())
    return table.take(lines), np.repeat(rows, counts)


def _stored(value: Any, arrow_type: pa.DataType) -> Any:
    return stored_text(value) if pa.types.is_string(arrow_type) else value
