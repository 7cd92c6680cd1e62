"""The rows of a table, which are all there from the start: those that earlier runs have left."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from vasuki.arrivals import Percentiles, WaitingTimes
from vasuki.base.units import percent_text
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Decoded, Request, Sequence
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.machines.cost_model import CostModel
from vasuki.planner import TimeLeft
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering.planned_order import PlannedOrder, order_requests
from vasuki.planner.plan import Plan, expected
from vasuki.runs.observers.progress import busy_if_slow
from vasuki.runs.opening import OpenJob
from vasuki.runs.placement import Placement
from vasuki.runs.workload import PLANNED_REQUESTS, first_rows, lengths_of

log = logging.getLogger(__name__)


class TableRows:
    """See `vasuki.runs.rows.rows.RunRows`."""

    has_end = True
    commits_within_s = math.inf  # unless the job says less

    def __init__(self, job: OpenJob) -> None:
        self._config = job.config
        self._num_rows, self._to_compute = job.folder.rows_left, job.rows_to_compute
        self._started_s = job.started_s
        self._waited = WaitingTimes(lambda request: 0.0)
        self._requests: Iterator[Request]  # set by `reading`
        self._first: list[Request]  # to plan from, set by `lengths`
        self._order: PlannedOrder  # set by `order`

    def to_answer(self) -> int:
        return self._num_rows

    def reading(self, requests: Iterator[Request]) -> AbstractContextManager[None]:
        self._requests = requests
        return nullcontext()

    def lengths(self) -> Lengths:
        """Lengths of all rows, as if the rest were like the first rows."""
        with busy_if_slow("reading rows to plan from") as far:
            self._first = list(first_rows(self._requests, PLANNED_REQUESTS, far, self._to_compute))
        return lengths_of(self._first, self._to_compute, self._config.knows_lengths)

    def plan(self, placement: Placement, lengths: Lengths) -> Plan:
        return placement.plan(lengths)

    def announce(self, plan: Plan, where: str) -> None:
        log.info(
            "planned: %d requests%s in %s, of which a better schedule could save at most %s; steps of %d tokens, "
            "offload %s%s; rates: %s",
            plan.requests,
            where,
            expected(plan),
            percent_text(plan.could_save),
            plan.chunk_tokens,
            plan.offload.mode,
            f", weights of {plan.layout.host_layers} layers on the host" if plan.layout.host_layers else "",
            plan.source,
        )

    def time_left_of(self, plan: Plan, cost_model: CostModel) -> TimeLeft:
        return TimeLeft(plan, cost_model)

    def source(self, plan: Plan, scheduler: Scheduler) -> Iterator[Request]:
        return self.order(plan)

    def order(self, plan: Plan, replicas: int = 1) -> PlannedOrder:
        """Requests as they start by the plan, on all replicas together."""
        self._order = order_requests(
            itertools.chain(self._first, self._requests),
            plan.settings,
            solver=plan.solver,
            output_length=self._config.plan.output_length,
            window_rows=self._config.plan.window_rows,
            order=plan.order,
            replicas=replicas,
        )
        return self._order

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.ended(finished, scheduler.queues.live())

    def ended(self, finished: list[Sequence], live: Iterable[Sequence]) -> None:
        """Note that rows have ended, and which have not."""
        self._order.learn(finished, live)
        if self._config.input.may_be_urgent:
            self._waited.ended(finished, time.perf_counter() - self._started_s)

    def sink(
        self,
        writer: PartWriter,
        decode: Callable[[Sequence], Decoded],
        text_of: Callable[[list[int]], str],
        on_commit: Callable[[], None],
    ) -> RowSink:
        return RowSink(writer, decode, text_of, on_commit, job=self._config)

    def finished(self, manifest: Manifest) -> Manifest:
        urgent_latency = Percentiles.of(self._waited.urgent_latency_s)
        return replace(
            manifest,
            ran=replace(manifest.ran, solver=self._order.solved.solver),
            urgent_latency=urgent_latency,
            missed_deadlines=self._waited.missed_deadlines,
        )
