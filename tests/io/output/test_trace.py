from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from vasuki.base.errors import InputError, Interrupted
from vasuki.io.location import Location
from vasuki.io.output.trace import StepRecord, TraceWriter, read_trace


def step(t_s: float, **fields: Any) -> StepRecord:
    return StepRecord(t_s=t_s, elapsed_s=0.1, prefill_tokens=5, decode_tokens=3, seqs=4, waiting=2, **fields)


@pytest.fixture(params=["local", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "local":
        return Location.parse(str(tmp_path))
    return Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "", "st://")


def test_a_resumed_trace_counts_its_runs(place: Location) -> None:
    for run in range(3):
        with TraceWriter(place / "trace.jsonl") as trace:
            assert trace.run == run
            for index in range(run + 1):
                trace.record(step(index / 3, finished=index))
    steps = list(read_trace(place))
    assert [record.run for record in steps] == [0, 1, 1, 2, 2, 2]
    assert steps[-1] == step(0.6666667, finished=2, run=2)


def test_lines_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    trace = TraceWriter(Location.parse(str(tmp_path)) / "trace.jsonl")
    trace.record(step(1.0))
    assert (tmp_path / "trace.jsonl").read_bytes() == b""
    trace.flush()
    assert (tmp_path / "trace.jsonl").read_bytes().count(b"\n") == 1
    trace.close()
    trace.close()


def test_a_full_disk_interrupts(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"cannot write .*/trace\.jsonl: what lay there was removed"):
        TraceWriter(Location.parse(str(tmp_path / "nowhere")) / "trace.jsonl")
    trace = TraceWriter(Location.parse(str(tmp_path)) / "trace.jsonl")
    trace._file.close()
    trace._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    trace.record(step(1.0))
    with pytest.raises(Interrupted, match=r"trace\.jsonl: No space left on device; rows finished before it are kept"):
        trace.flush()
    trace._file.close()


def test_a_disk_that_fills_up_in_the_midst_of_a_line(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path)) / "trace.jsonl"
    trace = TraceWriter(place)
    for index in range(100):
        trace.record(step(float(index)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(Interrupted, match="File too large"):
            trace.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trace.close()  # when there is room again
    with TraceWriter(place) as trace:
        trace.record(step(0.5))
    *earlier, last = read_trace(place)
    assert [record.t_s for record in earlier] == list(range(len(earlier)))
    assert (last.run, last.t_s) == (1, 0.5)


def test_a_line_cut_off_by_a_kill(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path))
    with TraceWriter(place / "trace.jsonl") as trace:
        trace.record(step(1.0))
        trace.record(step(2.0))
    file = tmp_path / "trace.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert [record.t_s for record in read_trace(place)] == [1.0]
    with TraceWriter(place / "trace.jsonl") as trace:
        trace.record(step(0.5))
    assert [(record.run, record.t_s) for record in read_trace(place)] == [(0, 1.0), (1, 0.5)]


def test_traces_of_shards_and_no_trace(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path))
    with pytest.raises(InputError, match=r"has no trace\.jsonl"):
        list(read_trace(place))
    for index in range(2):
        with TraceWriter(place / f"trace-{index}-of-2.jsonl") as trace:
            trace.record(step(float(index)))
    assert [record.t_s for record in read_trace(place)] == [0.0, 1.0]
    (tmp_path / "trace.jsonl").write_text("[]\n")
    with pytest.raises(InputError, match="a line that is not a step"):
        list(read_trace(place))


def test_a_trace_in_an_object_store_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vasuki.io.output.trace.STORED_BYTES", 2000)
    sizes = []
    for name, file_system in (
        ("local", fs.LocalFileSystem()),
        ("stored", fs.SubTreeFileSystem("/", fs.LocalFileSystem())),
    ):
        place = Location(file_system, str(tmp_path / name), name)
        for _ in range(3):
            with TraceWriter(place) as trace:
                for index in range(5):
                    trace.record(step(index / 2))
                    trace.flush()
        sizes.append(len(list(read_trace(place))))
        assert [record.t_s for record in read_trace(place)][:5] == [0, 0.5, 1, 1.5, 2]
    assert sizes[0] == 15 > sizes[1] >= 5
    assert (tmp_path / "stored").stat().st_size <= 2000
    assert caplog.messages == ["stored is full: of a trace in an object store 2.0 KiB are kept"] * 2
