"""Replicas in virtual time get their rows by the rule of real ones."""

from __future__ import annotations

import numpy as np
import pytest

from vasuki.base.job_file import parse_job
from vasuki.engine.sequence import Request
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan, plan_parallel, simulate_plan, simulated
from vasuki.planner.leases import Leases, Work
from vasuki.planner.lengths import Lengths, read_lengths
from vasuki.planner.ordering import order_requests
from vasuki.simulator import ReplicasResult, SimulatedMachine, simulate_replicas


def test_replicas_take_leases_and_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[ReplicasResult] = []
    handed: list[int] = []
    take = Leases.take

    def noted(self: Leases, replica: int) -> list[Request]:
        lease = take(self, replica)
        handed.extend(request.row for request in lease)
        return lease

    def kept(*arguments: object, **options: object) -> ReplicasResult:
        results.append(simulate_replicas(*arguments, **options))  # type: ignore[arg-type]
        return results[-1]

    lengths, shape, profile = (
        read_lengths("jobs/compare/summarise.csv", known=True),
        named_shape("llama-3-8b"),
        find_profile("a10"),
    )
    tree = {"model": {"shape": shape.name}, "input": {"path": "-", "prompt_token_ids": "-"}, "output": {"path": "-"}}
    config, layout = parse_job(tree), Layout(data_parallel=4)
    plan = plan_parallel(lengths, shape, profile, config, layout)
    monkeypatch.setattr(Leases, "take", noted)
    monkeypatch.setattr(simulated, "simulate_replicas", kept)
    played = simulate_plan(plan, lengths, shape, profile, plan_config=config.plan)
    assert sorted(handed) == list(range(len(lengths)))
    assert played.result.written.rows == len(lengths)
    (result,) = results
    assert max(result.ended_s) - min(result.ended_s) <= 0.03 * max(result.ended_s)
    assert played.result.makespan_s == pytest.approx(plan.makespan_s, rel=0.03)


class LeavesLongRows(Leases):
    """Has nothing for the second replica until the first has got two leases."""

    leases = 0

    def take(self, replica: int) -> list[Request]:
        if replica and self.leases < 2:
            return []
        lease = super().take(replica)
        self.leases += bool(lease)
        return lease


def test_a_replica_that_gets_nothing_at_first_asks_again() -> None:
    lengths = Lengths(np.full(64, 50), np.full(64, 20))
    cost = CostModel(named_shape("llama-3-8b"), find_profile("a10"), Layout())
    plan = make_plan(lengths, cost.shape, cost.profile)
    order = order_requests(lengths.requests(), plan.settings)
    leases = LeavesLongRows(order, Work.of(cost, plan), len(lengths), plan.makespan_s)
    result = simulate_replicas(leases, lengths.output_tokens.data, [SimulatedMachine(plan.settings, cost)] * 2)
    assert min(result.ended_s) > 0.5 * max(result.ended_s)
