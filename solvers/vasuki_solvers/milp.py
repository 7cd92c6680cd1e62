"""Exact plans for small sets, by mixed-integer linear programming. The only module that imports PuLP.

Where OR-Tools is installed, its constraint solver is asked instead, which proves far more (`cp_sat`).

Two formulations, after Appendix A (Algorithm 3) of the Vasuki paper:

`growing`, the default, holds what an item really holds at each age. Start variables are all it needs: x[i, s] = 1 when
item i starts at step s.

`static` is the appendix as printed, with its exit and presence variables e and y substituted by the starts that define
them: an item holds its largest size from start to end, and one step longer ("presence" subtracts only the exits before
step t). Its plans are feasible but longer; it is here to be compared with.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pulp

from vasuki_solvers import cp_sat
from vasuki_solvers.beam import beam_search
from vasuki_solvers.bounds import Bound
from vasuki_solvers.errors import UnsupportedLimit
from vasuki_solvers.greedy import greedy_plan
from vasuki_solvers.holdings import Holdings, coarse_holdings, growing_holdings, static_holdings
from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.local_search import local_search
from vasuki_solvers.plan import Plan
from vasuki_solvers.potential_lp import best_potentials
from vasuki_solvers.reverse import reverse_schedule

MAX_VARIABLES = 40_000
WARM_START_ITERATIONS = 3_000
WARM_START_SHARE = 0.2  # of the time limit, at most
POTENTIALS_SHARE = 0.2  # likewise, for a better bound and what it leads to
REFUTATION_SHARE = 0.7  # of the time that is left: refute short makespans before looking for a shorter plan

SolverName = Literal["cp-sat", "highs", "cbc"]


def milp_plan(
    instance: Instance,
    *,
    time_limit_s: float = 60.0,
    threads: int = 2,
    formulation: Literal["growing", "static"] = "growing",
    solver: SolverName | Literal["auto", "none"] = "auto",
    max_variables: int = MAX_VARIABLES,
    seed: int = 0,
) -> Plan:
    """The best plan found in `time_limit_s`, with the best bound: `plan.optimal` says whether it is proved.

    Greedy, local search, the bound of `potentials` and its beam search come first. Their plan is the answer whenever
    nothing shorter is found, and so also when no solver is installed ("auto" takes CP-SAT, else HiGHS, else CBC), when
    its time is up, or when the items alone are more than `max_variables`. If items x steps are more than that, steps
    are made coarser, and the plan found in coarse steps is decoded again in fine ones; its bound is then one that was
    known before, since coarse steps prove nothing.

    `formulation="static"` returns the plan of the paper's own model, even where it is longer than greedy's.

    Raises UnsupportedLimit for an instance with a prefill budget, which the model doesn't have.
    """
    if instance.prefill_tokens_per_step is not None:
        raise UnsupportedLimit("the MILP has no prefill budget: use local_search, or leave that limit out")
    deadline = time.perf_counter() + time_limit_s
    plan = local_search(
        greedy_plan(instance),
        iterations=WARM_START_ITERATIONS,
        time_budget_s=time_limit_s * WARM_START_SHARE,
        seed=seed,
    )
    backend = _backend(solver)
    if backend is None or not 0 < len(instance) <= max_variables or (plan.optimal and formulation == "growing"):
        return plan
    plan = _with_potentials(plan, threads, min(POTENTIALS_SHARE * time_limit_s, deadline - time.perf_counter()))
    if plan.optimal and formulation == "growing":
        return plan
    search = _Search(backend, threads, deadline)
    kind = "constraints" if backend == "cp-sat" else "milp"

    if formulation == "static":
        holdings = static_holdings(instance)
        first = holdings.list_schedule(plan.order)
        starts, _ = search.run(holdings, first, holdings.longest)
        return Plan.build(instance, starts, None, f"{kind}, static ({backend})", plan.bound)

    width = 1
    holdings = growing_holdings(instance)
    first = plan.starts
    while len(instance) * holdings.makespan(first) > max_variables:
        width *= 2
        holdings = coarse_holdings(instance, width)
        first = holdings.list_schedule(plan.order)
    starts, proved = search.run(holdings, first, plan.bound.steps if width == 1 else holdings.longest)
    if width > 1:
        # Times `width`, the starts are feasible; decoded by their ends, the plan loses what the rounding cost.
        ends = starts * width + instance.durations
        starts, _ = reverse_schedule(instance, np.argsort(-ends, kind="stable"))
        proved = plan.bound.steps
    method = f"{kind} ({backend})" if width == 1 else f"{kind} in steps of {width} ({backend})"
    bound = Bound(proved, kind) if proved > plan.bound.steps else plan.bound
    found = Plan.build(instance, starts, None, method, bound)
    if found.makespan < plan.makespan:
        return found
    return Plan.build(instance, plan.starts, None, plan.method, bound)


def _with_potentials(plan: Plan, threads: int, time_limit_s: float) -> Plan:
    """The same plan, or a shorter one, with the bound of the best potentials where that is larger."""
    deadline = time.perf_counter() + time_limit_s
    if plan.optimal or time_limit_s <= 0:
        return plan
    potentials = best_potentials(plan.instance, threads=threads, time_limit_s=time_limit_s)
    if potentials is None:
        return plan
    steps = potentials.bound(plan.instance)
    if steps > plan.bound.steps:
        plan = Plan.build(plan.instance, plan.starts, plan.waits, plan.method, Bound(steps, "growth"))
    if plan.optimal:
        return plan
    return beam_search(plan, potentials, deadline=deadline)[0]  # proofs are left to the solver


@dataclass(frozen=True, slots=True)
class _Search:
    """Solver, threads and deadline (on the performance counter) of one search."""

    backend: SolverName
    threads: int
    deadline: float

    def run(self, holdings: Holdings, starts: Ints, bound: int) -> tuple[Ints, int]:
        """The best starts found, and a proved lower bound on their makespan.

        CP-SAT is asked once. For the others the linear relaxation is no help: fractions of items fill the memory
        evenly, and it can't exceed the area bound. Refuting single makespans is what works, as the shortest ones are
        refuted the fastest. So first, from below: is there a plan of `bound` steps? Each "no" raises the bound by one,
        and the first "yes" is optimal. If an answer takes too long then, from above: minimise, starting from the best
        plan known.
        """
        if self.backend == "cp-sat":
            time_limit_s = self.deadline - time.perf_counter()
            return cp_sat.shortest_plan(holdings, starts, bound, threads=self.threads, time_limit_s=time_limit_s)
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
        """Solve `model` until `deadline`, from the plan `start` where the solver takes one."""
        time_limit_s = deadline - time.perf_counter()
        if time_limit_s <= 0:
            return _Outcome(None, complete=False, bound=0)
        if start is not None:
            model.set_start(start)
        problem = model.problem
        try:
            problem.solve(_pulp_solver(self.backend, self.threads, time_limit_s, warm=start is not None))
        except pulp.PulpSolverError:
            return _Outcome(None, complete=False, bound=0)
        complete = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionInfeasible)
        dual_bound = problem.solverModel.getInfo().mip_dual_bound if self.backend == "highs" else 0.0
        bound = int(np.ceil(dual_bound - 1e-6)) if np.isfinite(dual_bound) else 0
        solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return _Outcome(model.starts() if solved else None, complete, bound)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """starts: a plan, if one was found. complete: the answer is proved. bound: on the objective, 0 when unknown."""

    starts: Ints | None
    complete: bool
    bound: int


class _Model:
    """The time-indexed model: is there a plan within `horizon` steps, or, given `at_least`, which is the shortest?"""

    def __init__(self, holdings: Holdings, horizon: int, at_least: int | None = None) -> None:
        items = range(len(holdings.durations))
        self.problem: Any = pulp.LpProblem("plan", pulp.LpMinimize)
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
        """Give every variable its value in a plan, with identical items in the order that the model wants."""
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
    if solver in ("auto", "cp-sat") and importlib.util.find_spec("ortools") is not None:
        return "cp-sat"
    if solver in ("auto", "highs") and importlib.util.find_spec("highspy") is not None:
        return "highs"
    if solver in ("auto", "cbc") and _cbc().available():
        return "cbc"
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
