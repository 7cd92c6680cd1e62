"""Rows that are answered as they arrive, in one run without an end: `vasuki watch` on standard input, or on one file.

    FollowedRows ─ RequestStream ─ LiveFeed ─ ArrivingRows ─ drain ─ RowSink ─ parts, and a line for each answer

It is a run like any other but for where its rows come from and when it stops: it is planned from the rows that are
there first, and a signal lets it end those that it has begun.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from vasuki.arrivals import ArrivingRows, Percentiles, WaitingTimes, admission_for
from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted, JobFileError
from vasuki.engine.loop import Observer
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.io.input.followed import FollowedRows
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.tables import stored_text
from vasuki.io.location import Location
from vasuki.io.output.answers import Answer, answer_line
from vasuki.io.output.manifest import Bounds, Manifest, Predicted
from vasuki.io.output.output_folder import usable_folder
from vasuki.io.output.ownership import ARRIVED
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.machines.cost_model import CostModel
from vasuki.planner import RunningPrediction
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.rows_done import RowsDone
from vasuki.planner.simulated import refuse_target, settings_for_batches
from vasuki.runs.opening import Outcome, opened
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.placement import Placement
from vasuki.runs.run import Run, Runner
from vasuki.runs.signals import StopSignals
from vasuki.runs.workload import PLANNED_REQUESTS, lengths_of

ROWS_AHEAD = 4096  # read, tokenised, and not taken by the engine
COMMITS_WITHIN_S = 60.0  # a run without an end must not wait for 3 % of it
_LOOK_S = 0.1  # between two looks at signals, commits and the time

log = logging.getLogger(__name__)

Emit = Callable[[dict[str, Any]], None]


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
        stream = _Stream(job, PLANNED_REQUESTS, load_s)
        stream.listen(rows, signals, emit, until_idle_s)
        manifest = stream.to_end(loaded, signals)
    counts = manifest.rows
    if left := counts.total - counts.succeeded - counts.failed:
        why = "stopped by a signal; " if signals.asked() else ""
        raise Interrupted(f"{why}{left} rows are left, run the same command again to go on")
    return job.outcome(manifest)


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
        """Nothing: it is asked again after each step."""

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
        """Those that are there now, to plan from; they arrive later all the same."""
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


class _TimedSink(RowSink):
    """Commits by a clock that goes on while no step does."""

    def __init__(self, now_s: Callable[[], float], *args: Any) -> None:
        super().__init__(*args)
        self._now_s = now_s

    def commit_in_time(self) -> None:
        """Make rows durable if it is time."""
        super().commit_if_due(self._now_s())

    def commit_if_due(self, now_s: float) -> None:
        """Whatever the time of the loop, which counts steps alone."""
        self.commit_in_time()


class _StreamPrediction(RunningPrediction):
    """Foresees the end of the rows that have come, each of which takes its share of the plan."""

    def __init__(self, plan: Plan, cost_model: CostModel, rows_left: Callable[[], int]) -> None:
        super().__init__(plan, cost_model)
        self._rows_left = rows_left

    @property
    def left_s(self) -> float:
        return self._rows_left() * self.makespan_s / max(1, self.plan.requests)


class _Stream(Run):
    """A run of rows that arrive."""

    commits_within_s = COMMITS_WITHIN_S

    def listen(self, rows: FollowedRows, signals: StopSignals, emit: Emit, until_idle_s: float | None) -> None:
        """Say where rows come from, and their answers go."""
        self._rows, self._signals, self._emit, self._until_idle_s = rows, signals, emit, until_idle_s
        self._sink: _TimedSink | None = None
        self._answered_before = self.folder.done.count

    def should_stop(self, signals: StopSignals) -> bool:
        return False  # no row starts after a signal, and those that run may end

    def rows_to_answer(self) -> int:
        """Those that have come so far."""
        return max(0, self._rows.num_rows - self._answered_before)

    def prediction(self, plan: Plan, cost_model: CostModel) -> RunningPrediction:
        def rows_left() -> int:
            return self.rows_to_answer() - (self._sink.written.rows if self._sink else 0)

        return _StreamPrediction(plan, cost_model, rows_left)

    def _now_s(self) -> float:
        return time.monotonic() - self._rows.started_s

    @contextmanager
    def reading(self, requests: Iterator[Request]) -> Generator[Iterator[Request], None, None]:
        ahead = Prefetch((request for request in requests), ROWS_AHEAD)
        self._feed = LiveFeed(ahead, self._now_s, self._signals.asked, self._meanwhile, self._until_idle_s)
        try:
            yield iter(())
        finally:
            self._rows.stop()
            ahead.close()

    def first(self, requests: Iterator[Request]) -> list[Request]:
        with self._signals.deferred():
            self._feed.wait_until(math.inf)
            return self._feed.take_ready(PLANNED_REQUESTS)

    def lengths(self, first: list[Request]) -> Lengths:
        return lengths_of(first)

    def planned(self, placement: Placement, lengths: Lengths) -> Plan:
        many = lengths.take(np.arange(PLANNED_REQUESTS) % len(lengths))  # nobody knows what will come
        gathering = self.config.arrivals
        if find_policy(self.config.engine.policy).gathers:  # steps of a batch have to fit
            placement = placement.with_engine(chunk_tokens=gathering.batch_tokens)
        plan = placement.plan(replace(many, arrived_at_s=np.zeros(len(many))))
        if plan.settings.policy.gathers:
            refuse_target(gathering, lengths, CostModel(placement.shape, placement.profile, plan.layout))
            plan = replace(plan, settings=settings_for_batches(plan.settings, gathering))
        return plan

    def announce(self, plan: Plan) -> None:
        """No makespan: rows go on arriving."""
        log.info(
            "planned: steps of %d tokens for at most %d rows side by side, offload %s; rates: %s",
            plan.chunk_tokens,
            plan.max_num_seqs,
            plan.offload.mode,
            plan.source,
        )

    def source(
        self, first: list[Request], others: Iterator[Request], plan: Plan, scheduler: Scheduler
    ) -> tuple[Iterator[Request], list[Observer]]:
        admission = admission_for(plan.settings.policy, self.config.arrivals)
        self.waited = WaitingTimes(lambda request: request.arrived_s, self._now_s)
        self.waited.on_first_token = admission.first_token
        return ArrivingRows(self._feed, scheduler, admission), [self.waited]

    def sink(self, writer: PartWriter, decode: Callable[[Sequence], str], on_commit: Callable[[], None]) -> RowSink:
        def tell(answers: list[Answer]) -> None:
            for answer in answers:
                self._emit(answer_line(answer, writer.schema))

        self._sink = _TimedSink(self._now_s, writer, decode, on_commit, tell)
        return self._sink

    def bounds(self, plan: Plan, done: RowsDone, pace: float | None) -> Bounds:
        return Bounds()  # of rows that are waited for

    def finished(self, manifest: Manifest) -> Manifest:
        self.folder.grow(self._rows.num_rows)
        waited = self.waited
        return replace(
            super().finished(manifest),
            predicted=Predicted(source=manifest.predicted.source),
            ttft=Percentiles.of(waited.ttft_s),
            latency=Percentiles.of(waited.latency_s),
        )

    def _meanwhile(self) -> None:
        """Commit rows in time, and answer once more those that were sent again."""
        if self._sink is None:  # not begun
            return
        self._sink.commit_in_time()
        ids: dict[str, Any] = {}
        while self._rows.repeated:
            value = self._rows.repeated.popleft()
            ids[str(stored_text(value))] = value
        if ids:
            self._sink.commit()
            for line in self.folder.stored(set(ids)):  # none of a row that is under way: its answer will come
                self._emit({**line, "id": ids[line["id"]]})
