from __future__ import annotations

import datetime
import decimal
import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import MakeJob, WriteParquet, output, run

from vasuki.base.errors import Interrupted, JobFileError
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location
from vasuki.io.output import parts
from vasuki.io.output.answers import Answer, answer_schema, may_have_samples, to_table
from vasuki.io.output.parts import PartLabel, PartWriter, Totals, read_label, to_parquet

PLAIN = pa.schema([("id", pa.int64()), ("output", pa.string()), ("finish_reason", pa.string()), ("error", pa.string())])


def writer(folder: Path, schema: pa.Schema = PLAIN, **options: Any) -> PartWriter:
    numbers = iter(range(1000))
    place = Location.parse(str(folder))
    return PartWriter(
        lambda: place / f"part-{next(numbers):05d}.parquet",
        schema,
        config_hash="c",
        input_fingerprint="f",
        **options,
    )


def answer(row: int, **fields: Any) -> Answer:
    return Answer(**{"row": row, "id": row, "output": "x", "finish_reason": "stop", **fields})


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


@settings(deadline=None)
@given(st.sets(st.integers(0, 2**40), max_size=300), st.integers(0, 5))
def test_a_label_round_trips(rows: set[int], failed: int) -> None:
    label = PartLabel("hash", "print", np.array(sorted(rows), dtype=np.int64), Totals(len(rows), failed, 3, 4))
    back = PartLabel.from_json(label.to_json())
    assert back.rows.tolist() == label.rows.tolist()
    assert (back.config_hash, back.input_fingerprint, back.totals) == ("hash", "print", label.totals)


@pytest.mark.parametrize("stale", [1, 2])
def test_a_part_whose_server_let_go_of_it_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: int
) -> None:
    part = Location.parse(str(tmp_path / "part-00000.parquet"))
    label = PartLabel("c", "f", np.array([3, 5]), Totals(rows=2))
    part.write_bytes(to_parquet([pa.table({"id": [1, 2]})], label))
    left, open_part = [stale], Location.open

    def handed_out(self: Location) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_part(self)

    monkeypatch.setattr(Location, "open", handed_out)
    if stale == 1:
        found = read_label(part)
        assert found is not None
        assert found.rows.tolist() == [3, 5]
    else:
        with pytest.raises(Interrupted, match="its server let go of it"):
            read_label(part)


def test_labels_are_small() -> None:
    rows = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < 0.3)
    assert len(PartLabel("c", "f", rows, Totals()).to_json()) < len(rows), "less than a byte a row"


def test_a_part_says_what_it_holds(tmp_path: Path) -> None:
    out = writer(tmp_path)
    out.append([answer(7, prompt_tokens=3, output_tokens=2), answer(7, sample=1, prompt_tokens=3, error="no")])
    out.append([answer(2, output="y", prompt_tokens=1)])
    out.close()
    (part,) = parts_in(tmp_path)
    label = read_label(Location.parse(str(part)))
    assert label is not None
    assert label.rows.tolist() == [2, 7]
    assert label.totals == out.committed == Totals(rows=2, failed=1, prompt_tokens=7, output_tokens=2)
    assert pq.read_table(part)["id"].to_pylist() == [2, 7, 7], "in the order of the input"
    assert pq.read_metadata(part).row_group(0).column(0).compression == "ZSTD"
    assert [path.name for path in tmp_path.iterdir()] == [part.name], "nothing temporary is left"


def test_commits_follow_the_clock(tmp_path: Path) -> None:
    out = writer(tmp_path)
    commits = []
    for now in range(100_000):
        out.append([answer(now)])
        if out.is_due(now):
            commits.append(now)
            out._answers.clear()
            out._num_bytes = 0
            out.committed_s = now
    gaps = np.diff([0, *commits])
    assert (gaps >= 5).all()
    assert all(gap <= max(5, 0.03 * now) + 1 for gap, now in zip(gaps, commits, strict=True))
    expected = 33 + math.log(100_000 / 167) / -math.log(0.97)
    assert abs(len(commits) - expected) < 0.1 * expected


def test_commits_are_no_further_apart_than_what_may_be_lost(tmp_path: Path) -> None:
    often, rarely = writer(tmp_path, max_loss_s=20.0), writer(tmp_path)
    for out in (often, rarely):
        out.append([answer(0)])
        assert out.commit_if_due(1000.0)
        out.append([answer(1)])
    assert (often.is_due(1019.9), often.is_due(1020.0)) == (False, True)
    assert (rarely.is_due(1030.8), rarely.is_due(1031.0)) == (False, True)


def test_without_rows_it_may_be_time_but_there_is_no_part(tmp_path: Path) -> None:
    out = writer(tmp_path)
    assert [out.commit_if_due(now_s) for now_s in (4.0, 5.0, 6.0, 10.0)] == [False, True, False, True]
    out.close()
    assert parts_in(tmp_path) == []


def test_commits_follow_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "COMMIT_BYTES", 100_000)
    out = writer(tmp_path)
    for row in range(100):
        out.append([answer(row, output="x" * 10_000)])
        out.commit_if_due(0.0)
    out.close()
    assert 8 <= len(parts_in(tmp_path)) <= 13
    assert sum(pq.read_metadata(part).num_rows for part in parts_in(tmp_path)) == 100


