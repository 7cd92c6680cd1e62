"""What a run leaves of rows in flight, the next one finds, and nothing that was half written."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import _MockFileSystem

from vasuki.engine.sequence import FinishReason, Progress, Request, Sequence, TokenLogprob
from vasuki.io.location import Location
from vasuki.io.output.journal import Journal
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.selection import WHOLE, DoneRows, Selection, Shard

NAME = ".vasuki-journal.jsonl"


def journal_at(place: Location, config_hash: str = "c", done: tuple[int, ...] = ()) -> Journal:
    done_rows = DoneRows(1000)
    done_rows.add(done)
    return Journal(place, [place] if place.exists() else [], config_hash, "f", Selection(done=done_rows))


def row(number: int, tokens: list[int], sample: int = 0, **fields: object) -> Sequence:
    return Sequence(Request(number, number, 5, 9, sample_index=sample), tokens, **fields)  # type: ignore[arg-type]


def known(journal: Journal) -> dict[tuple[int, int], Progress]:
    requests = [Request(number, number, 5, 9, sample_index=sample) for number in range(10) for sample in range(3)]
    resumed = [request for request in journal.resume(requests) if request.progress != Progress()]
    return {(request.row, request.sample_index): request.progress for request in resumed}


@pytest.fixture(params=["disk", "store"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / NAME)) if request.param == "disk" else Location(_MockFileSystem(), NAME, NAME)


def test_rows_go_on_from_the_tokens_that_they_had(file: Location) -> None:
    ended = row(4, [5, 2], sample=1, finish_reason=FinishReason.STOP, logprob=-0.1)
    kept = [TokenLogprob(-0.25, ((7, -0.25), (9, -3.125))), TokenLogprob(-1.0, ((4, -0.1), (70000, -1.0)))]
    pending = row(5, [8], num_pending_tokens=1, finish_reason=FinishReason.LENGTH)
    journal_at(file).write([row(3, [7, 70000], logprob=-1.25, token_logprobs=kept), ended, pending, row(6, [])])
    assert known(journal_at(file)) == {
        (3, 0): Progress((7, 70000), -1.25, None, tuple(kept)),
        (4, 1): Progress((5, 2), -0.1, FinishReason.STOP),
        (5, 0): Progress((8,), 0.0),
    }


def test_a_row_whose_prompt_is_another_one_begins_anew(file: Location, caplog: pytest.LogCaptureFixture) -> None:
    def request(number: int, prompt: list[int]) -> Request:
        return Request(number, f"r{number}", len(prompt), 9, prompt_token_ids=np.array(prompt, dtype=np.int32))

    journal_at(file).write([Sequence(request(1, [3, 4]), [7]), Sequence(request(2, [3, 4]), [8])])
    resumed = list(journal_at(file).resume([request(1, [3, 4]), request(2, [3, 5])]))
    assert [each.progress for each in resumed] == [Progress((7,)), Progress()]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["row r2 had another prompt when it was begun: it starts again"]


def test_rows_that_have_ended_leave_the_journal_and_the_last_one_the_folder(file: Location) -> None:
    journal_at(file).write([row(3, [7]), row(4, [5]), row(5, [6])])
    journal = journal_at(file, done=(3,))
    assert journal.resumed_rows == 2
    list(journal.started([Request(4, 4, 5, 9)]))
    journal.write([])
    assert known(journal_at(file)) == {(5, 0): Progress((6,))}, "a row that has not started keeps its tokens"
    list(journal.started([Request(5, 5, 5, 9)]))
    journal.write([])
    assert not file.exists()


def test_a_closed_journal_stays_as_it_is(file: Location) -> None:
    journal = journal_at(file)
    journal.write([row(3, [7])])
    journal.close()
    journal.write([row(3, [7, 8])])
    assert known(journal_at(file)) == {(3, 0): Progress((7,))}


def test_another_jobs_journal_is_not_read(file: Location, caplog: pytest.LogCaptureFixture) -> None:
    journal_at(file).write([row(3, [7])])
    with caplog.at_level(logging.WARNING, "vasuki"):
        assert known(journal_at(file, config_hash="other")) == {}
    assert "start again" in caplog.text


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@given(rows=st.lists(tokens, min_size=1, max_size=5), data=st.data())
def test_what_is_damaged_is_left_out(rows: list[list[int]], data: st.DataObject) -> None:
    """Whatever byte changes and wherever it is cut off, a record says what was written or nothing."""
    file = Location(_MockFileSystem(), NAME, NAME)
    journal_at(file).write([row(number, tokens) for number, tokens in enumerate(rows)])
    content = bytearray(file.read_bytes())
    whole = known(journal_at(file))
    assert len(whole) == len(rows)
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    file.write_bytes(bytes(content))
    assert known(journal_at(file)).items() <= whole.items()


def test_a_whole_run_takes_over_what_shards_left(tmp_path: Path) -> None:
    def opened(shard: Shard = WHOLE, fresh: bool = False) -> OutputFolder:
        options = {"num_rows": 10, "config_hash": "c", "input_fingerprint": "f"}
        return OutputFolder.open(str(tmp_path), **options, shard=shard, fresh=fresh)  # type: ignore[arg-type]

    for index in range(2):
        with opened(Shard(index, 2)) as folder:
            journal = folder.journal()
            assert journal.resumed_rows == 0, "a shard knows its own rows alone"
            journal.write([row(index, [7])])
    with opened() as folder:
        journal = folder.journal()
        assert set(known(journal)) == {(0, 0), (1, 0)}
        journal.write([])
        assert [path.name for path in tmp_path.glob(".vasuki-journal*")] == [NAME]
    with opened(fresh=True) as folder:
        assert known(folder.journal()) == {}
