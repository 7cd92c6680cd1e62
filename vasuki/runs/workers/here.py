"""The one worker of a run in this process: a model on its device, called directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Decoded, Sequence
from vasuki.io.output.manifest import Bounds, Manifest
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.manifests import bounds_of
from vasuki.runs.observers.progress import Standing, busy_with
from vasuki.runs.opening import OpenJob
from vasuki.runs.placement import Placement, plan_for
from vasuki.runs.results import Results
from vasuki.runs.rows.rows import RunRows
from vasuki.runs.uncertainty import cost_of_uncertainty, is_affordable
from vasuki.runs.workers.device import Device
from vasuki.runs.workers.messages import Planned
from vasuki.runs.workers.workers import Intake
from vasuki.runs.workload import tokens_of

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel


class Here:
    """See `vasuki.runs.workers.workers.Workers`.

    Args:
        job: opened.
        rows: its rows.
        loaded: loads its model, or has it, and says how long that took.
    """

    count = 1
    where = ""
    _device: Device  # set by `load`
    _placement: Placement  # set by `plan`

    def __init__(self, job: OpenJob, rows: RunRows, loaded: Callable[[], tuple[LoadedModel, float]]) -> None:
        self._job = job
        self._rows = rows
        self._loaded = loaded

    @property
    def reusable(self) -> LoadedModel | None:
        """The model, for another run; None where weights on the host would have to be put together again."""
        return None if self._device.plan.layout.host_layers else self._device.loaded

    def load(self, refuse_late: Callable[[], object]) -> Intake:
        loaded, load_s = self._loaded()
        self._device = Device(self._job.key, loaded, load_s, self._job.started_s)
        return Intake(loaded.tokenizer, loaded.max_context, loaded.vocab_size, loaded.computed_on)

    def plan(self, lengths: Lengths) -> Plan:
        self._placement = self._device.place(tokens_of(lengths))
        return plan_for(lengths, partial(self._rows.plan, self._placement))

    def begin(self, plan: Plan) -> None:
        planned = Planned(plan, self._placement.shape, self._placement.profile)
        self._device.begin(planned, self._rows.time_left_of)

    def compute(self, results: Results, should_stop: Callable[[], bool]) -> None:
        self._results = results
        device = self._device
        requests = results.started(self._rows.source(device.plan, device.scheduler))
        device.compute(requests, results.sink, results.step, should_stop, [self._rows, _Looks(results)])

    def ask(self) -> None:
        self._results.note(self._device.scheduler.unfinished())

    def standing(self) -> Standing:
        device = self._device
        return Standing(device.scheduler.queues.num_running, device.kv_share, device.time_left.left_s)

    def decode(self, row: Sequence) -> Decoded:
        return self._device.loaded.tokenizer.decode(row)

    def manifest(self, num_tokens: int, is_whole: bool) -> Manifest:
        device, bounds = self._device, Bounds()  # none is known of rows that are waited for
        device.end()
        if self._rows.has_end:
            bounds = bounds_of(device.plan.any_schedule, device.done.sums, device.time_left.whole_pace)
            bounds = self._look_back(bounds) if is_whole else bounds
        return device.manifest(bounds, num_tokens)

    def _look_back(self, bounds: Bounds) -> Bounds:
        """The bounds, and what knowing the lengths would have saved, where finding out takes little of that time."""
        plan, lengths = self._device.plan, self._device.done.lengths
        if self._job.config.knows_lengths or bounds.schedule_s is None or lengths is None:
            return bounds
        if not is_affordable(plan, len(lengths), self._device.taken_s):
            return bounds
        with busy_with("looking back", self._job.options.quiet):
            return replace(bounds, uncertainty=cost_of_uncertainty(self._placement, plan, lengths))


@dataclass(frozen=True, slots=True)
class _Looks:
    """Lets observers of the run look after each step."""

    results: Results

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.results.look(now_s)
