from __future__ import annotations

import base64
import csv
import decimal
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import MakeJob, WriteParquet, output, run

from vasuki.base.errors import InputError, JobFileError
from vasuki.io.formats import decoded
from vasuki.io.formats import parquet as parquet_module
from vasuki.io.ids import IdHashes, refuse_duplicates
from vasuki.io.input.tables import InputTable, open_table
from vasuki.io.location import find_files
from vasuki.io.selection import EVERY_ROW, DoneRows, Selection, Shard


def rows_of(table: InputTable, selection: Selection = EVERY_ROW) -> list[tuple[int, dict[str, Any]]]:
    return [
        (row, {name: values[i] for name, values in block.columns.items()})
        for block in table.blocks(selection)
        for i, row in enumerate(block.rows)
    ]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- finding files ---------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_path_order_without_hidden_files(job: MakeJob, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "_SUCCESS", ".hidden.jsonl", "_tmp/d.jsonl"):
        jsonl(tmp_path / "in" / name, [{"text": name}])
    table = open_table(job(tmp_path / "in"))
    assert [(row, values["text"]) for row, values in rows_of(table)] == [
        (0, "a.jsonl"), (1, "b.jsonl"), (2, "sub/c.jsonl")
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("num_rows", [0, 2, 3, 4])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_file_that_changed_since_the_survey(
    job: MakeJob, tmp_path: Path, name: str, num_rows: int, form: str
) -> None:
    """Its rows are left out, and the other file's are read."""
    (tmp_path / "in").mkdir()
    write: Callable[[Path, list[str]], object] = {
        "jsonl": lambda path, texts: jsonl(path, [{"text": text} for text in texts]),
        "csv": lambda path, texts: path.write_text("\n".join(["text", *texts, ""])),
        "parquet": lambda path, texts: pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path),
    }[form]
    for each in "ab":
        write(tmp_path / f"in/{each}.{form}", [each] * 3)
    table = open_table(job(tmp_path / "in"))
    write(tmp_path / f"in/{name}.{form}", ["x"] * num_rows)
    found = rows_of(table, Selection(done=DoneRows(6)))
    assert [(row, values["text"]) for row, values in found] == {
        "a": [(3, "b"), (4, "b"), (5, "b")],
        "b": [(0, "a"), (1, "a"), (2, "a")],
    }[name]
    (problem,) = table.unread
    assert str(problem) == f"input changed while it was read: {tmp_path}/in/{name}.{form}"


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "csv", "parquet", "parquet of one group"])
def test_a_file_that_is_written_over_while_it_is_read(job: MakeJob, tmp_path: Path, form: str) -> None:
    """In place, with rows and bytes of the same number, and with its old time: no row of the new content is read."""
    rng = np.random.default_rng(0)
    texts = [rng.bytes(400).hex() for _ in range(12_000)]
    name = form.split(" ")[0]
    path = tmp_path / f"in.{name}"

    def content(texts: list[str]) -> bytes:
        if "parquet" in form:
            file, rows = io.BytesIO(), 12_000 if "group" in form else 1500
            pq.write_table(
                pa.table({"text": texts, "n": range(12_000)}), file, compression="none", row_group_size=rows,
                use_dictionary=False, write_statistics=False,
            )  # fmt: skip
            return file.getvalue()
        first = "text\n" if form == "csv" else ""
        lines = first + "".join(f"{text}\n" if form == "csv" else json.dumps({"text": text}) + "\n" for text in texts)
        return gzip.compress(lines.encode(), mtime=0) if form.endswith("gz") else lines.encode()

    path.write_bytes(content(texts))
    before = path.stat()
    table = open_table(job(path))
    blocks = table.blocks()
    read = next(blocks).columns["text"]
    changed = [*texts[:9000], *(text[::-1] for text in texts[9000:])]
    with path.open("r+b") as file:
        file.write(content(changed))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size == before.st_size) or "gz" in form
    for block in blocks:
        read += block.columns["text"]
    assert 1000 < len(read) <= 9000
    assert read == texts[: len(read)]
    (problem,) = table.unread
    assert str(problem) == f"input changed while it was read: {path}"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a", "b"]),
        ("[a].jsonl", ["a"]),
        ("?.jsonl", ["a", "b"]),
        ("**/*.jsonl", ["a", "b", "c"]),
        ("s*", ["c"]),
    ],
)
def test_globs(job: MakeJob, tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        jsonl(tmp_path / "in" / name, [{"text": Path(name).stem}])
    table = open_table(job(f"{tmp_path}/in/{pattern}"))
    assert [values["text"] for _, values in rows_of(table)] == expected


def test_a_file_url_and_a_glob_in_it(job: MakeJob, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    assert open_table(job(f"file://{tmp_path}/a.jsonl")).num_rows == 1
    assert open_table(job(f"file://{tmp_path}/*.jsonl")).num_rows == 1


def test_a_file_whose_name_looks_like_a_glob(job: MakeJob, tmp_path: Path) -> None:
    assert open_table(job(jsonl(tmp_path / "a[1].jsonl", [{"text": "a"}]))).num_rows == 1


def test_missing_input(job: MakeJob, tmp_path: Path) -> None:
    for path in (tmp_path / "none.parquet", tmp_path / "*.parquet"):
        with pytest.raises(InputError, match="does not exist, or holds no files"):
            open_table(job(path))


def test_unknown_url(job: MakeJob) -> None:
    with pytest.raises(InputError, match=r"cannot read input\.path ftp"):
        open_table(job("ftp://host/a.parquet"))


def test_mixed_formats_are_refused(job: MakeJob, tmp_path: Path) -> None:
    jsonl(tmp_path / "in/a.jsonl", [])
    (tmp_path / "in/b.csv").write_text("text\nx\n")
    with pytest.raises(JobFileError, match="mixes formats"):
        open_table(job(tmp_path / "in"))


def test_unknown_extension(job: MakeJob, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.data", [{"text": "a"}])
    with pytest.raises(JobFileError, match=r"a\.data does not tell its format"):
        open_table(job(tmp_path / "a.data"))
    assert open_table(job(tmp_path / "a.data", format="jsonl")).num_rows == 1


def test_packed_text(job: MakeJob, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "x"}\n' * 3)
    assert open_table(job(tmp_path / "a.jsonl.gz")).num_rows == 3
    data = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "LOUD.JSONL.GZ").write_bytes(data)
    assert open_table(job(tmp_path / "LOUD.JSONL.GZ")).num_rows == 3
    (tmp_path / "cut.jsonl.gz").write_bytes(data[:-12])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz"):
        open_table(job(tmp_path / "cut.jsonl.gz"))


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"prompt": "{txt}"}, "input.prompt names column 'txt'"),
        ({"id": "idd"}, "input.id names column 'idd'"),
        ({"sampling": {"max_tokens": {"column": "lenght"}}}, "sampling.max_tokens names column 'lenght'"),
        ({"plan": {"output_length": {"column": "lenght"}}}, "plan.output_length names column 'lenght'"),
        ({"output": {"columns": ["tex"]}}, "output.columns names column 'tex'"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_a_column_that_does_not_exist(
    job: MakeJob, parquet: WriteParquet, tmp_path: Path, keys: dict[str, Any], named: str, form: str
) -> None:
    path = parquet(text=["a"], id=[1], length=[3])
    if form == "jsonl":
        path = jsonl(tmp_path / "a.jsonl", [{"text": "a", "id": 1, "length": 3}])
    if form == "csv":
        path = tmp_path / "a.csv"
        path.write_text("text,id,length\na,1,3\n")
    with pytest.raises(JobFileError, match=rf"{named}.*did you mean '(text|id|length)'"):
        open_table(job(path, **keys))


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_folders_of_keys_and_values_are_columns(job: MakeJob, tmp_path: Path, form: str) -> None:
    """Compared with pyarrow's datasets, which read such folders too."""
    folders = ["year=2023/lang=de", "year=2024/lang=a%20b%2Fc", "year=2024/lang=__HIVE_DEFAULT_PARTITION__"]
    for folder in folders:
        path = tmp_path / "in" / folder / f"p.{form}"
        rows = pa.table({"text": [f"{folder} {row}" for row in range(3)]})
        if form == "jsonl":
            jsonl(path, rows.to_pylist())
        else:
            path.parent.mkdir(parents=True)
            (pq.write_table if form == "parquet" else pa_csv.write_csv)(rows, path)
    partitioning = ds.partitioning(pa.schema([("year", pa.string()), ("lang", pa.string())]), flavor="hive")
    format = "json" if form == "jsonl" else form
    expected = ds.dataset(tmp_path / "in", format=format, partitioning=partitioning).to_table()
    table = open_table(job(tmp_path / "in", prompt="{text} {year}", output={"columns": ["year", "lang"]}))
    assert table.carried_types == {"year": pa.string(), "lang": pa.string()}
    read = sorted((values for _, values in rows_of(table)), key=lambda values: values["text"])
    assert read == sorted(expected.to_pylist(), key=lambda values: values["text"])
    path.parent.rename(tmp_path / "in/year=2025")
    assert open_table(job(tmp_path / "in", prompt="{text} {year}")).fingerprint != table.fingerprint


def test_a_column_of_the_file_goes_before_that_of_its_folder(
    job: MakeJob, parquet: WriteParquet, tmp_path: Path
) -> None:
    parquet(name="in/year=2024/p.parquet", text=["a"], year=[7])
    (tmp_path / "in/year=2024/q.csv").write_text("text,year\nb,8\n")
    for name, year in (("p.parquet", 7), ("q.csv", "8")):
        ((_, values),) = rows_of(open_table(job(tmp_path / "in/year=2024" / name, prompt="{text} {year}")))
        assert values["year"] == year


def test_a_prompt_may_name_columns_of_folders_alone(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet(name="in/year=2024/p.parquet", text=["a", "b", "c"])
    table = open_table(job(tmp_path / "in", prompt="{year}"))
    assert rows_of(table) == [(row, {"year": "2024"}) for row in range(3)]
    assert rows_of(table, Selection(Shard(1, 2))) == [(1, {"year": "2024"})]


def test_a_folders_name_is_no_id(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet(name="in/year=2024/p.parquet", text=["a"])
    with pytest.raises(JobFileError, match=r"'year', .* a folder's name gives it, the same for all rows of a file"):
        open_table(job(tmp_path / "in", id="year"))


def test_a_dotted_column_beside_a_struct_of_the_same_path(job: MakeJob, parquet: WriteParquet) -> None:
    path = parquet(a=[{"b": 2**62}, {"b": 1}], **{"a.b": pa.array([1, 2], pa.int8())}, text=["x", "y"])
    table = open_table(job(path, prompt="{a.b} {text}", id="a.b", output={"columns": ["a.b", "a"]}))
    assert [values["a.b"] for _, values in rows_of(table)] == [1, 2]
    assert [values["a"] for _, values in rows_of(table)] == [{"b": 2**62}, {"b": 1}]
    (file,) = table.files
    assert file.survey(["a.b"], ["a.b"], None).numbers == {"a.b": (1, 2)}


def test_reserved_and_repeated_output_columns(job: MakeJob, parquet: WriteParquet) -> None:
    path = parquet(text=["a"], output=["b"], id=[1])
    with pytest.raises(JobFileError, match="'output' is a column of the answer"):
        open_table(job(path, output={"columns": ["output"]}))
    with pytest.raises(JobFileError, match="names 'text' twice"):
        open_table(job(path, output={"columns": ["text", "text"]}))
    assert not open_table(job(path, id="id", output={"columns": ["id"]})).carried_types


def test_repeated_input_columns(job: MakeJob, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    for name in ("a.parquet", "a.csv"):
        with pytest.raises(InputError, match="several columns named 'text'"):
            open_table(job(tmp_path / name))


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_a_corrupt_parquet_file(job: MakeJob, tmp_path: Path, parquet: WriteParquet) -> None:
    good = parquet(text=["a"] * 1000).read_bytes()
    for name, data in {"cut": good[:-9], "empty": b"", "text": b"hello"}.items():
        (tmp_path / f"{name}.parquet").write_bytes(data)
        with pytest.raises(InputError, match=rf"cannot read .*{name}\.parquet as Parquet"):
            open_table(job(tmp_path / f"{name}.parquet"))


def test_damaged_pages_are_named_when_met(job: MakeJob, parquet: WriteParquet) -> None:
    path = parquet(text=[f"row {i}" for i in range(1000)])
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    table = open_table(job(path))
    assert not rows_of(table)
    (problem,) = table.unread
    assert "in.parquet as Parquet" in str(problem)


def test_files_whose_types_disagree(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet("in/a.parquet", text=["a"], extra=pa.array([1], pa.int32()))
    parquet("in/b.parquet", text=["b"], extra=pa.array([2**40], pa.int64()))
    table = open_table(job(tmp_path / "in", output={"columns": ["extra"]}))
    assert table.carried_types == {"extra": pa.int64()}
    parquet("in/c.parquet", text=["c"], extra=["x"])
    with pytest.raises(InputError, match=r"column 'extra' is string in .*c\.parquet but int64"):
        open_table(job(tmp_path / "in", output={"columns": ["extra"]}))


def test_a_file_of_nothing_disagrees_with_none(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "in" / "b.parquet")
    pq.write_table(pa.table({}), tmp_path / "in" / "a.parquet")
    table = open_table(job(tmp_path / "in", output={"columns": ["n"]}))
    assert (table.num_rows, table.carried_types) == (2, {"n": pa.int64()})


def test_a_table_without_rows_keeps_the_types_of_its_columns(job: MakeJob, tmp_path: Path) -> None:
    empty = pa.table(
        {"id": pa.array([], pa.int32()), "text": pa.array([], pa.string()), "at": pa.array([], pa.date32())}
    )
    pq.write_table(empty, tmp_path / "a.parquet")
    table = open_table(job(tmp_path / "a.parquet", id="id", output={"columns": ["at"]}))
    assert (table.num_rows, table.id_type, table.carried_types) == (0, pa.int32(), {"at": pa.date32()})


def test_long_rows_come_in_small_blocks(job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (parquet_module, decoded):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100_000)
    rng = np.random.default_rng(0)
    path = parquet(text=[rng.bytes(5000).hex() for _ in range(100)])
    sizes = [len(block.rows) for block in open_table(job(path)).blocks()]
    assert sum(sizes) == 100
    assert max(sizes) <= 10


# --- JSON Lines ------------------------------------------------------------------------------------------------------


def test_ragged_json_lines(job: MakeJob, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"other": [1, {"x": 2}], "text": "b"}, {"text": None}, {}, {"text": "é" * 3_000_000}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    path.write_text("\ufeff" + path.read_text().replace("\n", "\r\n\r\n"))
    table = open_table(job(path, output={"columns": ["other"]}))
    assert table.num_rows == 5
    assert table.carried_types == {"other": pa.string()}
    (first, *rest) = list(table.blocks())
    assert (first.columns["text"] + [v for b in rest for v in b.columns["text"]]) == [
        "a",
        "b",
        None,
        None,
        "é" * 3_000_000,
    ]
    assert table.carried(first)["other"][:2] == [None, '[1, {"x": 2}]']


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, None], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([True, False], pa.bool_()),
        (["a", None], pa.string()),
        ([None], pa.string()),
        ([1, "a"], pa.string()),
        ([2**70], pa.string()),
        ([[1], [2]], pa.string()),
        ([True, 1], pa.string()),
    ],
)
def test_types_of_carried_json(job: MakeJob, tmp_path: Path, values: list[Any], expected: pa.DataType) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "extra": value} for value in values])
    table = open_table(job(path, output={"columns": ["extra"]}))
    assert table.carried_types["extra"] == expected
    (block,) = table.blocks()
    pa.array(table.carried(block)["extra"], type=expected)


