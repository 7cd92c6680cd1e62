"""Random small jobs: the plan is what happens, no bound is beaten, and no simpler scheduler would be done sooner.

`make test-plans` tries 2,000 of them, and more rows (VASUKI_PLANS).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hybrid import HYBRID

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import ModelError, VasukiError
from vasuki.engine.policy import POLICIES
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, SharedPrefixes
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import simulate_plan

pytestmark = pytest.mark.whole_search

JOBS = int(os.environ.get("VASUKI_PLANS", "14"))
MOST_ROWS = 220 if JOBS > 100 else 60
KINDS = (
    "tiny",
    "classify",
    "long prompts",
    "long outputs",
    "one giant",
    "equal",
    "mixed",
    "shared beginnings",
    "arrivals",
)
SHAPES = (
    named_shape("llama-3-8b"),
    named_shape("qwen2.5-0.5b"),
    named_shape("mistral-7b"),
    replace(named_shape("gpt-oss-20b"), num_layers=8, num_expert_layers=8, num_windowed_layers=4),
    HYBRID,
    replace(named_shape("qwen2.5-0.5b"), backend="padded"),
)
CARDS = ("a10", "a40", "a100", "h100", "gh200")
SOME = max(3, JOBS // 7)
# Of jobs of up to 220 rows, those that fill memory in many waves, short ones first.
FULL = (10, 43, 82, 3, 7, 12, 32, 33, 39, 52, 66, 73, 78, 83, 86, 87, 96)[: 3 if JOBS <= 100 else None]
NOISE = 0.01  # by which what should help may lengthen a job
OFF = 0.03  # by which a given setting may be better than what is found
BEHIND = 0.02  # that a plan may be longer than the best of the others: they may be lucky by so much


@dataclass(frozen=True)
class Job:
    """A job, and the card that it runs on."""

    lengths: Lengths
    shape: ModelShape
    card: str
    kv: KVConfig

    def plan(self, solver: str = "auto", link: float = 1, devices: int = 1, **engine: Any) -> Plan:
        """Its plan, with a link as many times as fast, and settings of the engine."""
        profile, config = find_profile(self.card), PlanConfig.model_validate({"solver": solver})
        curve = [
            point.model_copy(update={way: link * getattr(point, way) for way in ("h2d", "d2h", "both")})
            for point in profile.link.curve
        ]
        return make_plan(
            self.lengths,
            self.shape,
            profile.model_copy(update={"link": profile.link.model_copy(update={"curve": tuple(curve)})}),
            plan=config,
            engine=EngineConfig.model_validate(engine),
            kv=self.kv,
            layout=Layout(data_parallel=devices),
        )

    def simulated_s(self, plan: Plan) -> float:
        return simulate_plan(plan, self.lengths, self.shape, find_profile(self.card)).result.makespan_s


def job_of(seed: int, most_rows: int = MOST_ROWS) -> Job:
    random = np.random.default_rng(seed)
    rows = int(random.integers(8, most_rows))

    def lengths_about(shortest: float, longest: float, most: int, spread: float = 0.7) -> np.ndarray:
        median = np.log(random.uniform(shortest, longest))
        return np.clip(random.lognormal(median, spread, rows), 1, most).astype(np.int64)

    kind = KINDS[seed % len(KINDS)]
    if kind == "tiny":
        rows = int(random.integers(1, 8))
        prompts, outputs = lengths_about(20, 3000, 7000, 1), lengths_about(5, 400, 1000, 1)
    elif kind == "classify":
        prompts, outputs = lengths_about(50, 1500, 7000), random.integers(1, 5, rows)
    elif kind == "long prompts":
        prompts, outputs = lengths_about(1000, 4000, 7000), lengths_about(5, 100, 1000)
    elif kind == "long outputs":
        prompts, outputs = lengths_about(10, 200, 7000), lengths_about(100, 600, 1000)
    elif kind == "one giant":
        prompts, outputs = lengths_about(50, 800, 7000), lengths_about(5, 200, 1000)
        prompts[0] = 6500
    elif kind == "equal":
        prompts, outputs = (np.full(rows, int(random.integers(least, most))) for least, most in ((10, 2000), (1, 300)))
    else:
        prompts, outputs = lengths_about(100, 1500, 7000, 1.1), lengths_about(20, 300, 1000, 1)
    prefixes = arrived_at_s = None
    if kind == "shared beginnings":
        shared = [np.arange(size, dtype=np.int32) + 10_000 * size for size in random.integers(16, 1500, 3)]
        of_row = random.integers(0, 4, rows)
        prefixes = SharedPrefixes([np.zeros(0, np.int32), *shared], of_row)
        prompts += prefixes.tokens()
    if kind == "arrivals":
        arrived_at_s = random.exponential(random.uniform(0.001, 0.3), rows).cumsum()
    shape, card = SHAPES[random.integers(len(SHAPES))], str(random.choice(CARDS))
    kv = KVConfig()
    if random.random() < 0.4:  # a little more than the longest row, up to much
        tokens = random.uniform(1, 8) * (int((prompts + outputs).max()) + 64)
        kv = KVConfig(device_memory=int(tokens * shape.kv_bytes_per_token + 8 * shape.state_bytes))
    known = bool(random.random() < 0.4)
    return Job(Lengths(prompts, outputs, arrived_at_s, prefixes=prefixes, known=known), shape, card, kv)


@pytest.mark.parametrize("seed", range(JOBS))
def test_no_plain_policy_would_be_done_sooner(seed: int) -> None:
    job = job_of(seed)
    plan = job.plan()
    assert job.simulated_s(plan) == pytest.approx(plan.makespan_s, rel=1e-12)
    assert plan.lower_bound_s <= plan.schedule_bound_s <= plan.makespan_s * (1 + 1e-12)
    others = {"fifo": job.plan(solver="fifo").makespan_s}
    for policy in ("vllm", "sarathi", "orca"):
        try:
            others[policy] = job.plan(policy=policy).makespan_s
        except VasukiError:  # whole prompts, or usual limits, do not fit into so little memory
            continue
    assert plan.makespan_s <= (1 + BEHIND) * min(others.values()), others


@pytest.mark.parametrize("seed", [179, 305, 368])
def test_rows_that_arrive_may_be_served_first_come_and_leave_last_in_first_out(seed: int) -> None:
    """Jobs in which rounds with short prompts first, or victims with the least computed, end later."""
    job = job_of(seed, most_rows=220)
    assert job.plan().makespan_s <= (1 + NOISE) * job.plan(policy="vllm").makespan_s


@pytest.mark.parametrize("seed", range(SOME))
def test_what_should_help_never_lengthens_a_job(seed: int) -> None:
    """A row less, of known lengths; more memory, a faster link, a second device."""
    job = job_of(seed)
    plan = job.plan()
    helped = {"link": job.plan(link=2).makespan_s, "device": job.plan(devices=2).makespan_s}
    if isinstance(job.kv.device_memory, int):
        more = replace(job, kv=KVConfig(device_memory=int(1.3 * job.kv.device_memory)))
        helped["memory"] = more.plan().makespan_s
    assert max(helped.values()) <= (1 + NOISE) * plan.makespan_s, helped
    known = replace(job, lengths=replace(job.lengths, known=True))
    rows = np.arange(len(job.lengths))
    if len(rows) > 1:
        less = replace(known, lengths=known.lengths.take(np.delete(rows, len(rows) // 2), arriving=True))
        assert less.plan().makespan_s <= (1 + NOISE) * known.plan().makespan_s


@pytest.mark.parametrize("seed", range(SOME))
def test_no_size_of_steps_or_number_of_rows_is_better_than_what_is_found(seed: int) -> None:
    """But of rows that arrive: their steps are as large as prompts need, whatever that does to the last row."""
    job = job_of(seed)
    if job.lengths.arrived_at_s is not None:
        return
    plan = job.plan()

    def given_s(**engine: Any) -> float:
        try:
            return job.plan(**engine).makespan_s
        except ModelError:  # no memory for so many
            return math.inf

    more = min(2 * plan.chunk_tokens, POLICIES["vllm"].chunk_tokens)  # the largest that a plan looks at
    sizes = {max(16, plan.chunk_tokens // 4), max(16, plan.chunk_tokens // 2), more}
    rows = min(plan.max_num_seqs, len(job.lengths))
    given = {f"{size} tokens": given_s(chunk_tokens=size) for size in sizes}
    given |= {f"{count} rows": given_s(max_num_seqs=count) for count in {max(1, rows // 2), 2 * rows}}
    assert plan.makespan_s <= (1 + OFF) * min(given.values()), given


@pytest.mark.parametrize("seed", FULL)
def test_twice_the_rows_take_twice_as_long_where_memory_is_full(seed: int) -> None:
    """Of known lengths, in many waves: a few have a start and an end that the second half does not pay again."""
    job = job_of(seed, most_rows=220)
    job = replace(job, lengths=replace(job.lengths, known=True))
    plan = job.plan()
    stats = simulate_plan(plan, job.lengths, job.shape, find_profile(job.card)).result.stats
    assert stats.peak_device_blocks > 0.95 * plan.settings.num_blocks
    assert len(job.lengths) > 6 * stats.mean_seqs
    doubled = replace(job, lengths=job.lengths.take(np.arange(len(job.lengths)).repeat(2)))
    assert 1.85 < doubled.plan().makespan_s / plan.makespan_s < 2.05
