"""Exact schedules for small sets, by constraint programming. The only module that imports OR-Tools.

An item that grows is a stack of layers, each there from the age at which it is added until the item ends. With a prompt
of 4 and a duration of 4:

    tokens 7         #    one token, from age 3
           6       # #    one token, from age 2
           5     # # #    one token, from age 1
         1-4   # # # #    the prompt, from age 0
           age 0 1 2 3

So a schedule is a set of tasks of fixed length and demand, tied together by the starts of their items, on one
cumulative resource. There is no variable for a step, and from every dead end the solver learns a clause over bounds of
starts (lazy clause generation; Schutt, Feydy, Stuckey and Wallace, "Explaining the cumulative propagator", Constraints
16, 2011). That is why it proves in seconds what time-indexed variables leave open, whoever solves them (docs/LOG.md).

OR-Tools and highspy each bring a HiGHS of their own, of different versions under one name, and a process can load only
one of them. So this module is also a program, `python -m vasuki_solvers.cp_sat`: a question in JSON on each line in, an
answer on each line out.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np

from vasuki_solvers.holdings import Holdings
from vasuki_solvers.items import Ints

START_S = 1.0  # what the process takes to start and to load OR-Tools
SOLVING_SHARE = 0.9  # of the time limit; the rest is for a solver that looks at its clock too rarely


def shortest_schedule(
    holdings: Holdings, known: Ints, bound: int, *, threads: int, time_limit_s: float
) -> tuple[Ints, int]:
    """Returns the best starts found, [num_items], and a proved lower bound on the makespan: those known, or better.

    A solver that fails leaves them as they were, and so does one that runs out of time with nothing to show. Where the
    time limit leaves none after the start of the process, it is not asked.
    """
    less_than = holdings.makespan(known)
    if bound == less_than or time_limit_s <= START_S:
        return known, bound
    try:
        [(starts, proved)] = ask([question(holdings, bound, less_than, threads, time_limit_s)], time_limit_s)
    except (OSError, subprocess.SubprocessError):
        return known, bound
    return known if starts is None else np.array(starts, np.int64), proved


def question(holdings: Holdings, at_least: int, less_than: int, threads: int, time_limit_s: float) -> dict[str, Any]:
    """The question in JSON: of all schedules shorter than `less_than`, which is the shortest? `at_least` is a bound,
    and no less than the longest item, and smaller than `less_than`."""
    return {
        "tokens": [tokens.tolist() for tokens in holdings.tokens],
        "durations": holdings.durations,
        "identical": holdings.identical(),
        "capacity": holdings.capacity,
        "max_parallel": holdings.max_parallel,
        "at_least": at_least,
        "less_than": less_than,
        "threads": threads,
        "deadline": time.time() + SOLVING_SHARE * time_limit_s,
    }


def ask(questions: list[dict[str, Any]], timeout_s: float) -> list[Any]:
    """Ask a process that has OR-Tools for the `answer` to each question.

    Raises OSError or subprocess.SubprocessError when there is no such process, or when it fails or takes too long.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input="\n".join(map(json.dumps, questions)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=timeout_s,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(question: dict[str, Any]) -> tuple[list[int] | None, int]:
    """Returns the starts of the best schedule found, None if there is none, and a lower bound on every makespan."""
    from ortools.sat.python import cp_model

    tokens, durations, less_than = question["tokens"], question["durations"], question["less_than"]
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, less_than - 1 - duration, f"s_{i}") for i, duration in enumerate(durations)]

    # sum over the layers that are there in step t of what they add <= capacity        for all t
    # number of items that hold anything in step t                   <= max_parallel   likewise
    layers, added = [], []
    for i, held in enumerate(tokens):
        for age, (before, now) in enumerate(pairwise([0, *held])):
            if now > before:
                layers.append(model.new_fixed_size_interval_var(starts[i] + age, len(held) - age, f"l_{i}_{age}"))
                added.append(now - before)
    model.add_cumulative(layers, added, question["capacity"])
    if question["max_parallel"] is not None:
        spans = [model.new_fixed_size_interval_var(starts[i], len(held), f"p_{i}") for i, held in enumerate(tokens)]
        model.add_cumulative(spans, [1] * len(spans), question["max_parallel"])

    # start[i] <= start[j]                                            for identical i < j: they start in this order
    for group in question["identical"]:
        for i, j in pairwise(group):
            model.add(starts[i] <= starts[j])

    # minimise M,   M >= start[i] + duration[i]                       for all i
    makespan = model.new_int_var(question["at_least"], less_than - 1, "M")
    model.minimize(makespan)
    for start, duration in zip(starts, durations, strict=True):
        model.add(makespan >= start + duration)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = question["threads"]
    solver.parameters.max_time_in_seconds = max(0.0, question["deadline"] - time.time())
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, less_than
    proved = max(question["at_least"], math.ceil(solver.best_objective_bound - 1e-6))
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return [solver.value(start) for start in starts] if found else None, proved


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))))
