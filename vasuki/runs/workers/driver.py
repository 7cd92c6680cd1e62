"""One job on several replicas: a driver that reads, plans, hands out rows and writes, and replicas that compute.

    open_table ─ OutputFolder ─ Processes ─ RequestStream ─ plan ─ order ─ Leases ⇄ replicas ─ RowSink ─ manifest

Nothing is shared but messages, so a replica that dies takes no more with it than the tokens since its last note. Its
rows go to the others, and it is started again.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import reduce

from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted, VasukiError
from vasuki.base.logs import is_json
from vasuki.base.units import count_text, duration, percent_text, plural
from vasuki.engine.sequence import Sequence as Row
from vasuki.io.input.requests import RequestStream
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.manifest import Bounds, Manifest, Predicted, Timings, merge
from vasuki.io.output.sink import RowSink
from vasuki.io.output.trace import TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.machines.price import Cost
from vasuki.machines.split import Share
from vasuki.planner.job_sums import JobSums
from vasuki.planner.leases import Key, Leases, Work
from vasuki.planner.lengths import Lengths
from vasuki.planner.loss import commits_within_s
from vasuki.planner.ordering.planned_order import PlannedOrder, order_requests
from vasuki.planner.plan import Plan
from vasuki.runs.foresight import expected
from vasuki.runs.manifests import bounds_of
from vasuki.runs.observers.deadline import Deadline, time_over
from vasuki.runs.observers.metrics import FleetMetrics
from vasuki.runs.observers.progress import StatusLine, busy_if_slow, busy_with
from vasuki.runs.opening import OpenJob, Outcome, opened
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.placement import job_of_replica
from vasuki.runs.signals import StopSignals
from vasuki.runs.workers.messages import (
    Begin,
    Ended,
    Failed,
    Finish,
    Foresee,
    Foreseen,
    Lease,
    Note,
    Over,
    Ready,
    Replicas,
    Report,
    Setup,
    Start,
    Stop,
    ToDriver,
)
from vasuki.runs.workers.processes import Processes
from vasuki.runs.workload import PLANNED_REQUESTS, first_rows, lengths_of

log = logging.getLogger(__name__)

MOST_STARTS = 4  # of a replica, without the end of a row: what has killed it so often will go on doing so
SILENT_S = 600.0  # of a replica at work: then it hangs, unless steps take long
SLOW = 50  # times the longest step
LOOK_EVERY_S = 0.2  # at signals, and whether a part is due


def run_on_replicas(
    config: JobConfig,
    shares: list[Share],
    options: RunOptions = AS_USUAL,
    start: Start | None = None,
) -> Outcome:
    """Run what is left of a job on a replica for each share of the machine, or wherever `start` starts them.

    Raises:
        VasukiError: as a run on one device does; Interrupted also when every replica has died too often.
        KeyboardInterrupt: a signal before rows are generated, or a second one.
    """
    with StopSignals() as signals, opened(config, options) as job:
        if outcome := job.finished:
            return outcome

        def setup_of(share: Share, index: int, here: int) -> Setup:
            own = job_of_replica(config, share, here)
            fingerprints = job.config_hash, job.table.fingerprint, job.model_fingerprint
            return Setup(own, *fingerprints, share, index, len(shares), is_json())

        if start is None:
            setups = [setup_of(share, index, len(shares)) for index, share in enumerate(shares)]
        with start(setup_of) if start else Processes(setups) as replicas:
            manifest = Driver(job, replicas, shares).to_end(signals)
            job.refuse_gaps()
    return job.outcome(manifest)


@dataclass(slots=True)
class _Pulse:
    """What a replica said of itself last."""

    worked_s: float  # when its last step was heard of
    running: int = 0
    kv_share: float = 0.0


class Driver:
    """One run on several replicas.

    Args:
        job: opened.
        replicas: started.
        shares: what those compute on that are there at the start.
    """

    def __init__(self, job: OpenJob, replicas: Replicas, shares: list[Share]) -> None:
        self.config = job.config
        self.options = options = job.options
        self.table = job.table
        self.folder = folder = job.folder
        self.replicas = replicas
        self.shares = shares
        self.started_s = started_s = job.started_s
        self._ready_s: float | None = None  # from the start until rows are handed out
        self._deadline = Deadline(options.deadline_s, started_s, lambda: self._leases.time_left_s)
        self._starts = Counter(range(len(shares)))
        self._ready: dict[int, Ready] = {}  # replicas that wait for a plan
        self._plans: dict[str, Foreseen] = {}  # by kind of device
        self._planners: dict[str, int] = {}  # the replica that was asked for the plan of a kind
        self._silent_s: defaultdict[int, float] = defaultdict(
            float
        )  # since a replica was heard, in time that the driver was awake
        self._late_s = math.inf  # when those begin that are ready
        self._looked_s = time.perf_counter()
        self._longest_step_s = 0.0
        self._running: dict[int, _Pulse] = {}  # replicas that run rows
        self._wanting: set[int] = set()
        self._noting: set[int] = set()  # replicas that were asked how far their rows are
        self._rows: dict[Key, Row] = {}  # that were handed out, as far as is known
        self._texts: dict[Key, str] = {}  # of rows that have ended, other samples of which have not
        self._missed_deadlines = 0
        self._over: list[Over] = []  # of replicas that have ended
        self._prices: dict[int, float | None] = {}  # of an hour of each replica that has begun
        self._tokens = 0
        self._tail_s = 0.0
        self._journal = folder.journal()
        self._lengths: Lengths  # of the job, set once its first rows are read
        self._work: Work  # what tokens take on the kind of device that was planned for first
        self._order: PlannedOrder  # these are set with the plan
        self._leases: Leases
        self._may_plan = False  # once it is known for what
        self._may_begin = False  # once there is somewhere for rows to go
        self._is_ending = False
        self._failure: VasukiError | None = None  # of a replica, that ends the run
        self._sink: RowSink
        self._traces: list[TraceWriter]
        self._line: StatusLine
        self._figures: FleetMetrics | None = None

    def to_end(self, signals: StopSignals) -> Manifest:
        """Plan, generate, and write the manifest, also when interrupted."""
        from vasuki.hf.loading.tokenizer import Tokenizer  # transformers takes seconds to import

        model = self.config.model
        with busy_with(f"loading {model.path} on {plural(len(self.shares), 'replica')}", self.options.quiet):
            while not self._are_enough_ready():
                self._stop_when_over()
                self._listen()
        ready = next(iter(self._ready.values()))
        stream = RequestStream(
            self.table,
            self.config,
            Tokenizer(os.path.expanduser(model.path), model.revision, model.trust_remote_code),
            max_context_tokens=ready.max_context_tokens,
            vocab_size=ready.vocab_size,
            selection=self.folder.selection,
        )
        with stream:
            requests = self._journal.resume(stream)
            with busy_if_slow("reading rows to plan from") as far:
                first = list(first_rows(requests, PLANNED_REQUESTS, far, self.folder.rows_left))
            self._lengths = lengths_of(first, self.folder.rows_left)
            with busy_with("measuring the machine and planning", self.options.quiet):
                plan = self._plan()
            self.folder.begin()
            with signals.deferred():
                self._order = order_requests(
                    itertools.chain(first, requests),
                    plan.settings,
                    solver=plan.solver,
                    output_length=self.config.plan.output_length,
                    window_rows=self.config.plan.window_rows,
                    replicas=len(self.shares),
                )
                rows = max(1, len({request.row for request in first}))
                self._leases = Leases(
                    self._order, self._work, len(first) * self.folder.rows_left // rows, plan.makespan_s
                )
                return self._generate(plan, signals)

    def _are_enough_ready(self) -> bool:
        """Whether all are, or some, and those had time that are late: they may hang, and join when they don't.

        None is wanted to load while another measures how fast it is.
        """
        now_s = time.perf_counter()
        if not self._ready:
            self._late_s = now_s + min(30.0, max(5.0, (now_s - self.started_s) / 2))
        return bool(self._ready) and (len(self._ready) == len(self._starts) or now_s > self._late_s)

    def _plan(self) -> Plan:
        """The plan of one kind of device, which speaks for the job."""
        self._may_plan = True
        self._begin_those_ready()
        while not self._plans:
            self._listen()
        foreseen = next(iter(self._plans.values()))
        plan = foreseen.plan
        log.info(
            "planned: %d requests on %s in %s, of which a better schedule could save at most %s; rates: %s",
            plan.requests,
            plural(len(self.shares), "replica"),
            expected(plan),
            percent_text(plan.could_save),
            plan.source,
        )
        self._work = _work(foreseen)
        return plan

    def _stop_when_over(self) -> None:
        """Raises Interrupted when the time is over that the run may take."""
        most_s = self.options.max_time_s
        if time.perf_counter() - self.started_s >= most_s:
            raise time_over(most_s, self._ready_s)

    def _generate(self, plan: Plan, signals: StopSignals) -> Manifest:
        generate_started_s = time.perf_counter()
        self._ready_s = generate_started_s - self.started_s
        interrupted: Interrupted | None = None
        writer = self.folder.writer(
            answer_schema(self.config, self.table), max_loss_s=commits_within_s(self.config.plan)
        )
        self._traces = [TraceWriter(place) for place in self.folder.traces(len(self.shares))]
        self._sink = RowSink(writer, self._text, on_commit=self._note)
        self._line = StatusLine("prompts", self.options.quiet)
        if self.options.metrics:
            self._figures = FleetMetrics(self.options.metrics, lambda: self.folder.rows_left, self._sink)
        try:
            try:
                self._may_begin = True
                self._begin_those_ready()
                while not self._leases.is_done:
                    self._listen()
                    self._hand_out()
                    now_s = time.perf_counter()
                    self._deadline.look(now_s)
                    self._sink.commit_if_due(now_s - generate_started_s)
                    if self._line.is_due():
                        self._show(now_s - generate_started_s)
                    if self._figures:
                        at_risk_s = now_s - generate_started_s - writer.committed_s
                        self._figures.look(*self._pulse(), at_risk_s, self._leases.time_left_s)
                    if signals.asked():
                        raise Interrupted("stopped by a signal")
                    self._stop_when_over()
                ends_s = [pulse.worked_s for pulse in self._running.values()]
                self._tail_s = max(ends_s, default=0.0) - min(ends_s, default=0.0)
                self._end_all(Finish())
            except Interrupted as error:
                interrupted = error
                self._end_all(Stop())
        except BaseException:
            self._journal.close()
            raise
        finally:
            elapsed_s = time.perf_counter() - generate_started_s
            rows = self._sink.written.rows
            self._line.close(
                rows >= self.folder.rows_left, [f"{rows:,} rows", f"{self._tokens / elapsed_s:,.0f} tokens/s"]
            )
            self._running.clear()
            with busy_with("writing the last rows", self.options.quiet):
                self._sink.close()
                if self._figures:
                    self._figures.close()
                for trace in self._traces:
                    trace.close()
        left = self.folder.rows_left - self._sink.written.rows
        if self._over:
            written = writer.committed
            manifest = self.folder.finish(
                self._manifest(plan, generate_started_s, written.prompt_tokens + written.output_tokens),
                self._journal.resumed_rows,
                self._traces,
            )
        elif interrupted is None:
            interrupted = Interrupted("every replica has died before it could say what it did")
        if interrupted is not None:
            raise type(interrupted)(f"{interrupted}; {left} rows are left, {interrupted.goes_on}")
        return manifest

    def _manifest(self, plan: Plan, generate_started_s: float, num_tokens: int) -> Manifest:
        """One for all: work adds up, and time is the driver's."""
        merged, now_s = merge([over.manifest for over in self._over]), time.perf_counter()
        timings = Timings(
            load_s=merged.timings.load_s,
            plan_s=plan.plan_s,
            compile_s=merged.timings.compile_s,
            generate_s=now_s - generate_started_s,
            makespan_s=now_s - self.started_s,
            tail_s=self._tail_s,
        )
        devices, per_hour = self.replicas.devices, self._per_hour()
        predicted = Predicted(
            plan.makespan_s, plan.lower_bound_s, plan.schedule_bound_s, plan.source, plan.output_tokens_estimate
        )
        return replace(
            merged,
            job=self.config.model_dump(mode="json"),
            timings=timings,
            predicted=predicted,
            bounds=self._bounds(plan),
            missed_deadlines=self._missed_deadlines,
            device=merged.device | {"count": devices, "replicas": len(self.shares)},
            cost=Cost.of(timings.makespan_s, devices, per_hour and per_hour / devices, plan.cost.currency, num_tokens),
        )

    def _per_hour(self) -> float | None:
        """What all replicas cost; None where that is not known of one. Those that never began cost what others do."""
        prices = [price for price in self._prices.values() if price is not None]
        if len(prices) < len(self._prices):
            return None
        return statistics.mean(prices) * max(len(prices), len(self.shares))

    def _bounds(self, plan: Plan) -> Bounds:
        """What no schedule beats on as many replicas as fast as the fastest. None is known where they are of several
        kinds."""
        paces = [over.pace for over in self._over if over.pace is not None]
        if len(self._plans) > 1 or not paces:
            return Bounds()
        layouts = tuple(replace(layout, data_parallel=len(self._over)) for layout in plan.any_schedule.layouts)
        done = reduce(JobSums.__add__, (over.done for over in self._over))
        return bounds_of(replace(plan.any_schedule, layouts=layouts), done, min(paces))

    # --- what replicas say -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for index, message in self.replicas.receive(LOOK_EVERY_S):
            self._silent_s[index] = 0.0
            self._hear(index, message)
        now_s = time.perf_counter()
        awake_s, self._looked_s = min(1.0, now_s - self._looked_s), now_s
        for index in self._at_work():
            self._silent_s[index] += awake_s
            if self._silent_s[index] > max(SILENT_S, SLOW * self._longest_step_s):
                log.warning("replica %d has said nothing for %s and is killed", index, duration(self._silent_s[index]))
                self._silent_s[index] = 0.0
                self.replicas.kill(index)
        if failure := self._failure:  # not before all that was said is heard
            self._failure = None
            raise failure

    def _at_work(self) -> set[int]:
        """Replicas that have something to say before long."""
        planners = {index for kind, index in self._planners.items() if kind not in self._plans}
        return planners | {index for index in self._running if self._is_ending or self._leases.holds(index)}

    def _hear(self, index: int, message: ToDriver | None) -> None:
        match message:
            case Ready() as ready:
                self._starts.setdefault(index, 1)  # one that joins
                self._ready[index] = ready
                self._begin_those_ready()
            case Foreseen() as foreseen:
                self._plans.setdefault(self._ready[index].kind, foreseen)
                self._begin_those_ready()
            case Report() as report:
                self._take(index, report)
            case Over() as over:
                self._over.append(over)
                self._leave(index)
            case Failed(error) if self._is_ending:
                log.warning("replica %d: %s", index, error)
            case Failed(error):  # as it would whenever it is started
                self._failure, self._is_ending = error, True
            case None:
                self._lose(index)

    def _take(self, index: int, report: Report) -> None:
        worked_s = time.perf_counter() if report.steps else self._running[index].worked_s
        self._running[index] = _Pulse(worked_s, report.running, report.kv_share)
        for step in report.steps:
            self._tokens += step.prefill_tokens + step.decode_tokens
            self._longest_step_s = max(self._longest_step_s, step.elapsed_s)
            self._leases.computed(index, step.prefill_tokens, step.decode_tokens, step.elapsed_s)
            self._traces[index].record(step)
        if self._figures:
            self._figures.count(report.steps)
        if report.wants_rows:
            self._wanting.add(index)
        ended = [self._settle(index, row) for row in report.ended]
        if ended:
            self._order.learn(ended, self._rows.values())
        if report.in_flight is not None:
            for key, progress in report.in_flight.items():
                row = self._rows[key]
                row.output_token_ids, row.logprob = list(progress.output_token_ids), progress.logprob
            self._noted(index)

    def _settle(self, index: int, ended: Ended) -> Row:
        """A row that has ended goes to the output."""
        self._starts[index] = 1
        row = self._rows.pop(ended.key)
        row.output_token_ids, row.logprob = list(ended.progress.output_token_ids), ended.progress.logprob
        row.finish_reason, row.error = ended.progress.finish_reason, ended.error
        self._texts[ended.key] = ended.text
        self._missed_deadlines += time.perf_counter() - self.started_s > row.request.due_s
        self._leases.ended(index, ended.key, row.num_output_tokens)
        if self._figures:
            self._figures.ended(row.num_output_tokens - len(row.request.progress.output_token_ids))
        self._sink.write(row)
        if row.error or row.request.error:
            self._texts.pop(ended.key, None)
        return row

    def _text(self, row: Row) -> str:
        return self._texts.pop(row.request.key)

    # --- what replicas are told --------------------------------------------------------------------------------------

    def _begin_those_ready(self) -> None:
        """Plan for each kind of device once, and let the replicas begin whose plan is there."""
        if not self._may_plan or self._is_ending:
            return
        for index, ready in list(self._ready.items()):
            if ready.kind not in self._planners:
                self._planners[ready.kind] = index
                self.replicas.send(index, Foresee(self._lengths))
            elif ready.kind in self._plans and self._may_begin:
                self.replicas.send(index, Begin(self._plans[ready.kind]))
                del self._ready[index]
                self._prices[index] = self._plans[ready.kind].plan.cost.price_per_hour
                for later in range(len(self._traces), index + 1):
                    self._traces.append(TraceWriter(self.folder.traces(later + 1)[later]))
                work = _work(self._plans[ready.kind])
                self._leases.join(index, work.speed(self._work, self._lengths), work.row_token_s)
                self._running[index] = _Pulse(time.perf_counter())

    def _hand_out(self) -> None:
        for index in list(self._wanting):
            if requests := self._leases.take(index):
                for request in self._journal.started(requests):
                    progress = request.progress
                    self._rows[request.key] = Row(request, list(progress.output_token_ids), logprob=progress.logprob)
                self.replicas.send(index, Lease(requests))
                self._wanting.discard(index)

    def _note(self) -> None:
        """A part was written: ask how far the other rows are, to write that down, too."""
        self._noting = set(self._running)
        for index in self._noting:
            self.replicas.send(index, Note())
        self._noted(-1)

    def _noted(self, index: int) -> None:
        """Write the journal when all have answered."""
        self._noting.discard(index)
        if not self._noting:
            self._journal.write(itertools.chain(self._sink.incomplete(), self._rows.values()))
            for trace in self._traces:
                trace.flush()

    def _end_all(self, message: Finish | Stop) -> None:
        """Let replicas end, and hear their last words. Those that have not begun have none."""
        self._is_ending = True
        for index in self._running:
            self.replicas.send(index, message)
        while self._running:
            self._listen()

    # --- who comes and goes ------------------------------------------------------------------------------------------

    def _lose(self, index: int) -> None:
        """A replica has died: its rows go to the others, and it is started again."""
        if (ready := self._ready.pop(index, None)) and ready.kind not in self._plans:
            self._planners = {kind: planner for kind, planner in self._planners.items() if planner != index}
        if index in self._running:
            self._leave(index)
        if self._is_ending:
            return
        self._starts[index] += 1
        if self._starts[index] > MOST_STARTS:
            del self._starts[index]
            log.warning("replica %d has died %d times; the others go on without it", index, MOST_STARTS)
            if not self._starts:
                raise Interrupted(f"every replica has died {MOST_STARTS} times")
        elif self.replicas.start(index):
            log.warning("replica %d has died and is started again; its rows go to the others", index)
        else:
            del self._starts[index]
            log.warning("replica %d has gone with its machine; its rows go to the others, or wait for one", index)
        self._begin_those_ready()

    def _leave(self, index: int) -> None:
        """Whatever a replica holds is handed out anew, as far as it got."""
        del self._running[index]
        self._wanting.discard(index)
        held = [replace(request, progress=self._rows[request.key].progress) for request in self._leases.leave(index)]
        self._leases.give_back(held)
        if index in self._noting:
            self._noted(index)

    def _pulse(self) -> tuple[int, float]:
        """Rows in the steps of all replicas, and the share of their KV memory that is held."""
        pulses = self._running.values()
        kv_share = sum([pulse.kv_share for pulse in pulses]) / max(1, len(pulses))
        return sum([pulse.running for pulse in pulses]), kv_share

    def _show(self, elapsed_s: float) -> None:
        left_s, (running, kv_share) = self._leases.time_left_s, self._pulse()
        state = [
            f"{duration(left_s)} left" if self._running else "waiting for a replica",
            f"{self._sink.written.rows:,}/{self.folder.rows_left:,} rows",
            f"{self._tokens / elapsed_s:,.0f} tokens/s",
            f"{running} running on {plural(len(self._running), 'replica')}",
            f"KV {percent_text(kv_share)}",
            f"{count_text(self._tokens)} tokens",
        ]
        self._line.show(elapsed_s / (elapsed_s + left_s), state)


def _work(foreseen: Foreseen) -> Work:
    return Work.of(CostModel(foreseen.shape, foreseen.profile, foreseen.plan.layout), foreseen.plan)
