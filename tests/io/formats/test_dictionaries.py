"""Parquet files that are small on disk and large in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms import WriteParquet

from vasuki.base.errors import InputError
from vasuki.io.formats import parquet as parquet_format
from vasuki.io.formats.decoded import row_bytes, slices
from vasuki.io.formats.parquet import ParquetSource
from vasuki.io.formats.sources import BLOCK_BYTES, Block
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection, Shard


def blocks_of(path: Path, columns: list[str], selection: Selection = EVERY_ROW) -> Iterator[Block]:
    source = ParquetSource(Location.parse(str(path)))
    yield from source.blocks(columns, range(pq.read_metadata(path).num_rows), selection)


def values_of(path: Path, column: str, selection: Selection = EVERY_ROW) -> list[Any]:
    return [value for block in blocks_of(path, [column], selection) for value in block.columns[column]]


def test_few_long_documents_make_small_blocks(parquet: WriteParquet) -> None:
    """What retrieval jobs look like: 1,500 questions about four documents."""
    documents = [letter * 200_000 for letter in "abcd"]
    path = parquet(text=[documents[row % 4] for row in range(1500)], question=[f"q{row}" for row in range(1500)])
    rows = 0
    for block in blocks_of(path, ["text", "question"]):
        assert sum(map(len, block.columns["text"])) <= BLOCK_BYTES
        for row, text, question in zip(block.rows, *block.columns.values(), strict=True):
            assert (row, text, question) == (rows, documents[rows % 4], f"q{rows}")
            rows += 1
    assert rows == 1500


def test_conversations_that_begin_alike_make_small_blocks(parquet: WriteParquet) -> None:
    system = {"role": "system", "content": "x" * 200_000}
    chats = [[system, {"role": "user", "content": f"q{row}"}] if row % 7 else None for row in range(600)]
    path = parquet(messages=chats)
    read = []
    for block in blocks_of(path, ["messages"]):
        assert sum(200_000 for chat in block.columns["messages"] if chat) <= BLOCK_BYTES
        read += block.columns["messages"]
    assert read == chats


def test_a_dictionary_that_ran_full_makes_short_batches(parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are in a dictionary, the others are written out: the longest entry may be in each of the first."""
    texts = ["y" * 900_000] * 400 + [f"{row:05d}" * 100 for row in range(4000)]
    path = parquet(text=texts, row_group_size=10_000)
    longest = []

    def measured(batch: pa.RecordBatch, most_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        longest.append(batch.nbytes)
        return slices(batch, most_bytes)

    monkeypatch.setattr(parquet_format, "slices", measured)
    assert values_of(path, "text") == texts
    assert max(longest) < 2 * parquet_format._WORST_BYTES


BOMB = """
import resource, sys
import pyarrow.parquet as pq
from vasuki.io.formats.parquet import ParquetSource
from vasuki.io.location import Location
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
source = ParquetSource(Location.parse(sys.argv[1]))
first = next(source.blocks(["text"], range(1024)))
print(len(first.rows), len(first.columns["text"][0]))
"""


def test_a_text_that_is_in_every_row_is_not_there_once_a_row(tmp_path: Path) -> None:
    """Some hundred bytes on disk, 13 GB decoded."""
    entries = pa.array(["x" * 13_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1024, np.int32)), entries)
    options = dict(compression="brotli", dictionary_pagesize_limit=2**30, store_schema=False, write_statistics=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "bomb.parquet", **options)
    assert (tmp_path / "bomb.parquet").stat().st_size < 600
    command = [sys.executable, "-c", BOMB, str(tmp_path / "bomb.parquet")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "1 13000000\n", result.stderr


def test_what_is_absurd_is_refused_by_name(parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(text=["x" * 5000] * 10, empty=[[]] * 9 + [[None] * 200_000])
    monkeypatch.setattr(parquet_format, "_MOST_DICTIONARY_BYTES", 4000)
    with pytest.raises(InputError, match=r"in\.parquet: the dictionary of column 'text' takes 5,004 bytes"):
        values_of(path, "text")
    monkeypatch.setattr(parquet_format, "_MOST_EMPTY_VALUES", 1000)
    with pytest.raises(InputError, match=r"column 'empty\.list\.element' claims 200,009 values in \d+ bytes"):
        values_of(path, "empty")


def test_wanted_rows_alone_fill_blocks(parquet: WriteParquet) -> None:
    path = parquet(text=[f"t{row}" for row in range(5000)], row_group_size=5000)
    blocks = list(blocks_of(path, ["text"], Selection(Shard(1, 5))))
    assert [value for block in blocks for value in block.columns["text"]] == [f"t{row}" for row in range(1, 5000, 5)]
    assert len(blocks) == 1


# --- how large is a row? ---------------------------------------------------------------------------------------------

TEXTS = st.one_of(st.none(), st.text(alphabet="ab", max_size=40))
ROWS = st.lists(st.one_of(st.none(), st.lists(st.fixed_dictionaries({"content": TEXTS}), max_size=4)), max_size=12)


@given(ROWS, st.integers(0, 5), st.integers(1, 200))
def test_pieces_hold_all_rows_and_no_more_than_they_may(rows: list[Any], skipped: int, most_bytes: int) -> None:
    kind = pa.list_(pa.struct([("content", pa.string())]))
    nested = pa.array(rows, kind)
    texts = pa.array(["".join(item["content"] or "" for item in row or ()) for row in rows], pa.string())
    batch = pa.record_batch({"n": nested, "d": texts.dictionary_encode(), "t": texts}).slice(skipped)
    pieces = list(slices(batch, most_bytes))
    assert [row for piece, _ in pieces for row in piece.to_pylist()] == batch.to_pylist()
    for piece, num_bytes in pieces:
        assert num_bytes <= most_bytes or piece.num_rows == 1
        letters = sum(3 * len(row["t"]) for row in piece.to_pylist())
        assert num_bytes >= letters


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, 3]),
        pa.array([None, None]),
        pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2)),
        pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
        pa.array([b"12", None], pa.binary(2)),
        pa.array([], pa.list_(pa.string())),
    ],
)
def test_every_type_has_a_size(array: pa.Array) -> None:
    assert len(row_bytes(array)) == len(array)
    assert (row_bytes(array) >= 16).all()
