"""Replicas whose machines are taken away: every row ends once, whatever happens and when."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.engine.policy import POLICIES
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner.leases import Leases, Work
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering import order_requests
from vasuki.simulator import ReplicasResult, SimulatedMachine, simulate_replicas

SETTINGS = EngineSettings(POLICIES["vasuki"], Limits(256, 32), 4000, 16)


def play(cards: list[str], rows: int, rate: float, boot_s: float, seed: int) -> tuple[ReplicasResult, list[Sequence]]:
    random = np.random.default_rng(1)
    lengths = Lengths(random.integers(10, 300, rows), random.integers(1, 200, rows))
    machines = [
        SimulatedMachine(
            SETTINGS,
            CostModel(named_shape("llama-3-8b"), find_profile(card)),
            interruptions_per_hour=rate,
            boot_s=boot_s,
        )
        for card in cards
    ]
    order = order_requests(lengths.requests(known=True), SETTINGS)
    leases = Leases(order, Work(1e-4, 1e-3), rows, job_s=60.0)
    ended: list[Sequence] = []
    result = simulate_replicas(leases, lengths.output_tokens.tolist(), machines, seed=seed, on_ended=ended.append)
    assert {s.request.row: s.num_output_tokens for s in ended} == dict(enumerate(lengths.output_tokens))
    return result, ended


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(["a10", "a40"]), min_size=1, max_size=4),
    st.integers(1, 40),
    st.floats(0.0, 600.0),
    st.floats(0.0, 30.0),
    st.integers(0, 1000),
)
def test_every_row_ends_once(cards: list[str], rows: int, rate: float, boot_s: float, seed: int) -> None:
    result, ended = play(cards, rows, rate, boot_s, seed)
    assert len(ended) == rows
    assert result.makespan_s >= boot_s


def test_the_seed_says_when_machines_are_taken_away() -> None:
    calm, _ = play(["a10", "a40"], 60, 0.0, 5.0, seed=1)
    (one, _), (same, _), (other, _) = (play(["a10", "a40"], 60, 400.0, 5.0, seed) for seed in (1, 1, 2))
    assert calm.interruptions == calm.counters.recomputed_tokens == 0
    assert one.interruptions > 0 < one.counters.recomputed_tokens
    assert one.makespan_s == same.makespan_s != other.makespan_s
    assert min(one.makespan_s, other.makespan_s) > calm.makespan_s
