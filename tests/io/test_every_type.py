"""Columns of every type of Arrow's through whole runs and out again: compared with what pyarrow reads from the input.

Tables and lines that are made up follow; `make test-hostile` tries 500 of each.
"""

from __future__ import annotations

import csv
import decimal
import io
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import MakeJob, output, run
from test_plain import FLAT, nested

from vasuki.base import commits
from vasuki.base.config import JobConfig
from vasuki.base.errors import VasukiError
from vasuki.commands.cli import main
from vasuki.io.plain import plain_type
from vasuki.io.selection import Shard

FUZZED = settings(
    max_examples=int(os.environ.get("VASUKI_FUZZED", "15")), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def is_written(array: Any) -> bool:
    """Whether pyarrow writes such a column to Parquet, and reads it again."""
    try:
        pq.write_table(pa.table({"x": array}), file := io.BytesIO())
        return bool(pq.read_table(file)["x"].to_pylist() == array.to_pylist())
    except pa.ArrowNotImplementedError:
        return False


def numbers_as(kind: Any) -> Any:
    """A number, null and another, in the type's own unit; of times of day one before midnight, of dates a whole day."""
    if pa.types.is_decimal(kind):
        return pa.array([decimal.Decimal("0.00"), None, decimal.Decimal("-1.50")], kind)
    if not pa.types.is_temporal(kind):
        return pa.array([0, None, 100], kind)
    units = pa.array([0, None, 86_399 if pa.types.is_time(kind) else 86_400_000])
    return units.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


def as_copied(values: Any) -> Any:
    """Python values in which a uuid is its bytes, as it is copied."""
    return _stored(values.to_pylist())


def _stored(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_stored(part) for part in value)
    if isinstance(value, dict):
        return {key: _stored(part) for key, part in value.items()}
    return value.bytes if isinstance(value, uuid.UUID) else value


NUMBERS = [
    pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.float16(), pa.float32(),
    pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal256(76, 2), pa.time32("s"), pa.time64("ns"), pa.date64(),
    pa.timestamp("s"), pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ns"), pa.duration("s"), pa.duration("ns"),
]  # fmt: skip
OTHERS: dict[str, Any] = {str(kind): numbers_as(kind) for kind in NUMBERS} | {
    "tenths of halves": pa.array(np.array([0.1, 1 / 3, 2], np.float16)),
    "tenths of singles": pa.array([0.1, None, 1 / 3], pa.float32()),
    "large binary": pa.array([b"\xff", None, b""], pa.large_binary()),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0], pa.int8())),
    "uuid": pa.array([bytes(16), None, b"\xff" * 16], pa.uuid()),
}
EVERY = {
    name: column
    for flat, array in (FLAT | OTHERS).items()
    for name, column in [(flat, array), *((f"{outer} of {flat}", once) for outer, once in nested(array))]
    if is_written(column)
}

SLICED = sorted(name for name, column in EVERY.items() if is_written(column.slice(1, 1)))  # not views of bytes


def attempt(job: JobConfig) -> int | None:
    """How many rows a run worked on, each of which is in the output; None if it was refused, with one line."""
    try:
        num_rows = run(job)
    except VasukiError as error:
        line = str(error)
    else:
        answers = output(job).select(["finish_reason", "error"]).to_pylist() if num_rows else []
        assert len(answers) == num_rows
        assert all((answer["finish_reason"] == "error") == (answer["error"] is not None) for answer in answers)
        return num_rows
    assert len(line.splitlines()) == 1
    return None


def whole(job: JobConfig) -> None:
    assert run(job) == 3


def resumed(job: JobConfig) -> None:
    assert run(job, stop_after=1) < 3
    run(job)


def sharded(job: JobConfig) -> None:
    assert run(job, Shard(0, 2)) == 2
    assert run(job, Shard(1, 2)) == 1


