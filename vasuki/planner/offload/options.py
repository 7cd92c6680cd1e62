"""Ways to offload as options: what they share, and how two are compared."""

from __future__ import annotations

from dataclasses import replace

from vasuki.engine.offload import OffloadPlan
from vasuki.machines.memory_budget import host_weight_bytes
from vasuki.planner.candidates import Candidate, Problem
from vasuki.planner.prediction import NOISE, Prediction, preferred

# Of plans that differ by less than noise, one that does not hang on a link as fast as its profile, and wastes no work.
HIDDEN = 0.95  # share of the copy time that must pass behind compute
AGAIN = 0.05  # most tokens to be computed again, as a share of prompt tokens


def because(prediction: Prediction, offload: OffloadPlan) -> Prediction:
    """Return the prediction with another offload plan or reason."""
    settings = replace(prediction.candidate.settings, offload=offload)
    return replace(prediction, candidate=replace(prediction.candidate, settings=settings))


def best(problem: Problem, options: list[Prediction]) -> Prediction:
    """Choose, among those about as fast as the preferred one, one that hides its copies and computes little again, and
    that loses too much by a kill only if the preferred one does."""
    fastest = preferred(problem, options)
    if not fastest.loses_too_much(problem):
        options = [option for option in options if not option.loses_too_much(problem)]
    near = (1 + NOISE) * fastest.makespan_s

    def merit(option: Prediction) -> tuple[bool, bool, float]:
        stats = option.result.stats
        hides = stats.hidden_copy_s >= HIDDEN * (stats.hidden_copy_s + stats.exposed_copy_s)
        again = option.result.counters.recomputed_tokens / (option.simulated_requests * problem.work.prompt_tokens)
        return hides, again <= AGAIN, -option.makespan_s

    return max((option for option in options if option.makespan_s <= near), key=merit)


def host_kv_bytes(problem: Problem, candidate: Candidate) -> int:
    """Host memory that weights leave to KV."""
    return max(0, problem.kv.host_memory - host_weight_bytes(problem.shape, candidate.cost.layout))
