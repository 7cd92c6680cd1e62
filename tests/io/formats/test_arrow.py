"""Arrow files give the rows that pyarrow put into them, and those that a Parquet file of the same table gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from rooms import MakeJob

from vasuki.base.errors import InputError, JobFileError
from vasuki.io.formats.arrow import ArrowSource
from vasuki.io.formats.parquet import ParquetSource
from vasuki.io.formats.sources import Block, Source
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection, Shard

ROWS = 2_500
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "text": [f"row {i}" if i % 7 else None for i in range(ROWS)],
        "kind": pa.array(["letter", "bill"] * (ROWS // 2)).dictionary_encode(),
        "parts": pa.array([[{"role": "user", "content": "é" * (i % 3)}] for i in range(ROWS)]),
        "view": pa.array([str(i) for i in range(ROWS)], pa.string_view()),
        "small": pa.array([i % 100 for i in range(ROWS)], pa.uint8()),
    }
)
COLUMNS = TABLE.column_names


def as_file(path: Path, table: Any = TABLE, **options: Any) -> None:
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=1_700)


def as_stream(path: Path, table: Any = TABLE, **options: Any) -> None:
    with pa.ipc.new_stream(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=1_700)


WRITERS: dict[str, Callable[[Path], None]] = {
    "file": as_file,
    "stream": as_stream,
    "file, packed": lambda path: as_file(path, compression="zstd"),
    "stream, packed": lambda path: as_stream(path, compression="lz4"),
    "feather": lambda path: feather.write_feather(TABLE, str(path)),
}


def surveyed(source: Source) -> Any:
    return source.survey(COLUMNS, ["id", "small"], None)


def rows_of(source: Source, selection: Selection = EVERY_ROW) -> list[tuple[Any, ...]]:
    blocks: list[Block] = list(source.blocks(COLUMNS, range(10, 10 + ROWS), selection))
    return [row for block in blocks for row in zip(block.rows, *(block.columns[name] for name in COLUMNS), strict=True)]


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_of_a_parquet_file(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "a.arrow")
    plain = TABLE.set_column(
        COLUMNS.index("view"), "view", pa.array(TABLE["view"].to_pylist())
    )  # as old pyarrow has it
    pq.write_table(plain, tmp_path / "a.parquet")
    ours, theirs = (
        ArrowSource(Location.parse(f"{tmp_path}/a.arrow")),
        ParquetSource(Location.parse(f"{tmp_path}/a.parquet")),
    )
    mine, same = surveyed(ours), surveyed(theirs)
    assert (mine.num_rows, mine.types) == (ROWS, same.types)
    assert {key: tuple(map(int, value)) for key, value in mine.numbers.items()} == {
        "id": (0, ROWS - 1),
        "small": (0, 99),
    }
    assert rows_of(ours) == rows_of(theirs)
    half = Selection(shard=Shard(1, 2))
    assert rows_of(ours, half) == rows_of(theirs, half)
    values = [row[2] for row in rows_of(ours)]
    assert values == TABLE.column("text").to_pylist()


def test_a_file_that_changes_while_it_is_read_is_left(tmp_path: Path) -> None:
    as_stream(tmp_path / "a.arrow")
    source = ArrowSource(Location.parse(f"{tmp_path}/a.arrow"))
    surveyed(source)
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(InputError, match="input changed while it was read"):
        rows_of(source)


@pytest.mark.parametrize("write", [as_file, as_stream])
def test_broken_files_are_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "a.arrow"
    write(path)
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(40):
        path.write_bytes(whole[: draw.randrange(len(whole) // 2)])  # in the midst of the first batch
        with pytest.raises(InputError, match=r"cannot read .*a\.arrow as Arrow"):
            surveyed(ArrowSource(Location.parse(str(path))))
    for _ in range(200):
        data = bytearray(whole)
        data[draw.randrange(min(len(data), 3_000))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        source = ArrowSource(Location.parse(str(path)))
        try:
            survey = surveyed(source)
            list(source.blocks(COLUMNS, range(survey.num_rows), EVERY_ROW))
        except InputError:
            pass
        except KeyError:  # the name of a column, which a table compares with what the job reads
            pass


def test_feathers_first_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(InputError, match=r"a\.feather is of Feather's first version; write it with the second"):
        surveyed(ArrowSource(Location.parse(f"{tmp_path}/a.feather")))


def test_a_folder_that_datasets_saved(job: MakeJob, tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    as_stream(folder / "data-00000-of-00002.arrow", TABLE.slice(0, 2_000))
    as_stream(folder / "data-00001-of-00002.arrow", TABLE.slice(2_000))
    as_stream(folder / "cache-1f2e.arrow", TABLE)
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for path in (tmp_path / "saved", folder):
        table = open_table(job(path, id="id", output={"columns": ["kind", "small"]}))
        assert (table.num_rows, str(table.carried_types["small"])) == (ROWS, "uint8")
        assert [row for block in table.blocks() for row in table.ids(block)] == list(range(ROWS))


def test_ids_that_come_twice_are_found_over_files(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    as_stream(tmp_path / "in/a.arrow")
    as_file(tmp_path / "in/b.feather")
    with pytest.raises(JobFileError, match="id"):
        open_table(job(tmp_path / "in", id="id"))
