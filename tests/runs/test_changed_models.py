"""A model whose files change while a job runs with it: no answer of it is another model's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from resumed_job import answers, job_into

from vasuki.base import commits
from vasuki.commands.cli import main
from vasuki.io.output.sink import RowSink


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commits, "COMMIT_S", 0.0)
    shutil.copytree(tiny_model, tmp_path / "model")
    return job_into(tmp_path / "job", tmp_path / "model")


def run(job: Path) -> Result:
    return CliRunner().invoke(main, ["run", str(job), "--quiet"])


def write_into(file: Path) -> None:
    """Other numbers in place of the weights, in the same file."""
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"\x3c" * (size // 2))


def replace(file: Path) -> None:
    """Another file in its place."""
    shutil.copy(file, file.with_suffix(".new"))
    write_into(file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def after_some_rows(monkeypatch: pytest.MonkeyPatch, change: Any, file: Path) -> None:
    """Let `change` happen to a file in the midst of the run."""
    write, rows = RowSink.write, []

    def write_and_change(self: RowSink, sequence: Any) -> None:
        write(self, sequence)
        rows.append(sequence)
        if len(rows) == 10:
            change(file)

    monkeypatch.setattr(RowSink, "write", write_and_change)


def test_weights_that_are_written_into_while_they_are_used(
    job: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model)
    assert run(undisturbed).exit_code == 0
    expected = answers(undisturbed)
    with monkeypatch.context() as patch:
        after_some_rows(patch, write_into, tmp_path / "model" / "model.safetensors")
        result = run(job)
    assert result.exit_code == 4
    assert "model.safetensors was written into while the job ran; rows finished before it are kept" in result.stderr
    kept = answers(job)
    assert 0 < kept.num_rows < expected.num_rows
    whole = {row["id"]: row for row in expected.to_pylist()}
    assert all(row == whole[row["id"]] for row in kept.to_pylist())
    refused = run(job)
    assert (refused.exit_code, "another model" in refused.stderr) == (5, True)
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "model" / "model.safetensors")
    assert run(job).exit_code == 0
    assert answers(job).equals(expected)


def test_weights_that_are_replaced_are_still_those_that_were_loaded(
    job: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = job_into(tmp_path / "undisturbed", tiny_model)
    assert run(undisturbed).exit_code == 0
    after_some_rows(monkeypatch, replace, tmp_path / "model" / "model.safetensors")
    assert run(job).exit_code == 0
    assert answers(job).equals(answers(undisturbed))
