"""Exact schedules for small sets, by mixed-integer linear programming. The only module that imports PuLP.

There are two formulations, after Appendix A (Algorithm 3) of the Vasuki paper:

`growing`, the default, holds what an item really holds at each age. Start variables are all it needs: x[i, s] = 1 when
item i starts at step s.

`static` is the appendix as printed, with its exit and presence variables e and y substituted by the starts that define
them: an item holds its largest size from start to end, and one step longer ("presence" subtracts only the exits before
step t). Its schedules are feasible but longer; it is here to be compared with.

A model has a variable for every item and step, so items of a thousand steps need a coarser clock: several steps become
one, in which an item holds the most that it holds in any of them. Whatever fits by that clock fits step by step, and
the schedule is then packed step by step; but it proves nothing.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pulp

from vasuki_solvers.bounds import Bound
from vasuki_solvers.exceptions import UnsupportedLimit
from vasuki_solvers.greedy import greedy_schedule
from vasuki_solvers.holdings import Holdings, growing_holdings, static_holdings
from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.local_search import local_search
from vasuki_solvers.schedule import Schedule

MAX_COEFFICIENTS = 200_000  # of a model
COEFFICIENTS_A_SECOND = 200_000  # that PuLP states, writes, and CBC reads, about
STATING_SHARE = 0.25  # of the time limit
WARM_START_ITERATIONS = 3_000
WARM_START_SHARE = 0.2  # of the time limit, at most
REFUTATION_SHARE = 0.7  # of the time that is left: refute short makespans before looking for a shorter schedule

SolverName = Literal["cbc", "highs"]


def milp_schedule(
    instance: Instance,
    *,
    time_limit_s: float = 60.0,
    threads: int = 2,
    formulation: Literal["growing", "static"] = "growing",
    solver: SolverName | Literal["auto", "none"] = "auto",
    seed: int = 0,
) -> Schedule:
    """The best schedule found in `time_limit_s`, with the best bound: `schedule.optimal` says whether it is proved.

    Greedy and local search come first. Their schedule is the answer whenever nothing shorter is found, and so also when
    no solver is installed ("auto" takes CBC, which comes with PuLP before 4.0, else HiGHS) or when its time is up.

    `formulation="static"` returns the schedule of the paper's own model, even where it is longer than greedy's.

    Raises UnsupportedLimit for an instance with a prefill budget, which the model doesn't have.
    """
    if instance.prefill_tokens_per_step is not None:
        raise UnsupportedLimit("the MILP has no prefill budget: use local_search, or leave that limit out")
    deadline = time.perf_counter() + time_limit_s
    known = local_search(
        greedy_schedule(instance),
        iterations=WARM_START_ITERATIONS,
        time_budget_s=time_limit_s * WARM_START_SHARE,
        seed=seed,
    )
    backend = _backend(solver)
    if backend is None or not len(instance) or (known.optimal and formulation == "growing"):
        return known
    search = _Search(backend, threads, deadline)

    if formulation == "static":
        holdings = static_holdings(instance)
        starts, _ = search.run(holdings, holdings.list_schedule(known.order), holdings.longest)
        return Schedule.build(instance, starts, None, f"milp, static ({backend})", known.bound)

    clock = _clock(instance, known, min(MAX_COEFFICIENTS, STATING_SHARE * COEFFICIENTS_A_SECOND * time_limit_s))
    holdings = growing_holdings(instance, clock)
    starts = known.starts if clock == 1 else holdings.list_schedule(known.order)
    starts, proved = search.run(holdings, starts, -(-known.bound.steps // clock))
    bound = Bound(proved, "milp") if clock == 1 and proved > known.bound.steps else known.bound
    if clock > 1:
        starts = growing_holdings(instance).list_schedule(np.argsort(starts, kind="stable"))
    found = Schedule.build(instance, starts, None, f"milp ({backend})", bound)
    if found.makespan < known.makespan:
        return found
    return Schedule.build(instance, known.starts, None, known.method, bound)


def has_solver() -> bool:
    """Whether a solver for MILPs is installed."""
    return _backend("auto") is not None


def _clock(instance: Instance, known: Schedule, most: float) -> int:
    """Steps to a tick of the clock with which a model, up to the end of the schedule known, has at most that number of
    coefficients; or the longest item's steps, where none has."""
    coefficients = growing_holdings(instance).num_coefficients(known.makespan)
    clock, longest = max(1, math.ceil(math.sqrt(coefficients / max(1.0, most)))), int(instance.durations.max())
    while 1 < clock < longest:  # coefficients fall with its square, about
        holdings = growing_holdings(instance, clock)
        if holdings.num_coefficients(holdings.makespan(holdings.list_schedule(known.order))) <= most:
            break
        clock += 1
    return min(clock, longest)


