"""One job on a Ray cluster of several nodes, all on this machine: the answers of a run on one device."""

from __future__ import annotations

import logging
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from ray_nodes import two_nodes
from replicas_job import NUM_ROWS, QUIET, answers, job_into
from tiny_job import WORDS

from vasuki.base import commits
from vasuki.base.errors import Interrupted, JobFileError
from vasuki.base.job_file import load_job, parse_job
from vasuki.commands.cli import main
from vasuki.io.output.output_folder import OutputFolder
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job
from vasuki.runs.workers.driver import MOST_STARTS
from vasuki.runs.workers.messages import Setup, ToDriver
from vasuki.runs.workers.ray import nodes
from vasuki.runs.workers.ray import run as cluster_run
from vasuki.runs.workers.ray.nodes import Nodes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from vasuki.runs.workers.ray import actors
    from vasuki.runs.workers.ray.actors import Actors

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's


def on(address: str) -> RunOptions:
    return RunOptions(quiet=True, cluster=address)


@pytest.fixture
def cluster() -> Iterator[Any]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commits, "COMMIT_S", 0.02)
    return job_into(tmp_path / "job", tiny_model)


def strike_at(monkeypatch: pytest.MonkeyPatch, messages: int, strike: Callable[[Actors], None]) -> None:
    """Do something after a number of messages of the first replica."""
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
    manifest = run_job(load_job(str(job)), on(cluster.address)).manifest
    assert answers(job).equals(expected)
    assert manifest.rows.succeeded == NUM_ROWS
    assert manifest.device["replicas"] == 2


@pytest.mark.parametrize("task", [{"task": "score"}, {"task": "embed", "embed": {"pooling": "mean"}}], ids=str)
def test_what_is_asked_in_place_of_an_answer_is_the_same_too(
    cluster: Any, tmp_path: Path, tiny_model: Path, task: dict[str, Any]
) -> None:
    texts, source = [" ".join(WORDS[: 1 + row % 5]) for row in range(40)], tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(40), "text": texts}), source)
    tables = []
    for name, options in (("one", QUIET), ("two", on(cluster.address))):
        rows = {"path": str(source), "id": "id", "prompt": "{text}", "chat": False, "duplicates": "each"}
        tree = {"model": {"path": str(tiny_model), "dtype": "float32"}, "input": rows, **task}
        run_job(parse_job({**tree, "output": {"path": str(tmp_path / name)}}), options)
        parts = [pq.read_table(part) for part in (tmp_path / name).glob("part-*.parquet")]
        tables.append(pa.concat_tables(parts).sort_by("id"))
    assert tables[0].num_rows == 40
    assert tables[0].equals(tables[1])


