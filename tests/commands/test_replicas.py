"""One job on two replicas, which are real processes: the answers of a run on one device, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_job import WORDS, job_tree

from vasuki.base import commits
from vasuki.base.config import load_job
from vasuki.commands.fleet.driver import run_on_replicas
from vasuki.commands.fleet.messages import ToDriver
from vasuki.commands.fleet.processes import Processes
from vasuki.commands.run import run_job
from vasuki.io.location import Location
from vasuki.io.output.trace import read_trace
from vasuki.machines.split import Share

NUM_ROWS = 60
KILLS = int(os.environ.get("VASUKI_KILLS", "0")) // 10
HERE = tuple(os.sched_getaffinity(0))
SHARES = [Share(processors=HERE[:1], threads=1), Share(processors=HERE[-1:], threads=1)]


def job_into(folder: Path, model: Path) -> Path:
    """A job with short rows and long ones, into an output folder of its own."""
    folder.mkdir()
    texts = [" ".join(WORDS[row % 5 : row % 5 + 1 + row * 7 % 13]) for row in range(NUM_ROWS)]
    limits = [70 if row % 7 == 0 else 3 + row % 11 for row in range(NUM_ROWS)]
    table = pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts, "limit": limits})
    pq.write_table(table, folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / "out")
    tree["sampling"] = {"max_tokens": {"column": "limit"}, "n": 2, "temperature": 0.5}
    tree["model"]["dtype"] = "float32"
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def answers(job: Path) -> pa.Table:
    parts = sorted((job.parent / "out").glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts]).sort_by(
        [("id", "ascending"), ("sample", "ascending")]
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> pa.Table:
    """The answers of a run on one device."""
    job = job_into(tmp_path_factory.mktemp("one") / "job", tiny_model)
    run_job(load_job(str(job)), quiet=True)
    return answers(job)


class KillsReplicas(Processes):
    """Kills the first one behind so many of its messages."""

    messages = 0
    kills_at = 14

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        said = super().receive(timeout_s)
        for index, message in said:
            if index == 0 and message is not None:
                self.messages += 1
                if self.messages == self.kills_at:
                    self._running[0][0].kill()
        return said


@pytest.mark.parametrize("kills_at", random.Random(7).sample(range(1, 40), KILLS))
def test_a_replica_that_is_killed_at_any_moment_costs_no_row(
    tmp_path: Path, tiny_model: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, kills_at: int
) -> None:
    """From the moment on at which it has loaded its model."""
    monkeypatch.setattr("vasuki.commands.fleet.driver.Processes", KillsReplicas)
    monkeypatch.setattr(KillsReplicas, "kills_at", kills_at)
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    job = job_into(tmp_path / "job", tiny_model)
    assert run_on_replicas(load_job(str(job)), SHARES, quiet=True).manifest.rows.succeeded == NUM_ROWS
    assert answers(job).equals(expected)


def test_a_replica_that_is_killed_is_started_again(
    tmp_path: Path,
    tiny_model: Path,
    expected: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("vasuki.commands.fleet.driver.Processes", KillsReplicas)
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    job = job_into(tmp_path / "job", tiny_model)
    manifest = run_on_replicas(load_job(str(job)), SHARES, quiet=True).manifest
    assert "replica 0 has died and is started again" in caplog.text
    assert answers(job).equals(expected)
    assert (job.parent / "out" / "_SUCCESS").exists()
    assert manifest.rows.succeeded == NUM_ROWS
    assert manifest.device["replicas"] == 2
    traces = sorted((job.parent / "out").glob("trace-*.jsonl"))
    assert [trace.name for trace in traces] == ["trace-0-of-2.jsonl", "trace-1-of-2.jsonl"]
    assert all(any(read_trace(Location.parse(str(trace)))) for trace in traces)  # both had rows to run


def test_a_driver_that_is_killed_takes_its_replicas_with_it_and_is_gone_on_with(
    tmp_path: Path, tiny_model: Path, expected: pa.Table
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    script = (
        "import sys, vasuki.base.commits as c; c.COMMIT_S = 0.02\n"
        "from vasuki.base.config import load_job; from vasuki.machines.split import Share\n"
        "from vasuki.commands.fleet.driver import run_on_replicas\n"
        f"run_on_replicas(load_job({str(job)!r}), {SHARES!r}, quiet=True)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script])
    journal = job.parent / "out" / ".vasuki-journal.jsonl"
    while driver.poll() is None and not (journal.exists() and list(journal.parent.glob("part-*.parquet"))):
        time.sleep(0.005)
    replicas = children(driver.pid)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert len(replicas) == 2
    while any(is_alive(pid) for pid in replicas):  # until the test times out
        time.sleep(0.01)
    assert 0 < answers(job).num_rows < expected.num_rows
    outcome = run_on_replicas(load_job(str(job)), SHARES, quiet=True)
    assert answers(job).equals(expected)
    assert outcome.manifest.runs[-1].resumed_rows > 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
