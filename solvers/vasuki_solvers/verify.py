"""The referee: replays a plan step by step, and shares no code with what builds plans."""

from __future__ import annotations

import heapq
from collections import defaultdict

from vasuki_solvers.errors import InvalidPlan
from vasuki_solvers.plan import Plan


def verify(plan: Plan) -> None:
    """Raise InvalidPlan, with the step and the excess, unless the plan keeps every rule of its instance.

    Every item has a start; no step holds more tokens than the capacity or more items than `max_parallel`; the prefill
    budget can take in each prompt between its start and its first token (checked by serving the earliest deadline
    first, which succeeds whenever anything does); and the bound does not exceed the makespan. O(sum of durations).
    """
    instance = plan.instance
    if not len(plan.starts) == len(plan.waits) == len(instance):
        raise InvalidPlan(f"{len(plan.starts)} starts and {len(plan.waits)} waits for {len(instance)} items")
    prompts, durations = instance.prompts.tolist(), instance.durations.tolist()
    starts, waits = plan.starts.tolist(), plan.waits.tolist()
    for i, (start, wait) in enumerate(zip(starts, waits, strict=True)):
        if start < 0 or wait < 0:
            raise InvalidPlan(f"item {i} starts at step {start} and waits {wait} steps")

    arriving: dict[int, list[int]] = defaultdict(list)
    for i, start in enumerate(starts):
        arriving[start].append(i)
    running: list[int] = []
    for t in range(plan.makespan):
        running = [i for i in running if t < starts[i] + waits[i] + durations[i]] + arriving[t]
        held = sum(prompts[i] + max(0, t - starts[i] - waits[i]) for i in running)
        if held > instance.capacity:
            raise InvalidPlan(f"step {t} holds {held} tokens, {held - instance.capacity} more than the capacity")
        if instance.max_parallel is not None and len(running) > instance.max_parallel:
            raise InvalidPlan(f"step {t} runs {len(running)} items, and max_parallel is {instance.max_parallel}")

    if instance.prefill_tokens_per_step is not None:
        _verify_prefill(plan, instance.prefill_tokens_per_step, arriving)
    if plan.bound.steps > plan.makespan:
        raise InvalidPlan(f"the bound of {plan.bound.steps} steps exceeds the makespan of {plan.makespan}")


def _verify_prefill(plan: Plan, budget: int, arriving: dict[int, list[int]]) -> None:
    """Serve prompt chunks, earliest first token first, and see that none is late."""
    waiting: list[tuple[int, int, int]] = []  # (step of the first token, item, prompt tokens still to take in)
    for t in range(plan.makespan):
        for i in arriving[t]:
            heapq.heappush(waiting, (t + int(plan.waits[i]), i, int(plan.instance.prompts[i])))
        left = budget
        while waiting and left:
            deadline, i, tokens = heapq.heappop(waiting)
            chunk = min(tokens, left)
            left -= chunk
            if tokens > chunk:
                heapq.heappush(waiting, (deadline, i, tokens - chunk))
        if waiting and waiting[0][0] <= t:
            raise InvalidPlan(f"step {t}: item {waiting[0][1]} still waits for {waiting[0][2]} tokens of prefill")