def test_an_actor_that_is_killed_is_started_again(
    cluster: Any, job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strike_at(monkeypatch, 8, lambda there: there.kill(0))
    run_job(load_job(str(job)), on(cluster.address))
    assert "replica 0 has died and is started again" in caplog.text
    assert answers(job).equals(expected)


def remove(cluster: Any, node: Any, replicas: Actors) -> None:
    """Kill a node, and hand out no row until Ray knows it and its actors are gone."""
    there = replicas._nodes.alive()
    cluster.remove_node(node, allow_graceful=False)
    while replicas._nodes.alive() == there:  # until the test times out
        time.sleep(0.05)


def test_a_node_that_leaves_costs_no_row_and_prints_nothing(
    cluster: Any,
    job: Path,
    expected: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG, "vasuki")

    def strike(replicas: Actors) -> None:
        node = next(node for node in cluster.workers if node.node_id == replicas._slots[0].node)
        remove(cluster, node, replicas)

    strike_at(monkeypatch, 4, strike)
    run_job(load_job(str(job)), on(cluster.address))
    assert "replica 0 has gone with its machine" in caplog.text
    assert "Ray: " in caplog.text
    assert capsys.readouterr().out == ""
    assert answers(job).equals(expected)


def test_a_job_whose_only_node_leaves_goes_on_with_one_that_joins(
    job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.add_node(num_cpus=0)
    worker = cluster.add_node(num_cpus=1)

    def strike(replicas: Actors) -> None:
        remove(cluster, worker, replicas)
        cluster.add_node(num_cpus=1)

    strike_at(monkeypatch, 4, strike)
    try:
        run_job(load_job(str(job)), on(cluster.address))
    finally:
        cluster.shutdown()
    assert "replica 0 has gone with its machine" in caplog.text
    assert "has joined and gets replica 0" in caplog.text
    assert answers(job).equals(expected)


def run(job: Path, cluster: Any, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["run", str(job), "--quiet", "--set", "engine.device=cpu", "--on", cluster.address, *arguments]
    )


def assert_one_line(result: Result, exit_code: int, words: str) -> None:
    assert result.exit_code == exit_code, result.output
    (line,) = result.output.splitlines()
    assert words in line


def test_a_cluster_that_cannot_run_a_job_is_told_in_one_line(
    cluster: Any, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_line(run(job, cluster, "--set", "engine.device=cuda"), 2, "the Ray cluster has none")
    assert_one_line(run(job, cluster, "--replicas", "3"), 2, "3 are asked for, and the Ray cluster has 2 CPUs")

    config = load_job(str(job))
    with OutputFolder.open(config.output.path, num_rows=NUM_ROWS, config_hash="-", input_fingerprint="-"):
        assert_one_line(run(job, cluster), 5, "is in use by process")

    own = metadata.version("vasuki")
    with monkeypatch.context() as patch:
        patch.setattr("vasuki.runs.workers.ray.nodes.metadata.version", lambda name: "99.0")
        assert_one_line(run(job, cluster), 2, f"has vasuki {own}, and this is 99.0")

    on_any_node = actors._on_any_node
    for path, words in ((tmp_path / "nowhere", "nowhere"), (another_model(job, tmp_path / "other"), "differs from")):

        def elsewhere(setup: Setup, path: Path = path) -> Setup:
            setup = on_any_node(setup)
            config = setup.job.config
            model = config.model.model_copy(update={"path": str(path)})
            return replace(setup, job=replace(setup.job, config=config.model_copy(update={"model": model})))

        with monkeypatch.context() as patch:
            patch.setattr(actors, "_on_any_node", elsewhere)
            result = run(job, cluster, "--fresh")
            assert_one_line(result, 4, words)
            assert "on node" in result.output


def another_model(job: Path, folder: Path) -> Path:
    """The job's model, but for a byte of its weights."""
    shutil.copytree(load_job(str(job)).model.path, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    return folder


def test_one_replica_is_one_and_what_is_unsaid_is_all(cluster: Any, job: Path, expected: pa.Table) -> None:
    manifest = run_job(load_job(str(job), ["engine.replicas=1"]), on(cluster.address)).manifest
    assert manifest.device["replicas"] == 1
    assert answers(job).equals(expected)


def test_a_deadline_that_will_not_hold_is_told(
    cluster: Any, job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vasuki.runs.observers.deadline.LOOK_EVERY_S", 0.0)
    run_job(load_job(str(job)), RunOptions(quiet=True, deadline_s=1.0, cluster=cluster.address))
    assert caplog.text.count("--deadline 1.0 s will be missed") == 1


def test_a_cluster_that_is_not_there_may_still_start(
    job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_PATIENCE_S", 0.2)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(Interrupted, match="no Ray cluster there yet: Connection refused"),
    ):
        run_job(load_job(str(job)), on("ray://127.0.0.1:9"))
    assert caplog.text.count("waiting for the Ray cluster at ray://127.0.0.1:9") == 1
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(Interrupted, match=r"--on ray \(RAY_ADDRESS=127.0.0.1:9\): no Ray cluster there yet"):
        run_job(load_job(str(job)), on("ray"))


def test_a_host_without_an_address_is_not_waited_for(job: Path) -> None:
    with pytest.raises(JobFileError, match="no Ray cluster there"):
        run_job(load_job(str(job)), on("ray://no.such.host.invalid:10001"))


@contextmanager
def taken(cluster: Any, *nodes: Any) -> Iterator[Callable[[], None]]:
    """Nodes whose processors others use. Gives what makes those leave."""

    class Other:
        def begin(self) -> None:
            """Be there."""

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    where = [NodeAffinitySchedulingStrategy(node.node_id, soft=False) for node in nodes]
    others = [ray.remote(num_cpus=1, scheduling_strategy=each)(Other).remote() for each in where]
    ray.get([other.begin.remote() for other in others])

    def leave() -> None:
        while others:
            ray.kill(others.pop())

    yield leave
    ray.shutdown()


def test_replicas_wait_for_room_and_say_so(
    cluster: Any, job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors, "PATIENCE_S", 1.0)
    with taken(cluster, *cluster.workers) as leave:
        receive = Actors.receive

        def received(self: Actors, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
            if "not started" in caplog.text:
                leave()
            return receive(self, timeout_s)

        monkeypatch.setattr(Actors, "receive", received)
        run_job(load_job(str(job), ["engine.device=auto"]), on(cluster.address))
    assert "2 of 2 replicas have not started after 1.0 s: each needs 1 CPU, and of 2 in the Ray cluster 0 are free" in (
        caplog.text
    )
    assert "the Ray cluster has no GPU, so replicas take CPUs" in caplog.text
    assert answers(job).equals(expected)


def test_a_replica_whose_node_is_taken_moves_to_a_spare_one(
    cluster: Any, job: Path, expected: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "PATIENCE_S", 1.0)
    busy = cluster.workers[0]

    class BusyFirst(Nodes):
        def __init__(self, device: str, replicas: int | Literal["auto"]) -> None:
            super().__init__(device, replicas)
            self.slots.sort(key=lambda slot: bool(slot.node != busy.node_id))

    monkeypatch.setattr(cluster_run, "Nodes", BusyFirst)
    with taken(cluster, busy):
        run_job(load_job(str(job), ["engine.replicas=1"]), on(cluster.address))
    assert answers(job).equals(expected)


class Unknown:
    """What only this process knows."""


def test_an_actor_that_dies_of_an_error_says_which_and_is_not_started_for_ever(
    cluster: Any, job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors, "_on_any_node", lambda setup: Unknown())
    with pytest.raises(Interrupted, match=f"every replica has died {MOST_STARTS} times"):
        run_job(load_job(str(job), ["engine.replicas=1"]), on(cluster.address))
    said = re.findall("replica 0: .*No module named 'test_ray_cluster'\n", caplog.text)
    assert len(said) == MOST_STARTS
