"""A trace as Perfetto reads it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from run_folders import write_trace

from vasuki.commands.cli import main
from vasuki.io.location import Location
from vasuki.io.output.trace import StepRecord, TraceWriter

Event = dict[str, Any]


def step(t_s: float, elapsed_s: float, prompts: int, decodes: int, **fields: Any) -> StepRecord:
    return StepRecord(t_s, elapsed_s, prompts, decodes, 3, 1, kv_device_bytes=100, **fields)


def events_of(folder: Path) -> list[Event]:
    """Convert a run folder; fail on what breaks the rules of the format."""
    target = folder / "chrome.json"
    result = CliRunner().invoke(main, ["trace", str(folder), "--chrome", str(target)])
    assert result.exit_code == 0, result.stderr
    events: list[Event] = json.loads(target.read_text())["traceEvents"]
    assert f"wrote {len(events)} events" in result.stdout
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert event["ph"] in "MXiC"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    for track in slices.values():  # slices that overlap would be drawn as if one had called the other
        for before, after in pairwise(track):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    return events


def named(events: list[Event], track: str) -> list[Event]:
    """The events of a track, without its name."""
    tids = {event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == track}
    return [event for event in events if event["tid"] in tids and event["ph"] != "M"]


def test_steps_copies_commits_and_runs_are_tracks(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path / "trace.jsonl"))
    with TraceWriter(place) as trace:
        trace.record(step(2.0, 2.0, 8, 0))
        trace.record(step(3.0, 1.0, 4, 2, swapped_blocks=3, copied_bytes=77, exposed_copy_s=0.5, hidden_copy_s=9.0))
        trace.flush(5)
        trace.flush(5)  # no row since then
        trace.record(step(4.0, 0.5, 0, 2, copied_bytes=9, hidden_copy_s=0.25))
    with TraceWriter(place) as trace:
        trace.record(step(1.0, 1.0, 0, 1))
        trace.flush(2)
    events = events_of(tmp_path)
    spans = {
        track: [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in named(events, track)]
        for track in ("runs", "steps", "copies")
    }
    assert spans == {
        "runs": [("run 0", 0, 4), ("run 1", 4, 1)],
        "steps": [("prompts", 0, 2), ("prompts, decodes", 2, 1), ("decodes", 3.5, 0.5), ("decodes", 4, 1)],
        "copies": [("swaps", 2, 1), ("streamed layers", 3.5, 0.25)],
    }
    assert [(event["name"], event["ts"] / 1e6) for event in named(events, "commits")] == [("5 rows", 3), ("2 rows", 5)]
    assert sum(event["ph"] == "C" for event in events) == 2 * 4


def test_shards_are_processes_side_by_side(tmp_path: Path) -> None:
    for shard in (0, 1):
        write_trace(tmp_path, [step(1.0, 1.0, 8, 0)])
        (tmp_path / "trace.jsonl").rename(tmp_path / f"trace-{shard}-of-2.jsonl")
    events = events_of(tmp_path)
    assert {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"} == {
        "trace-0-of-2.jsonl": 1,
        "trace-1-of-2.jsonl": 2,
    }
    assert [event["ts"] for event in named(events, "steps")] == [0, 0]


@pytest.mark.parametrize("target", ["chrome.json", "nowhere/chrome.json"])
def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, target: str) -> None:
    if "/" in target:
        write_trace(tmp_path, [step(1.0, 1.0, 8, 0)])
    result = CliRunner().invoke(main, ["trace", str(tmp_path), "--chrome", str(tmp_path / target)])
    assert result.exit_code == (2 if "/" in target else 4)
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / target).exists()
