"""What comes back from the workers of a run: rows that end go to the output, the tokens of the others to the journal,
steps to traces and to the observers."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vasuki.base.errors import Interrupted
from vasuki.engine.sequence import Decoded, Request, Sequence
from vasuki.io.output.journal import Journal
from vasuki.io.output.parts import PartWriter, Totals
from vasuki.io.output.trace import StepRecord, TraceWriter
from vasuki.runs.observers.deadline import Deadline
from vasuki.runs.observers.metrics import RunMetrics
from vasuki.runs.observers.progress import RunProgress, Standing, busy_with
from vasuki.runs.opening import OpenJob
from vasuki.runs.rows.rows import RunRows


class Results:
    """Takes rows, tokens and steps from workers, in a `with` statement, at whose end everything is written.

    Args:
        job: opened.
        rows: of the run.
        writer: of parts.
        journal: of the rows in flight.
        decode: what the output of a finished sequence says.
        text_of: the text of some tokens.
        ask: asks workers how far the rows are that they have begun, which is told by `note`.
        standing: how the workers stand.
        workers: how many, at first.

    Attributes:
        sink: takes rows that end.
        traces: one for each worker.
    """

    def __init__(
        self,
        job: OpenJob,
        rows: RunRows,
        writer: PartWriter,
        journal: Journal,
        decode: Callable[[Sequence], Decoded],
        text_of: Callable[[list[int]], str],
        ask: Callable[[], None],
        standing: Callable[[], Standing],
        workers: int,
    ) -> None:
        self._folder = job.folder
        self._quiet = job.options.quiet
        self._writer = writer
        self._journal = journal
        self._standing = standing
        self.traces = [TraceWriter(place) for place in self._folder.traces(workers)]
        self.sink = rows.sink(writer, decode, text_of, ask)
        self._progress = RunProgress(rows.to_answer, lambda: self.sink.written.rows, standing, self._quiet)
        self._deadline = Deadline(job.options.deadline_s, job.started_s, lambda: standing().left_s)
        metrics = job.options.metrics
        self._metrics = RunMetrics(metrics, rows.to_answer, self.sink) if metrics else None

    def joined(self, worker: int) -> None:
        """Note that a worker of this number, which may be new, has joined."""
        for later in range(len(self.traces), worker + 1):
            self.traces.append(TraceWriter(self._folder.traces(later + 1)[later]))

    def started(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests as they go to a worker, and those that are to be asked again."""
        return self._journal.started(_WithRetries(self.sink.again, iter(requests)))

    def step(self, step: StepRecord, worker: int = 0) -> None:
        """Take a step that a worker has made."""
        self.traces[worker].record(step)
        self._progress.count(step)
        if self._metrics:
            self._metrics.count(step)

    def look(self, now_s: float) -> None:
        """Show how the run stands, if it is time; `now_s` is the clock by which rows are committed."""
        self._deadline.look(time.perf_counter())
        self._progress.look()
        if self._metrics:
            self._metrics.look(self._standing(), now_s - self._writer.committed_s)

    def copy(self, copies: Iterator[Totals]) -> None:
        """Take rows that are answered by copies of others, which are durable by then."""
        self._writer.commit()
        for totals in copies:
            self.sink.written += totals
            self._progress.look()

    def note(self, rows: Iterable[Sequence]) -> None:
        """Note how far all rows are that have begun. The trace comes last, so that it has no step whose tokens the
        journal lacks."""
        self._journal.write(itertools.chain(self.sink.incomplete(), rows))
        durable_rows = self._writer.committed.rows if len(self.traces) == 1 else 0  # of whom, nobody knows
        for trace in self.traces:
            trace.flush(durable_rows)

    def __enter__(self) -> Results:
        self._deadline.look(time.perf_counter())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Interrupted):
            self._journal.close()
        self._progress.close()
        try:
            with busy_with("writing the last rows", self._quiet):
                self.sink.close()
        finally:
            if self._metrics:
                self._metrics.close()
            for trace in self.traces:
                trace.close()


class _WithRetries:
    """Requests, and before them whatever is to be asked again by then. It goes on behind a StopIteration."""

    def __init__(self, again: deque[Request], requests: Iterator[Request]) -> None:
        self._again = again
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        return self._again.popleft() if self._again else next(self._requests)
