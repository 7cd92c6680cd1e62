"""Rows that ask for the same are computed once, and rows that have not changed keep their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_job import WORDS, job_tree, write_tiny_model

from vasuki.base.config import JobConfig
from vasuki.base.errors import InputError, OutputInUse
from vasuki.base.job_file import parse_job
from vasuki.io.location import Location
from vasuki.io.output.manifest import read_manifest
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job
from vasuki.runs.workload import job_workload

TEXTS = [" ".join(WORDS[each : each + 3]) for each in range(6)]
ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def job(model: Path, folder: Path, table: dict[str, list[Any]], name: str = "out", **changes: Any) -> JobConfig:
    pq.write_table(pa.table(table), folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / name)
    tree["model"]["dtype"] = "float32"
    for section, keys in changes.items():
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return parse_job(tree)


def table_of(config: JobConfig) -> list[dict[str, Any]]:
    parts = Path(config.output.path).glob("part-*.parquet")
    rows = [row for part in sorted(parts) for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: (row["id"], row.get("sample", 0)))


ROWS_OF_6: dict[str, list[Any]] = {
    "id": [f"r{row}" for row in range(ROWS)],
    "text": [TEXTS[row * row % 6] for row in range(ROWS)],
    "extra": [[row, None] for row in range(ROWS)],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"output": {"columns": ["extra"]}},
        {"sampling": {"n": 2, "max_tokens": 6}},
        {"output": {"logprobs": 2}},
        {"sampling": {"choices": ["a", "the dog"]}, "output": {"choice_probabilities": True}},
        {"answer": {"kind": ["a", "b"]}, "sampling": {"max_tokens": 40}},
        {"engine": {"replicas": 2}},
    ],
    ids=str,
)
def test_equal_rows_have_the_answers_that_each_has(
    model: Path, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    once = job(model, tmp_path, ROWS_OF_6, "once", **changes)
    each = job(model, tmp_path, ROWS_OF_6, "each", **changes)
    each = each.model_copy(update={"input": each.input.model_copy(update={"duplicates": "each"})})
    with caplog.at_level("INFO"):
        run_job(once)
    assert "26 rows equal others: their answers are computed once" in caplog.text
    run_job(each)
    assert table_of(once) == table_of(each)
    steps = [run_job(config).manifest.steps for config in (once, each)]
    assert steps[0] < steps[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": 1.0}},
        {"sampling": {"max_tokens": {"column": "most"}}},
        {"input": {"prompt": "{text} {most}"}},
        {"input": {"duplicates": "each"}},
    ],
    ids=str,
)
def test_rows_that_are_not_equal_are_computed(
    model: Path, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    table: dict[str, list[Any]] = {**ROWS_OF_6, "most": list(range(1, ROWS + 1))}
    with caplog.at_level("INFO"):
        run_job(job(model, tmp_path, table, **changes))
    assert "equal others" not in caplog.text


def test_only_rows_without_a_temperature_of_their_own_are_equal(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table: dict[str, list[Any]] = {**ROWS_OF_6, "text": [TEXTS[0]] * ROWS, "heat": [0.0] * 10 + [0.7] * 20}
    with caplog.at_level("INFO"):
        run_job(job(model, tmp_path, table, sampling={"temperature": {"column": "heat"}}))
    assert "9 rows equal others" in caplog.text


@pytest.mark.parametrize(("own", "equal"), [(None, False), (0, True), (0.8, False)])
def test_a_temperature_of_null_is_that_of_the_job(
    model: Path, tmp_path: Path, own: float | None, equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": [{"role": "user", "content": "two dogs"}], "temperature": own}
    lines = [json.dumps({"custom_id": f"r{row}", "url": "/v1/chat/completions", "body": body}) for row in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    tree = job_tree(model, tmp_path / "in.jsonl", tmp_path / "out")
    tree["input"] = {"path": str(tmp_path / "in.jsonl"), "format": "openai-batch"}
    tree["sampling"] |= {"temperature": 0.8}
    with caplog.at_level("INFO"):
        run_job(parse_job(tree))
    assert ("5 rows equal others" in caplog.text) == equal
    answers = {row["output"] for row in table_of(parse_job(tree))}
    assert (len(answers) == 1) == equal


def test_a_row_that_fails_fails_for_all_its_equals(model: Path, tmp_path: Path) -> None:
    table: dict[str, list[Any]] = {
        "id": list(range(4)),
        "text": [" ".join(WORDS * 20), "the cat", " ".join(WORDS * 20), None],
    }
    rows = table_of(run_ended(job(model, tmp_path, table, errors={"max_fraction": 1})))
    assert rows[0]["error"] == rows[2]["error"]
    assert "no room is left" in rows[0]["error"]
    assert [row["error"] is None for row in rows] == [False, True, False, False]


def run_ended(config: JobConfig, **options: Any) -> JobConfig:
    run_job(config, RunOptions(**options))
    return config


def test_what_is_lost_is_made_again(model: Path, tmp_path: Path) -> None:
    """As a kill between any two parts leaves it."""
    config = run_ended(job(model, tmp_path, ROWS_OF_6))
    whole, folder = table_of(config), Path(config.output.path)
    for lost in sorted(folder.glob("part-*.parquet")):
        lost.unlink()
        (folder / "_SUCCESS").unlink()
        run_ended(config)
        assert table_of(config) == whole


def test_shards(model: Path, tmp_path: Path) -> None:
    config = job(model, tmp_path, ROWS_OF_6)
    for shard in ("1/3", "0/3", "2/3"):
        run_ended(config, shard=shard)
    assert table_of(config) == table_of(run_ended(job(model, tmp_path, ROWS_OF_6, "whole")))
    assert (Path(config.output.path) / "_SUCCESS").exists()


def changed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The same table a day later: some rows are gone, some are new, all have moved, and a text has changed."""
    ids = ["new", *rows["id"][:3:-1]]
    texts = ["two dogs", *rows["text"][:3:-1]]
    texts[4] = "green hills"
    return {"id": ids, "text": texts, "extra": [[None]] * len(ids)}


