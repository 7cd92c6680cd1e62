from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rooms import MakeJob, WriteParquet, finished

from vasuki.engine.sequence import Decoded, FinishReason, Request, SamplingParams, Sequence
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.parts import PartWriter, Totals
from vasuki.io.output.sink import RowSink


class WatchedSink(RowSink):
    """Counts its commits and shows the rows that are in its folder."""

    def __init__(self, writer: PartWriter, folder: Path) -> None:
        super().__init__(writer, lambda sequence: Decoded(f"row {sequence.request.row}"), on_commit=self._count)
        self.commits = 0
        self._folder = folder

    def _count(self) -> None:
        self.commits += 1

    def rows(self) -> list[dict[str, Any]]:
        return [row for part in sorted(self._folder.glob("part-*")) for row in pq.read_table(part).to_pylist()]


@pytest.fixture
def sink(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> WatchedSink:
    config = job(parquet(text=["a"]), sampling={"n": 2})
    numbers = iter(range(100))
    place = Location.parse(str(tmp_path))
    schema = answer_schema(config, open_table(config))
    writer = PartWriter(lambda: place / f"part-{next(numbers)}.parquet", schema, config_hash="c", input_fingerprint="f")
    return WatchedSink(writer, tmp_path)


def request(row: int, n: int = 1, sample_index: int = 0, **fields: Any) -> Request:
    return Request(row, row, 5, 9, sampling=SamplingParams(n=n), sample_index=sample_index, **fields)


def test_rows_wait_for_their_samples(sink: WatchedSink) -> None:
    sink.write(finished(request(1, n=2, sample_index=1)))
    sink.write(finished(request(2)))
    sink.commit_if_due(10.0)
    assert [row["id"] for row in sink.rows()] == [2]
    sink.write(finished(request(1, n=2, sample_index=0)))
    sink.close()
    assert [(row["id"], row["sample"]) for row in sink.rows()] == [(2, 0), (1, 0), (1, 1)]
    assert sink.written == Totals(rows=2, failed=0, prompt_tokens=15, output_tokens=9)
    assert sink.commits == 2


def test_samples_of_an_unfinished_row_are_left_to_the_next_run(sink: WatchedSink) -> None:
    sink.write(finished(request(1, n=2)))
    sink.close()
    assert sink.rows() == []
    assert sink.written.rows == 0
    assert [sequence.request.row for sequence in sink.incomplete()] == [1]


def test_failed_rows(sink: WatchedSink) -> None:
    sink.write(finished(request(1, n=2, error="bad row")))
    sink.write(Sequence(request(2), error="too long", finish_reason=FinishReason.ERROR, output_token_ids=[4]))
    sink.write(Sequence(request(3), finish_reason=FinishReason.ERROR))
    sink.close()
    assert [(row["error"], row["output"], row["prompt_tokens"], row["output_tokens"]) for row in sink.rows()] == [
        ("bad row", "", 5, 0),
        ("too long", "", 5, 0),
        ("failed without a reason", "", 5, 0),
    ]
    assert {row["finish_reason"] for row in sink.rows()} == {"error"}
    assert (sink.written.succeeded, sink.written.failed) == (0, 3)


def test_a_row_fails_with_one_of_its_samples(sink: WatchedSink) -> None:
    sink.write(finished(request(1, n=2)))
    sink.write(Sequence(request(1, n=2, sample_index=1), error="no", finish_reason=FinishReason.ERROR))
    assert (sink.written.succeeded, sink.written.failed) == (0, 1)


@pytest.mark.parametrize(
    ("ends", "ignore_eos", "words"),
    [
        ("lls", False, ["2 of 3 answers ran to their limit of tokens and were cut there"]),
        ("ls", False, []),
        ("ll", True, []),
    ],
)
def test_it_is_said_when_most_answers_were_cut(
    sink: WatchedSink, ends: str, ignore_eos: bool, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for row, end in enumerate(ends):
        reason = FinishReason.LENGTH if end == "l" else FinishReason.STOP
        wanted = replace(request(row), sampling=SamplingParams(ignore_eos=ignore_eos))
        sink.write(Sequence(wanted, output_token_ids=[1], finish_reason=reason))
    sink.close()
    assert [record.message for record in caplog.records] == words