WIDE = 2**53 + 1  # the first integer that a double rounds


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([WIDE, 1.5], ["9007199254740993", "1.5"]),
        ([-WIDE, None, 1.5], ["-9007199254740993", None, "1.5"]),
        ([WIDE - 1, 1.5], [2.0**53, 1.5]),
        ([WIDE, 1], [WIDE, 1]),
    ],
)
def test_json_numbers_are_carried_as_they_are(
    job: MakeJob, tmp_path: Path, values: list[Any], expected: list[Any]
) -> None:
    """In two runs, and in files of their own: the type is the same for every part."""
    for row, value in enumerate(values):
        jsonl(tmp_path / f"in/{row}.jsonl", [{"text": "x", "extra": value}])
    config = job(tmp_path / "in", output={"columns": ["extra"]})
    run(config, stop_after=1)
    run(config)
    assert output(config)["extra"].to_pylist() == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.array([WIDE]), pa.array([0.5]), ["9007199254740993", "0.5"]),
        (pa.array([7, None]), pa.array([0.5]), [7.0, None, 0.5]),
        (pa.array([None], pa.int64()), pa.array([0.5]), [None, 0.5]),
        (pa.array([decimal.Decimal("1.10")]), pa.array([0.1]), ["1.10", "0.1"]),
        (pa.array([decimal.Decimal("1.10")]), pa.array([WIDE]), [decimal.Decimal("1.10"), WIDE]),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), ["18446744073709551615", "-1"]),
        (pa.array([7], pa.uint64()), pa.array([-1]), [7, -1]),
        (pa.array([2**24 + 1], pa.int32()), pa.array([0.5], pa.float32()), None),
    ],
)
def test_numbers_of_files_that_disagree_are_carried_as_they_are(
    job: MakeJob, parquet: WriteParquet, tmp_path: Path, one: pa.Array, other: pa.Array, expected: list[Any] | None
) -> None:
    parquet("in/a.parquet", text=["x"] * len(one), extra=one)
    parquet("in/b.parquet", text=["x"], extra=other)
    config = job(tmp_path / "in", output={"columns": ["extra"]})
    run(config, stop_after=1)
    run(config)
    values = output(config)["extra"].to_pylist()
    assert values == (expected or one.to_pylist() + other.to_pylist())
    assert output(config)["error"].null_count == output(config).num_rows


