"""Every schedule that a job allows on a machine, and what none of them beats.

Plans are held against it beforehand, for the lengths that they expect, and runs at their end, for those that came.
Nothing that arrives after some moment can start before it: where rows arrive, the bound is the greatest, over a few
moments, of the moment and what those rows take that come from then on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vasuki.base.errors import ModelError
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.lower_bound import LowerBound, job_lower_bound
from vasuki.planner.schedule_bound import StepRoom, schedule_bound_s, step_rooms

_MOMENTS = 8  # at which rows arrive, and the rest of a job begins


@dataclass(frozen=True, slots=True)
class AnySchedule:
    """All schedules of a model on a machine.

    Args:
        shape: the model.
        profile: the device.
        layouts: over one device or several, with weights in every place that a plan may choose.
        device_memory: as in the job file.
        offload: whether KV may pass over the link.
        beside_weights_bytes: see `memory_budget`.
    """

    shape: ModelShape
    profile: HardwareProfile
    layouts: tuple[Layout, ...]
    device_memory: float
    offload: bool
    beside_weights_bytes: int | None = None

    def least_s(self, job: JobSums) -> float:
        """Seconds that no schedule of a job beats under the cost model, see `schedule_bound`; 0 if the model fits
        nowhere."""
        bounds = []
        for layout in self.layouts:
            cost = CostModel(self.shape, self.profile, layout)
            if rooms := self.rooms(layout):
                bounds.append(schedule_bound_s(job, cost, rooms, self.offload))
        return min(bounds, default=0.0)

    def least_of_lengths_s(self, lengths: Lengths) -> float:
        """The same for requests that start no earlier than they arrive."""
        if lengths.arrived_at_s is None:
            return self.least_s(JobSums.of_lengths(self.shape, lengths))
        late = replace(lengths, prefixes=None)  # earlier rows may have computed what later ones begin with
        return max(
            float(lengths.arrived_at_s[first]) + self.least_of_lengths_s(late.take(np.arange(first, len(lengths))))
            for first in _moments(lengths)
        )

    def at_datasheet_rates(self, job: JobSums) -> LowerBound:
        """What no schedule beats at datasheet rates, see `lower_bound`."""
        layout = self.layouts[0]
        kv_tokens = math.inf
        if not self.offload:
            rooms = [room.kv_tokens for each in self.layouts for room in self.rooms(each)]
            kv_tokens = layout.pipeline_parallel * max(rooms, default=kv_tokens)
        return job_lower_bound(self.shape, self.profile, job, kv_tokens, layout)

    def rooms(self, layout: Layout) -> list[StepRoom]:
        """Every step size, in a few ranges, of a micro-batch: as many as there are stages share a device's memory.

        Where rows run one by one, a prompt is computed with its last chunk, so that a step has any number of tokens.
        """
        rooms = step_rooms(partial(self._kv_tokens, layout))
        if rooms and self.shape.backend == "alone":
            rooms = [StepRoom(math.inf, rooms[0].kv_tokens)]
        return [StepRoom(room.step_tokens, room.kv_tokens / layout.pipeline_parallel) for room in rooms]

    def _kv_tokens(self, layout: Layout, step_tokens: int) -> float:
        """The room for KV and for all else that rows keep, if steps sample a single token; 0 if there is none."""
        try:
            budget = memory_budget(
                self.shape.without_states,
                self.profile,
                device_memory=self.device_memory,
                block_tokens=1,
                max_step_tokens=step_tokens,
                max_num_seqs=1,
                layout=layout,
                beside_weights_bytes=self.beside_weights_bytes,
            )
        except ModelError:
            return 0.0
        return budget.kv_bytes / budget.kv_bytes_per_token


def _moments(lengths: Lengths) -> list[int]:
    """The first row from some moments on: the start, the last arrival, and some between."""
    last = len(lengths) - 1
    return sorted({round(last * part / _MOMENTS) for part in range(_MOMENTS + 1)})
