"""Replicas as the workers of a run: they are planned for, rows are handed out to them, and what they say is heard.

    order ─ Leases ⇄ replicas ─ Results

Nothing is shared but messages, so a replica that dies takes no more with it than the tokens since its last note. Its
rows go to the others, and it is started again.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from vasuki.base.errors import Interrupted, VasukiError
from vasuki.base.units import duration, plural
from vasuki.engine.sequence import Decoded
from vasuki.engine.sequence import Sequence as Row
from vasuki.io.output.manifest import Bounds, Manifest, Predicted, Timings, merge
from vasuki.machines.cost_model import CostModel
from vasuki.machines.here.split import Share
from vasuki.machines.price import Cost
from vasuki.planner.job_sums import JobSums
from vasuki.planner.leases import Key, Leases, Work
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.manifests import bounds_of
from vasuki.runs.observers.progress import Standing, busy_with
from vasuki.runs.opening import OpenJob
from vasuki.runs.results import Results
from vasuki.runs.rows.table import TableRows
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
    Replicas,
    Report,
    Stop,
    Take,
    ToDriver,
)
from vasuki.runs.workers.workers import Intake

log = logging.getLogger(__name__)

MOST_STARTS = 4  # of a replica, without the end of a row: what has killed it so often will go on doing so
SILENT_S = 600.0  # of a replica at work: then it hangs, unless steps take long
SLOW = 50  # times the longest step
LOOK_EVERY_S = 0.2  # at signals, and whether a part is due


@dataclass(slots=True)
class _Pulse:
    """What a replica said of itself last."""

    worked_s: float  # when its last step was heard of
    running: int = 0
    kv_share: float = 0.0


class Driver:
    """The workers of a run on several replicas, see `vasuki.runs.workers.workers.Workers`.

    Args:
        job: opened.
        rows: its rows.
        replicas: started.
        shares: what those compute on that are there at the start.
    """

    _lengths: Lengths  # of the job, set by `plan`
    _work: Work  # what tokens take on the kind of device that was planned for first; set by `plan`
    _leases: Leases  # set by `begin`
    _results: Results  # set by `compute`

    def __init__(self, job: OpenJob, rows: TableRows, replicas: Replicas, shares: list[Share]) -> None:
        self.config = job.config
        self.replicas = replicas
        self.count = len(shares)
        self._job = job
        self._table_rows = rows
        self._starts = Counter(range(len(shares)))
        self._ready: dict[int, Ready] = {}  # replicas that wait for a plan
        self._plans: dict[str, Planned] = {}  # by kind of device
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
        self._texts: dict[Key, Decoded] = {}  # of rows that have ended, other samples of which have not
        self._over: list[Over] = []  # of replicas that have ended
        self._prices: dict[int, float | None] = {}  # of an hour of each replica that has begun
        self._begun_s = 0.0  # handing out rows, on `time.perf_counter`'s clock
        self._tail_s = 0.0
        self._may_plan = False  # once it is known for what
        self._may_begin = False  # once there is somewhere for rows to go
        self._is_ending = False
        self._failure: VasukiError | None = None  # of a replica, that ends the run

    @property
    def where(self) -> str:
        return f" on {plural(self.count, 'replica')}"

    def load(self, refuse_late: Callable[[], object]) -> Intake:
        from vasuki.hf.loading.tokenizer import Tokenizer  # transformers takes seconds to import

        model = self.config.model
        with busy_with(f"loading {model.path}{self.where}", self._job.options.quiet):
            while not self._are_enough_ready():
                refuse_late()
                self._listen()
        ready = next(iter(self._ready.values()))
        tokenizer = Tokenizer(os.path.expanduser(model.path), model.revision, model.trust_remote_code)
        computed_on = "; ".join(dict.fromkeys(each.computed_on for each in self._ready.values()))
        return Intake(tokenizer, ready.max_context_tokens, ready.vocab_size, computed_on)

    def _are_enough_ready(self) -> bool:
        """Whether all replicas are ready, or some are and the late ones had time: they may hang, and join if they
        don't.

        None is wanted to load while another measures how fast it is.
        """
        now_s = time.perf_counter()
        if not self._ready:
            self._late_s = now_s + min(30.0, max(5.0, (now_s - self._job.started_s) / 2))
        return bool(self._ready) and (len(self._ready) == len(self._starts) or now_s > self._late_s)

    def plan(self, lengths: Lengths) -> Plan:
        """The plan of one kind of device, which speaks for the job."""
        self._lengths = lengths
        self._may_plan = True
        self._begin_those_ready()
        while not self._plans:
            self._listen()
        planned = next(iter(self._plans.values()))
        self._work = _work(planned)
        return planned.plan

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        order = self._table_rows.order(plan, self.count)
        self._leases = Leases(order, self._work, len(self._lengths), plan.makespan_s)

    def compute(self, results: Results, should_stop: Callable[[], bool]) -> None:
        self._results = results
        self._begun_s = time.perf_counter()
        try:
            self._may_begin = True
            self._begin_those_ready()
            while not self._leases.is_done:
                self._listen()
                self._hand_out()
                now_s = time.perf_counter() - self._begun_s
                results.sink.commit_if_due(now_s)
                results.look(now_s)
                if should_stop():
                    raise Interrupted("stopped by a signal")
            ends_s = [pulse.worked_s for pulse in self._running.values()]
            self._tail_s = max(ends_s, default=0.0) - min(ends_s, default=0.0)
            self._end_all(Finish())
        except Interrupted:
            self._end_all(Stop())
            raise
        finally:
            self._running.clear()

    def ask(self) -> None:
        self._noting = set(self._running)
        for index in self._noting:
            self.replicas.send(index, Note())
        self._noted(-1)

    def _noted(self, index: int) -> None:
        """Tell how far rows are when all have answered."""
        self._noting.discard(index)
        if not self._noting:
            self._results.note(self._rows.values())

    def standing(self) -> Standing:
        pulses = self._running.values()
        kv_share = sum([pulse.kv_share for pulse in pulses]) / max(1, len(pulses))
        return Standing(sum([pulse.running for pulse in pulses]), kv_share, self._leases.time_left_s, len(pulses))

    def decode(self, row: Row) -> Decoded:
        return self._texts.pop(row.request.key)

    def manifest(self, num_tokens: int, is_whole: bool) -> Manifest | None:
        """One manifest for all replicas: work adds up, and time is the driver's. None where all have died before they
        reported."""
        if not self._over:
            return None
        plan, merged, now_s = self._plan, merge([over.manifest for over in self._over]), time.perf_counter()
        timings = Timings(
            load_s=merged.timings.load_s,
            plan_s=plan.plan_s,
            compile_s=merged.timings.compile_s,
            generate_s=now_s - self._begun_s,
            makespan_s=now_s - self._job.started_s,
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
            device=merged.device | {"count": devices, "replicas": self.count},
            cost=Cost.of(timings.makespan_s, devices, per_hour and per_hour / devices, plan.cost.currency, num_tokens),
        )

    def _per_hour(self) -> float | None:
        """What all replicas cost; None where that is not known of one. Those that never began cost what others do."""
        prices = [price for price in self._prices.values() if price is not None]
        if len(prices) < len(self._prices):
            return None
        return statistics.mean(prices) * max(len(prices), self.count)

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
            case Planned() as planned:
                self._plans.setdefault(self._ready[index].kind, planned)
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
            self._longest_step_s = max(self._longest_step_s, step.elapsed_s)
            self._leases.computed(index, step.prefill_tokens, step.decode_tokens, step.elapsed_s)
            self._results.step(step, index)
        if report.wants_rows:
            self._wanting.add(index)
        ended = [self._settle(index, row) for row in report.ended]
        if ended:
            self._table_rows.ended([row for row in ended if not row.request.error], self._rows.values())
        if report.in_flight is not None:
            for key, progress in report.in_flight.items():
                row = self._rows[key]
                row.become(progress)
            self._noted(index)

    def _settle(self, index: int, ended: Ended) -> Row:
        """Give a row that has ended to the output."""
        self._starts[index] = 1
        row = self._rows.pop(ended.key)
        row.become(ended.progress)
        row.error = ended.error
        self._texts[ended.key] = ended.said
        self._leases.ended(index, ended.key, row.num_output_tokens)
        self._results.sink.write(row)
        if again := self._results.sink.again:
            self._leases.give_back(list(again))
            again.clear()
        if row.error or row.request.error:
            self._texts.pop(ended.key, None)
        return row

    # --- what replicas are told --------------------------------------------------------------------------------------

    def _begin_those_ready(self) -> None:
        """Plan for each kind of device once, and let the replicas begin whose plan is there."""
        if not self._may_plan or self._is_ending:
            return
        for index, ready in list(self._ready.items()):
            if ready.kind not in self._planners:
                self._planners[ready.kind] = index
                self.replicas.send(index, PlanFor(self._lengths))
            elif ready.kind in self._plans and self._may_begin:
                self.replicas.send(index, Begin(self._plans[ready.kind]))
                del self._ready[index]
                self._prices[index] = self._plans[ready.kind].plan.cost.price_per_hour
                self._results.joined(index)
                work = _work(self._plans[ready.kind])
                self._leases.join(index, work.speed(self._work, self._lengths), work.row_token_s)
                self._running[index] = _Pulse(time.perf_counter())

    def _hand_out(self) -> None:
        for index in list(self._wanting):
            if requests := self._leases.take(index):
                for request in self._results.started(requests):
                    self._rows[request.key] = Row.going_on(request)
                self.replicas.send(index, Take(requests))
                self._wanting.discard(index)

    def _end_all(self, message: Finish | Stop) -> None:
        """Let replicas end, and hear their last reports. Replicas that have not begun have none."""
        self._is_ending = True
        for index in self._running:
            self.replicas.send(index, message)
        while self._running:
            self._listen()

    # --- who comes and goes ------------------------------------------------------------------------------------------

    def _lose(self, index: int) -> None:
        """Handle a replica that has died: its rows go to the others, and it is started again."""
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
        """Hand out again what a replica holds, with the tokens that its rows have."""
        del self._running[index]
        self._wanting.discard(index)
        held = [replace(request, progress=self._rows[request.key].progress) for request in self._leases.leave(index)]
        self._leases.give_back(held)
        if index in self._noting:
            self._noted(index)


def _work(planned: Planned) -> Work:
    return Work.of(CostModel(planned.shape, planned.profile, planned.plan.layout), planned.plan)
