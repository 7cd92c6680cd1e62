"""The driver of replicas, over some whose steps take virtual time: who gets which rows depends on nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from replicas_job import QUIET, SHARES, job_into

from vasuki.base.errors import Interrupted, OutOfMemory
from vasuki.base.job_file import load_job
from vasuki.engine.sequence import FinishReason, Progress, Request
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.trace import StepRecord
from vasuki.machines.here.split import Share
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.planner.job_sums import JobSums
from vasuki.runs.options import RunOptions
from vasuki.runs.placement import placed_on
from vasuki.runs.run import run_on_replicas
from vasuki.runs.workers.driver import MOST_STARTS
from vasuki.runs.workers.messages import (
    Begin,
    Ended,
    Failed,
    Finish,
    Note,
    Over,
    PlanFor,
    Planned,
    Ready,
    Report,
    Setup,
    SetupOf,
    Stop,
    Take,
    ToDriver,
    ToReplica,
)
from vasuki.runs.workers.processes import Processes
from vasuki.runs.workload import shape_of
from vasuki.simulator.replicas import ASK_BELOW

SEQS = 8  # in a step
Said = tuple[int, ToDriver | None]


@dataclass
class Replica:
    """Runs up to `SEQS` rows side by side, a token each in a step."""

    step_s: float
    now_s: float = 0.0
    at_hand: deque[Request] = field(default_factory=deque)
    running: dict[tuple[int, int], tuple[Request, int]] = field(default_factory=dict)  # with tokens so far
    has_asked: bool = False

    def step(self) -> Report:
        """One step, at whose end rows are asked for as real replicas do."""
        prompts = 0
        while self.at_hand and len(self.running) < SEQS:
            request = self.at_hand.popleft()
            self.running[request.row, request.sample_index] = request, 0
            prompts += request.num_prompt_tokens
        decodes, ended = len(self.running), []
        for key, (request, tokens) in list(self.running.items()):
            self.running[key] = request, tokens + 1
            if tokens + 1 == request.max_tokens:
                del self.running[key]
                ended.append(Ended(key, Progress((3,) * request.max_tokens, 0.0, FinishReason.LENGTH)))
        self.now_s += self.step_s if decodes else 0.0
        asks = len(self.at_hand) < ASK_BELOW and not self.has_asked
        self.has_asked |= asks
        record = StepRecord(self.now_s, self.step_s, prompts, decodes, decodes, len(self.at_hand))
        return Report(ended, [record] * bool(decodes), asks, running=len(self.running))


class Virtual:
    """Replicas of which the one that is behind has its turn."""

    devices = 1

    def __init__(self, steps_s: list[float], setup_of: SetupOf) -> None:
        self.setup: Setup = setup_of(SHARES[0], 0, len(steps_s))
        self.replicas = [Replica(step_s) for step_s in steps_s]
        self.said: list[Said] = [(index, Ready("virtual", 128, 320, "virtual")) for index in range(len(steps_s))]
        self.begun: set[int] = set()

    def start(self, index: int) -> bool:
        raise AssertionError("none dies")

    def kill(self, index: int) -> None:
        raise AssertionError("none hangs")

    def send(self, index: int, message: ToReplica) -> None:
        replica = self.replicas[index]
        match message:
            case PlanFor(lengths):
                config, profile = self.setup.job.config, find_profile("cpu")
                placement = placed_on(config, shape_of(config), profile)
                plan = placement.plan(lengths, Layout(data_parallel=len(self.replicas)))
                self.said.append((index, Planned(plan, placement.shape, profile)))
            case Begin():
                self.begun.add(index)
            case Take(requests):
                if not replica.at_hand and not replica.running:
                    replica.now_s = max(replica.now_s, min(self.replicas[busy].now_s for busy in self.busy or [index]))
                replica.at_hand.extend(requests)
                replica.has_asked = False
            case Note():
                self.said.append((index, Report(in_flight={})))
            case Finish() | Stop():
                over = Over(Manifest({}, "", ""), JobSums.of(shape_of(self.setup.job.config), [], []), None)
                self.said.append((index, over))

    def receive(self, timeout_s: float) -> list[Said]:
        said, self.said = self.said, []
        able = {*self.busy, *(index for index in self.begun if not self.replicas[index].has_asked)}
        if said or not able:
            return said
        index = min(able, key=lambda index: self.replicas[index].now_s)
        return [(index, self.replicas[index].step())]

    @property
    def busy(self) -> list[int]:
        return [index for index in self.begun if self.replicas[index].at_hand or self.replicas[index].running]

    def __enter__(self) -> Virtual:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left running."""


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.4)])
def test_replicas_end_together_whatever_their_speeds(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...]
) -> None:
    """Their plan takes them to be equal."""
    monkeypatch.setattr("replicas_job.NUM_ROWS", 1000)
    job = job_into(tmp_path / "job", tiny_model)
    tree = yaml.safe_load(job.read_text())
    tree["sampling"]["ignore_eos"] = True
    tree["plan"] = {"output_length": "max"}
    job.write_text(yaml.safe_dump(tree))
    made: list[Virtual] = []

    def start(setup_of: SetupOf, shares: list[Share]) -> Virtual:
        made.append(Virtual([0.01 / speed for speed in speeds], setup_of))
        return made[0]

    manifest = run_on_replicas(load_job(str(job)), [SHARES[0]] * len(speeds), QUIET, start).manifest
    assert manifest.rows.succeeded == 1000
    ends_s = [replica.now_s for replica in made[0].replicas]
    assert max(ends_s) - min(ends_s) <= 0.03 * max(ends_s)


