"""A better order for a few rows of known lengths, found in no more time than it may save.

Candidates are compared with greedy's order. That of the chosen one may be improved, once, and the run takes over what
is found:

    time = min(makespan / 20 - what planning took so far, makespan x (1 - bound / steps)),

where the simulation takes `steps` steps, and none takes fewer than `bound`: no order can save more than that.
"""

from __future__ import annotations

from dataclasses import replace

from vasuki.planner.candidates import Problem
from vasuki.planner.ordering.planned_order import Capacity, best_order
from vasuki.planner.prediction import PLANNING_SHARE, Prediction, predict, preferred
from vasuki_solvers import Instance, lower_bound


def with_best_order(problem: Problem, chosen: Prediction, spent_s: float) -> Prediction:
    """What was chosen, with a better order where one is found. spent_s: seconds that planning took so far."""
    job, steps = problem.lengths, chosen.result.stats.steps
    if not problem.seeks_best_order or chosen.simulated_requests < len(job):
        return chosen
    bound_steps = _least_steps(problem, chosen)
    if steps <= bound_steps:
        return replace(chosen, optimal=True)
    limit_s = time_limit_s(chosen.makespan_s, steps, bound_steps, spent_s)
    if limit_s <= 0:
        return chosen
    capacity = Capacity.of(chosen.candidate.settings)
    found = best_order(job.prompt_tokens, job.output_tokens, capacity, limit_s)
    better = preferred(problem, [chosen, predict(problem, chosen.candidate, found=found)])
    return replace(better, optimal=found.optimal and better.result.stats.steps == found.steps)


def time_limit_s(makespan_s: float, steps: int, bound_steps: int, spent_s: float) -> float:
    """Seconds that looking for a better order may take, negative where too many are spent already."""
    return min(PLANNING_SHARE * makespan_s - spent_s, makespan_s * (1 - bound_steps / steps))


def _least_steps(problem: Problem, chosen: Prediction) -> int:
    """Steps that no order undercuts, whatever rows share and however blocks are filled."""
    job, settings = problem.lengths, chosen.candidate.settings
    instance = Instance(job.own_prompt_tokens, job.output_tokens, settings.kv_tokens, settings.limits.max_num_seqs)
    return lower_bound(instance).steps
