"""A step of a Ray Data pipeline gives the tokens of `vasuki run`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from replicas_job import NUM_ROWS, answers, job_into

import vasuki.ray
from vasuki.base.errors import JobFileError, VasukiError
from vasuki.base.job_file import load_job
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    from ray import data

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Path:
    return job_into(tmp_path / "job", tiny_model)


def with_input(job: Path, **changes: Any) -> Path:
    tree = yaml.safe_load(job.read_text())
    tree["input"] |= changes
    job.write_text(yaml.safe_dump(tree))
    return job


def test_a_step_of_a_pipeline_has_the_answers_of_a_run(job: Path) -> None:
    """With samples that are drawn, in batches that are not the run's order, on two actors."""
    run_job(load_job(str(job)), RunOptions(quiet=True))
    dataset = data.read_parquet(str(job.parent / "in.parquet")).add_column("words", lambda batch: 7)
    answered = vasuki.ray.map_batches(dataset, str(job), batch_size=16, actors=2, num_cpus=0.5).to_pandas()
    table = pa.Table.from_pandas(answered, preserve_index=False)
    ordered = table.sort_by([("id", "ascending"), ("sample", "ascending")])
    expected = answers(job)
    assert table.column_names == ["id", "text", "limit", "within", "words", *expected.column_names[1:]]
    for name in expected.column_names:
        assert ordered[name].to_pylist() == expected[name].to_pylist()
    assert set(ordered["words"].to_pylist()) == {7}
    assert not (job.parent / "out" / "batch.parquet").exists()


def test_token_ids_as_tensors_and_rows_without_names(job: Path, tiny_model: Path) -> None:
    ids = np.arange(3, 3 + 40 * 5).reshape(40, 5)
    job = with_input(job, prompt_token_ids="tokens", prompt="", chat="auto", id="", deadline="")
    config = load_job(str(job), ["sampling={max_tokens: 4}"])
    job.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    pq.write_table(pa.table({"tokens": ids.tolist()}), job.parent / "in.parquet")
    run_job(config, RunOptions(quiet=True))
    dataset = vasuki.ray.map_batches(data.from_numpy(ids).rename_columns({"data": "tokens"}), str(job))
    rows = dataset.take_all()
    expected = pq.read_table(sorted((job.parent / "out").glob("part-*.parquet"))).sort_by("id")
    assert [list(row["output_token_ids"]) for row in rows] == expected["output_token_ids"].to_pylist()
    assert np.array_equal(np.stack([row["tokens"] for row in rows]), ids)
    assert "id" not in rows[0]


def test_rows_that_fail_say_so_and_the_others_go_on(job: Path) -> None:
    table = pq.read_table(job.parent / "in.parquet").slice(0, 4)
    texts = ["", *table["text"].to_pylist()[1:]]
    table = table.set_column(1, "text", pa.array(texts))
    answered = vasuki.ray.Answers(str(job))(table)
    assert answered["error"][0].as_py() == "prompt is empty"
    assert answered["error"].null_count == answered.num_rows - 1
    assert answered["id"].to_pylist() == ["r0", "r1", "r1", "r2", "r2", "r3", "r3"]


def test_a_batch_may_be_empty(job: Path) -> None:
    table = pq.read_table(job.parent / "in.parquet")
    step = vasuki.ray.Answers(str(job))
    assert step(table.slice(0, 0)).schema == step(table).schema


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["id", "words", "limit", "within"], "input.prompt names column 'text'"),
        (["id", "text", "limit", "within", "output"], "has a column 'output'"),
    ],
)
def test_columns_that_do_not_fit_are_named(job: Path, names: list[str], words: str) -> None:
    table = pa.table({name: [1] * NUM_ROWS for name in names})
    with pytest.raises(JobFileError, match=words):
        vasuki.ray.Answers(str(job))(table)


def test_a_model_that_is_not_there_is_named(job: Path) -> None:
    tree = yaml.safe_load(job.read_text())
    tree["model"]["path"] = str(job.parent / "nowhere")
    job.write_text(yaml.safe_dump(tree))
    with pytest.raises(VasukiError, match="nowhere"):
        vasuki.ray.Answers(str(job))
