"""One job on two replicas, which are real processes: the answers of a run on one device, whichever process is
killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from replicas_job import NUM_ROWS, QUIET, SHARES, answers, children, count_parts, is_stopped_amid_rows, job_into

from vasuki.base import commits
from vasuki.base.job_file import load_job
from vasuki.commands.cli import main
from vasuki.io.location import Location
from vasuki.io.output.manifest import Bounds
from vasuki.io.output.trace import read_trace
from vasuki.planner.leases import Leases
from vasuki.runs.run import run_on_replicas
from vasuki.runs.workers.messages import Planned, Ready, ToDriver
from vasuki.runs.workers.processes import Processes

KILLS = int(os.environ.get("VASUKI_KILLS", "0")) // 10


class KillsReplicas(Processes):
    """Kills the first one after a number of its messages."""

    messages = 0
    kills_at = 4  # among the first, so that rows are left

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        said = super().receive(timeout_s)
        for index, message in said:
            if index == 0 and message is not None:
                self.messages += 1
                if self.messages == self.kills_at:
                    self.strike()
        return said

    def strike(self) -> None:
        self.kill(0)


class TwoKinds(Processes):
    """The other one is another kind of card, whose profile says that it is half as fast."""

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        return [(index, self._slow(message) if index else message) for index, message in super().receive(timeout_s)]

    def _slow(self, message: ToDriver | None) -> ToDriver | None:
        if isinstance(message, Ready):
            return replace(message, kind="slow")
        if isinstance(message, Planned):
            profile = message.profile
            rates = {name: rate / 2 for name, rate in profile.peak_tflops.items()}
            slow = {
                "peak_tflops": rates,
                "memory_gb_per_s": profile.memory_gb_per_s / 2,
                "overheads": profile.overheads.model_copy(
                    update={
                        name: 2 * getattr(profile.overheads, name) for name in ("step_us", "launch_us", "kernel_us")
                    }
                ),
            }
            return replace(message, profile=profile.model_copy(update=slow))
        return message


class StopsReplicas(KillsReplicas):
    """Has one hang, as a device does at times."""

    def strike(self) -> None:
        self._running[0].process.send_signal(signal.SIGSTOP)


class StartsOne(Processes):
    """Has the other hang before it has loaded."""

    def start(self, index: int) -> bool:
        starts = super().start(index)
        if index:
            self._running[index].process.send_signal(signal.SIGSTOP)
        return starts


@pytest.mark.parametrize("kills_at", random.Random(7).sample(range(1, 40), KILLS))
def test_a_replica_that_is_killed_at_any_moment_costs_no_row(
    tmp_path: Path, tiny_model: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, kills_at: int
) -> None:
    """From the moment on at which it has loaded its model."""
    monkeypatch.setattr(KillsReplicas, "kills_at", kills_at)
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    job = job_into(tmp_path / "job", tiny_model)
    assert run_on_replicas(load_job(str(job)), SHARES, QUIET, KillsReplicas).manifest.rows.succeeded == NUM_ROWS
    assert answers(job).equals(expected)


def test_a_replica_that_is_killed_is_started_again(
    tmp_path: Path,
    tiny_model: Path,
    expected: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    job = job_into(tmp_path / "job", tiny_model)
    manifest = run_on_replicas(load_job(str(job)), SHARES, QUIET, KillsReplicas).manifest
    assert "replica 0 has died and is started again" in caplog.text
    assert answers(job).equals(expected)
    assert (job.parent / "out" / "_SUCCESS").exists()
    assert manifest.rows.succeeded == NUM_ROWS
    assert manifest.device["replicas"] == 2
    assert manifest.missed_deadlines == 2, "both samples of a row"
    assert manifest.urgent_latency is not None
    assert 0 < (manifest.bounds.datasheet_s or 0) < (manifest.bounds.schedule_s or 0) < manifest.timings.generate_s
    traces = sorted((job.parent / "out").glob("trace-*.jsonl"))
    assert [trace.name for trace in traces] == ["trace-0-of-2.jsonl", "trace-1-of-2.jsonl"]
    assert all(any(read_trace(Location.parse(str(trace)))) for trace in traces)  # both had rows to run


@pytest.mark.parametrize("kind", [StopsReplicas, StartsOne])
def test_a_replica_that_hangs_keeps_nobody_waiting(
    kind: type[Processes], tmp_path: Path, tiny_model: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vasuki.runs.workers.driver.SILENT_S", 2.0)
    job = job_into(tmp_path / "job", tiny_model)
    run_on_replicas(load_job(str(job)), SHARES, QUIET, kind)
    assert answers(job).equals(expected)


def test_a_slower_kind_of_card_is_expected_to_be_slower(
    tmp_path: Path, tiny_model: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds: dict[int, float] = {}
    join = Leases.join

    def noted(self: Leases, replica: int, speed: float = 1.0, row_token_s: float = 0.0) -> None:
        speeds[replica] = speed
        join(self, replica, speed, row_token_s)

    monkeypatch.setattr(Leases, "join", noted)
    job = job_into(tmp_path / "job", tiny_model)
    manifest = run_on_replicas(load_job(str(job)), SHARES, QUIET, TwoKinds).manifest
    assert answers(job).equals(expected)
    assert manifest.bounds == Bounds(), "of two kinds none is known"
    assert speeds[1] / speeds[0] == pytest.approx(0.5, rel=0.1)


def test_the_last_figures_are_those_of_the_manifest(tmp_path: Path, tiny_model: Path) -> None:
    job, file = job_into(tmp_path / "job", tiny_model), tmp_path / "figures.txt"
    arguments = ["run", str(job), "--replicas", "2", "--quiet", "--json", "--metrics", str(file)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    manifest = json.loads(result.stdout)
    assert manifest["device"]["replicas"] == 2
    seen = dict(
        line.split() for line in file.read_text().splitlines() if line.startswith("vasuki_") and "{" not in line
    )
    wanted = {
        "vasuki_rows": NUM_ROWS,
        "vasuki_rows_done_total": NUM_ROWS,
        "vasuki_rows_failed_total": 0,
        "vasuki_generated_tokens_total": manifest["tokens"]["output"],
        "vasuki_steps_total": manifest["steps"],
        "vasuki_running_sequences": 0,
        "vasuki_time_left_seconds": 0,
    }
    assert {name: float(seen[name]) for name in wanted} == wanted


def test_rows_that_no_replica_can_run_are_error_rows(tmp_path: Path, tiny_model: Path) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    config = load_job(str(job), ["input.prompt=" + "{text} " * 500, "errors.max_fraction=1"])
    manifest = run_on_replicas(config, SHARES, QUIET).manifest
    assert manifest.rows.failed == NUM_ROWS


def test_whoever_is_killed_whenever(tmp_path: Path, tiny_model: Path, expected: pa.Table) -> None:
    """A third of the kills hit the driver, and half come when rows are known to run."""
    rng, kills, jobs = random.Random(3), 0, 0
    wanted = max(1, KILLS)
    while kills < wanted:
        jobs += 1
        job = job_into(tmp_path / str(jobs), tiny_model)
        code = -signal.SIGKILL
        while code:
            driver = start_driver(job)
            if kills < wanted:
                kills += kill_somebody(job, driver, rng)
            code = driver.wait()
            assert code in (0, -signal.SIGKILL)
        assert answers(job).equals(expected)
        assert (job.parent / "out" / "_SUCCESS").exists()


def kill_somebody(job: Path, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Kill the driver or a replica at a random moment, once a part is written or any time. Returns whether it lived."""
    there = count_parts(job)
    if rng.random() < 0.5:
        while driver.poll() is None and count_parts(job) == there:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
    else:
        time.sleep(rng.uniform(0, 8))
    victims = [driver.pid] if rng.random() < 1 / 3 else children(driver.pid)
    with contextlib.suppress(ProcessLookupError):
        if driver.poll() is None and victims:
            os.kill(rng.choice(victims), signal.SIGKILL)
            return True
    return False


def start_driver(job: Path) -> subprocess.Popen[bytes]:
    script = (
        "import sys, vasuki.base.commits as c; c.COMMIT_S = 0.02\n"
        "from vasuki.base.job_file import load_job; from vasuki.machines.here.split import Share\n"
        "from vasuki.runs.run import run_on_replicas\n"
        "from vasuki.runs.options import RunOptions\n"
        f"run_on_replicas(load_job({str(job)!r}), {SHARES!r}, RunOptions(quiet=True))"
    )
    return subprocess.Popen([sys.executable, "-c", script])


def test_a_driver_that_is_killed_takes_its_replicas_with_it_and_is_gone_on_with(
    tmp_path: Path, tiny_model: Path, expected: pa.Table
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    driver = start_driver(job)
    while driver.poll() is None and not is_stopped_amid_rows(driver, job):
        driver.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    replicas = children(driver.pid)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert len(replicas) == 2
    while any(is_alive(pid) for pid in replicas):  # until the test times out
        time.sleep(0.01)
    assert 0 < answers(job).num_rows < expected.num_rows
    outcome = run_on_replicas(load_job(str(job)), SHARES, QUIET)
    assert answers(job).equals(expected)
    assert outcome.manifest.runs[-1].resumed_rows > 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
