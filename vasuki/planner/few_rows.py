"""A better order for a few rows, looked for once, after everything else is chosen; the run takes over what is found.

    greedy's order ---+
    first come -------+--> simulated, the best --> moves of single rows, each simulated, --> the order
    the solver's -----+                            until the time is over

A solver counts steps. What decides is the simulation, which also knows prompts, blocks and preemption: so the answer is
behind neither greedy's order nor the input's, whatever the solver finds.

Where outputs are not known beforehand, every row is taken to reach its limit, as far as the search can tell: recorded
lengths that the run is not told must not order it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace

from vasuki.base.errors import JobFileError
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.ordering.planned_order import MOST_ROWS, Capacity, Ordered, searched_order, solve_order
from vasuki.planner.prediction import Prediction, predict, preferred
from vasuki_solvers import Instance, lower_bound, moved

SEARCH_SHARE, MOST_SEARCH_S = 1 / 50, 60.0  # of the makespan, and at most, where plan.solver_time is `auto`
SOLVER_SHARE = 1 / 3  # of the time for a better order is the solver's, the rest for moves


def refuse_solver(problem: Problem) -> None:
    """Raises JobFileError for a solver that could not do what the job asks it for."""
    solver, rows, policy = problem.plan.solver, len(problem.lengths), problem.policy
    if solver == "auto" or (solver == "fifo" and not policy.sorted_prompts):
        return
    if not policy.ordered:
        raise JobFileError(
            f"plan.solver: {solver} plans the order of policy vasuki, and {policy.name} has its own: leave it out"
        )
    if solver not in MOST_ROWS:
        return
    most = MOST_ROWS[solver]
    if problem.rows_arrive:
        raise JobFileError(f"plan.solver: {solver} orders rows that are there, and these arrive; `auto` orders both")
    if rows > most:
        raise JobFileError(
            f"plan.solver: {solver} orders {most:,} rows at most, and the job has {rows:,}; `auto` does any"
        )
    if solver == "milp":
        from vasuki_solvers.milp import has_solver  # PuLP takes a while to import

        if not has_solver():
            raise JobFileError("plan.solver: milp has no solver; `pip install 'vasuki[milp]'` brings one")


def with_best_order(problem: Problem, chosen: Prediction, candidates: Iterable[Candidate]) -> Prediction:
    """What was chosen, with the best order that is found in time.

    `order_gap` of the result says by how much its steps exceed what no order undercuts.

    Args:
        problem: the job.
        chosen: the best of those simulated in greedy's order.
        candidates: others, which may be better in the input's order.
    """
    solver = problem.searching_solver
    if solver is None or len(problem.lengths) < 2:
        return chosen
    began_s, whole = time.perf_counter(), problem
    if not problem.lengths.known:
        told = replace(problem.lengths, output_tokens=problem.lengths.limits, known=True)
        problem = replace(problem, lengths=told)
        chosen = predict(problem, chosen.candidate)
    job = problem.lengths

    def tried(candidate: Candidate, order: list[int]) -> Prediction:
        return predict(problem, candidate, found=Ordered(order, solver))

    as_they_come = list(range(len(job)))
    known = [tried(candidate, as_they_come) for candidate in [chosen.candidate, *candidates]]
    best = preferred(problem, [chosen, *known])
    candidate = best.candidate
    capacity, least_steps = Capacity.of(candidate.settings), _least_steps(problem, candidate)
    greedy = solve_order(job.prompt_tokens, job.output_tokens, capacity, "greedy").order
    best = preferred(problem, [best, tried(candidate, greedy)])
    limit_s = time_limit_s(problem, best, least_steps)
    if best.result.stats.steps > least_steps and limit_s > 0:
        found = searched_order(job.prompt_tokens, job.output_tokens, capacity, solver, SOLVER_SHARE * limit_s)
        best = preferred(problem, [best, tried(candidate, found)])
    rng = random.Random(0)
    while best.result.stats.steps > least_steps and time.perf_counter() < began_s + limit_s:
        best = preferred(problem, [best, tried(candidate, moved(list(best.order) or greedy, rng))])
    if problem.plan.solver == solver:  # and looked for the order, even if the best one known before is as good
        best = replace(best, solved=replace(best.solved, solver=solver))
    gap = best.result.stats.steps / least_steps - 1
    if problem is not whole:
        solved = best.solved
        best = predict(whole, best.candidate, found=Ordered(list(best.order) or greedy, solved.solver))
    return replace(best, order_gap=gap)


def time_limit_s(problem: Problem, known: Prediction, least_steps: int) -> float:
    """Seconds that looking for a better order may take: no more than it can save, nor than the job says."""
    saved_s = known.makespan_s * (1 - least_steps / known.result.stats.steps)
    if problem.plan.solver_time != "auto":
        return min(problem.plan.solver_time, saved_s)
    return min(SEARCH_SHARE * known.makespan_s, MOST_SEARCH_S, saved_s)


def _least_steps(problem: Problem, candidate: Candidate) -> int:
    """Steps that no order undercuts, whatever rows share and however blocks are filled."""
    job, settings = problem.lengths, candidate.settings
    instance = Instance(job.own_prompt_tokens, job.output_tokens, settings.kv_tokens, settings.limits.max_num_seqs)
    return lower_bound(instance).steps
