"""A row of the output, and the schema that all parts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vasuki.base.config import JobConfig
from vasuki.base.config_values import Column
from vasuki.io.input.columns import ANSWER_COLUMNS, LATER_COLUMNS
from vasuki.io.input.tables import Rows, stored_text
from vasuki.io.output.scores import score_fields
from vasuki.io.output.typed import columns_of, reader_of
from vasuki.io.output.vectors import vector_fields
from vasuki.io.values import value_bytes

_ROW_OVERHEAD_BYTES = 600  # the Python objects around a row: 400 to 600 by tracemalloc, CPython 3.11


@dataclass(frozen=True, slots=True)
class Answer:
    """A row of the output. `row` orders the rows of a part and is not written itself."""

    row: int
    id: str | int
    output: str
    finish_reason: str
    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    sample: int = 0
    output_token_ids: Any = ()  # int32 [output_tokens], if the output has that column
    logprob: float | None = None
    logprobs: Any = None  # of each token, as the column of that name has it
    carried: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None  # its value, where the job says what answers look like
    answer_status: str | None = None
    tries: int | None = None
    reasoning: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # of further columns

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        texts = sum(len(text or "") for text in (self.output, self.error, self.reasoning))
        texts += sum(map(value_bytes, self.carried.values()))
        return _ROW_OVERHEAD_BYTES + texts + 4 * len(self.output_token_ids)


def answer_schema(job: JobConfig, table: Rows) -> Any:
    """The `pyarrow.Schema` of the output, fixed before the first row so that all parts agree."""
    fields = [pa.field("id", table.id_type)]
    fields += [pa.field(name, arrow_type) for name, arrow_type in table.carried_types.items()]
    if may_have_samples(job):
        fields.append(pa.field("sample", pa.int32()))
    fields += [
        *([pa.field("reasoning", pa.string())] if job.output.reasoning else []),
        *([pa.field("output", pa.string())] if job.task == "generate" else []),
        *(vector_fields(job) if job.task in ("embed", "classify") else score_fields(job)),
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
    ]
    if reader := reader_of(job):
        fields += columns_of(reader, job, [*(field.name for field in fields), *LATER_COLUMNS])
        if job.errors.retries:
            fields.append(pa.field("tries", pa.int32()))
    if job.output.token_ids:
        fields.append(pa.field("output_token_ids", pa.list_(pa.int32())))
    if job.output.logprobs:
        fields.append(pa.field("logprob", pa.float64()))
    if job.output.alternatives is not None:
        token = [("token", pa.string()), ("token_id", pa.int32()), ("logprob", pa.float64())]
        likely = [("top_logprobs", pa.list_(pa.struct(token)))] if job.output.alternatives else []
        fields.append(pa.field("logprobs", pa.list_(pa.struct([*token, *likely]))))
    return pa.schema(fields)


def may_have_samples(job: JobConfig) -> bool:
    """Return whether a row may have more than one answer, so that the output needs the column `sample`."""
    return isinstance(job.sampling.n, Column) or job.sampling.n > 1 or job.input.format == "openai-batch"


def to_table(answers: Sequence[Answer], schema: Any) -> Any:
    """Answers as a `pyarrow.Table`."""
    arrays = []
    for column in schema:
        values = [_value(answer, column.name) for answer in answers]
        if column.name == "id" and pa.types.is_string(column.type):
            values = [stored_text(value) for value in values]
        if pa.types.is_fixed_size_list(column.type):  # pyarrow before 26 reads no file with a null among such lists
            lacks = [None] * column.type.list_size
            values = [
                lacks if value is None and column.name not in answer.carried else value
                for answer, value in zip(answers, values, strict=True)
            ]
        arrays.append(pa.array(values, type=column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def with_null_errors(table: Any) -> Any:
    """The lines of a part, which has empty strings in place of no error if an older version wrote it."""
    errors = table["error"]
    nulled = pc.if_else(pc.equal(errors, ""), pa.scalar(None, pa.string()), errors)
    return table.set_column(table.column_names.index("error"), "error", nulled)


def answer_line(answer: Answer, schema: Any) -> dict[str, Any]:
    """An answer as a line of JSON has it, with the id as it came."""
    values = {name: _value(answer, name) for name in schema.names}
    if "output_token_ids" in values:
        values["output_token_ids"] = [int(token) for token in values["output_token_ids"]]
    return values


def _value(answer: Answer, column: str) -> Any:
    if column in answer.carried:
        return answer.carried[column]
    if column in answer.values:
        return answer.values[column]
    if column in ANSWER_COLUMNS:
        return getattr(answer, column, None)  # a row that has failed has no others
    return answer.answer.get(column) if isinstance(answer.answer, dict) else None  # a field of it
