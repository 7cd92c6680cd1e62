"""Streams that are closed, that nobody reads, or whose disk is full: no run ends by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from resumed_job import NUM_ROWS, answers, job_into

LENGTHS = "num_prefill_tokens,num_decode_tokens\n200,20\n"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in which `vasuki` is a command."""
    functions = f'vasuki() {{ "{sys.executable}" -m vasuki "$@"; }}; set -o pipefail; {command}'
    return subprocess.run(["bash", "-c", functions], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "<&- >&- 2>&-"])
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path, tiny_model: Path, stderr: str) -> None:
    job = job_into(tmp_path / "job", tiny_model, max_tokens=2)
    assert shell(f"vasuki run job.yaml {stderr}", job.parent).returncode == 0
    assert answers(job).num_rows == NUM_ROWS
    assert (job.parent / "out" / "_SUCCESS").exists()


def test_a_reader_that_goes_away_leaves_the_exit_code_to_the_rows(tmp_path: Path, tiny_model: Path) -> None:
    job = job_into(tmp_path / "job", tiny_model, max_tokens=2)
    texts = ["the cat", "the cat " * 1000]
    pq.write_table(pa.table({"id": ["fits", "does not"], "text": texts}), job.parent / "in.parquet")
    ended = shell("vasuki run job.yaml --quiet --json | true", job.parent)
    assert ended.returncode == 3
    assert ended.stderr.startswith("vasuki: 1 of 2 rows failed")


def test_what_is_printed_may_be_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    plan = "vasuki plan lengths.csv --set model.shape=llama-3-8b --gpu a10 --json"
    for reader in ("| true", "| head -c 1", ">&-"):
        ended = shell(f"{plan} {reader}", tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(shell(plan, tmp_path).stdout)


def test_what_a_full_disk_has_not_taken_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    ended = shell("vasuki plan lengths.csv --set model.shape=llama-3-8b --gpu a10 > /dev/full", tmp_path)
    assert ended.returncode == 75
    assert ended.stderr == (
        "vasuki: cannot write to stdout: No space left on device; run the same command again to go on\n"
    )