def test_a_large_part_is_made_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GROUP_BYTES", 25_000)
    out = writer(tmp_path)
    lengths = [10_000] * 5 + [60_000, 1, 1]
    out.append([answer(row, output="x" * length) for row, length in enumerate(lengths)])
    out.close()
    (part,) = parts_in(tmp_path)
    metadata = pq.read_metadata(part)
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert groups == [2, 2, 1, 1, 2]
    assert [len(text) for text in pq.read_table(part)["output"].to_pylist()] == lengths
    assert read_label(Location.parse(str(part)), with_pages=True) is not None


def test_an_empty_output_has_columns(tmp_path: Path) -> None:
    writer(tmp_path, even_if_empty=True).close()
    (part,) = parts_in(tmp_path)
    assert pq.read_schema(part).names == PLAIN.names


def test_a_full_disk_interrupts_and_leaves_no_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = writer(tmp_path)
    out.append([answer(1)])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(Interrupted, match=r"part-00000\.parquet: No space left on device"):
            out.close()
        assert list(tmp_path.iterdir()) == []
    out.append([answer(2)])
    out.close()
    (part,) = parts_in(tmp_path)
    assert pq.read_table(part)["id"].to_pylist() == [2], "row 1 is left to the next run"


def test_rows_that_cannot_be_made_a_part_stay_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(answers: list[Answer], schema: pa.Schema) -> None:
        raise MemoryError

    out = writer(tmp_path)
    out.append([answer(1)])
    with monkeypatch.context() as patch:
        patch.setattr(parts, "to_table", fail)
        with pytest.raises(MemoryError):
            out.close()
    out.close()
    (part,) = parts_in(tmp_path)
    assert pq.read_table(part)["id"].to_pylist() == [1]


# --- the schema ------------------------------------------------------------------------------------------------------

EVERY_TYPE = {
    "number": pa.array([1, None], pa.int16()),
    "text": pa.array(["a", None], pa.large_string()),
    "when": pa.array([1, None], pa.timestamp("ns", "UTC")),
    "day": pa.array([datetime.date(2024, 1, 2), None]),
    "far": pa.array([2**62, None], pa.timestamp("us")),
    "price": pa.array([decimal.Decimal("1.20"), None], pa.decimal128(9, 2)),
    "share": pa.array([decimal.Decimal("0.25"), None], pa.decimal128(2, 2)),
    "raw": pa.array([b"\xff", None], pa.binary()),
    "nested": pa.array([[{"a": 1, "b": [True]}], None]),
    "category": pa.array(["a", None]).dictionary_encode(),
    "half": pa.array([0.5, None], pa.float32()),
    "row": pa.array([9, None]),
}


def test_carried_columns_keep_type_and_value(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(**EVERY_TYPE, prompt=["p", "q"]), prompt="{prompt}", output={"columns": list(EVERY_TYPE)})
    assert run(config) == 2
    table = output(config)
    for name, column in EVERY_TYPE.items():
        plain = pa.string() if name == "category" else column.type  # dictionaries of several files need not be one
        assert table.schema.field(name).type == plain
        assert table[name].combine_chunks().equals(column.cast(plain))


def test_a_column_of_nulls_has_a_type(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"], none=pa.nulls(1)), output={"columns": ["none"]})
    run(config)
    assert output(config).schema.field("none").type == pa.string()


@pytest.mark.parametrize(
    ("sampling", "out", "extra"),
    [
        ({}, {}, []),
        ({}, {"token_ids": True, "logprobs": True}, ["output_token_ids", "logprob"]),
        ({"n": 2}, {}, ["sample"]),
        ({"n": {"column": "n"}}, {}, ["sample"]),
    ],
)
def test_the_columns_of_the_contract(
    job: MakeJob, parquet: WriteParquet, sampling: dict[str, Any], out: dict[str, bool], extra: list[str]
) -> None:
    config = job(parquet(text=["a", ""], n=[1, 1]), sampling=sampling, output=out)
    schema = answer_schema(config, open_table(config))
    expected = ["id", "output", "finish_reason", "error", "prompt_tokens", "output_tokens"]
    assert sorted(schema.names) == sorted(expected + extra)
    assert schema.field("prompt_tokens").type == pa.int32()
    run(config)
    table = output(config)
    assert table.schema.equals(schema)
    first, last = table.slice(0, 1).to_pylist()[0], table.slice(table.num_rows - 1).to_pylist()[0]
    assert (first["id"], first["output"], first["finish_reason"], first["error"]) == (0, "A", "stop", None)
    assert (last["output"], last["finish_reason"], last["error"], last["output_tokens"]) == (
        "", "error", "prompt is empty", 0
    )  # fmt: skip
    if "logprob" in extra:
        assert (first["logprob"], first["output_token_ids"]) == (-1.5, [1, 2, 3])
        assert (last["logprob"], last["output_token_ids"]) == (None, [])


def test_batch_files_may_have_samples(job: MakeJob, tmp_path: Path) -> None:
    assert may_have_samples(job(tmp_path / "a.jsonl", format="openai-batch"))


def test_a_carried_column_that_no_request_has(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"], b=[1]), output={"columns": ["b"]})
    table = to_table([answer(0)], answer_schema(config, open_table(config)))
    assert table["b"].to_pylist() == [None]


def test_output_columns_are_checked_before_reading(job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="'error' is a column of the answer"):
        open_table(job(tmp_path / "none.parquet", output={"columns": ["error"]}))
