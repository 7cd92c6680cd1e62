"""`vasuki watch --stdin` and a file that grows: a line for each row, none lost and none twice in the output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from tiny_job import WORDS, job_tree

from vasuki.base.errors import JobFileError, OutputInUse, TooManyRowErrors
from vasuki.base.job_file import load_job
from vasuki.io.output.manifest import Predicted
from vasuki.io.output.ownership import ARRIVED
from vasuki.runs.observers.metrics import Metrics
from vasuki.runs.opening import Outcome
from vasuki.runs.options import RunOptions
from vasuki.runs.run import answer_rows, run_job

Job = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    def write(**changes: Any) -> Path:
        tree = job_tree(tiny_model, tmp_path / "rows.jsonl", tmp_path / "out")
        for section, keys in changes.items():
            tree[section] = {**tree.get(section, {}), **keys}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def line(number: int) -> bytes:
    return json.dumps({"id": number, "text": " ".join(WORDS[: 1 + number % 13])}).encode() + b"\n"


def lines(first: int, last: int) -> bytes:
    return b"".join(map(line, range(first, last)))


def stored(folder: Path) -> list[dict[str, Any]]:
    return [row for part in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


def piped(
    path: Path,
    chunks: Iterable[bytes],
    gap_s: float = 0.0,
    waits: bool = False,
    metrics: Metrics | None = None,
) -> tuple[list[dict[str, Any]], Outcome]:
    """Send chunks through a pipe to its end. Returns the answers in the order in which they came. If the sender `waits`
    it sends the second chunk behind the first answer."""
    answers: list[dict[str, Any]] = []
    read, write = os.pipe()

    def send() -> None:
        with os.fdopen(write, "wb") as pipe:
            for chunk in chunks:
                pipe.write(chunk)
                pipe.flush()
                time.sleep(gap_s)
                while waits and not answers:
                    time.sleep(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return answers, answer_rows(
            load_job(str(path)), read, answers.append, options=RunOptions(quiet=True, metrics=metrics)
        )
    finally:
        os.close(read)
        sender.join()


@pytest.mark.parametrize("policy", ["vasuki", "prefill-packing"])
def test_each_line_is_answered_as_by_a_run(job: Job, tmp_path: Path, policy: str) -> None:
    gathered = {"engine": {"policy": policy, "chunk_tokens": "auto"}, "arrivals": {"target_s": 0.2}}
    path = job(**gathered if policy == "prefill-packing" else {}, output={"columns": ["text"]})
    whole = lines(0, 40)
    middle = len(whole) // 2 + 3
    answers, outcome = piped(path, [whole[:middle], whole[middle:]], gap_s=0.1)
    assert sorted(answer["id"] for answer in answers) == list(range(40))
    (tmp_path / "rows.jsonl").write_bytes(whole)
    path = job(output={"columns": ["text"], "path": str(tmp_path / "alone")})
    run_job(load_job(str(path)), RunOptions(quiet=True))
    alone = {row["id"]: row for row in stored(tmp_path / "alone")}
    assert all(answer == alone[answer["id"]] for answer in answers)
    assert {row["id"]: row["output"] for row in stored(tmp_path / "out")} == {
        str(number): row["output"] for number, row in alone.items()
    }
    assert (tmp_path / "out" / "_SUCCESS").exists()
    manifest = outcome.manifest
    assert manifest.rows.succeeded == manifest.rows.total == 40
    assert manifest.ttft is not None
    assert manifest.latency is not None
    assert 0 < manifest.ttft.mean_s < manifest.latency.mean_s
    assert manifest.predicted == Predicted(source=manifest.predicted.source), "nobody knows what will come"


def test_answers_that_fail_a_check_are_asked_for_again(job: Job, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "sampling": {"regex": "[0-9]", "temperature": 3.0, "max_tokens": 4},
        "output": {"path": str(tmp_path / "out"), "check": "answer in ['1', '2', '3', '4', '5']"},
        "errors": {"retries": 3},
    }
    rows, _ = piped(job(**asked), [lines(0, 20)])
    assert len(rows) == 20
    assert {1, 2, 3} <= {row["tries"] for row in rows}
    assert all((row["answer_status"] == "ok") == (row["output"] in "12345") for row in rows)


def test_rows_wait_for_the_model_too(job: Job) -> None:
    """They are noted while it loads, and as old as that."""
    _, outcome = piped(job(), [lines(0, 5)])
    manifest = outcome.manifest
    assert manifest.ttft is not None
    assert manifest.ttft.p50_s > manifest.timings.load_s > 0


def test_rows_join_those_that_run(job: Job) -> None:
    """A short row that comes second ends first."""
    long = {"id": "long", "text": "the", "most": 100}
    short = {"id": "short", "text": "the", "most": 1}
    path = job(sampling={"max_tokens": {"column": "most"}, "ignore_eos": True})
    chunks = [json.dumps(row).encode() + b"\n" for row in (long, short)]
    answers, outcome = piped(path, chunks)
    assert [answer["id"] for answer in answers] == ["short", "long"]
    assert outcome.manifest.batch.max_seqs == 2


def test_urgent_rows_pass_those_that_wait_and_change_no_token(job: Job, tmp_path: Path) -> None:
    """Rows that run make room for them, with their KV, and go on later."""
    usual = [{"id": i, "text": " ".join(WORDS[: 1 + i % 13]), "most": 90 if i else 5} for i in range(24)]
    urgent = [{"id": 100 + i, "text": "the cat", "most": 3, "how": 1 + i % 2} for i in range(4)]
    urgent.append({"id": 200, "text": "the", "most": 1, "how": "very"})
    urgent.append({"id": 201, "text": "the", "most": 1, "within": 0})
    changes = {
        "input": {"priority": "how", "deadline": "within"},
        "sampling": {"max_tokens": {"column": "most"}, "ignore_eos": True},
        "engine": {"max_num_seqs": 4},
    }
    chunks = [b"".join(json.dumps(row).encode() + b"\n" for row in rows) for rows in (usual, urgent)]
    answers, outcome = piped(job(**changes), chunks, waits=True)
    ended = [answer["id"] for answer in answers]
    assert max(ended.index(100 + i) for i in range(4)) < min(ended.index(i) for i in range(8, 24))
    assert ended.index(101) < ended.index(100), "the highest priority first"
    bad = answers[ended.index(200)]
    assert bad["error"] == "priority is 'very', which is not a number"
    manifest = outcome.manifest
    assert manifest.missed_deadlines == 1
    assert manifest.preemptions.swap > 0
    rows = [row for row in usual + urgent if row["id"] != 200]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = job(input=changes["input"], sampling=changes["sampling"], output={"path": str(tmp_path / "plain")})
    manifest = run_job(load_job(str(plain)), RunOptions(quiet=True)).manifest
    assert manifest.ttft is None
    assert manifest.missed_deadlines == 1
    assert manifest.urgent_latency is not None, "from the start of the run"
    assert 0 < manifest.urgent_latency.p50_s < manifest.timings.makespan_s
    alone = {row["id"]: row["output_token_ids"] for row in stored(tmp_path / "plain")}
    assert {answer["id"]: answer["output_token_ids"] for answer in answers if not answer["error"]} == alone


def test_a_line_that_comes_again_is_answered_again_and_not_run(job: Job, tmp_path: Path) -> None:
    first, _ = piped(job(), [lines(0, 5)])
    again, outcome = piped(job(), [lines(3, 8)])
    assert sorted(answer["id"] for answer in again) == [3, 4, 5, 6, 7]
    by_id = {answer["id"]: answer for answer in first}
    assert all(answer == by_id[answer["id"]] for answer in again if answer["id"] < 5)
    assert sorted(row["id"] for row in stored(tmp_path / "out")) == [str(number) for number in range(8)]
    assert outcome.manifest.rows.total == 8


def test_metrics_count_the_rows_that_have_come(job: Job, tmp_path: Path) -> None:
    """Rows without an earlier run's, and without any that are still to come."""
    file = tmp_path / "figures.txt"
    for chunk, rows in ((lines(0, 5), 5), (lines(3, 8), 3)):
        with Metrics(str(file)) as metrics:
            piped(job(), [chunk], metrics=metrics)
        found = dict(text.split() for text in file.read_text().splitlines() if not text.startswith("#"))
        assert float(found["vasuki_rows"]) == float(found["vasuki_rows_done_total"]) == rows
        assert float(found["vasuki_time_left_seconds"]) == 0