def retried(job: JobConfig) -> None:
    assert run(job, failing=(0, 2)) == 3
    assert run(job, retries_errors=True) == 2


@pytest.mark.parametrize("way", [whole, resumed, sharded, retried])
def test_every_type_comes_through_as_it_was(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[JobConfig], None]
) -> None:
    monkeypatch.setattr(commits, "COMMIT_S", 0.5)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"], **EVERY}), path)
    made = job(path, output={"columns": [*EVERY]})
    way(made)
    answers, expected = output(made).sort_by("id"), pq.read_table(path)
    assert answers["error"].to_pylist() == [None] * 3
    for name in EVERY:
        stored = expected.schema.field(name).type
        assert pa.types.is_null(stored) or answers.schema.field(name).type == plain_type(stored), name
        assert answers[name].to_pylist() == as_copied(expected[name]), name
    for form in ("jsonl", "csv", "openai"):
        target = tmp_path / f"answers.{form}"
        result = CliRunner().invoke(main, ["export", made.output.path, "--to", str(target), "--format", form])
        assert result.exit_code == 0, result.output
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "answers.jsonl").read_text().split("\n")[:-1]
    ]
    assert len(lines) == 3
    for name in ("bool", "int8", "uint64", "double", "string", "list of string", "struct of double", "dictionary"):
        assert [line[name] for line in lines] == expected[name].to_pylist(), name
    with open(tmp_path / "answers.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["string"] for row in rows] == ["a", "", "é"]
    assert len((tmp_path / "answers.openai").read_text().splitlines()) == 3


@FUZZED
@given(st.data())
def test_tables_that_are_made_up(job: MakeJob, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any rows of any columns, as a prompt, an id and a copy: each has its line in the output, or the job one line."""
    folder = tmp_path_factory.mktemp("fuzzed")
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    names = data.draw(st.lists(st.sampled_from(SLICED), min_size=1, max_size=4, unique=True))
    table = pa.table({name: pa.chunked_array([EVERY[name].slice(row, 1) for row in rows]) for name in names})
    keys: dict[str, Any] = {"id": data.draw(st.sampled_from(names))} if data.draw(st.booleans()) else {}
    path = folder / "in.parquet"
    pq.write_table(table, path, row_group_size=data.draw(st.integers(1, 8)))
    carried = [name for name in names if name != keys.get("id")]
    prompt = "".join(f"{{{name}}}" for name in names)
    made = job(path, prompt=prompt, output={"columns": carried, "path": str(folder / "out")}, **keys)
    num_rows = attempt(made)
    assert num_rows == len(rows) or (keys and num_rows is None)
    if num_rows is None:
        return
    expected = pq.read_table(path)
    answers = output(made)
    for name in carried:
        assert answers[name].to_pylist() == as_copied(expected[name]), name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.fixed_dictionaries({}, optional={"text": JSON, "id": JSON, "more": JSON})
MARKS = st.text(alphabet="\",;\t|'\r\n{}[]:\\ux0a\0\ufeff", max_size=20)
LINES = st.lists(
    (ROWS | JSON).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20) | MARKS.map(str.encode)
)
HEADERS = st.sampled_from([b"text,id,more", b"text;id;more", b"'text'|'id'|'more'"])


@FUZZED
@given(st.data(), st.sampled_from(["jsonl", "csv", "tsv"]), st.booleans(), st.sampled_from(["text", "infer"]))
def test_lines_that_are_made_up(
    job: MakeJob, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: str, named: bool, types: str
) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    first = [] if form == "jsonl" else [data.draw(HEADERS)]
    path = folder / f"in.{form}"
    path.write_bytes(b"\n".join([*first, *data.draw(LINES), b""]))
    keys: dict[str, Any] = {"id": "id"} if named else {}
    if form != "jsonl":
        keys["csv"] = {"types": types}
    attempt(job(path, output={"columns": ["more"], "path": str(folder / "out")}, **keys))
