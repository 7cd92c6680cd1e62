"""One job on a Ray cluster of several nodes, all on this machine: the answers of a run on one device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_replicas import NUM_ROWS, answers, job_into

from vasuki.base import commits
from vasuki.base.config import load_job
from vasuki.base.errors import JobFileError
from vasuki.commands.cluster.run import run_on_ray
from vasuki.commands.fleet.messages import ToDriver
from vasuki.commands.run import run_job

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from vasuki.commands.cluster.actors import Actors

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without processors, and two nodes with one each."""
    cluster = Cluster()
    cluster.add_node(num_cpus=0)
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> pa.Table:
    job = job_into(tmp_path_factory.mktemp("one") / "job", tiny_model)
    run_job(load_job(str(job)), quiet=True)
    return answers(job)


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    return job_into(tmp_path / "job", tiny_model)


def strike_at(monkeypatch: pytest.MonkeyPatch, messages: int, strike: Callable[[Actors], None]) -> None:
    """Do something behind so many messages of the first replica."""
    receive, heard = Actors.receive, 0

    def counted(self: Actors, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        nonlocal heard
        said = receive(self, timeout_s)
        before = heard
        heard += sum(index == 0 and message is not None for index, message in said)
        if before < messages <= heard:
            strike(self)
        return said

    monkeypatch.setattr(Actors, "receive", counted)


def test_answers_are_those_of_one_device(cluster: Any, job: Path, expected: pa.Table) -> None:
    manifest = run_on_ray(load_job(str(job)), cluster.address, quiet=True).manifest
    assert answers(job).equals(expected)
    assert manifest.rows.succeeded == NUM_ROWS
    assert manifest.device["replicas"] == 2


def test_an_actor_that_is_killed_is_started_again(
    cluster: Any, job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strike_at(monkeypatch, 8, lambda actors: actors.kill(0))
    run_on_ray(load_job(str(job)), cluster.address, quiet=True)
    assert "replica 0 has died and is started again" in caplog.text
    assert answers(job).equals(expected)


def remove(cluster: Any, node: Any, actors: Actors) -> None:
    """Kill a node, and hand out no row until Ray knows it and its actors are gone."""
    there = actors._nodes.alive()
    cluster.remove_node(node, allow_graceful=False)
    while actors._nodes.alive() == there:  # until the test times out
        time.sleep(0.05)


def test_a_node_that_leaves_costs_no_row(
    cluster: Any, job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def strike(actors: Actors) -> None:
        node = next(node for node in cluster.workers if node.node_id == actors._slots[0].node)
        remove(cluster, node, actors)

    strike_at(monkeypatch, 4, strike)
    run_on_ray(load_job(str(job)), cluster.address, quiet=True)
    assert "replica 0 has gone with its machine" in caplog.text
    assert answers(job).equals(expected)


def test_a_job_whose_only_node_leaves_goes_on_with_one_that_joins(
    job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.add_node(num_cpus=0)
    worker = cluster.add_node(num_cpus=1)

    def strike(actors: Actors) -> None:
        remove(cluster, worker, actors)
        cluster.add_node(num_cpus=1)

    strike_at(monkeypatch, 4, strike)
    try:
        run_on_ray(load_job(str(job)), cluster.address, quiet=True)
    finally:
        cluster.shutdown()
    assert "replica 0 has gone with its machine" in caplog.text
    assert "has joined and gets replica 0" in caplog.text
    assert answers(job).equals(expected)


@pytest.mark.parametrize(
    ("override", "words"),
    [("engine.device=cuda", "the Ray cluster has none"), ("engine.replicas=3", "3 are asked for")],
)
def test_a_cluster_that_has_not_what_is_asked_for(cluster: Any, job: Path, override: str, words: str) -> None:
    with pytest.raises(JobFileError, match=words):
        run_on_ray(load_job(str(job), [override]), cluster.address, quiet=True)


def test_no_cluster_there(job: Path) -> None:
    with pytest.raises(JobFileError, match="no Ray cluster there"):
        run_on_ray(load_job(str(job)), "ray://127.0.0.1:9", quiet=True)
