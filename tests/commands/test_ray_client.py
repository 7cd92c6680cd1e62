"""A job on a cluster that was started by hand, from a process that is none of its own: `--on ray://HOST:PORT`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_replicas import answers, job_into

from vasuki.base.config import load_job
from vasuki.commands.run import run_job

pytest.importorskip("ray")

RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = os.environ | {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120"}  # a busy machine takes its time


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """Address of a head of two processors, for those that are no part of the cluster."""
    port = free_port()
    options = [f"--port={free_port()}", f"--ray-client-server-port={port}", "--num-cpus=2", "--include-dashboard=false"]
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--disable-usage-stats", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    while not answers_at(port):  # until the test times out
        assert head.poll() is None
        time.sleep(0.1)
    yield f"ray://127.0.0.1:{port}"
    head.terminate()
    head.wait()


def answers_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def run(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vasuki", "run", str(job), "--quiet", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_answers_are_those_of_one_device(head: str, tmp_path: Path, tiny_model: Path) -> None:
    one, job = job_into(tmp_path / "one", tiny_model), job_into(tmp_path / "job", tiny_model)
    run_job(load_job(str(one)), quiet=True)
    ended = run(job, "--on", head, "--replicas", "2")
    assert ended.returncode == 0, ended.stderr
    assert answers(job).equals(answers(one))
