"""The plan's makespan, corrected by the steps of the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.engine.shaping import shaping_of
from vasuki.machines.cost_model import CostModel
from vasuki.planner.plan import Plan

WARM_UP_STEPS = 3  # allocation and compilation fall into the first steps
ENOUGH_STEPS = 20  # of a kind, before it is trusted fully


@dataclass(slots=True)
class _Kind:
    """Steps with prompts, or steps without."""

    steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0

    def add(self, predicted_s: float, measured_s: float) -> None:
        self.steps += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s

    def ratio(self, otherwise: float) -> float:
        """Measured over predicted; with few steps it is drawn to `otherwise`."""
        if not self.predicted_s:
            return otherwise
        trust = min(1.0, self.steps / ENOUGH_STEPS)
        return trust * self.measured_s / self.predicted_s + (1 - trust) * otherwise


class TimeLeft:
    """An engine observer that compares steps with the cost model, by kind, and corrects the plan with the ratios.

    A job begins with prompts and ends with decodes. Weighing both kinds by the time that the plan gives them keeps the
    first minutes, which are nearly all prompts, from speaking for the whole.

    Args:
        plan: what was predicted.
        cost_model: the one the plan was made with.
        rows_left: of those that have come, where more may: each takes its share of the plan.
    """

    def __init__(self, plan: Plan, cost_model: CostModel, rows_left: Callable[[], int] | None = None) -> None:
        self.plan = plan
        self._rows_left = rows_left
        self._cost_model = cost_model
        self._shaping = shaping_of(plan.settings.policy)
        self._steps = self._peak_blocks = 0
        self._last: tuple[StepResult, float] | None = None  # the step that was priced last
        self._with_prompts, self._decodes_only, self._all = _Kind(), _Kind(), _Kind()
        self._done_s = {True: 0.0, False: 0.0}  # by the cost model, of steps with prompts and of steps without
        self._expected_tokens = self._output_tokens = self._rows = 0  # of rows that have ended
        self._elapsed_s = 0.0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Compare a step."""
        step_s = self.step_s(batch, result, scheduler)
        self._steps += result.num_steps
        self._elapsed_s += result.elapsed_s
        for sequence in finished:
            self._rows += 1
            self._expected_tokens += min(sequence.request.expected_tokens, sequence.request.max_tokens)
            self._output_tokens += sequence.num_output_tokens
        self._done_s[bool(batch.prefills)] += step_s
        if step_s and self._steps > WARM_UP_STEPS:
            for kind in (self._all, self._with_prompts if batch.prefills else self._decodes_only):
                kind.add(step_s, result.elapsed_s)

    def step_s(self, batch: Batch, result: StepResult, scheduler: Scheduler) -> float:
        """What the cost model says of a step that is over; 0 where nothing was computed. Other observers may ask, too,
        before or after this one has seen the step: it is priced once."""
        if self._last is None or self._last[0] is not result:
            self._last = result, self._price(batch, result, scheduler)
        return self._last[1]

    def _price(self, batch: Batch, result: StepResult, scheduler: Scheduler) -> float:
        if not (batch.decodes or batch.prefills):
            return 0.0
        cost, settings = self._cost_model, self.plan.settings
        offload = settings.offload
        shaped = self._shaping(batch) if self._shaping else None
        work = cost.batch_work(batch, cost.swap_copies(batch, settings.block_tokens), shaped)
        moved = offload.streamed_in(batch), settings.block_tokens * cost.shape.kv_bytes_per_token_per_layer
        steps = cost.repeated(work, result.num_steps, *moved, may_be_recorded=offload.depth is None)
        step_s = sum([step.total_s for step in steps])
        new_blocks = scheduler.queues.pool.peak_held - self._peak_blocks
        self._peak_blocks += new_blocks
        return step_s + cost.first_touch_s(new_blocks * settings.block_tokens)

    @property
    def ratio(self) -> float:
        """Measured time over predicted time, expected for the whole job; 1 before anything was measured."""
        overall = self._all.ratio(1.0)
        share = self.plan.prompt_steps_share
        return share * self._with_prompts.ratio(overall) + (1 - share) * self._decodes_only.ratio(overall)

    @property
    def pace(self) -> float | None:
        """Measured time over predicted time of the steps so far; None while they are few."""
        if self._all.steps < ENOUGH_STEPS or not self._all.predicted_s:
            return None
        return self._all.measured_s / self._all.predicted_s

    @property
    def whole_pace(self) -> float | None:
        """Measured time over predicted time of all steps, however few; None before the first."""
        predicted_s = sum(self._done_s.values())
        return self._elapsed_s / predicted_s if predicted_s else None

    @property
    def left_s(self) -> float:
        """Seconds to the last row: the plan's steps of either kind less those done, each at its pace so far.

        Rows that have ended correct what the plan took for their outputs, and near the end they speak for themselves;
        while a plan computes prompts first none end, so before that they say nothing.
        """
        if self._rows_left is not None:
            return self._rows_left() * self.makespan_s / max(1, self.plan.requests)
        overall, plan = self._all.ratio(1.0), self.plan
        shorter = self._output_tokens / self._expected_tokens if self._expected_tokens else 1.0
        ended = min(1.0, self._rows / plan.requests) if plan.requests else 1.0
        prompts_s = plan.makespan_s * plan.prompt_steps_share
        decodes_s = (plan.makespan_s - prompts_s) * (1 + ended * (shorter - 1))
        by_work_s = max(0.0, prompts_s - self._done_s[True]) * self._with_prompts.ratio(overall)
        by_work_s += max(0.0, decodes_s - self._done_s[False]) * self._decodes_only.ratio(overall)
        if not ended:
            return by_work_s
        trust = ended**4
        return trust * self._elapsed_s * (1 / ended - 1) + (1 - trust) * by_work_s

    @property
    def makespan_s(self) -> float:
        """The plan's makespan at the pace of this run."""
        return self.plan.makespan_s * self.ratio
