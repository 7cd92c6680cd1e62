"""What the commands do, as Python functions. A job is the path of its file, the same as a dict, or a `JobConfig`.

They raise a `VasukiError` where a command ends with its exit code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vasuki.base.config import JobConfig
from vasuki.base.job_file import load_job, parse_job
from vasuki.io.batch import as_arrow, batch_job, with_answers
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated
from vasuki.runs.opening import Outcome
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.placement import Placement, replicas_elsewhere
from vasuki.runs.planning import placements_of, plans_of, simulate_workload
from vasuki.runs.renting import parse_fleets
from vasuki.runs.run import run_job
from vasuki.runs.workload import Workload, job_workload, workload_of

__all__ = ["Job", "RunOptions", "enrich", "plan", "run", "simulate"]

Table = TypeVar("Table")
Job = str | Path | Mapping[str, Any] | JobConfig


def run(job: Job, options: RunOptions = AS_USUAL) -> Outcome:
    """Run what is left of a job. In the main thread a signal ends it well; in others signals are the caller's.

    Returns:
        The `manifest`, and the `answers` as a `pyarrow.dataset.Dataset`. Rows that fail are among them, with an
        `error`; `raise_for_errors` raises where they are more than the job allows.

    Raises:
        VasukiError: as `vasuki run` ends with its exit code; finished rows are durable.
    """
    return run_job(_config(job), options)


def enrich(table: Table, *, model: str, prompt: str = "", options: RunOptions = AS_USUAL, **settings: Any) -> Table:
    """A table in memory with what a model says of its rows: the same rows, with the columns that the job's output has.

    Nothing is left of it if the process ends before it is done: `run` is for what should outlast that.

    Args:
        table: of pyarrow, pandas or Polars.
        model: a folder, or a Hugging Face id.
        prompt: a template over the columns.
        options: as for `run`.
        settings: further keys of a job, such as `answer={"kind": ["a", "b"]}`, `task="embed"` or
            `sampling={"max_tokens": 8}`.

    Returns:
        A table of the same kind. With `sampling.n` each row is there as often.

    Raises:
        VasukiError: as `vasuki run` ends with its exit code.
    """
    given = {**settings.pop("input", {}), **({"prompt": prompt} if prompt else {})}
    place = {"output": {"path": "-", **settings.pop("output", {})}}
    job = parse_job({"model": {"path": model}, "input": {"path": "-", **given}, **place, **settings}, "enrich")
    with tempfile.TemporaryDirectory(prefix="vasuki-") as folder:
        own = batch_job(job, as_arrow(table), Path(folder))
        run_job(own, options)
        answered: Table = with_answers(table, own)
    return answered


def plan(job: Job, gpus: Iterable[str] = ()) -> list[Plan]:
    """Predict what a job takes on each card, or on this machine if none is named.

    Args:
        job: or the path of a LENGTHS.csv.
        gpus: names of cards or paths of profiles, such as `a10` or `a10:4`.

    Raises:
        VasukiError: as `vasuki plan` ends with its exit code.
    """
    workload = _workload(job)
    return plans_of(workload, _placements(workload, gpus))


def simulate(job: Job, gpus: Iterable[str] = (), policies: Iterable[str] = ()) -> list[Simulated]:
    """Run a job in virtual time on each card, with each policy, or with the job's own.

    Raises:
        VasukiError: as `vasuki simulate` ends with its exit code.
    """
    workload = _workload(job)
    return simulate_workload(workload, _placements(workload, gpus), policies)


def _config(job: Job) -> JobConfig:
    if isinstance(job, JobConfig):
        return job
    return parse_job(job) if isinstance(job, Mapping) else load_job(job)


def _placements(workload: Workload, gpus: Iterable[str]) -> list[Placement]:
    return placements_of(parse_fleets(gpus, unsaid=replicas_elsewhere(workload.config)), workload)


def _workload(job: Job) -> Workload:
    return workload_of(str(job)) if isinstance(job, str | Path) else job_workload(_config(job))
