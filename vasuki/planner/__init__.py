"""Requests and a machine -> Plan: what to run, what that takes, and how far it is from what no schedule can beat.

    one_device       the story: candidates, the fastest of them, the offload that pays, the plan
    several_devices  the same for replicas and pipeline stages
    candidates       the ways to run a job that memory allows
    memory_budget    how much KV that leaves room for
    steady_state     what each is worth, by arithmetic alone
    prediction       how long one takes: the real scheduler in virtual time
    offload_choice   what moves to the host, by price
    offload_policy   how many layers can live there without slowing a step down
    lower_bound      seconds that no schedule can beat
    refine           the prediction, corrected while the job runs

The order of requests is no part of a plan: `vasuki.ordering` makes it while rows come. docs/planner.md tells the whole.
"""

from vasuki.planner.one_device import OFFLOAD_MODES, make_plan
from vasuki.planner.running_prediction import RunningPrediction
from vasuki.planner.several_devices import plan_parallel

__all__ = ["OFFLOAD_MODES", "RunningPrediction", "make_plan", "plan_parallel"]
