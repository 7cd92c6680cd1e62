"""A table in memory, as the input of a job, and the same table with its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError, one_line
from vasuki.io.input.columns import is_of_answer, needed_columns
from vasuki.io.output.typed import columns_of, reader_of
from vasuki.io.plain import plain

_ROW = "row of the batch"


def batch_job(job: JobConfig, batch: Any, folder: Path) -> JobConfig:
    """The job over a file in a folder, which has the columns of a `pyarrow.Table` that the job reads.

    Raises:
        JobFileError: the job reads a format of files, or the table has a column that the answers have.
    """
    if job.input.format == "openai-batch":
        raise JobFileError("input.format: openai-batch is one of files; name the columns of the dataset instead")
    for name in batch.column_names:
        if name != "id" and is_of_answer(name, job):
            raise JobFileError(f"the dataset has a column '{name}', as the answers have; rename it")
    if reader := reader_of(job):
        columns_of(reader, job, batch.column_names)  # a field may have the name of a column
    job = job.model_copy(
        update={
            "input": job.input.model_copy(update={"path": str(folder / "batch.parquet"), "format": "parquet"}),
            "output": job.output.model_copy(update={"path": str(folder / "out"), "columns": (_ROW,)}),
        }
    )
    columns = {name: _plain(batch[name]) for name in needed_columns(job) if name in batch.column_names}
    table = pa.table(columns | {_ROW: pa.array(range(batch.num_rows), pa.int64())})
    pq.write_table(table, job.input.path)
    return job


def with_answers(batch: Any, job: JobConfig) -> Any:
    """A table, of pyarrow, pandas or Polars, with the columns of the answers in the output folder of its job. Its rows
    are in their order, and those with several samples are there as often."""
    answers = pa.concat_tables([pq.read_table(part) for part in Path(job.output.path).glob("part-*.parquet")])
    by = [name for name in (_ROW, "sample") if name in answers.column_names]
    answers = answers.sort_by([(name, "ascending") for name in by])
    rows, added = answers[_ROW], answers.select([name for name in answers.column_names if name not in ("id", _ROW)])
    if isinstance(batch, pa.Table):
        table = batch.take(rows)
        for name in added.column_names:
            table = table.append_column(name, added[name])
        return table
    if _is_of_pandas(batch):
        frame = batch.iloc[rows.to_pylist()]
        return frame.assign(**{name: column.array for name, column in added.to_pandas().items()})
    return batch[rows.to_pylist()].hstack(type(batch)(added))


def as_arrow(table: Any) -> Any:
    """A `pyarrow.Table` with the values of one of pyarrow, pandas or Polars. Raises JobFileError for anything else."""
    if isinstance(table, pa.Table):
        return table
    try:
        if _is_of_pandas(table):
            return pa.Table.from_pandas(table, preserve_index=False)
        found = pa.table(table)
        return pa.table({name: plain(found[name]) for name in found.column_names})
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = type(table).__name__
        raise JobFileError(f"a {kind} is no table of pyarrow, pandas or Polars: {one_line(error)}") from None


def _is_of_pandas(table: Any) -> bool:
    return type(table).__module__.split(".")[0] == "pandas"


def _plain(column: Any) -> Any:
    """A column in a type that Parquet knows: lists in place of tensors."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.array([value.tolist() if hasattr(value, "tolist") else value for value in column.to_pylist()])
