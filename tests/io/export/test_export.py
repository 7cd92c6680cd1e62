"""Answers as other programs read them: whole, in the order of the input, in the form that they expect."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from rooms import output, run

from vasuki.base import commits
from vasuki.base.config import JobConfig
from vasuki.commands.cli import main
from vasuki.io.export.writing import _csv
from vasuki.io.location import Location
from vasuki.io.output.parts import read_label, to_parquet

NUM_ROWS = 25


def export(job: JobConfig, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", job.output.path, *arguments])


@pytest.fixture
def done(job: Callable[..., JobConfig], parquet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """An output of several parts that hold rows in no order, two samples each, some failed."""
    monkeypatch.setattr(commits, "COMMIT_S", 3.0)
    texts = [f'row {number}, "quoted"\nü' for number in range(NUM_ROWS)]
    columns = {"text": texts, "blob": [bytes([200, number]) for number in range(NUM_ROWS)]}
    source = parquet(name="in.parquet", key=[f"k{number}" for number in range(NUM_ROWS)], **columns)
    made = job(source, id="key", sampling={"n": 2}, output={"columns": ["text", "blob"], "token_ids": True})
    run(made, failing=(3, 20), stop_after=30)
    run(made, failing=(3, 20))
    return made


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_bare_carriage_return_stays_in_its_cell() -> None:
    cells = ["a\rb", "c\nd", 'e"f', "g,h", ""]
    line = _csv(cells).decode()
    assert next(csv.reader(io.StringIO(line, newline=""))) == cells
    assert line[-2:] != "\r\n"


def test_lines_are_those_of_the_parts_in_the_order_of_the_input(done: JobConfig, tmp_path: Path) -> None:
    result = export(done, "--to", str(tmp_path / "a.jsonl"), "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {str(tmp_path / "a.jsonl"): 2 * NUM_ROWS})
    lines = lines_of(tmp_path / "a.jsonl")
    assert [(line["id"], line["sample"]) for line in lines] == [(f"k{n}", s) for n in range(NUM_ROWS) for s in (0, 1)]
    expected = {(line["id"], line["sample"]): line for line in output(done).to_pylist()}
    for line in lines:
        assert line.pop("blob")
        want = expected[line["id"], line["sample"]]
        assert line == {name: value for name, value in want.items() if name != "blob"}


def test_a_csv_file_says_the_same(done: JobConfig, tmp_path: Path) -> None:
    assert export(done, "--to", str(tmp_path / "a.csv")).exit_code == 0
    assert export(done, "--to", str(tmp_path / "a.jsonl")).exit_code == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    as_cells = [{name: _cell(value) for name, value in line.items()} for line in lines_of(tmp_path / "a.jsonl")]
    assert rows == as_cells


def _cell(value: object) -> str:
    return json.dumps(value) if isinstance(value, list) else "" if value is None else str(value)


def test_hosted_batch_results(done: JobConfig, tmp_path: Path) -> None:
    """The shape that `openai.types.chat.ChatCompletion` and readers of batch output files parse."""
    target, errors = tmp_path / "results.jsonl", tmp_path / "results.errors.jsonl"
    result = export(done, "--to", str(target), "--format", "openai", "--json")
    assert json.loads(result.stdout) == {str(target): NUM_ROWS - 2, str(errors): 2}
    results, failures = lines_of(target), lines_of(errors)
    assert [line["custom_id"] for line in failures] == ["k3", "k20"]
    for line in failures:
        assert (line["response"], set(line["error"])) == (None, {"code", "message"})
        assert line["error"]["message"] == "no room"
    for line in results:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body = line["response"]["body"]
        assert body["object"] == "chat.completion"
        assert (body["model"], type(body["created"])) == ("", int)
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert {choice["message"]["role"] for choice in body["choices"]} == {"assistant"}
        assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
        usage = body["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["completion_tokens"] == 6
    assert len({line["id"] for line in results + failures}) == NUM_ROWS
    run(done, retries_errors=True)
    assert export(done, "--to", str(target), "--format", "openai").exit_code == 0
    assert (len(lines_of(target)), errors.exists()) == (NUM_ROWS, False)


def test_openais_own_package_reads_them(done: JobConfig, tmp_path: Path) -> None:
    chat = pytest.importorskip("openai.types.chat")
    target = tmp_path / "results.jsonl"
    assert export(done, "--to", str(target), "--format", "openai").exit_code == 0
    for line in lines_of(target):
        completion = chat.ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert completion.model_dump(exclude_unset=True) == line["response"]["body"]
        assert completion.choices[0].message.content.startswith("ROW ")
    batch = pytest.importorskip("openai.types")
    for line in lines_of(tmp_path / "results.errors.jsonl"):
        assert batch.BatchError.model_validate(line["error"], strict=True).message == "no room"


def test_mistakes_get_a_line(done: JobConfig, tmp_path: Path) -> None:
    for code, words, arguments in [
        (2, "end it in .jsonl or .csv", (done.output.path, "--to", "answers.xlsx")),
        (2, "cannot export", (done.output.path, "--to", str(tmp_path / "no" / "a.csv"))),
        (2, "cannot export", (done.output.path, "--to", "nowhere://a.csv")),
        (2, "cannot export", (done.output.path, "--to", "nowhere://a.csv?region=x.y")),
        (2, "end it in .jsonl or .csv", (done.output.path, "--to", "nowhere://a.parquet?name=b.csv")),
        (2, "end it in .jsonl or .csv", (done.output.path, "--to", "s3://key:secret@b/a?c")),
        (4, "has no part-", (str(tmp_path / "empty"), "--to", str(tmp_path / "a.csv"))),
    ]:
        result = CliRunner().invoke(main, ["export", *arguments])
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
        assert ".vasuki-" not in result.stderr, "nobody knows of temporary files"
        assert "Errno" not in result.stderr
        assert "secret" not in result.stderr
    part = next(Path(done.output.path).glob("part-*"))
    part.write_bytes(part.read_bytes()[:-100])
    before = set(tmp_path.iterdir())
    assert export(done, "--to", str(tmp_path / "b.csv")).exit_code == 4
    assert set(tmp_path.iterdir()) == before, "nothing half-written stays"


def test_an_empty_output_has_its_columns(
    job: Callable[..., JobConfig], parquet: Callable[..., Path], tmp_path: Path
) -> None:
    empty = job(parquet(text=pa.array([], pa.string())))
    run(empty)
    assert export(empty, "--to", str(tmp_path / "a.csv")).exit_code == 0
    assert (tmp_path / "a.csv").read_text().startswith("id,output,finish_reason")


def test_few_parts_are_open_at_a_time(done: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export(done, "--to", str(tmp_path / "a.jsonl")).exit_code == 0
    parts = len(list(Path(done.output.path).glob("part-*.parquet")))
    monkeypatch.setattr("vasuki.io.export.reopened.MOST_OPEN", 1)
    open_now = max(int(name) for name in os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 4, hard))
    try:
        result = export(done, "--to", str(tmp_path / "b.jsonl"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.exit_code == 0, result.stderr
    assert parts > 4
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_parts_of_two_jobs_are_refused(done: JobConfig, tmp_path: Path) -> None:
    part = Location.parse(done.output.path) / "part-00000.parquet"
    label = read_label(part)
    assert label is not None
    table = pq.read_table(part.path)
    stranger = Path(done.output.path) / "part-00099.parquet"
    stranger.write_bytes(to_parquet([table], replace(label, config_hash="another", rows=label.rows + 1000)))
    result = export(done, "--to", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 4
    assert "part-00099.parquet is of another job or input than part-00000.parquet" in result.stderr
    assert not (tmp_path / "a.jsonl").exists()


def test_an_output_that_lacks_rows_is_exported_as_a_part_alone(done: JobConfig, tmp_path: Path) -> None:
    out, target = Path(done.output.path), tmp_path / "a.jsonl"
    removed = sorted(out.glob("part-*.parquet"))[1]
    label = read_label(Location.parse(str(removed)))
    assert label is not None
    left = NUM_ROWS - len(label.rows)
    removed.unlink()
    for lost, what in [
        ("", f"{left} of {NUM_ROWS} rows"),
        ("manifest.json", f"{left} of {NUM_ROWS} rows"),
        ("_SUCCESS", f"{left} rows, and no run has ended there"),
    ]:
        if lost:
            (out / lost).unlink()
        result = export(done, "--to", str(target))
        assert result.exit_code == 4
        assert result.stderr == (
            f"vasuki: {out} has {what}; run its job again, or export what there is with --partial\n"
        )
        assert not target.exists()
    result = export(done, "--to", str(target), "--partial", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {str(target): 2 * left})
    assert len(lines_of(target)) == 2 * left


def test_a_run_that_was_stopped_is_exported_as_a_part_alone(
    job: Callable[..., JobConfig], parquet: Callable[..., Path], tmp_path: Path
) -> None:
    made = job(parquet(text=["a"] * NUM_ROWS))
    run(made, stop_after=10)
    assert f"has 10 of {NUM_ROWS} rows; " in export(made, "--to", str(tmp_path / "a.csv")).stderr
    assert export(made, "--to", str(tmp_path / "a.csv"), "--partial").exit_code == 0
