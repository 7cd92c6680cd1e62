"""Rows that are answered as they arrive, in one run without an end: `vasuki watch` on standard input, or on one file.

    FollowedRows ─ RequestStream ─ LiveFeed ─ ArrivingRows ─ drain ─ RowSink ─ parts, and a line for each answer

The run is planned from the rows that are there first, and a signal lets it end those that it has begun.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from vasuki.arrivals import ArrivingRows, Gathering, Percentiles, WaitingTimes, admission_for
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Decoded, Request, Sequence
from vasuki.io.input.followed import FollowedRows
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.tables import stored_text
from vasuki.io.output.answers import Answer, answer_line
from vasuki.io.output.manifest import Manifest, Predicted
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.machines.cost_model import CostModel
from vasuki.planner import TimeLeft
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import refuse_target, settings_for_batches
from vasuki.runs.opening import OpenJob
from vasuki.runs.placement import Placement
from vasuki.runs.signals import StopSignals
from vasuki.runs.workload import PLANNED_REQUESTS, lengths_of

ROWS_AHEAD, BYTES_AHEAD = 4096, 48_000_000  # read, tokenised, and not taken by the engine
COMMITS_WITHIN_S = 60.0  # a run without an end must not wait for 3 % of it
_LOOK_S = 0.1  # between two looks at signals, commits and the time

log = logging.getLogger(__name__)

Emit = Callable[[dict[str, Any]], None]


class LiveFeed:
    """See `vasuki.arrivals.source.Feed`: the rows of a background thread, in real time.

    Args:
        rows: as they are tokenised.
        now_s: the clock on which they arrived.
        is_over: whether no more should start.
        meanwhile: called while there is nothing to do, and whenever rows are asked for.
        until_idle_s: ends the feed when none has come for so long.
    """

    def __init__(
        self,
        rows: Prefetch[Request],
        now_s: Callable[[], float],
        is_over: Callable[[], bool],
        meanwhile: Callable[[], None],
        until_idle_s: float | None = None,
    ) -> None:
        self._rows = rows
        self._clock = now_s
        self.is_over = is_over
        self.meanwhile = meanwhile
        self._until_idle_s = math.inf if until_idle_s is None else until_idle_s
        self._here: deque[Request] = deque()  # taken from the thread
        self._has_ended = False
        self._taken = 0

    @property
    def now_s(self) -> float:
        return self._clock()

    def arrived(self) -> tuple[Request, float] | None:
        self.meanwhile()
        if not (self._here or self._receive(0)):
            return None
        self._taken += 1
        request = self._here.popleft()
        return request, request.arrived_s

    def num_arrived(self) -> int:
        return self._taken + len(self._here)

    def work_until(self, at_s: float) -> None:
        """Do nothing: the feed is asked again after each step."""

    def wait_until(self, at_s: float) -> bool:
        idle_since_s = self.now_s
        while not self.is_over():
            now_s = self.now_s
            if self._here or now_s >= at_s:
                return True
            is_idle = now_s - idle_since_s >= self._until_idle_s
            if at_s == math.inf and (self._has_ended or is_idle):
                return False
            if self._has_ended:
                time.sleep(min(_LOOK_S, at_s - now_s))
            else:
                self._receive(min(_LOOK_S, at_s - now_s))
            self.meanwhile()
        return False

    def take_ready(self, most: int) -> list[Request]:
        """The rows that are there now, to plan from; they arrive later all the same."""
        while len(self._here) < most and self._receive(0):
            pass
        return list(self._here)

    def _receive(self, timeout_s: float) -> bool:
        """Whether a row came from the thread."""
        try:
            request = self._rows.within(timeout_s)
        except StopIteration:
            self._has_ended = True
            return False
        if request is not None:
            self._here.append(request)
        return request is not None


class RowsThatArrive:
    """See `vasuki.runs.rows.rows.RunRows`.

    Args:
        job: opened with these rows.
        rows: as they are read.
        signals: after one no row starts, and those that run may end.
        emit: gets the answers.
        until_idle_s: see `LiveFeed`.
    """

    has_end = False
    commits_within_s = COMMITS_WITHIN_S

    def __init__(
        self, job: OpenJob, rows: FollowedRows, signals: StopSignals, emit: Emit, until_idle_s: float | None
    ) -> None:
        self._config = job.config
        self._folder = job.folder
        self._rows = rows
        self._signals = signals
        self._emit = emit
        self._until_idle_s = until_idle_s
        self._answered_before = job.folder.done.count
        self._sink: RowSink | None = None  # until rows can end
        self._feed: LiveFeed  # set while rows are read
        self._waited: WaitingTimes  # set with the source

    def to_answer(self) -> int:
        return max(0, self._rows.num_rows - self._answered_before)

    @contextmanager
    def reading(self, requests: Iterator[Request]) -> Generator[None, None, None]:
        ahead = Prefetch((row for row in requests), ROWS_AHEAD, lambda row: row.num_bytes, BYTES_AHEAD)
        self._feed = LiveFeed(ahead, self._now_s, self._signals.asked, self._meanwhile, self._until_idle_s)
        try:
            yield
        finally:
            self._rows.stop()
            ahead.close()

    def lengths(self) -> Lengths:
        """Lengths of many rows like the first that come."""
        log.info("waiting for rows from %s", self._rows.source)
        with self._signals.deferred():
            self._feed.wait_until(math.inf)
            first = self._feed.take_ready(PLANNED_REQUESTS)
        return _many(lengths_of(first, known=self._config.knows_lengths))

    def plan(self, placement: Placement, lengths: Lengths) -> Plan:
        gathering = Gathering.of(self._config)
        if find_policy(self._config.engine.policy).gathers:  # steps of a batch have to fit
            placement = placement.with_engine(chunk_tokens=gathering.batch_tokens)
        many = _many(lengths)
        plan = placement.plan(replace(many, arrived_at_s=np.zeros(len(many))))
        if plan.settings.policy.gathers:
            refuse_target(gathering, lengths, CostModel(placement.shape, placement.profile, plan.layout))
            plan = replace(plan, settings=settings_for_batches(plan.settings, gathering))
        return plan

    def announce(self, plan: Plan, where: str) -> None:
        """Tell the log of a plan without a makespan, since rows go on arriving."""
        log.info(
            "planned: steps of %d tokens for at most %d rows side by side, offload %s; rates: %s",
            plan.chunk_tokens,
            plan.max_num_seqs,
            plan.offload.mode,
            plan.source,
        )

    def time_left_of(self, plan: Plan, cost_model: CostModel) -> TimeLeft:
        def rows_left() -> int:
            return self.to_answer() - (self._sink.written.rows if self._sink else 0)

        return TimeLeft(plan, cost_model, rows_left)

    def source(self, plan: Plan, scheduler: Scheduler) -> Iterator[Request]:
        """Requests, which start as they arrive."""
        admission = admission_for(plan.settings.policy, Gathering.of(self._config))
        self._waited = WaitingTimes(lambda request: request.arrived_s, self._now_s)
        self._waited.on_first_token = admission.first_token
        return ArrivingRows(self._feed, scheduler, admission)

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self._waited.record(now_s, batch, result, scheduler, finished)

    def sink(
        self,
        writer: PartWriter,
        decode: Callable[[Sequence], Decoded],
        text_of: Callable[[list[int]], str],
        on_commit: Callable[[], None],
    ) -> RowSink:
        def tell(answers: list[Answer]) -> None:
            for answer in answers:
                self._emit(answer_line(answer, writer.schema))

        self._sink = RowSink(writer, decode, text_of, on_commit, tell, self._now_s, self._config)
        return self._sink

    def finished(self, manifest: Manifest) -> Manifest:
        self._folder.grow(self._rows.num_rows)
        waited = self._waited
        return replace(
            manifest,
            predicted=Predicted(source=manifest.predicted.source),
            ttft=Percentiles.of(waited.ttft_s),
            latency=Percentiles.of(waited.latency_s),
            urgent_latency=Percentiles.of(waited.urgent_latency_s),
            missed_deadlines=waited.missed_deadlines,
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._rows.started_s

    def _meanwhile(self) -> None:
        """Commit rows in time, and answer once more those that were sent again."""
        if self._sink is None:  # not begun
            return
        self._sink.commit_if_due(0.0)
        ids: dict[str, Any] = {}
        while self._rows.repeated:
            value = self._rows.repeated.popleft()
            ids[str(stored_text(value))] = value
        if ids:
            self._sink.commit()
            for line in self._folder.stored(set(ids)):  # none of a row that is under way: its answer will come
                self._emit({**line, "id": ids[line["id"]]})


def _many(lengths: Lengths) -> Lengths:
    """As many rows as a plan is made for, like these: nobody knows what will come."""
    return lengths.take(np.arange(PLANNED_REQUESTS) % len(lengths)) if len(lengths) else lengths