@dataclass(frozen=True, slots=True)
class _Search:
    """One search by one solver, which ends at `deadline` on the performance counter."""

    backend: SolverName
    threads: int
    deadline: float

    def run(self, holdings: Holdings, starts: Ints, bound: int) -> tuple[Ints, int]:
        """The best starts found, and a proved lower bound on their makespan.

        The linear relaxation is no help: fractions of items fill the memory evenly, and it can't exceed the area bound.
        Refuting single makespans is what works, as the shortest ones are refuted the fastest. So first, from below: is
        there a schedule of `bound` steps? Each "no" raises the bound by one, and the first "yes" is optimal. If an
        answer takes too long then, from above: minimise, starting from the best schedule known.
        """
        if holdings.num_coefficients(holdings.makespan(starts)) > MAX_COEFFICIENTS:
            return starts, bound
        refute_until = time.perf_counter() + REFUTATION_SHARE * (self.deadline - time.perf_counter())
        while bound < holdings.makespan(starts):
            outcome = self._solve(_Model(holdings, horizon=bound), None, refute_until)
            if outcome.starts is not None:
                return outcome.starts, bound
            if not outcome.complete:
                break
            bound += 1
        if bound < holdings.makespan(starts):
            model = _Model(holdings, horizon=holdings.makespan(starts), at_least=bound)
            outcome = self._solve(model, starts, self.deadline)
            if outcome.starts is not None and holdings.makespan(outcome.starts) < holdings.makespan(starts):
                starts = outcome.starts
            bound = holdings.makespan(starts) if outcome.complete else max(bound, outcome.bound)
        return starts, bound

    def _solve(self, model: _Model, start: Ints | None, deadline: float) -> _Outcome:
        """Solve `model` until `deadline`, from the schedule `start` where the solver takes one."""
        if start is not None:
            model.set_start(start)
        time_limit_s = deadline - time.perf_counter()
        if time_limit_s <= 0:
            return _Outcome(None, complete=False, bound=0)
        problem = model.problem
        try:
            solver = _pulp_solver(self.backend, self.threads, time_limit_s, warm=start is not None)
            with tempfile.TemporaryDirectory() as solver.tmpDir:  # PuLP leaves its files where CBC ends otherwise
                problem.solve(solver)
        except pulp.PulpSolverError:
            return _Outcome(None, complete=False, bound=0)
        complete = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionInfeasible)
        dual_bound = problem.solverModel.getInfo().mip_dual_bound if self.backend == "highs" else 0.0
        bound = int(np.ceil(dual_bound - 1e-6)) if np.isfinite(dual_bound) else 0
        solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return _Outcome(model.starts() if solved else None, complete, bound)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a solver answered. starts: a schedule, if one was found. complete: the answer is proved. bound: on the
    objective, 0 when unknown."""

    starts: Ints | None
    complete: bool
    bound: int


class _Model:
    """The time-indexed model: is there a schedule within `horizon` steps? Given `at_least`, which is the shortest?"""

    def __init__(self, holdings: Holdings, horizon: int, at_least: int | None = None) -> None:
        items = range(len(holdings.durations))
        self.problem: Any = pulp.LpProblem("schedule", pulp.LpMinimize)
        self.makespan: Any = None
        # x[i, s] in {0, 1}: item i starts at step s. No s lets it end after the horizon.
        x = self.x = [
            [
                self.problem.add_variable(f"x_{i}_{s}", cat=pulp.LpBinary)
                for s in range(horizon - holdings.durations[i] + 1)
            ]
            for i in items
        ]

        # sum over s of x[i, s] = 1                                        for all i: every item starts once
        for i in items:
            self.problem += pulp.lpSum(x[i]) == 1

        # sum over i, s of x[i, s] * holding[i, t - s] <= capacity         for all t, where 0 <= t - s < ages of i
        # sum over i, s of x[i, s]                     <= max_parallel     likewise
        for t in range(horizon):
            running = [
                (x[i][s], int(holdings.tokens[i][t - s]))
                for i in items
                for s in range(max(0, t - len(holdings.tokens[i]) + 1), min(t + 1, len(x[i])))
            ]
            self.problem += pulp.LpAffineExpression(running) <= holdings.capacity
            if holdings.max_parallel is not None:
                self.problem += pulp.lpSum(variable for variable, _ in running) <= holdings.max_parallel

        # sum over s of s * x[i, s] <= sum over s of s * x[j, s]           for identical i < j: they start in this order
        def start_of(i: int) -> Any:
            return pulp.LpAffineExpression([(variable, s) for s, variable in enumerate(x[i])])

        for group in holdings.identical():
            for i, j in pairwise(group):
                self.problem += start_of(i) <= start_of(j)

        # minimise M,   M >= sum over s of s * x[i, s] + duration[i]       for all i
        if at_least is not None:
            self.makespan = self.problem.add_variable("M", at_least, horizon, pulp.LpInteger)
            self.problem.setObjective(self.makespan)
            for i in items:
                self.problem += self.makespan >= start_of(i) + holdings.durations[i]
        self._holdings = holdings

    def set_start(self, starts: Ints) -> None:
        """Give every variable its value in a schedule, with identical items in the order that the model wants."""
        ordered = self._holdings.in_order(starts)
        for i, variables in enumerate(self.x):
            for s, variable in enumerate(variables):
                variable.setInitialValue(int(s == ordered[i]))
        if self.makespan is not None:
            self.makespan.setInitialValue(self._holdings.makespan(starts))

    def starts(self) -> Ints | None:
        """The starts in the solution; None when it holds none (a time limit can leave it empty)."""
        values = [np.array([variable.value() or 0.0 for variable in variables]) for variables in self.x]
        if any(abs(value.max(initial=0.0) - 1) > 1e-3 or abs(value.sum() - 1) > 1e-3 for value in values):
            return None
        return np.array([value.argmax() for value in values], np.int64)


def _backend(solver: SolverName | Literal["auto", "none"]) -> SolverName | None:
    """The solver to use, if it is installed."""
    if solver in ("auto", "cbc") and _cbc().available():
        return "cbc"
    if solver in ("auto", "highs") and importlib.util.find_spec("highspy") is not None:
        return "highs"
    return None


def _cbc(**options: Any) -> Any:
    """CBC from the search path, or else the one that comes with PuLP (before 4.0)."""
    installed = pulp.COIN_CMD(msg=False, **options)
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    return installed if installed.available() or bundled is None else pulp.COIN_CMD(path=bundled, msg=False, **options)


def _pulp_solver(backend: SolverName, threads: int, time_limit_s: float, *, warm: bool) -> Any:
    """A PuLP solver. With `warm` it starts from the initial values of the variables."""
    if backend == "cbc":
        return _cbc(threads=threads, timeLimit=time_limit_s, warmStart=warm)

    import highspy

    highspy.Highs.resetGlobalScheduler(True)  # else it insists on the number of threads of the first solve
    solver = pulp.HiGHS(msg=False, threads=threads, timeLimit=time_limit_s)

    def run(problem: Any) -> None:
        solution = highspy.HighsSolution()
        solution.col_value = [variable.value() for variable in problem.variables()]
        problem.solverModel.setSolution(solution)
        problem.solverModel.run()

    if warm:
        solver.callSolver = run  # PuLP's HiGHS interface takes no start, and this is the step it would belong to
    return solver
