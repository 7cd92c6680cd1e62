"""Requests and a machine -> Plan: what to run, in which order, and what that will take.

    one_device            the story: candidates, the fastest of them, the offload that pays, the plan
    several_devices       the same for replicas and pipeline stages
    renting/              which cards to rent for a deadline, on demand or on spot
    candidates            the ways to run a job that memory allows
    steady_state          how fast each runs in the long run, by arithmetic alone
    prediction            how long a candidate takes: the real scheduler in virtual time
    search                a better way for a small job: propose, simulate, keep
    whole_job             how long the chosen candidate takes for every row, and how sure that is
    offload/              what moves to the host, by price
    ordering/             the order in which rows start, made while they come
    leases                rows for replicas, so that all end together
    simulated             a plan, run in virtual time on every request
    loss                  what a kill costs: the work of rows that are not durable yet
    few_rows              a better order for a few rows of known lengths, looked for in 2 % of their time
    lower_bound           seconds that no schedule can beat at datasheet rates
    schedule_bound        the same under the cost model, and what a better plan could save
    any_schedule          what no schedule of a job beats; job_sums: its rows as sums; rows_done: those a run has done
    time_left             the prediction, corrected while the job runs
    plan                  the result; lengths: prompt and output lengths of a job's requests

docs/planner.md describes all of it.
"""

from vasuki.planner.one_device import make_plan
from vasuki.planner.several_devices import plan_parallel
from vasuki.planner.simulated import Simulated, simulate_plan
from vasuki.planner.time_left import TimeLeft

__all__ = ["Simulated", "TimeLeft", "make_plan", "plan_parallel", "simulate_plan"]