@pytest.mark.parametrize("changes", [{}, {"sampling": {"temperature": 1.0, "max_tokens": 6}}], ids=str)
def test_rows_that_have_not_changed_keep_their_answers(
    model: Path, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    changes = {**changes, "input": {"unchanged": "reuse"}, "output": {"columns": ["extra"]}}
    first = run_ended(job(model, tmp_path, ROWS_OF_6, **changes))
    parts = set(Path(first.output.path).glob("part-*"))
    with caplog.at_level("INFO"):
        again = run_ended(job(model, tmp_path, changed(ROWS_OF_6), **changes))
    assert "25 rows are unchanged" in caplog.text
    assert not parts & set(Path(first.output.path).glob("part-*"))
    assert table_of(again) == table_of(run_ended(job(model, tmp_path, changed(ROWS_OF_6), "anew", **changes)))
    run_ended(job(model, tmp_path, ROWS_OF_6, **changes))
    assert len(table_of(first)) == ROWS


def test_what_a_later_run_takes_from_an_earlier_one(model: Path, tmp_path: Path) -> None:
    reuse: dict[str, Any] = {"input": {"unchanged": "reuse"}}
    run_ended(job(model, tmp_path, ROWS_OF_6))
    with pytest.raises(OutputInUse, match="input that has changed since"):  # it has not kept what rows asked for
        run_job(job(model, tmp_path, changed(ROWS_OF_6), **reuse))
    run_ended(job(model, tmp_path, ROWS_OF_6, **reuse), fresh=True)
    with pytest.raises(OutputInUse, match="input that has changed since"):
        run_job(job(model, tmp_path, changed(ROWS_OF_6)))
    with pytest.raises(OutputInUse, match="another model, input, sampling"):
        run_job(job(model, tmp_path, changed(ROWS_OF_6), sampling={"max_tokens": 3}, **reuse))


def test_rows_that_have_failed_are_computed_again(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"input": {"unchanged": "reuse"}, "errors": {"max_fraction": 1}}
    table: dict[str, list[Any]] = {"id": [0, 1, 2], "text": [" ".join(WORDS * 20), "the cat", "two dogs"]}
    run_ended(job(model, tmp_path, table, **more))
    with caplog.at_level("INFO"):
        run_ended(job(model, tmp_path, {name: values[:2] for name, values in table.items()}, **more))
    assert "1 row is unchanged" in caplog.text


def test_a_run_that_reuses_goes_on_where_it_was_killed(model: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"input": {"unchanged": "reuse"}}
    expected = table_of(run_ended(job(model, tmp_path, changed(ROWS_OF_6), "anew", **more)))
    config = run_ended(job(model, tmp_path, ROWS_OF_6, **more))
    folder, kept = Path(config.output.path), tmp_path / "kept"
    kept.mkdir()
    for part in folder.glob("part-*"):
        (kept / part.name).write_bytes(part.read_bytes())
    run_ended(job(model, tmp_path, changed(ROWS_OF_6), **more))
    for part in kept.iterdir():  # as before the last moment
        (folder / part.name).write_bytes(part.read_bytes())
    sorted(folder.glob("part-*"))[-1].unlink()
    (folder / "_SUCCESS").unlink()
    assert table_of(run_ended(job(model, tmp_path, changed(ROWS_OF_6), **more))) == expected


def test_plans_count_what_is_computed(model: Path, tmp_path: Path) -> None:
    config = job(model, tmp_path, ROWS_OF_6, input={"unchanged": "reuse"})
    assert len(job_workload(config).lengths) == 4
    run_ended(config)
    manifest = read_manifest(Location.parse(config.output.path) / "manifest.json")
    assert (manifest.rows.total, manifest.copied_rows) == (ROWS, 26)
    later = job(model, tmp_path, changed(ROWS_OF_6), input={"unchanged": "reuse"})
    assert len(job_workload(later).lengths) == 2
    few = {name: values[:3] for name, values in ROWS_OF_6.items()}
    with pytest.raises(InputError, match="every row keeps the answer that it has"):
        job_workload(job(model, tmp_path, few, input={"unchanged": "reuse"}))
    run_ended(job(model, tmp_path, few, input={"unchanged": "reuse"}))
