"""A job on a Ray cluster whose workers, nodes and driver are killed at random moments. `make test-ray` kills 20.

Drivers are processes of their own, nodes are raylets on this machine, and one that was killed is replaced at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ray_nodes import two_nodes
from replicas_job import answers, children, count_parts, is_stopped_amid_rows, job_into

from vasuki.io.location import Location
from vasuki.io.output.manifest import read_manifest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray")

KILLS = int(os.environ.get("VASUKI_RAY_KILLS", "3"))
PROGRAM = """
import sys
from vasuki.base import commits
from vasuki.base.job_file import load_job
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job
commits.COMMIT_S = 0.02
run_job(load_job(sys.argv[1]), RunOptions(quiet=True, cluster=sys.argv[2]))
"""

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as cluster:
        yield cluster


def start_driver(job: Path, cluster: Any) -> subprocess.Popen[bytes]:
    with (job.parent / "stderr").open("ab") as said:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(job), cluster.address], stderr=said)


def is_whole(job: Path, expected: pa.Table) -> bool:
    return answers(job).equals(expected) and (job.parent / "out" / "_SUCCESS").exists()


def test_a_driver_that_is_killed_is_gone_on_with(
    cluster: Any, tmp_path: Path, tiny_model: Path, expected: pa.Table
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    driver = start_driver(job, cluster)
    while driver.poll() is None and not is_stopped_amid_rows(driver, job):
        driver.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    done = set(answers(job)["id"].to_pylist())
    assert 0 < len(done) < len(set(expected["id"].to_pylist()))
    assert start_driver(job, cluster).wait() == 0
    assert is_whole(job, expected)
    assert read_manifest(Location.parse(str(job.parent / "out" / "manifest.json"))).runs[-1].resumed_rows > 0


def test_whoever_is_killed_whenever(cluster: Any, tmp_path: Path, tiny_model: Path, expected: pa.Table) -> None:
    """All kinds equally often, half of them when rows are known to run."""
    rng, killed, jobs = random.Random(11), Counter[str](), 0
    while killed.total() < KILLS:
        job = job_into(tmp_path / str(jobs), tiny_model)
        jobs += 1
        code = -signal.SIGKILL
        while code:
            driver = start_driver(job, cluster)
            wait_for_a_moment(job, driver, rng)
            if killed.total() < KILLS and driver.poll() is None:
                what = min(("driver", "worker", "node"), key=lambda name: (killed[name], rng.random()))
                killed[what] += KILLERS[what](cluster, driver, rng)
            code = driver.wait()
            assert code in (0, -signal.SIGKILL), (job.parent / "stderr").read_text()[-3000:]
        assert is_whole(job, expected)
    print(f"killed: {dict(killed)} in {jobs} jobs")


def wait_for_a_moment(job: Path, driver: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Until another part is written, or any time before."""
    there, waited = count_parts(job), rng.random() < 0.5
    until_s = time.monotonic() + rng.uniform(0, 12)
    while driver.poll() is None and (count_parts(job) == there if waited else time.monotonic() < until_s):
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3) if waited else 0)


def kill_driver(cluster: Any, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    driver.kill()
    return driver.wait() != 0


def kill_worker(cluster: Any, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Kill an actor's process. Returns whether there was one."""
    raylets = [process.process.pid for node in cluster.workers for process in node.all_processes["raylet"]]
    actors = [pid for raylet in raylets for pid in children(raylet) if b"ReplicaActor" in command_of(pid)]
    if actors:
        os.kill(rng.choice(actors), signal.SIGKILL)
    return bool(actors)


def kill_node(cluster: Any, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    place = rng.randrange(len(cluster.workers))
    cluster.remove_node(cluster.workers[place], allow_graceful=False)
    cluster.workers[place] = cluster.add_node(num_cpus=1)
    return True


KILLERS = {"driver": kill_driver, "worker": kill_worker, "node": kill_node}


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
