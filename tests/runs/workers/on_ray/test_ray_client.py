"""A job on a cluster that was started by hand, from a process that is none of its own: `--on ray://HOST:PORT`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import replicas_job
from replicas_job import answers, children, count_parts, job_into

from vasuki.base.errors import Interrupted
from vasuki.base.job_file import load_job
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job
from vasuki.runs.workers.ray import nodes

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's

RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = os.environ | {
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # a busy machine takes its time
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def starting_head() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A head of two processors that is about to start, and the port for those that are no part of the cluster."""
    port = free_port()
    options = [f"--port={free_port()}", f"--ray-client-server-port={port}", "--num-cpus=2", "--include-dashboard=false"]
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--disable-usage-stats", *agent_port(), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    yield head, port
    head.terminate()
    head.wait()


def agent_port() -> list[str]:
    """An earlier cluster may still hold the port that is usual."""
    return [f"--dashboard-agent-listen-port={free_port()}"]


@contextlib.contextmanager
def started_head() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The same, once it listens, and its address."""
    with starting_head() as (head, port):
        while not answers_at(port):  # until the test times out
            assert head.poll() is None
            time.sleep(0.1)
        yield head, f"ray://127.0.0.1:{port}"


def answers_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def run(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vasuki", "run", str(job), "--quiet", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_answers_are_those_of_one_device(tmp_path: Path, tiny_model: Path) -> None:
    one, job = job_into(tmp_path / "one", tiny_model), job_into(tmp_path / "job", tiny_model)
    run_job(load_job(str(one)), RunOptions(quiet=True))
    with started_head() as (_, address):
        ended = run(job, "--on", address, "--replicas", "2")
    assert ended.returncode == 0, ended.stderr
    assert answers(job).equals(answers(one))


def test_a_server_that_is_still_starting_is_waited_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_PATIENCE_S", 600.0)  # of a busy machine
    monkeypatch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "120")
    job = job_into(tmp_path / "job", tiny_model)
    with starting_head() as (_, port):
        assert not answers_at(port)
        run_job(load_job(str(job)), RunOptions(quiet=True, cluster=f"ray://127.0.0.1:{port}"))
    assert answers(job).num_rows


def test_a_server_that_goes_away_is_one_line_and_the_rows_stay(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_job, "NUM_ROWS", 6000)
    job = job_into(tmp_path / "job", tiny_model)
    with started_head() as (head, address):
        command = [sys.executable, "-m", "vasuki", "run", str(job), "--quiet", "--set", "engine.device=cpu"]
        driver = subprocess.Popen([*command, "--on", address], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        while not count_parts(job):  # until the test times out
            assert driver.poll() is None
            time.sleep(0.01)
        for pid in [*children(head.pid), head.pid]:
            os.kill(pid, signal.SIGKILL)
        said = driver.communicate()[1]
    assert driver.returncode == Interrupted.exit_code
    (line,) = [line for line in said.splitlines() if "vasuki" in line]
    assert "the Ray cluster is gone" in line
    assert answers(job).num_rows
