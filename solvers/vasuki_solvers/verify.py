"""The referee: replays a schedule step by step, and shares no code with what builds schedules."""

from __future__ import annotations

import heapq
from collections import defaultdict

from vasuki_solvers.exceptions import InvalidSchedule
from vasuki_solvers.schedule import Schedule


def verify(schedule: Schedule) -> None:
    """Raise InvalidSchedule, with the step and the excess, unless the schedule keeps every rule of its instance.

    Every item has a start; no step holds more tokens than the capacity or more items than `max_parallel`; the prefill
    budget can take in each prompt between its start and its first token (checked by serving the earliest deadline
    first, which succeeds whenever anything does); and the bound does not exceed the makespan. O(sum of durations).
    """
    instance = schedule.instance
    if not len(schedule.starts) == len(schedule.waits) == len(instance):
        raise InvalidSchedule(
            f"{len(schedule.starts)} starts and {len(schedule.waits)} waits for {len(instance)} items"
        )
    prompts, durations = instance.prompts.tolist(), instance.durations.tolist()
    starts, waits = schedule.starts.tolist(), schedule.waits.tolist()
    for i, (start, wait) in enumerate(zip(starts, waits, strict=True)):
        if start < 0 or wait < 0:
            raise InvalidSchedule(f"item {i} starts at step {start} and waits {wait} steps")

    arriving: dict[int, list[int]] = defaultdict(list)
    for i, start in enumerate(starts):
        arriving[start].append(i)
    running: list[int] = []
    for t in range(schedule.makespan):
        running = [i for i in running if t < starts[i] + waits[i] + durations[i]] + arriving[t]
        held = sum(prompts[i] + max(0, t - starts[i] - waits[i]) for i in running)
        if held > instance.capacity:
            raise InvalidSchedule(f"step {t} holds {held} tokens, {held - instance.capacity} more than the capacity")
        if instance.max_parallel is not None and len(running) > instance.max_parallel:
            raise InvalidSchedule(f"step {t} runs {len(running)} items, and max_parallel is {instance.max_parallel}")

    if instance.prefill_tokens_per_step is not None:
        _verify_prefill(schedule, instance.prefill_tokens_per_step, arriving)
    if schedule.bound.steps > schedule.makespan:
        raise InvalidSchedule(f"the bound of {schedule.bound.steps} steps exceeds the makespan of {schedule.makespan}")


def _verify_prefill(schedule: Schedule, budget: int, arriving: dict[int, list[int]]) -> None:
    """Serve prompt chunks, earliest first token first, and see that none is late."""
    waiting: list[tuple[int, int, int]] = []  # (step of the first token, item, prompt tokens still to take in)
    for t in range(schedule.makespan):
        for i in arriving[t]:
            heapq.heappush(waiting, (t + int(schedule.waits[i]), i, int(schedule.instance.prompts[i])))
        left = budget
        while waiting and left:
            deadline, i, tokens = heapq.heappop(waiting)
            chunk = min(tokens, left)
            left -= chunk
            if tokens > chunk:
                heapq.heappush(waiting, (deadline, i, tokens - chunk))
        if waiting and waiting[0][0] <= t:
            raise InvalidSchedule(f"step {t}: item {waiting[0][1]} still waits for {waiting[0][2]} tokens of prefill")