def test_integers_without_statistics_may_be_any(job: MakeJob, tmp_path: Path) -> None:
    for name, column in {"a": pa.array([1]), "b": pa.array([0.5])}.items():
        pq.write_table(pa.table({"text": ["x"], "extra": column}), tmp_path / f"{name}.parquet", write_statistics=False)
    table = open_table(job(f"{tmp_path}/*.parquet", output={"columns": ["extra"]}))
    assert table.carried_types == {"extra": pa.string()}


def test_ids_that_no_integer_type_holds_become_text(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet("in/a.parquet", text=["x"], key=pa.array([2**64 - 1], pa.uint64()))
    parquet("in/b.parquet", text=["x"], key=pa.array([-1]))
    config = job(tmp_path / "in", id="key")
    run(config)
    assert output(config)["id"].to_pylist() == ["18446744073709551615", "-1"]


def test_a_value_that_its_column_cannot_hold_fails_its_row(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    """Days of the year 3000 in seconds, together with times in nanoseconds, which end in 2262."""
    parquet("in/a.parquet", text=["x", "y"], when=pa.array([32503680000, 1], pa.timestamp("s")))
    parquet("in/b.parquet", text=["z"], when=pa.array([1], pa.timestamp("ns")))
    config = job(tmp_path / "in", output={"columns": ["when"]})
    assert run(config) == 3
    table = output(config)
    assert table["error"].to_pylist() == ["column 'when' has a value that is no timestamp[ns]", None, None]
    assert table["when"].cast(pa.int64()).to_pylist() == [None, 10**9, 1]


def test_a_value_without_text_fails_its_row(job: MakeJob, parquet: WriteParquet) -> None:
    """As a list that is nested more deeply than what writes it as text can go."""
    table = open_table(job(parquet(text=["a", "b"], extra=["c", "d"]), output={"columns": ["extra"]}))
    (block,) = table.blocks()
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    block.columns["extra"][1] = nested
    assert table.carried(block) == {"extra": ["c", None]}
    assert block.malformed == {1: "column 'extra' has a value that is no string"}


def test_malformed_lines_fail_alone(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": \n[1]\n{"text": "\xff"}\n{"text": "\\ud800"}\n'
        + b"[" * 100_000
        + b'\n{"text": "b"}\n'
    )
    (block,) = open_table(job(tmp_path / "a.jsonl")).blocks()
    assert block.columns["text"] == ["a", None, None, None, None, None, "b"]
    assert "line 2 is not JSON" in block.malformed[1]
    assert block.malformed[2] == "line 3 is not a JSON object"
    assert block.malformed[3] == "line 4 is not UTF-8 text"
    assert block.malformed[4] == "line 5 has half a surrogate pair, which no text holds"
    assert set(block.malformed) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("ids", "expected"), [((1, 9), [1, 2, 3, 9]), (("a", "2"), ["a", "2", "3", "2"])])
def test_a_malformed_line_without_an_id_is_known_by_its_line(
    job: MakeJob, tmp_path: Path, ids: tuple[Any, Any], expected: list[Any]
) -> None:
    first, last = (json.dumps({"text": "a", "id": each}) for each in ids)
    (tmp_path / "a.jsonl").write_text(f'{first}\n{{"text"\n[]\n{last}\n')
    table = open_table(job(tmp_path / "a.jsonl", id="id"))
    (block,) = table.blocks()
    assert table.ids(block) == expected
    assert set(block.malformed) == {1, 2}


def test_half_a_surrogate_pair_costs_a_line_its_text_but_not_its_id(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "\\ud83d"}\n{"id": "b", "text": "\\ud83d\\ude00"}\n')
    table = open_table(job(tmp_path / "a.jsonl", id="id"))
    (block,) = table.blocks()
    assert (table.ids(block), block.columns["text"], list(block.malformed)) == (["a", "b"], [None, "\U0001f600"], [0])


def test_a_malformed_csv_row_is_known_by_its_line_too(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\na,x\nb\nc,y\n")
    table = open_table(job(tmp_path / "a.csv", id="id"))
    (block,) = table.blocks()
    assert (table.ids(block), list(block.malformed)) == (["a", "3", "c"], [1])


def test_a_name_that_is_no_utf_8_is_refused_by_name(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in (b"ok.jsonl", b"caf\xe9.jsonl"):
        with open(os.path.join(os.fsencode(tmp_path / "in"), name), "w") as file:
            file.write('{"text": "a"}\n')
    with pytest.raises(InputError, match=r"caf\\xe9\.jsonl is not UTF-8; rename the file"):
        open_table(job(tmp_path / "in"))


class Keys(encryption.KmsClient):  # type: ignore[misc]
    """Wraps keys in nothing."""

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


def test_an_encrypted_column_is_in_nobodys_way_unless_the_job_reads_it(job: MakeJob, tmp_path: Path) -> None:
    """To look at the metadata of such a column ends the process."""
    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["secret"]}, plaintext_footer=True)
    factory = encryption.CryptoFactory(lambda config: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({"text": ["a", "b"], "secret": ["c", "d"], "other": ["e", "f"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    (block,) = open_table(job(tmp_path / "a.parquet", output={"columns": ["other"]})).blocks()
    assert block.columns == {"text": ["a", "b"], "other": ["e", "f"]}
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet as Parquet: .*decrypt"):
        open_table(job(tmp_path / "a.parquet", prompt="{secret}"))


def test_files_agree_on_what_they_hold_not_on_how(job: MakeJob, tmp_path: Path) -> None:
    """Categories against text, a file without rows, and columns that the output does not get."""
    labels = [f"label-{i}" for i in range(100)]
    files = {
        "a": {
            "text": labels,
            "label": pa.array(labels).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
        },
        "b": {"text": labels, "label": pa.array([f"other-{i}" for i in range(100)]).dictionary_encode()},
        "c": {"text": ["p"], "label": pa.array(["x"])},
        "d": {"text": pa.array([], pa.string()), "label": pa.array([], pa.int32())},
        "e": {"text": ["p"], "label": ["y"], "other": pa.array([1])},
        "f": {"text": ["p"], "label": ["z"], "other": pa.array([[1]])},
    }
    for name, columns in files.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    table = open_table(job(tmp_path / "*.parquet", output={"columns": ["label"]}))
    assert (table.num_rows, table.carried_types) == (203, {"label": pa.string()})
    carried = [label for block in table.blocks() for label in table.carried(block)["label"]]
    assert carried == [*labels, *(f"other-{i}" for i in range(100)), "x", "y", "z"]


@pytest.mark.parametrize("zone", ["+00:00", "Etc/UTC", "UTC"])
def test_utc_is_one_zone_whatever_it_is_called(job: MakeJob, tmp_path: Path, zone: str) -> None:
    moments = [datetime(2026, 11, 27, hour, tzinfo=UTC) for hour in (1, 2)]
    for name, tz, moment in [("a", "UTC", moments[0]), ("b", zone, moments[1])]:
        when = pa.array([moment], pa.timestamp("us", tz))
        pq.write_table(pa.table({"text": ["p"], "when": when}), tmp_path / f"{name}.parquet")
    for path, expected in [("*.parquet", moments), ("b.parquet", moments[1:])]:
        table = open_table(job(tmp_path / path, output={"columns": ["when"]}))
        assert table.carried_types == {"when": pa.timestamp("us", "UTC")}
        assert [when for block in table.blocks() for when in table.carried(block)["when"]] == expected


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_csv_is_text(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffid,text,when\n007,"two\nlines, ""quoted""",2024-01-02\n\n1e3,,\n')
    table = open_table(job(tmp_path / "a.csv", id="id", output={"columns": ["when"]}))
    (block,) = table.blocks()
    assert block.columns == {"id": ["007", "1e3"], "text": ['two\nlines, "quoted"', ""], "when": ["2024-01-02", ""]}
    assert table.id_type == pa.string()
    assert table.carried_types == {"when": pa.string()}


def test_csv_rows_of_the_wrong_width_fail_alone(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,b\nx,1\ny\nz,1,2\nw,2\n")
    (block,) = open_table(job(tmp_path / "a.csv")).blocks()
    assert block.columns["text"] == ["x", None, None, "w"]
    assert block.malformed[1] == "the row that ends in line 3 has 1 cells, the header 2"


def test_tsv_and_a_huge_cell(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tb\n" + "x" * 1_000_000 + "\t1\n")
    (block,) = open_table(job(tmp_path / "a.tsv")).blocks()
    assert len(block.columns["text"][0]) == 1_000_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"text\nna\xefve\n", "is not UTF-8 .byte 0xef.; input.csv.encoding says what it is, such as cp1252"),
        (b'text\n"never closed\nand so on\n', "cannot read .*unexpected end of data in line 3"),
        (b'text\nfine\n"closed" and on\n', "cannot read .*expected after.* in line 3"),
    ],
)
def test_bad_csv(job: MakeJob, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(InputError, match=message):
        open_table(job(tmp_path / "a.csv"))


WRITTEN: list[tuple[str, dict[str, Any]]] = [  # what separates cells, and what the job has to say of it
    (";", {}), ("\t", {}), ("|", {}), (",", {}), ("^", {"delimiter": "^"}),
]  # fmt: skip


@pytest.mark.parametrize(("delimiter", "said"), WRITTEN)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("quote", ['"', "'"])
def test_csv_as_others_write_it(
    job: MakeJob, tmp_path: Path, delimiter: str, said: dict[str, Any], encoding: str, quote: str
) -> None:
    """The texts hold every delimiter, quotes and line breaks."""
    texts = ["a;b|c\td,e^f", "plain", 'it\'s "so"', "two\nlines; of, it", "na\xefve", "", "x" * 70_000]
    with open(tmp_path / "a.csv", "w", encoding=encoding, newline="") as file:
        if quote == "'":
            writer = csv.writer(file, delimiter=delimiter, quotechar=quote, quoting=csv.QUOTE_ALL)
        else:
            writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([("key", "text", "last"), *((key, text, "1,5") for key, text in enumerate(texts))])
    said = {**said, **({"encoding": encoding} if encoding == "cp1252" else {})}
    if quote == "'":
        said["quote"] = quote
    table = open_table(job(tmp_path / "a.csv", csv=said, id="key"))
    assert [values["text"] for _, values in rows_of(table)] == texts


def test_utf_16_without_its_mark_is_refused_by_name(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;b\nx;1\n")
    with pytest.raises(InputError, match=r"a\.csv .*does not start with BOM; input\.csv\.encoding says what it is"):
        open_table(job(tmp_path / "a.csv", csv={"encoding": "utf-16"}))


def test_what_a_csv_file_is_taken_for_is_said(job: MakeJob, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "a.csv").write_text("text,b\nx,1\n")
    open_table(job(tmp_path / "a.csv"))
    assert not caplog.messages
    (tmp_path / "b.csv").write_text("text;b\nx;1\n")
    open_table(job(tmp_path / "b.csv"))
    assert caplog.messages == [f"{tmp_path}/b.csv has semicolons between cells, double quotes, utf-8"]


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        ("text\na;b\nc;d\n", ["text"]),  # the header has one cell
        ("text,b\nx;1\ny;2\n", ["text", "b"]),  # no line is cut as the header is
        ("text;a,b\n1;2,3\n4;5,6\n", ["text;a", "b"]),  # two fit: the usual one is taken
        ("text;b\n1;2\n3;4;5\n6;7\n8;9\n", ["text", "b"]),  # a broken line fails alone
        ('text;b\n"1;2\n3,4\n5|6";7\n', ["text", "b"]),  # not what is within quotes
        ("text;b\u2028c\n1;2\n", ["text", "b\u2028c"]),
        ("text;b\r\n1;2\r\n", ["text", "b"]),
        ("text;b\n", ["text", "b"]),
    ],
)
def test_delimiters_are_found_only_without_doubt(job: MakeJob, tmp_path: Path, data: str, columns: list[str]) -> None:
    (tmp_path / "a.csv").write_bytes(data.encode())
    table = open_table(job(tmp_path / "a.csv", prompt=f"{{{columns[0]}}}"))
    (file,) = table.files
    assert [*file.survey([], [], None).types] == columns


def test_csv_without_a_header_and_without_quotes(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,"1\nb,2\n')
    table = open_table(job(tmp_path / "a.csv", prompt="{column0}{column1}", csv={"header": False, "quote": ""}))
    assert [values for _, values in rows_of(table)] == [
        {"column0": "a", "column1": '"1'},
        {"column0": "b", "column1": "2"},
    ]
    table = open_table(job(tmp_path / "a.csv", prompt="{x}{y}", csv={"header": ["x", "y"], "quote": ""}))
    assert rows_of(table)[0] == (0, {"x": "a", "y": '"1'})
    (tmp_path / "a.csv").write_text("")
    assert open_table(job(tmp_path / "a.csv", prompt="{x}", csv={"header": ["x"]})).num_rows == 0


def test_types_of_csv_are_those_that_arrow_infers(job: MakeJob, tmp_path: Path) -> None:
    """Compared with pyarrow's reader, but for leading zeros and plus signs, which it drops."""
    cells = {
        "integer": ["1", "-20", ""], "number": ["1.50", "2", ""], "large": [str(2**62), "0", "1"],
        "date": ["2021-05-03", "", "1999-12-31"], "time": ["2021-05-03 10:11:12", "2021-05-03T10:11:12", ""],
        "truth": ["true", "False", ""], "words": ["1", "x", ""], "none": ["", "", ""], "signs": ["-", "1e5", "2"],
    }  # fmt: skip
    names = [*cells]
    lines = [",".join(["text", *names]), *(",".join(["t", *(cells[name][row] for name in names)]) for row in range(3))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    table = open_table(job(tmp_path / "a.csv", csv={"types": "infer"}, output={"columns": names}))
    expected = pa_csv.read_csv(tmp_path / "a.csv").drop(["text", "none"])
    (block,) = table.blocks()
    carried = table.carried(block)
    for name in expected.column_names:
        kind = expected.schema.field(name).type
        assert table.carried_types[name] == (pa.timestamp("us") if name == "time" else kind), name
        assert pa.array(carried[name], table.carried_types[name]).to_pylist() == expected[name].to_pylist(), name
    assert (table.carried_types["none"], carried["none"]) == (pa.string(), ["", "", ""])
    assert block.columns["number"] == cells["number"]  # in a prompt it stands as it was written


def test_cells_that_name_things_stay_text(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,code,phone,many,odd\nt,007,+49,9223372036854775808,2021-02-30\n")
    columns = ["code", "phone", "many", "odd"]
    table = open_table(job(tmp_path / "a.csv", csv={"types": "infer"}, output={"columns": columns}))
    (block,) = table.blocks()
    assert [*table.carried(block).values()] == [["007"], ["+49"], ["9223372036854775808"], ["2021-02-30"]]
    assert {*table.carried_types.values()} == {pa.string()}


def test_csv_files_that_disagree_on_types(job: MakeJob, tmp_path: Path) -> None:
    for name, cells in (("a", "1,1,1.50"), ("b", "2.5,x,2021-05-03"), ("c", ",,")):
        (tmp_path / f"{name}.csv").write_text(f"text,n,m,o\nt,{cells}\n")
    table = open_table(job(tmp_path / "*.csv", csv={"types": "infer"}, output={"columns": ["n", "m", "o"]}))
    assert table.carried_types == {"n": pa.float64(), "m": pa.string(), "o": pa.string()}
    carried = [table.carried(block) for block in table.blocks()]
    assert [pa.array(some["n"], pa.float64()).to_pylist() for some in carried] == [[1.0], [2.5], [None]]
    assert [some["o"] for some in carried] == [["1.50"], ["2021-05-03"], [""]]


def test_settings_of_csv_for_other_files_are_refused(job: MakeJob, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    for keys in ({}, {"format": "jsonl"}):
        with pytest.raises(JobFileError, match=r"input\.csv goes with CSV files, not jsonl"):
            open_table(job(tmp_path / "a.jsonl", csv={"types": "infer"}, **keys))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delimiter": ";;"}, "should be one character, or tab"),
        ({"delimiter": "\n"}, "should be one character, or tab"),
        ({"quote": "auto"}, "should be one character, or tab"),
        ({"delimiter": ";", "quote": ";"}, "are the same character"),
        ({"encoding": "latin-99"}, "'latin-99' is no encoding that Python knows"),
        ({"encoding": "hex"}, "'hex' is no encoding that Python knows"),
    ],
)
def test_settings_of_csv_that_cannot_be(job: MakeJob, settings: dict[str, str], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        job("a.csv", csv=settings)


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_duplicate_and_missing_ids(job: MakeJob, tmp_path: Path, parquet: WriteParquet, form: str) -> None:
    def write(ids: list[str | None]) -> Path:
        if form == "parquet":
            return parquet(text=["t"] * len(ids), id=ids, row_group_size=2)
        if form == "jsonl":
            return jsonl(tmp_path / "a.jsonl", [{"text": "t", "id": value} for value in ids])
        (tmp_path / "a.csv").write_text("text,id\n" + "".join(f"t,{'' if v is None else v}\n" for v in ids))
        return tmp_path / "a.csv"

    assert open_table(job(write(["a", "b", "c"]), id="id")).num_rows == 3
    with pytest.raises(JobFileError, match=r"input\.id 'id' is not unique: rows 1 and 3 are both 'b'"):
        open_table(job(write(["a", "b", "c", "b", "a"]), id="id"))
    with pytest.raises(JobFileError, match="row 2 has no id"):
        open_table(job(write(["a", "b", None]), id="id"))


def test_ids_of_several_files_are_compared(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet("in/a.parquet", text=["x"], id=[7])
    parquet("in/b.parquet", text=["y", "z"], id=[8, 7])
    with pytest.raises(JobFileError, match="rows 0 and 2 are both '7'"):
        open_table(job(tmp_path / "in", id="id"))


def test_json_ids_that_are_not_all_integers_become_text(job: MakeJob, tmp_path: Path) -> None:
    table = open_table(job(jsonl(tmp_path / "a.jsonl", [{"text": "t", "id": 1}, {"text": "t", "id": "b"}]), id="id"))
    assert table.ids(next(table.blocks())) == ["1", "b"]
    path = jsonl(tmp_path / "b.jsonl", [{"text": "t", "id": 1}, {"text": "t", "id": "1"}])
    with pytest.raises(JobFileError, match="both '1'"):
        open_table(job(path, id="id"))


def test_integer_ids_keep_their_type(job: MakeJob, parquet: WriteParquet) -> None:
    table = open_table(job(parquet(text=["a"], id=pa.array([2**63], pa.uint64())), id="id"))
    assert table.id_type == pa.uint64()
    assert table.ids(next(table.blocks())) == [2**63]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_the_first_duplicate_is_found(ids: list[int]) -> None:
    hashes = IdHashes("id")
    for value in ids:
        hashes.add(value)
    suspects = hashes.suspects()
    assert len(suspects) == len({value for value in ids if ids.count(value) > 1})
    first = next((row for row, value in enumerate(ids) if value in ids[:row]), None)
    if first is None:
        refuse_duplicates("id", suspects, enumerate(ids))
    else:
        with pytest.raises(JobFileError, match=f"rows {ids.index(ids[first])} and {first} are both"):
            refuse_duplicates("id", suspects, enumerate(ids))


def test_equal_hashes_are_only_a_suspicion() -> None:
    from vasuki.io.ids import _hash

    suspects = np.array(sorted([_hash("a"), _hash("b")]))
    refuse_duplicates("id", suspects, [(0, "a"), (1, "b"), (2, "c")])


# --- selection -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(0, 50),
    count=st.integers(1, 4),
    done=st.sets(st.integers(0, 49)),
    row_group_size=st.integers(1, 20),
    text=st.booleans(),
)
def test_every_wanted_row_is_read_once(
    job: MakeJob, tmp_path: Path, num_rows: int, count: int, done: set[int], row_group_size: int, text: bool
) -> None:
    path = tmp_path / ("a.jsonl" if text else "a.parquet")
    if text:
        jsonl(path, [{"text": f"t{i}"} for i in range(num_rows)])
    else:
        table = pa.table({"text": pa.array([f"t{i}" for i in range(num_rows)], pa.string())})
        pq.write_table(table, path, row_group_size=row_group_size)
    done_rows = DoneRows(num_rows)
    done_rows.add(sorted(row for row in done if row < num_rows))
    opened = open_table(job(path))
    found = [pair for i in range(count) for pair in rows_of(opened, Selection(Shard(i, count), done_rows))]
    assert sorted(row for row, _ in found) == [row for row in range(num_rows) if row not in done]
    assert all(values["text"] == f"t{row}" for row, values in found)


def test_shards() -> None:
    assert Shard.parse("1/4") == Shard(1, 4)
    assert Shard(1, 4).label == "-1-of-4"
    assert [Shard(i, 4).num_rows(10) for i in range(4)] == [3, 3, 2, 2]
    for text in ("4/4", "x", "1", "0/0", "-1/3"):
        with pytest.raises(JobFileError, match="write it as I/N"):
            Shard.parse(text)


def test_done_rows_refuse_a_row_twice() -> None:
    done = DoneRows(5)
    done.add([1, 3])
    for rows in ([3], [2, 2], [5], [-1]):
        with pytest.raises(ValueError, match="row"):
            done.add(rows)
    assert done.count == 2
    assert done.count_in(Shard(1, 2)) == 2


# --- fingerprint -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_the_fingerprint_follows_the_content(job: MakeJob, tmp_path: Path, form: str) -> None:
    def write(folder: str, texts: list[str]) -> str:
        path = tmp_path / folder / f"a.{form}"
        path.parent.mkdir(exist_ok=True)
        if form == "parquet":
            pq.write_table(pa.table({"text": texts}), path)
        elif form == "jsonl":
            jsonl(path, [{"text": text} for text in texts])
        else:
            path.write_text("text\n" + "".join(text + "\n" for text in texts))
        return open_table(job(path)).fingerprint

    texts = [f"text {i}" for i in range(2000)]
    first = write("one", texts)
    assert write("two", texts) == first, "a copy is the same input"
    assert write("one", [*texts[:1000], "text X", *texts[1001:]]) != first
    assert write("one", texts[:-1]) != first
    assert write("one", texts[::-1]) != first


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_edit_of_what_is_read_is_seen(job: MakeJob, tmp_path: Path, compression: str) -> None:
    """Of the same length, anywhere in a file of megabytes."""

    def fingerprint(texts: list[str], other: str = "x") -> str:
        columns = {"text": texts, "other": [other * 50] * len(texts)}
        pq.write_table(pa.table(columns), tmp_path / "in.parquet", compression=compression, write_statistics=False)
        return open_table(job(tmp_path / "in.parquet")).fingerprint

    rng = np.random.default_rng(0)
    texts = [rng.bytes(120).hex() for _ in range(9000)]
    first = fingerprint(texts)
    assert (tmp_path / "in.parquet").stat().st_size > 2**20
    for row in (7, 999, 3333, 5001, 7777):
        edited = [*texts[:row], texts[row][::-1], *texts[row + 1 :]]
        assert fingerprint(edited) != first
    assert fingerprint(texts) == first


@pytest.mark.parametrize("pattern", ["in", "in/**", "in/**/*.parquet"])
def test_links_that_lead_back_multiply_no_rows(
    job: MakeJob, parquet: WriteParquet, tmp_path: Path, pattern: str
) -> None:
    parquet("in/a.parquet", text=["a"] * 2)
    parquet("in/sub/b.parquet", text=["b"] * 2)
    (tmp_path / "in" / "sub" / "up").symlink_to("..")
    assert open_table(job(tmp_path / pattern)).num_rows == 4


def test_links_to_folders_elsewhere_are_followed(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet("in/a.parquet", text=["a"] * 2)
    parquet("data/b.parquet", text=["b"] * 2)
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "data")
    assert open_table(job(tmp_path / "in")).num_rows == 4


@pytest.mark.parametrize(
    ("pattern", "output", "refused"),
    [
        ("", "out", True),
        ("", "a/b/out", True),
        ("**", "out", True),
        ("**/*.parquet", "out", True),
        ("*/*.parquet", "out", True),
        ("*", "out", True),
        ("o[a-z]t", "out", True),
        ("*.parquet", "out", False),
        ("**/*.jsonl", "out", False),
        ("*/*.parquet", "a/out", False),
        ("a*", "out", False),
        ("", "_out", False),
        ("", ".out", False),
        ("", "../beside", False),
    ],
)
def test_output_within_the_input_is_refused_before_the_first_run(
    job: MakeJob, parquet: WriteParquet, tmp_path: Path, pattern: str, output: str, refused: bool
) -> None:
    parquet("in/a.parquet", text=["a"])
    folder, where = {"path": str(tmp_path / "in" / output)}, f"{tmp_path}/in/{pattern}"
    assert open_table(job(tmp_path / "in/a.parquet", output=folder)).num_rows == 1  # one file, named outright
    if refused:
        with pytest.raises(JobFileError, match=r"output.path .* lies in input.path"):
            open_table(job(where, output=folder))
    # And what a run would write there is found, or is not.
    written = tmp_path / "in" / output / "part-0.parquet"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text("")
    assert (os.path.realpath(written) in {file.real_path for file in find_files(where)}) == refused


def test_output_among_the_input_is_refused(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    parquet("data/a.parquet", text=["a"])
    for path in (tmp_path / "data", f"file://{tmp_path}/data"):
        with pytest.raises(JobFileError, match=r"holds the input file a\.parquet"):
            open_table(job(path, output={"path": str(path)}))
    assert open_table(job(tmp_path / "data", output={"path": str(tmp_path / "data2")})).num_rows == 1
    assert open_table(job(tmp_path / "data/a.parquet", output={"path": str(tmp_path)})).num_rows == 1


def test_nested_nanoseconds_have_a_text_without_pandas(tmp_path: Path) -> None:
    """Where pandas is not installed, pyarrow makes no Python value of them."""
    program = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pandas":
            raise ImportError
sys.meta_path.insert(0, Lacking())
import numpy as np, pyarrow as pa
from vasuki.io.values import as_text, python_values
times = pa.array([np.datetime64("2026-01-01T00:00:00.123456789", "ns"), None])
lists = pa.ListArray.from_arrays([0, 2], times)
maps = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.timestamp("ns")))
for column in (pa.StructArray.from_arrays([times], ["t"]), pa.StructArray.from_arrays([lists], ["l"]), maps):
    values = python_values(column)
    assert pa.array(values, column.type).equals(column)
    print(as_text(values[0]))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [
        '{"t": "2026-01-01 00:00:00.123456789"}',
        '{"l": ["2026-01-01 00:00:00.123456789", null]}',
        '{"a": "1970-01-01 00:00:00.000000001"}',
    ]
