"""The composition root of `vasuki run`: a JobConfig becomes a run.

    open_table ─ OutputFolder ─ load_model ─ RequestStream ─ make_plan ─ order_requests ─ drain ─ RowSink ─ manifest

Whatever can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted, JobFileError
from vasuki.base.units import duration
from vasuki.engine.loop import Observer
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.io.input.followed import FollowedRows
from vasuki.io.input.requests import RequestStream
from vasuki.io.location import Location
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.journal import Journal
from vasuki.io.output.manifest import Bounds, Manifest
from vasuki.io.output.output_folder import usable_folder
from vasuki.io.output.ownership import ARRIVED
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.io.output.trace import TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.machines.stolen_time import StolenTime
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import BACKENDS
from vasuki.planner import RunningPrediction
from vasuki.planner.loss import commits_within_s
from vasuki.planner.plan import Plan
from vasuki.planner.rows_done import RowsDone
from vasuki.runs.foresight import rough_tokens
from vasuki.runs.hindsight import cost_of_uncertainty, is_affordable
from vasuki.runs.manifests import bounds_of
from vasuki.runs.observers.deadline import Deadline, time_over
from vasuki.runs.observers.metrics import RunMetrics
from vasuki.runs.observers.progress import Progress, busy_with
from vasuki.runs.opening import OpenJob, Outcome, opened
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.placement import Placement, placed_as_loaded, shares_here
from vasuki.runs.rows.arriving import Emit, RowsThatArrive
from vasuki.runs.rows.table import TableRows
from vasuki.runs.signals import StopSignals
from vasuki.runs.workers.device import Computation, load
from vasuki.runs.workers.driver import run_on_replicas
from vasuki.runs.workers.ray.run import run_on_ray

if TYPE_CHECKING:
    from vasuki.hf.device.energy import EnergyMeter
    from vasuki.hf.loading.load_model import LoadedModel

log = logging.getLogger(__name__)


def run_job(config: JobConfig, options: RunOptions = AS_USUAL) -> Outcome:
    """Run what is left of a job: in a Ray cluster if the options name one, on several devices if the job wants them,
    else here. See `Runner.run`."""
    if options.cluster is not None:
        return run_on_ray(config, options.cluster, options)
    if shares := shares_here(config):
        return run_on_replicas(config, shares, options)
    with StopSignals() as signals:
        return Runner(signals, options).run(config)


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
        closing(FollowedRows(config, file, pipe, arrivals_from_s)) as rows,
        opened(config, options, arriving=rows) as job,
    ):
        rows.begin(job.folder.selection)  # they wait from now on, also for the model
        loaded, load_s = Runner(signals, options).model(config, job.model_fingerprint)
        log.info("waiting for rows from %s", "standard input" if pipe is not None else config.input.path)
        arriving = RowsThatArrive(job, rows, signals, emit, until_idle_s)
        manifest = Run(job, arriving, load_s).to_end(loaded, signals)
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
        self._load_s = 0.0  # in the run at hand
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
            self._fingerprint = job.model_fingerprint
            loaded = self._kept() or self._load(config)
            self._has_run = True
            run = Run(job, TableRows(job), self._load_s)
            manifest = run.to_end(loaded, self.signals)
            self._loaded = None if run.weights_on_host else loaded  # which would have to be put together again
            job.refuse_gaps()
        return job.outcome(manifest)

    def model(self, config: JobConfig, fingerprint: str) -> tuple[LoadedModel, float]:
        """The model of a job, and the seconds that it took to load. Raises ModelError, also if it has another
        fingerprint by now."""
        self._fingerprint = fingerprint
        return self._load(config), self._load_s

    def load(self, config: JobConfig) -> None:
        """Load the model that the jobs share now; the first run does otherwise. Raises ModelError."""
        self._fingerprint = model_fingerprint(config.model)
        self._loaded = self._load(config)

    def _load(self, config: JobConfig) -> LoadedModel:
        with busy_with(f"loading {config.model.path}", self.options.quiet):
            loaded, self._load_s = load(config, self._fingerprint)
        how = "" if loaded.way == "ragged" else f", backend: {BACKENDS[loaded.way]}"
        log.info("loaded %s on %s in %s%s", config.model.path, loaded.device, duration(self._load_s), how)
        return loaded

    def _kept(self) -> LoadedModel | None:
        """The model if it is there. The device gets back the memory of the run before in any case."""
        if self._has_run:
            from vasuki.hf.device.memory import give_back

            give_back()
        if self._loaded is None:
            return None
        loaded, self._loaded, self._load_s = replace(self._loaded, compile_s=0.0), None, 0.0
        return loaded


class Rows(Protocol):
    """Rows of a run, and what depends on where they come from.

    Attributes:
        has_end: whether all are there from the start: then there are bounds, and a signal or `options.max_time_s` stops
            the run between two steps. Else they stop by themselves, and those that have begun may end.
        to_plan: rows that the machine is measured for.
        commits_within_s: how long a row that has ended may wait for its part, whatever the job allows.
    """

    has_end: bool
    commits_within_s: float
    to_plan: int

    def to_answer(self) -> int:
        """Rows of this run so far, those included that it has answered."""
        ...

    def reading(self, requests: Iterator[Request]) -> AbstractContextManager[Iterator[Request]]:
        """The requests, while they are read."""
        ...

    def first(self, requests: Iterator[Request]) -> list[Request]:
        """The requests to plan from."""
        ...

    def plan(self, placement: Placement, first: list[Request]) -> Plan:
        """Plan from the first requests, and say so."""
        ...

    def predicting(self, plan: Plan, cost_model: CostModel) -> RunningPrediction:
        """What foresees the end while the run lasts."""
        ...

    def source(
        self, first: list[Request], others: Iterator[Request], plan: Plan, scheduler: Scheduler
    ) -> tuple[Iterator[Request], list[Observer]]:
        """All requests in the order in which they start, and who looks at the steps for that."""
        ...

    def sink(self, writer: PartWriter, decode: Callable[[Sequence], str], on_commit: Callable[[], None]) -> RowSink:
        """Where rows go that end."""
        ...

    def finished(self, manifest: Manifest) -> Manifest:
        """The manifest, with how long rows waited."""
        ...


class Run:
    """One run of a loaded model, and what is measured of it.

    Args:
        job: opened.
        rows: its rows.
        load_s: what loading the model took.
    """

    def __init__(self, job: OpenJob, rows: Rows, load_s: float) -> None:
        self.job = job
        self.config = job.config
        self.options = job.options
        self.folder = job.folder
        self.rows = rows
        self.load_s = load_s
        self.weights_on_host = False
        self.stolen = StolenTime()

    def to_end(self, loaded: LoadedModel, signals: StopSignals) -> Manifest:
        """Plan, generate, and write the manifest, also when interrupted."""
        from vasuki.hf.device.energy import EnergyMeter

        energy = EnergyMeter(loaded.device)
        stream = RequestStream(
            self.job.table,
            self.config,
            loaded.tokenizer,
            max_context_tokens=loaded.max_context,
            vocab_size=loaded.vocab_size,
            selection=self.folder.selection,
        )
        journal = self.folder.journal()
        with stream, self.rows.reading(journal.resume(stream)) as requests:
            first = self.rows.first(requests)
            with busy_with("measuring the machine and planning", self.options.quiet):
                placement = placed_as_loaded(self.config, loaded, rough_tokens(first, self.rows.to_plan))
                plan = self.rows.plan(placement, first)
            self.weights_on_host = plan.layout.host_layers > 0
            self.folder.begin()
            schema, max_loss_s = answer_schema(self.config, self.job.table), commits_within_s(self.config.plan)
            writer = self.folder.writer(schema, max_loss_s=min(max_loss_s, self.rows.commits_within_s))
            with signals.deferred():
                stop = partial(self._should_stop, signals, time.perf_counter() - self.job.started_s)
                return self._generate(loaded, placement, plan, first, requests, writer, journal, stop, energy)

    def _should_stop(self, signals: StopSignals, ready_s: float) -> bool:
        """Whether to stop between two steps. Raises Interrupted if the time is over."""
        if not self.rows.has_end:
            return False
        most_s = self.options.max_time_s
        if time.perf_counter() - self.job.started_s >= most_s:
            raise time_over(most_s, ready_s)
        return signals.asked()

    def _look_back(self, placement: Placement, plan: Plan, done: RowsDone, bounds: Bounds, taken_s: float) -> Bounds:
        """The bounds, and what knowing the lengths would have saved, where finding out takes little of that time."""
        lengths = done.lengths
        if bounds.schedule_s is None or lengths is None or not is_affordable(plan, len(lengths), taken_s):
            return bounds
        with busy_with("looking back", self.options.quiet):
            return replace(bounds, uncertainty=cost_of_uncertainty(placement, plan, lengths))

    def _generate(
        self,
        loaded: LoadedModel,
        placement: Placement,
        plan: Plan,
        first: list[Request],
        others: Iterator[Request],
        writer: PartWriter,
        journal: Journal,
        should_stop: Callable[[], bool],
        energy: EnergyMeter,
    ) -> Manifest:
        interrupted: Interrupted | None = None
        computation = Computation(
            self.config, loaded, plan, placement.shape, placement.profile, predicting=self.rows.predicting
        )
        plan, prediction, scheduler = computation.plan, computation.prediction, computation.scheduler
        requests, observers = self.rows.source(first, others, plan, scheduler)
        try:
            with TraceWriter(self.folder.trace) as trace:

                def note() -> None:  # the trace last, so that it has no step whose tokens the journal lacks
                    journal.write(itertools.chain(sink.incomplete(), scheduler.unfinished()))
                    trace.flush(writer.committed.rows)

                sink = self.rows.sink(writer, loaded.tokenizer.decode, note)
                progress = Progress(self.rows.to_answer, lambda: sink.written.rows, prediction, self.options.quiet)
                deadline = Deadline(self.options.deadline_s, self.job.started_s, lambda: prediction.left_s)
                deadline.look(time.perf_counter())
                counted = []
                if self.options.metrics:
                    counted = [RunMetrics(self.options.metrics, self.rows.to_answer, sink, writer, prediction)]
                observers += [progress, deadline, *counted]
                try:
                    computation.compute(journal.started(requests), sink, trace.record, should_stop, observers)
                except BaseException as error:
                    if not isinstance(error, Interrupted):
                        journal.close()
                    raise
                finally:
                    progress.close()
                    with busy_with("writing the last rows", self.options.quiet):
                        sink.close()
                    for run_metrics in counted:
                        run_metrics.close()
        except Interrupted as error:
            interrupted = error
        computation.end(placement.machine, self.stolen.share)
        done = computation.done
        bounds = Bounds()  # none is known of rows that are waited for
        if self.rows.has_end:
            bounds = bounds_of(plan.any_schedule, computation.done.sums, prediction.whole_pace)
        if interrupted is None:
            bounds = self._look_back(placement, plan, done, bounds, computation.taken_s)
        written = writer.committed
        manifest = computation.manifest(
            self.job.config_hash,
            self.job.table.fingerprint,
            self.job.started_s,
            self.load_s,
            bounds,
            written.prompt_tokens + written.output_tokens,
            energy.energy_j,
            self.stolen.share,
        )
        manifest = self.folder.finish(self.rows.finished(manifest), journal.resumed_rows, [trace])
        if interrupted is not None:
            raise type(interrupted)(f"{interrupted}; {self.folder.rows_left} rows are left, {interrupted.goes_on}")
        return manifest