def test_a_signal_lets_rows_end_that_were_begun(job: Job, tmp_path: Path) -> None:
    """And starts no other, as the number of those tells that are left."""
    path = job(sampling={"max_tokens": {"column": "most"}, "ignore_eos": True}, engine={"max_num_seqs": 4})
    drained = start(path)
    assert drained.stdin is not None
    assert drained.stdout is not None
    for number in range(40):
        row = {"id": number, "text": "the cat", "most": 3 if number == 0 else 150}
        drained.stdin.write(json.dumps(row).encode() + b"\n")
    answers = [json.loads(drained.stdout.readline())]
    drained.send_signal(signal.SIGTERM)
    stdout, stderr = drained.communicate(timeout=300)
    answers += [json.loads(text) for text in stdout.splitlines()]
    assert {0, 1, 2, 3} <= {answer["id"] for answer in answers}
    assert len(answers) < 30, "four that ran, and those that the scheduler looked ahead to"
    assert drained.returncode == 75
    assert f"stopped by a signal; {40 - len(answers)} rows are left".encode() in stderr


def test_what_is_wrong_with_a_line_is_its_answer(job: Job) -> None:
    bad = [b"nonsense\n", b'{"text": "the cat"}\n', b"\n", b'{"id": 9, "text": ""}\n', b'{"id": 10, "te']
    answers, outcome = piped(job(), [lines(0, 3), *bad])
    errors = [answer["error"] for answer in answers if answer["error"]]
    assert len(errors) == 4
    assert any("line 4 is not JSON" in error for error in errors)
    assert any("no id: its 'id' is null or empty" in error for error in errors)
    assert any("prompt is empty" in error for error in errors)
    half = "line 8 is not JSON: Unterminated string starting at column 12"
    assert half in errors, "a stream that ends in half a line"
    assert outcome.manifest.rows.failed == 4
    with pytest.raises(TooManyRowErrors, match="4 of 7 rows failed"):
        outcome.raise_for_errors()


