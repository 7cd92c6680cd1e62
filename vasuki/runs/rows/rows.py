"""What a run needs of its rows, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from vasuki.engine.loop import Observer
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Decoded, Request, Sequence
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.machines.cost_model import CostModel
from vasuki.planner import TimeLeft
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.placement import Placement


class RunRows(Observer, Protocol):
    """Rows of a run, and what depends on where they come from. They see each step, for their order may learn from it.

    Attributes:
        has_end: whether all are there from the start: then there are bounds, and a signal or `options.max_time_s` stops
            the run between two steps. Else they stop by themselves, and those that have begun may end.
        commits_within_s: how long a row that has ended may wait for its part, whatever the job allows.
    """

    has_end: bool
    commits_within_s: float

    def to_answer(self) -> int:
        """Rows of this run so far, those included that it has answered."""
        ...

    def reading(self, requests: Iterator[Request]) -> AbstractContextManager[None]:
        """A context around all that follows, in which rows are read."""
        ...

    def lengths(self) -> Lengths:
        """Read the first rows. Returns what to plan for."""
        ...

    def plan(self, placement: Placement, lengths: Lengths) -> Plan:
        """Plan for rows of these lengths. Raises as `Placement.plan`."""
        ...

    def announce(self, plan: Plan, where: str) -> None:
        """Tell the log of a plan; `where` is that of the workers."""
        ...

    def time_left_of(self, plan: Plan, cost_model: CostModel) -> TimeLeft:
        """What predicts the end while the run lasts."""
        ...

    def source(self, plan: Plan, scheduler: Scheduler) -> Iterator[Request]:
        """All requests in the order in which they start."""
        ...

    def sink(
        self,
        writer: PartWriter,
        decode: Callable[[Sequence], Decoded],
        text_of: Callable[[list[int]], str],
        on_commit: Callable[[], None],
    ) -> RowSink:
        """The sink of rows that end."""
        ...

    def finished(self, manifest: Manifest) -> Manifest:
        """The manifest, with how long rows waited."""
        ...