class RunsOut(Virtual):
    """Has the first replica run out of memory, and be gone, with its first rows."""

    def send(self, index: int, message: ToReplica) -> None:
        if index == 0 and isinstance(message, Take):
            self.begun.discard(index)
            self.said += [(index, Failed(OutOfMemory("memory ran out"))), (index, None)]
        else:
            super().send(index, message)


def test_a_replica_that_runs_out_of_memory_ends_the_run_as_it_ends_one_on_one_device(
    tmp_path: Path, tiny_model: Path
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    with pytest.raises(OutOfMemory, match="memory ran out; 60 rows are left, they go on once the job takes less"):
        run_on_replicas(load_job(str(job)), SHARES, QUIET, lambda setup_of, shares: RunsOut([0.01, 0.01], setup_of))


class Dies(Processes):
    """Has replicas die whenever they are started."""

    doomed: ClassVar[set[int]] = {0}

    def start(self, index: int) -> bool:
        starts = super().start(index)
        if index in self.doomed:
            self.kill(index)
        return starts


def test_a_replica_that_always_dies_is_left_out(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    manifest = run_on_replicas(load_job(str(job)), SHARES, QUIET, Dies).manifest
    assert manifest.rows.succeeded == manifest.rows.total
    assert caplog.text.count("replica 0 has died and is started again") == MOST_STARTS - 1
    assert f"replica 0 has died {MOST_STARTS} times; the others go on without it" in caplog.text


def test_a_run_whose_replicas_always_die_ends_and_can_be_gone_on_with(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dies, "doomed", {0, 1})
    job = job_into(tmp_path / "job", tiny_model)
    with pytest.raises(Interrupted, match=f"every replica has died {MOST_STARTS} times"):
        run_on_replicas(load_job(str(job)), SHARES, QUIET, Dies)
    monkeypatch.setattr(Dies, "doomed", set())
    assert run_on_replicas(load_job(str(job)), SHARES, QUIET, Dies).manifest.rows.succeeded


def test_the_time_that_a_run_may_take_counts_while_it_waits_for_replicas(tmp_path: Path, tiny_model: Path) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    with pytest.raises(Interrupted, match="--max-time are over"):
        run_on_replicas(load_job(str(job)), SHARES, RunOptions(quiet=True, max_time_s=0.0))
