"""The only root of a run: rows, and workers that compute them.

    open_table ─ OutputFolder ─ load ─ RequestStream ─ plan ─ order_requests ─ compute ─ Results ─ manifest

Whatever can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted, JobFileError
from vasuki.base.logs import is_json
from vasuki.base.units import duration
from vasuki.io.input.followed import FollowedRows
from vasuki.io.input.requests import RequestStream
from vasuki.io.location import Location
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.output_folder import usable_folder
from vasuki.io.output.ownership import ARRIVED
from vasuki.machines.here.split import Share
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import BACKENDS
from vasuki.planner.loss import commits_within_s
from vasuki.runs.observers.deadline import time_over
from vasuki.runs.observers.progress import busy_with
from vasuki.runs.opening import JobKey, OpenJob, Outcome, opened
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.placement import job_of_replica, shares_here
from vasuki.runs.results import Results
from vasuki.runs.rows.arriving import Emit, RowsThatArrive
from vasuki.runs.rows.rows import RunRows
from vasuki.runs.rows.table import TableRows
from vasuki.runs.signals import StopSignals
from vasuki.runs.workers.device import load
from vasuki.runs.workers.driver import Driver
from vasuki.runs.workers.here import Here
from vasuki.runs.workers.messages import Setup, Start
from vasuki.runs.workers.processes import Processes
from vasuki.runs.workers.ray.run import replicas_on_ray
from vasuki.runs.workers.workers import Workers
from vasuki.runs.workload import model_tokenizer

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel

log = logging.getLogger(__name__)


def run_job(config: JobConfig, options: RunOptions = AS_USUAL) -> Outcome:
    """Run what is left of a job: in a Ray cluster if the options name one, on several devices if the job wants them,
    else here. See `Runner.run`."""
    if options.cluster is not None:
        with replicas_on_ray(config, options.cluster) as (shares, start):
            return run_on_replicas(config, shares, options, start)
    if shares := shares_here(config):
        return run_on_replicas(config, shares, options)
    with StopSignals() as signals:
        return Runner(signals, options).run(config)


def run_on_replicas(
    config: JobConfig, shares: list[Share], options: RunOptions = AS_USUAL, start: Start = Processes
) -> Outcome:
    """Run what is left of a job on a replica for each share of a machine, which `start` starts.

    Raises:
        VasukiError: as a run on one device does; Interrupted also when every replica has died too often.
        KeyboardInterrupt: a signal before rows are generated, or a second one.
    """
    with StopSignals() as signals, opened(config, options) as job:
        if outcome := job.finished:
            return outcome

        def setup_of(share: Share, index: int, here: int) -> Setup:
            own = replace(job.key, config=job_of_replica(config, share, here))
            return Setup(own, share, index, len(shares), is_json())

        rows = TableRows(job)
        with start(setup_of, shares) as replicas:
            manifest = run_to_end(job, rows, Driver(job, rows, replicas, shares), signals)
            job.refuse_gaps()
    return job.outcome(manifest)


def answer_rows(
    config: JobConfig,
    pipe: int | None,
    emit: Emit,
    until_idle_s: float | None = None,
    options: RunOptions = AS_USUAL,
) -> Outcome:
    """Answer rows as they arrive, until the pipe ends, a signal comes, or none has come for some time.

    Args:
        config: the job; the answers become parts of its output folder.
        pipe: file descriptor from which lines are read; None to follow the file `input.path`.
        emit: gets each answer as it ends. A row may come again after a kill, but none is left out.
        until_idle_s: how long to wait for another row once all are answered; for ever if None.
        options: how to run it; `quiet` and `metrics` play a part.

    Raises:
        VasukiError: as a run does; Interrupted also where a signal left rows to be started.
    """
    arrivals_from_s = time.monotonic()
    if config.engine.replicas != 1:
        raise JobFileError("engine.replicas: rows that arrive are answered by one; set it to 1")
    place = usable_folder(config.output.path)
    if pipe is not None and not place.is_local:
        raise JobFileError("output.path: --stdin needs a local folder, where rows are noted as they come")
    file = (place / ARRIVED).path if pipe is not None else Location.parse(config.input.path).path
    with (
        StopSignals() as signals,
        closing(FollowedRows(config, file, pipe, arrivals_from_s)) as followed,
        opened(config, options, arriving=followed) as job,
    ):
        followed.begin(job.folder.selection)  # they wait from now on, also for the model
        rows = RowsThatArrive(job, followed, signals, emit, until_idle_s)
        manifest = run_to_end(job, rows, Here(job, rows, lambda: loaded(job.key, options)), signals)
    counts = manifest.rows
    if left := counts.total - counts.succeeded - counts.failed:
        why = "stopped by a signal; " if signals.asked() else ""
        raise Interrupted(f"{why}{left} rows are left, run the same command again to go on")
    return job.outcome(manifest)


class Runner:
    """Runs one job after another of those that share a model, which stays loaded.

    Args:
        signals: stop signals of this run, or of a series of runs.
        options: how to run each.
    """

    def __init__(self, signals: StopSignals, options: RunOptions = AS_USUAL) -> None:
        self.signals = signals
        self.options = options
        self._loaded: LoadedModel | None = None  # while no run has it
        self._fingerprint = ""  # of the model that is loaded, whatever becomes of its files
        self._has_run = False

    def run(self, config: JobConfig) -> Outcome:
        """Run what is left of a job on one device. Raises Interrupted behind the first step that ends after
        `options.max_time_s`, loading included. Warns when it foresees an end after `options.deadline_s`.

        The first SIGTERM or SIGINT while rows are generated makes finished ones durable and raises Interrupted.

        Raises:
            VasukiError: as described in `vasuki.base.errors`; finished rows are durable whatever is raised.
            KeyboardInterrupt: a signal before that, or a second one.
        """
        with opened(config, self.options, self._fingerprint if self._loaded else "") as job:
            if outcome := job.finished:
                return outcome
            rows = TableRows(job)
            here = Here(job, rows, lambda: self._model(job.key))
            manifest = run_to_end(job, rows, here, self.signals)
            self._loaded = here.reusable
            job.refuse_gaps()
        return job.outcome(manifest)

    def load(self, config: JobConfig) -> None:
        """Load the model that the jobs share now; the first run does otherwise. Raises ModelError."""
        self._fingerprint = model_fingerprint(config.model)
        self._loaded, _ = loaded(JobKey(config, "", "", self._fingerprint), self.options)

    def _model(self, job: JobKey) -> tuple[LoadedModel, float]:
        """The model, and the seconds that loading it took now. The device gets back the memory of the run before."""
        if self._has_run:
            from vasuki.hf.device.device import give_back

            give_back()
        kept, self._loaded, self._has_run = self._loaded, None, True
        self._fingerprint = job.model_fingerprint
        return (replace(kept, compile_s=0.0), 0.0) if kept else loaded(job, self.options)


def loaded(job: JobKey, options: RunOptions) -> tuple[LoadedModel, float]:
    """See `load`; tells what is loaded, and how long that took."""
    path = job.config.model.path
    with busy_with(f"loading {path}", options.quiet):
        model, load_s = load(job)
    how = "" if model.backend == "ragged" else f", backend: {BACKENDS[model.backend]}"
    log.info("loaded %s on %s in %s%s", path, model.device, duration(load_s), how)
    if model.varies:
        log.info("a row may get other last bits with other rows beside it: %s", model.varies)
    return model, load_s


def run_to_end(job: OpenJob, rows: RunRows, workers: Workers, signals: StopSignals) -> Manifest:
    """Plan, generate, and write the manifest, also when interrupted."""
    options, folder = job.options, job.folder
    ready_s: float | None = None  # from the start until rows are computed

    def should_stop() -> bool:
        if not rows.has_end:
            return False
        if time.perf_counter() - job.started_s >= options.max_time_s:
            raise time_over(options.max_time_s, ready_s)
        return signals.asked()

    intake = workers.load(should_stop)
    stream = RequestStream(
        job.table,
        job.config,
        intake.tokenizer,
        max_context_tokens=intake.max_context_tokens,
        vocab_size=intake.vocab_size,
        selection=job.selection,
        twin=partial(model_tokenizer, job.config),
    )
    journal = folder.journal()
    with stream, rows.reading(journal.resume(stream)):
        lengths = rows.lengths()
        with busy_with("measuring the machine and planning", options.quiet):
            plan = workers.plan(lengths)
        rows.announce(plan, workers.where)
        folder.begin()
        max_loss_s = min(commits_within_s(job.config.plan), rows.commits_within_s)
        schema = answer_schema(job.config, job.table)
        if others := [each for each in folder.was_computed_on if each != intake.computed_on]:
            log.warning(
                "%s has answers computed on %s; the others are computed on %s, where 16-bit answers may differ",
                folder.place,
                "; ".join(others),
                intake.computed_on,
            )
        writer = folder.writer(schema, max_loss_s=max_loss_s, computed_on=intake.computed_on)
        with signals.deferred():
            ready_s = time.perf_counter() - job.started_s
            workers.begin(plan)
            texts = workers.decode, intake.tokenizer.text_of
            results = Results(job, rows, writer, journal, *texts, workers.ask, workers.standing, workers.count)
            interrupted: Interrupted | None = None
            try:
                with results:
                    workers.compute(results, should_stop)
                    results.copy(job.copies(schema, should_stop))
            except Interrupted as error:
                interrupted = error
            written, left = writer.committed, folder.rows_left - results.sink.written.rows
            manifest = workers.manifest(written.prompt_tokens + written.output_tokens, interrupted is None)
            if manifest is not None:
                manifest = folder.finish(rows.finished(manifest), journal.resumed_rows, results.traces)
                left = folder.rows_left
                if interrupted is None:
                    return manifest
            interrupted = interrupted or Interrupted("every replica has died before it could say what it did")
            raise type(interrupted)(f"{interrupted}; {left} rows are left, {interrupted.goes_on}")
