"""vasuki as clusters start it: pods of an Indexed Job, by the script of its manifest, and a Ray job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from replicas_job import answers, job_into
from test_ray_client import RAY, agent_port, free_port

from vasuki.base.job_file import load_job
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job

pytest.importorskip("ray")

VASUKI = Path(sys.executable).with_name("vasuki")
MANIFEST = Path(__file__).parents[4] / "jobs" / "kubernetes" / "indexed-job.yaml"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes, which all end with the test, whatever their parents are by then."""
    mark = f"VASUKI_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    environment = os.environ | {name: value, "PATH": f"{VASUKI.parent}{os.pathsep}{os.environ['PATH']}"}

    processes: list[subprocess.Popen[str]] = []

    def started(*command: str, log: Path, **variables: str) -> subprocess.Popen[str]:
        with log.open("w") as said:
            own = environment | variables
            processes.append(subprocess.Popen(command, cwd=tmp_path, env=own, stdout=said, stderr=said, text=True))
        return processes[-1]

    yield started
    while marked := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if has_mark(pid, mark)]:
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for process in processes:
        process.wait()


def has_mark(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def wait_for(words: str, log: Path, process: subprocess.Popen[Any]) -> None:
    while words not in log.read_text():  # until the test times out
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)


def test_pods_of_an_indexed_job_share_its_rows(start: Start, tmp_path: Path, tiny_model: Path) -> None:
    nightly, one = job_into(tmp_path / "job", tiny_model), job_into(tmp_path / "one", tiny_model)
    shutil.copy(nightly, tmp_path / "nightly.yaml")
    run_job(load_job(str(one)), RunOptions(quiet=True))
    (job,) = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    variables = {"HEAD": f"127.0.0.1:{free_port()}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    logs = [tmp_path / f"pod-{index}.log" for index in range(2)]
    other = start(*command, log=logs[1], JOB_COMPLETION_INDEX="1", **variables)
    patient = vasuki_behind("Ray runtime started", logs[1], tmp_path / "bin")
    first = start(*command, log=logs[0], JOB_COMPLETION_INDEX="0", **variables, PATH=patient)
    assert first.wait() == 0, logs[0].read_text()[-3000:]
    other.terminate()  # as the Job does, since index 0 has succeeded
    assert other.wait() == 0
    assert json.loads((nightly.parent / "out" / "manifest.json").read_text())["device"]["replicas"] == 2
    assert answers(nightly).equals(answers(one))


def vasuki_behind(words: str, log: Path, folder: Path) -> str:
    """A PATH on which `vasuki` is the command, once the log has the words: small jobs end before others join."""
    folder.mkdir()
    script = folder / "vasuki"
    script.write_text(f"""#!/bin/sh\nuntil grep -q '{words}' '{log}'; do sleep 0.1; done\nexec '{VASUKI}' "$@"\n""")
    script.chmod(0o755)
    return os.pathsep.join([str(folder), str(VASUKI.parent), os.environ["PATH"]])


def test_a_ray_job_runs_on_the_cluster_around_it(start: Start, tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="Ray takes no jobs without ray[default]")
    job, one = job_into(tmp_path / "job", tiny_model), job_into(tmp_path / "one", tiny_model)
    run_job(load_job(str(one)), RunOptions(quiet=True))
    port = free_port()
    options = [f"--port={free_port()}", f"--dashboard-port={port}", "--num-cpus=2", "--disable-usage-stats"]
    head = start(RAY, "start", "--head", "--block", *options, *agent_port(), log=tmp_path / "head.log")
    wait_for("Ray runtime started", tmp_path / "head.log", head)
    command = ["vasuki", "run", str(job), "--on", "ray", "--replicas", "2"]
    submit = [RAY, "job", "submit", "--address", f"http://127.0.0.1:{port}", "--", *command]
    log = tmp_path / "submit.log"
    for _ in range(60):  # while the agent that takes jobs starts
        if not start(*submit, log=log).wait():
            break
        assert "try again later" in log.read_text(), log.read_text()[-3000:]
        time.sleep(1)
    assert answers(job).equals(answers(one))
