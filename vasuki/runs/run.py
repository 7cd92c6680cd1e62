"""The composition root of `vasuki run`: a JobConfig becomes a run.

    open_table ─ OutputFolder ─ load_model ─ RequestStream ─ make_plan ─ order_requests ─ drain ─ RowSink ─ manifest

Whatever can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vasuki.arrivals import Percentiles, WaitingTimes
from vasuki.base.config import JobConfig
from vasuki.base.errors import InputError, Interrupted, ModelError, TooManyRowErrors
from vasuki.base.units import duration, percent_text, plural
from vasuki.engine.loop import Observer, RunStats, drain
from vasuki.engine.policy import runnable_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import InputTable, Rows, open_table
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.journal import Journal
from vasuki.io.output.manifest import Bounds, Manifest, Timings, read_manifest
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.io.output.trace import TraceWriter
from vasuki.io.selection import Shard
from vasuki.machines.cost_model import CostModel
from vasuki.machines.stolen_time import StolenTime
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import BACKENDS
from vasuki.planner import RunningPrediction
from vasuki.planner.lengths import Lengths
from vasuki.planner.loss import commits_within_s
from vasuki.planner.ordering.planned_order import order_requests
from vasuki.planner.plan import Plan
from vasuki.planner.rows_done import RowsDone
from vasuki.runs.foresight import MachineProfile, expected, look_back, rough_tokens
from vasuki.runs.hindsight import cost_of_uncertainty, is_affordable
from vasuki.runs.manifests import bounds_of, run_manifest
from vasuki.runs.observers.deadline import Deadline
from vasuki.runs.observers.metrics import Metrics, RunMetrics
from vasuki.runs.observers.progress import Progress, busy_with
from vasuki.runs.observers.tracer import StepTracer
from vasuki.runs.observers.watchdog import Watchdog
from vasuki.runs.placement import Placement, placed_as_loaded, stays_on_host
from vasuki.runs.signals import StopSignals
from vasuki.runs.workload import first_rows, lengths_of

if TYPE_CHECKING:
    from vasuki.hf.device.energy import EnergyMeter
    from vasuki.hf.loading.load_model import LoadedModel

log = logging.getLogger(__name__)

NOTHING_TO_RUN = Lengths(np.ones(1, np.int64), np.ones(1, np.int64))  # stands in where none of the first rows can run
PLANNED_REQUESTS = 4096  # read before the first step to plan from; a larger input is taken to go on like them


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    manifest: Manifest
    max_error_fraction: float

    def raise_for_errors(self) -> None:
        """Raises TooManyRowErrors if more rows failed than the job allows."""
        rows = self.manifest.rows
        allowed = Fraction(str(self.max_error_fraction)) * rows.total  # of the decimal as written, which no float is
        if rows.failed > allowed:
            raise TooManyRowErrors(
                f"{rows.failed} of {rows.total} rows failed, errors.max_fraction allows {self.max_error_fraction:g}; "
                "the column `error` says why"
            )


def run_job(
    config: JobConfig,
    shard: str = "0/1",
    fresh: bool = False,
    quiet: bool = False,
    retries_errors: bool = False,
    max_time_s: float = math.inf,
    metrics: Metrics | None = None,
    deadline_s: float = math.inf,
) -> Outcome:
    """Run what is left of a job. See `Runner.run`."""
    with StopSignals() as signals:
        return Runner(signals, quiet, metrics).run(config, shard, fresh, retries_errors, max_time_s, deadline_s)


class Runner:
    """Runs one job after another of those that share a model, which stays loaded.

    Args:
        signals: that stop a run, and whoever has several.
        quiet: without a progress bar.
        metrics: to count into.
    """

    def __init__(self, signals: StopSignals, quiet: bool = False, metrics: Metrics | None = None) -> None:
        self.signals = signals
        self.quiet = quiet
        self.metrics = metrics
        self._loaded: LoadedModel | None = None  # while no run has it
        self._fingerprint = ""  # of the model that is loaded, whatever becomes of its files
        self._load_s = 0.0  # in the run at hand
        self._has_run = False

    def run(
        self,
        config: JobConfig,
        shard: str = "0/1",
        fresh: bool = False,
        retries_errors: bool = False,
        max_time_s: float = math.inf,
        deadline_s: float = math.inf,
    ) -> Outcome:
        """Run what is left of a job; with `retries_errors` also the rows that failed. Raises Interrupted behind the
        first step that ends after `max_time_s`, loading included. Warns when it foresees an end after `deadline_s`.

        The first SIGTERM or SIGINT while rows are generated makes finished ones durable and raises Interrupted.

        Raises:
            VasukiError: as described in `vasuki.base.errors`; finished rows are durable whatever is raised.
            KeyboardInterrupt: a signal before that, or a second one.
        """
        started_s = time.perf_counter()
        runnable_policy(config.engine.policy, config.engine.attention)
        own_shard = Shard.parse(shard)
        table = open_table(config)
        if self._loaded is None:
            self._fingerprint = model_fingerprint(config.model)
        config_hash = config.config_hash(self._fingerprint)
        with OutputFolder.open(
            config.output.path,
            num_rows=table.num_rows,
            config_hash=config_hash,
            input_fingerprint=table.fingerprint,
            shard=own_shard,
            fresh=fresh,
            retries_errors=retries_errors,
        ) as folder:
            if folder.is_finished:
                log.info("nothing to do: %s is complete", config.output.path)
                return Outcome(read_manifest(folder.manifest), config.errors.max_fraction)
            loaded = self._kept() or self._load(config)
            self._has_run = True
            run = Run(
                config,
                config_hash,
                table,
                folder,
                folder.rows_left,
                self.quiet,
                started_s,
                self._load_s,
                self.metrics,
                deadline_s,
            )
            manifest = run.to_end(loaded, self.signals, max_time_s)
            self._loaded = None if run.weights_on_host else loaded  # which would have to be put together again
            refuse_gaps(folder, table)
        return Outcome(manifest, config.errors.max_fraction)

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
        started_s = time.perf_counter()
        with busy_with(f"loading {config.model.path}", self.quiet):
            from vasuki.hf.loading.load_model import load_model  # torch and transformers take seconds to import

            loaded = load_model(
                config.model,
                config.engine.device,
                partial(stays_on_host, config),
                config.engine.compile != "off",
                config.kv.dtype,
                config.engine.attention,
            )
        if model_fingerprint(config.model) != self._fingerprint:
            raise ModelError(f"model {config.model.path} changed while it was loaded; run again when it is whole")
        self._load_s = time.perf_counter() - started_s - loaded.compile_s
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


def refuse_gaps(folder: OutputFolder, table: InputTable) -> None:
    """Say why rows of this share are not in the output, although the run has come to its end.

    Raises:
        InputError: input files could not be read to their ends.
        Interrupted: parts have been removed meanwhile.
    """
    if not folder.rows_left:
        return
    left = plural(folder.rows_left, "row")
    if table.unread:
        problems = "; ".join(map(str, table.unread))
        raise InputError(f"{problems}; all other rows are answered, {left} are left until it is as it was")
    raise Interrupted(f"{left} are missing from {folder.place}, removed while the job ran; {Interrupted.goes_on}")


def plan_for(lengths: Lengths, planned: Callable[[Lengths], Plan]) -> Plan:
    """The plan that `planned` makes for such lengths, or for none at all."""
    try:
        return planned(lengths if len(lengths) else NOTHING_TO_RUN)
    except InputError:  # none of them fits: they become error rows, as beside others that do
        return planned(NOTHING_TO_RUN)


class Run:
    """One run, and what is measured of it."""

    commits_within_s = math.inf  # unless the job says less

    def __init__(
        self,
        config: JobConfig,
        config_hash: str,
        table: Rows,
        folder: OutputFolder,
        rows_left: int,
        quiet: bool,
        started_s: float,
        load_s: float,
        metrics: Metrics | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        self.config = config
        self.config_hash = config_hash
        self.table = table
        self.folder = folder
        self.rows_left = rows_left
        self.quiet = quiet
        self.started_s = started_s
        self.load_s = load_s
        self.metrics = metrics
        self.deadline_s = deadline_s
        self.weights_on_host = False
        self.energy: EnergyMeter  # set once there is a model
        self.machine: MachineProfile  # set with the plan
        self.stolen = StolenTime()
        self.stats = RunStats()
        self.waited: WaitingTimes  # set with the source

    def to_end(self, loaded: LoadedModel, signals: StopSignals, max_time_s: float) -> Manifest:
        """Plan, generate, and write the manifest, also when interrupted."""
        from vasuki.hf.device.energy import EnergyMeter

        self.energy = EnergyMeter(loaded.device)
        stream = RequestStream(
            self.table,
            self.config,
            loaded.tokenizer,
            max_context_tokens=loaded.max_context,
            vocab_size=loaded.vocab_size,
            selection=self.folder.selection,
        )
        journal = self.folder.journal()
        with stream, self.reading(journal.resume(stream)) as requests:
            first = self.first(requests)
            with busy_with("measuring the machine and planning", self.quiet):
                placement = placed_as_loaded(self.config, loaded, rough_tokens(first, self.rows_left))
                self.machine = placement.machine
                plan = self._plan(placement, first)
            self.weights_on_host = plan.layout.host_layers > 0
            cost_model = CostModel(placement.shape, placement.profile, plan.layout)
            self.folder.begin()
            schema, max_loss_s = answer_schema(self.config, self.table), commits_within_s(self.config.plan)
            max_loss_s = min(max_loss_s, self.commits_within_s)
            writer = self.folder.writer(schema, max_loss_s=max_loss_s)
            with signals.deferred():
                stop = partial(self.should_stop, signals, max_time_s)
                return self._generate(loaded, placement, plan, cost_model, first, requests, writer, journal, stop)

    def should_stop(self, signals: StopSignals, max_time_s: float) -> bool:
        """Whether to stop between two steps. Raises Interrupted if the time is over."""
        if time.perf_counter() - self.started_s >= max_time_s:
            raise Interrupted(f"the {duration(max_time_s)} of --max-time are over")
        return signals.asked()

    def rows_to_answer(self) -> int:
        """Rows of this run, those included that it has answered."""
        return self.rows_left

    def prediction(self, plan: Plan, cost_model: CostModel) -> RunningPrediction:
        """What foresees the end while the run lasts."""
        return RunningPrediction(plan, cost_model)

    @contextmanager
    def reading(self, requests: Iterator[Request]) -> Generator[Iterator[Request], None, None]:
        """The requests, while they are read."""
        yield requests

    def first(self, requests: Iterator[Request]) -> list[Request]:
        """The requests to plan from."""
        return list(first_rows(requests, PLANNED_REQUESTS))

    def source(
        self, first: list[Request], others: Iterator[Request], plan: Plan, scheduler: Scheduler
    ) -> tuple[Iterator[Request], list[Observer]]:
        """All requests in the order in which they start, and who looks at the steps for that."""
        order = order_requests(
            itertools.chain(first, others),
            plan.settings,
            solver=plan.solver,
            output_length=self.config.plan.output_length,
            window_rows=self.config.plan.window_rows,
            order=plan.order,
        )
        waited = WaitingTimes(lambda request: 0.0, lambda: time.perf_counter() - self.started_s)
        self.waited = waited
        says_what_is_urgent = self.config.input.priority or self.config.input.deadline
        return order, [order, waited] if says_what_is_urgent else [order]

    def sink(self, writer: PartWriter, decode: Callable[[Sequence], str], on_commit: Callable[[], None]) -> RowSink:
        """Where rows go that end."""
        return RowSink(writer, decode, on_commit)

    def planned(self, placement: Placement, lengths: Lengths) -> Plan:
        """The plan for requests of such lengths. Raises InputError if none fits."""
        return placement.plan(lengths)

    def finished(self, manifest: Manifest) -> Manifest:
        """The manifest, with what else is known in the end."""
        waited = self.waited
        urgent_latency = Percentiles.of(waited.urgent_latency_s)
        return replace(manifest, urgent_latency=urgent_latency, missed_deadlines=waited.missed_deadlines)

    def bounds(self, plan: Plan, done: RowsDone, pace: float | None) -> Bounds:
        """What no schedule of the rows that were done beats."""
        return bounds_of(plan.any_schedule, done.sums, pace)

    def _look_back(self, placement: Placement, plan: Plan, done: RowsDone, bounds: Bounds, taken_s: float) -> Bounds:
        """The bounds, and what knowing the lengths would have saved, where finding out takes little of that time."""
        lengths = done.lengths
        if bounds.schedule_s is None or lengths is None or not is_affordable(plan, len(lengths), taken_s):
            return bounds
        with busy_with("looking back", self.quiet):
            return replace(bounds, uncertainty=cost_of_uncertainty(placement, plan, lengths))

    def _plan(self, placement: Placement, first: list[Request]) -> Plan:
        """Plan from the first rows."""
        plan = plan_for(self.lengths(first), partial(self.planned, placement))
        self.announce(plan)
        return plan

    def lengths(self, first: list[Request]) -> Lengths:
        """What is planned for: the first rows, and the others as if they went on like them."""
        return lengths_of(first, self.rows_left)

    def announce(self, plan: Plan) -> None:
        """Log what was planned."""
        log.info(
            "planned: %d requests in %s, of which a better schedule could save at most %s; steps of %d tokens, "
            "offload %s%s; rates: %s",
            plan.requests,
            expected(plan),
            percent_text(plan.could_save),
            plan.chunk_tokens,
            plan.offload.mode,
            f", weights of {plan.layout.host_layers} layers on the host" if plan.layout.host_layers else "",
            plan.source,
        )

    def _generate(
        self,
        loaded: LoadedModel,
        placement: Placement,
        plan: Plan,
        cost_model: CostModel,
        first: list[Request],
        others: Iterator[Request],
        writer: PartWriter,
        journal: Journal,
        should_stop: Callable[[], bool],
    ) -> Manifest:
        from vasuki.hf.loading.weights import place_weights
        from vasuki.hf.ragged_executor import build_executor

        done = RowsDone(placement.shape)
        loaded = place_weights(loaded, plan.layout.host_layers)
        generate_started_s = time.perf_counter()
        interrupted: Interrupted | None = None
        executor = build_executor(loaded, plan.settings, self.config.output.logprobs, cost_model=cost_model)
        plan = replace(plan, settings=executor.settings)
        prediction, scheduler = self.prediction(plan, cost_model), Scheduler(plan.settings)
        requests, observers = self.source(first, others, plan, scheduler)
        try:
            with TraceWriter(self.folder.trace) as trace:

                def note() -> None:  # the trace last, so that it has no step whose tokens the journal lacks
                    journal.write(itertools.chain(sink.incomplete(), scheduler.unfinished()))
                    trace.flush(writer.committed.rows)

                sink = self.sink(writer, loaded.tokenizer.decode, note)
                progress = Progress(self.rows_to_answer, lambda: sink.written.rows, prediction, self.quiet)
                num_layers = loaded.kv_layout.num_layers
                tracer = StepTracer(trace.record, plan.settings, loaded.token_bytes, num_layers, prediction)
                watchdog = Watchdog(prediction.step_s)
                deadline = Deadline(self.deadline_s, self.started_s, lambda: prediction.left_s)
                deadline.look(time.perf_counter())
                observers += [prediction, tracer, progress, watchdog, deadline, done]
                counted = []
                if self.metrics:
                    counted = [RunMetrics(self.metrics, self.rows_to_answer, sink, writer, prediction)]
                observers += counted
                gc.freeze()  # the collector need not walk through what was loaded, half a second in the midst of a job
                try:
                    drain(journal.started(requests), scheduler, executor, sink, observers, should_stop, self.stats)
                except BaseException as error:
                    if not isinstance(error, Interrupted):
                        journal.close()
                    raise
                finally:
                    gc.unfreeze()
                    watchdog.close()
                    progress.close()
                    with busy_with("writing the last rows", self.quiet):
                        sink.close()
                    for run_metrics in counted:
                        run_metrics.close()
        except Interrupted as error:
            interrupted = error
        now_s = time.perf_counter()
        done.count(scheduler.unfinished())
        look_back(self.machine, prediction.pace, self.stolen.share)
        bounds = self.bounds(plan, done, prediction.whole_pace)
        if interrupted is None:
            bounds = self._look_back(placement, plan, done, bounds, now_s - generate_started_s)
        written = writer.committed
        manifest = run_manifest(
            self.config,
            self.config_hash,
            self.table.fingerprint,
            plan,
            loaded,
            self.stats,
            scheduler.queues.counters,
            Timings(
                load_s=self.load_s,
                plan_s=plan.plan_s,
                compile_s=loaded.compile_s,
                generate_s=now_s - generate_started_s,
                makespan_s=now_s - self.started_s,
            ),
            bounds=bounds,
            num_tokens=written.prompt_tokens + written.output_tokens,
            energy_j=self.energy.energy_j,
            stolen_share=self.stolen.share,
        )
        manifest = self.folder.finish(self.finished(manifest), journal.resumed_rows, [trace])
        if interrupted is not None:
            raise type(interrupted)(f"{interrupted}; {self.folder.rows_left} rows are left, {interrupted.goes_on}")
        return manifest