def test_a_last_line_without_an_end_is_a_row(job: Job) -> None:
    answers, _ = piped(job(), [lines(0, 2).rstrip()])
    assert sorted(answer["id"] for answer in answers) == [0, 1]


def test_what_cannot_be_streamed_is_refused(job: Job) -> None:
    for changes, problem in (
        ({"input": {"id": ""}}, "--stdin needs input.id"),
        ({"input": {"format": "csv"}}, "jsonl, not csv"),
        ({"output": {"path": "mock://bucket/out"}}, "output.path"),
        ({"engine": {"replicas": 2}}, "engine.replicas: rows that arrive are answered by one"),
        ({"engine": {"policy": "static"}}, "pads its batches"),
    ):
        with pytest.raises(JobFileError, match=problem):
            piped(job(**changes), [])


def test_a_file_is_followed_as_it_grows(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half a line waits for its rest; at the end it is told of, and the next start has it."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(0, 3) + line(3)[:9])

    def append() -> None:
        for part in (line(3)[9:] + line(4), line(5)[:-1], b"\n" + line(6)[:12]):
            time.sleep(0.2)
            with open(file, "ab") as stream:
                stream.write(part)

    writer = threading.Thread(target=append)
    writer.start()
    outcome = answer_rows(
        load_job(str(job())), None, lambda answer: None, until_idle_s=1.5, options=RunOptions(quiet=True)
    )
    writer.join()
    assert outcome.manifest.rows.succeeded == outcome.manifest.rows.total == 6
    assert "ends in half a line, which waits for its rest" in caplog.text
    with open(file, "ab") as stream:
        stream.write(line(6)[12:])
    outcome = answer_rows(
        load_job(str(job())), None, lambda answer: None, until_idle_s=0.0, options=RunOptions(quiet=True)
    )
    assert [row["id"] for row in stored(tmp_path / "out")] == [str(number) for number in range(7)]
    assert outcome.manifest.rows.succeeded == 7


def test_a_file_that_begins_with_half_a_line_loses_nothing_by_it(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no row yet: all others are answered, and each start says so, until its rest is there."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(0, 2) + line(2)[:11])
    for _ in range(2):
        caplog.clear()
        outcome = answer_rows(
            load_job(str(job())), None, lambda answer: None, until_idle_s=0.0, options=RunOptions(quiet=True)
        )
        assert outcome.manifest.rows.succeeded == outcome.manifest.rows.total == 2
        assert (tmp_path / "out" / "_SUCCESS").exists()
        assert "ends in half a line, which waits for its rest" in caplog.text
    file.write_bytes(lines(0, 3).rstrip())
    outcome = answer_rows(
        load_job(str(job())), None, lambda answer: None, until_idle_s=0.0, options=RunOptions(quiet=True)
    )
    assert outcome.manifest.rows.succeeded == outcome.manifest.rows.total == 3


def test_half_a_line_that_a_kill_left_behind_is_no_row(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ARRIVED).write_bytes(lines(0, 2) + line(2)[:11])
    answers, outcome = piped(job(), [])
    assert sorted(answer["id"] for answer in answers) == [0, 1]
    assert outcome.manifest.rows.succeeded == outcome.manifest.rows.total == 2
    assert (out / ARRIVED).read_bytes() == lines(0, 2)


def start(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vasuki", "watch", str(path), "--stdin"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)  # no line stays in a buffer


def test_a_killed_process_and_a_signal_lose_no_row(job: Job, tmp_path: Path) -> None:
    """One is killed with rows under way, whose lines are gone from the pipe. The next answers them without being sent
    them again, and a signal lets it end what it has begun."""
    path = job(sampling={"max_tokens": 60, "ignore_eos": True})
    killed = start(path)
    assert killed.stdin is not None
    assert killed.stdout is not None
    killed.stdin.write(lines(0, 200))
    killed.stdin.flush()
    answers = [json.loads(killed.stdout.readline()) for _ in range(3)]
    killed.kill()
    answers += [json.loads(text) for text in killed.communicate()[0].splitlines()]
    assert len(answers) < 200

    drained = start(path)
    assert drained.stdin is not None
    assert drained.stdout is not None
    more = [json.loads(drained.stdout.readline())]
    drained.send_signal(signal.SIGTERM)
    stdout, stderr = drained.communicate(timeout=300)
    more += [json.loads(text) for text in stdout.splitlines()]
    assert drained.returncode == 75, stderr
    assert b"rows are left, run the same command again" in stderr
    told = {answer["id"] for answer in answers + more}
    durable = {int(row["id"]) for row in stored(tmp_path / "out")}
    assert {answer["id"] for answer in more} <= durable <= told, "what ended is durable"

    last = start(path)
    stdout, stderr = last.communicate(lines(200, 203), timeout=300)
    assert last.returncode == 0, stderr
    more += [json.loads(text) for text in stdout.splitlines()]
    assert len({answer["id"] for answer in more}) == len(more)
    outputs = {answer["id"]: answer["output"] for answer in more}
    assert outputs.keys() | {answer["id"] for answer in answers} == set(range(203))
    assert all(outputs.get(answer["id"], answer["output"]) == answer["output"] for answer in answers)
    assert sorted(int(row["id"]) for row in stored(tmp_path / "out")) == list(range(203))


@pytest.mark.parametrize("name", [".vasuki-rows.jsonl", "manifest.json"])
def test_what_is_not_ours_is_refused_before_a_model_is_loaded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr("vasuki.runs.run.Runner")
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(OutputInUse, match=f"{name} is a pipe"):
        piped(job(), [])
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "trace.jsonl").write_text("theirs")
    with pytest.raises(OutputInUse, match=r"trace\.jsonl, which is not ours"):
        piped(job(), [])
