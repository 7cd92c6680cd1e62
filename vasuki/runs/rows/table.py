"""The rows of a table, which are all there from the start: those that earlier runs have left."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from vasuki.arrivals import Percentiles, WaitingTimes
from vasuki.base.units import percent_text
from vasuki.engine.loop import Observer
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.machines.cost_model import CostModel
from vasuki.planner import RunningPrediction
from vasuki.planner.ordering.planned_order import order_requests
from vasuki.planner.plan import Plan
from vasuki.runs.foresight import expected
from vasuki.runs.observers.progress import busy_if_slow
from vasuki.runs.opening import OpenJob
from vasuki.runs.placement import Placement, plan_for
from vasuki.runs.workload import PLANNED_REQUESTS, first_rows, lengths_of

log = logging.getLogger(__name__)


class TableRows:
    """See `vasuki.runs.run.Rows`."""

    has_end = True
    commits_within_s = math.inf  # unless the job says less

    def __init__(self, job: OpenJob) -> None:
        self._config = job.config
        self._started_s = job.started_s
        self.to_plan = job.folder.rows_left
        self._waited: WaitingTimes  # set with the source

    def to_answer(self) -> int:
        return self.to_plan

    def reading(self, requests: Iterator[Request]) -> AbstractContextManager[Iterator[Request]]:
        return nullcontext(requests)

    def first(self, requests: Iterator[Request]) -> list[Request]:
        with busy_if_slow("reading rows to plan from") as far:
            return list(first_rows(requests, PLANNED_REQUESTS, far, self.to_plan))

    def plan(self, placement: Placement, first: list[Request]) -> Plan:
        """Plan for these, and for the others as if they went on like them."""
        plan = plan_for(lengths_of(first, self.to_plan), placement.plan)
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
        return plan

    def predicting(self, plan: Plan, cost_model: CostModel) -> RunningPrediction:
        return RunningPrediction(plan, cost_model)

    def source(
        self, first: list[Request], others: Iterator[Request], plan: Plan, scheduler: Scheduler
    ) -> tuple[Iterator[Request], list[Observer]]:
        """They start in the order of the plan."""
        order = order_requests(
            itertools.chain(first, others),
            plan.settings,
            solver=plan.solver,
            output_length=self._config.plan.output_length,
            window_rows=self._config.plan.window_rows,
            order=plan.order,
        )
        self._waited = WaitingTimes(lambda request: 0.0, lambda: time.perf_counter() - self._started_s)
        says_what_is_urgent = self._config.input.priority or self._config.input.deadline
        return order, [order, self._waited] if says_what_is_urgent else [order]

    def sink(self, writer: PartWriter, decode: Callable[[Sequence], str], on_commit: Callable[[], None]) -> RowSink:
        return RowSink(writer, decode, on_commit)

    def finished(self, manifest: Manifest) -> Manifest:
        urgent_latency = Percentiles.of(self._waited.urgent_latency_s)
        return replace(manifest, urgent_latency=urgent_latency, missed_deadlines=self._waited.missed_deadlines)
