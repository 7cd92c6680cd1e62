"""What a kill costs: by hand, against an account of every token, and as a bound on what the planner chooses."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base import commits
from vasuki.base.commits import commit_interval_s, next_commit_s
from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.units import longer_text, time_text
from vasuki.engine.batch import Batch, ScheduledChunk, StepResult
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import Mixing, find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan, one_device
from vasuki.planner.candidates import Candidate, Problem, ranked_candidates
from vasuki.planner.lengths import Lengths
from vasuki.planner.loss import Loss, RowWork, max_loss_s
from vasuki.planner.offload import choice
from vasuki.planner.prediction import Prediction, predict, preferred
from vasuki.report.plan_table import plan_table
from vasuki.simulator import simulate

A10, LLAMA = find_profile("a10"), named_shape("llama-3-8b")
AUTO = PlanConfig()
jobs = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=2, max_size=25)


def settings_of(num_blocks: int, mixing: Mixing, max_num_seqs: int = 8) -> EngineSettings:
    policy = replace(find_policy("vasuki"), mixing=mixing)
    return EngineSettings(policy, Limits(64, max_num_seqs), num_blocks, 16)


@dataclass
class Account:
    """Every step's time, token by token, and what is lost if the kill comes at any moment."""

    work_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # by row
    ended: list[int] = field(default_factory=list)  # and not committed
    durable_s: float = 0.0
    committed_s: float = 0.0
    area: float = 0.0
    most_s: float = 0.0
    longest_step_s: float = 0.0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        elapsed_s = result.elapsed_s
        for sequence, _, num_tokens, _ in batch.chunks:
            self.work_s[sequence.request.row] += elapsed_s * num_tokens / batch.num_tokens
        self.area += elapsed_s * (now_s - elapsed_s / 2 - self.durable_s)
        self.most_s = max(self.most_s, now_s - self.durable_s)
        self.longest_step_s = max(self.longest_step_s, elapsed_s)
        self.ended += [sequence.request.row for sequence in finished]
        if self.ended and now_s - self.committed_s >= commit_interval_s(now_s):
            self.durable_s += sum(self.work_s[row] for row in self.ended)
            self.ended, self.committed_s = [], now_s


def accounts(job: list[tuple[int, int]], settings: EngineSettings) -> tuple[Account, Loss, float]:
    prompts, outputs = (np.array(column) for column in zip(*job, strict=True))
    lengths, account, seen = Lengths(prompts, outputs), Account(), RowWork()
    result = simulate(
        lengths.requests(known=True),
        outputs.tolist(),
        settings,
        CostModel(LLAMA, A10),
        observers=[account, seen],
        one_by_one=True,
    )
    return account, seen.loss(AUTO), result.stats.now_s


@pytest.mark.parametrize("mixing", [Mixing.MIXED, Mixing.EXCLUSIVE])
@given(job=jobs, commit_s=st.sampled_from([0.0, 0.2]))
def test_it_is_what_an_account_of_every_token_says(mixing: Mixing, job: list[tuple[int, int]], commit_s: float) -> None:
    """But that a commit waits for the end of a step, and the next ones with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commits, "COMMIT_S", commit_s)
        patch.setattr(commits, "COMMIT_SHARE", 0.0)
        account, loss, makespan_s = accounts(job, settings_of(1000, mixing))
    assert loss.mean_s == pytest.approx(account.area / makespan_s, abs=1.01 * account.longest_step_s + 0.25 * commit_s)
    assert loss.most_s == pytest.approx(account.most_s, abs=1.01 * account.longest_step_s + 0.5 * commit_s)


@given(job=jobs)
def test_rows_that_make_room_change_little(job: list[tuple[int, int]]) -> None:
    """Which steps they missed is not noted, only how many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commits, "COMMIT_S", 0.0)
        account, loss, makespan_s = accounts(job, settings_of(28, Mixing.MIXED))
    assert loss.mean_s == pytest.approx(account.area / makespan_s, rel=0.15, abs=account.longest_step_s)


@given(
    job=st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 1)), min_size=1, max_size=50),
    max_loss=st.floats(5, 50),
)
def test_no_loss_exceeds_what_was_done(job: list[tuple[float, float]], max_loss: float) -> None:
    gaps_s, shares = (np.array(column) for column in zip(*job, strict=True))
    ends_s, total = np.cumsum(gaps_s), shares.sum()
    work_s = np.diff(np.minimum(ends_s, np.cumsum(shares) / total * ends_s[-1]), prepend=0.0)  # none before it is done
    work_s[-1] += ends_s[-1] - work_s.sum()
    loss = Loss.of(ends_s, work_s, AUTO)
    assert 0 <= loss.mean_s <= loss.most_s + 1e-9 <= ends_s[-1] + 2e-9
    assert loss.mean_s <= ends_s[-1] / 2 + 1e-9
    assert Loss.of(ends_s, work_s, PlanConfig(max_loss=max_loss)).mean_s <= loss.mean_s + max_loss / 2 + 1e-9


def test_losses_by_hand() -> None:
    one = Loss.of(np.array([100.0]), np.array([100.0]), AUTO)  # nothing is safe before the end
    assert (one.mean_s, one.most_s) == (50.0, 100.0)
    two = Loss.of(np.array([50.0, 100.0]), np.array([50.0, 50.0]), AUTO)  # the first waits for no interval
    assert (two.mean_s, two.most_s) == (25.0, 50.0)
    late = Loss.of(np.array([4.0, 100.0]), np.array([4.0, 96.0]), AUTO)  # five seconds after the start
    assert late.mean_s == pytest.approx(50 - 4 * 95 / 100)
    assert Loss.of(np.array([]), np.array([]), AUTO) == Loss(0.0, 0.0)


def test_rows_one_after_the_other_lose_half_a_row_and_half_an_interval() -> None:
    ends_s = np.arange(1.0, 101)
    loss = Loss.of(ends_s, np.ones(100), AUTO)
    assert loss.mean_s == pytest.approx(5 / 2, abs=0.1)
    assert loss.most_s == 5.0


@given(st.floats(0, 1e5), st.sampled_from([math.inf, 1.0, 60.0]))
def test_the_next_commit_is_the_first_that_is_due(committed_s: float, max_loss_s: float) -> None:
    now_s = next_commit_s(committed_s, max_loss_s)
    assert now_s - committed_s >= commit_interval_s(now_s, max_loss_s) * (1 - 1e-6) - 1e-9
    sooner_s = committed_s + 0.999 * (now_s - committed_s)
    assert sooner_s - committed_s < commit_interval_s(sooner_s, max_loss_s)


def lengths_of(rows: int, prompt: float, output: float) -> Lengths:
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(prompt), 0.5, rows), 1, 3000).astype(np.int64)
    outputs = np.clip(random.lognormal(np.log(output), 0.5, rows), 1, 1000).astype(np.int64)
    return Lengths(prompts, outputs)


def problem_of(lengths: Lengths, config: PlanConfig = AUTO, kv: KVConfig | None = None) -> Problem:
    return Problem(lengths, LLAMA, A10, config, EngineConfig(), kv or KVConfig(), None, Layout())


def test_a_sample_foresees_what_a_whole_simulation_does() -> None:
    problem = problem_of(lengths_of(3000, 300, 150))
    candidate = ranked_candidates(problem)[0]
    sampled = predict(problem, candidate)
    assert sampled.simulated_requests < 2000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vasuki.planner.prediction.SIMULATION_US", 10**9)
        whole = predict(problem, candidate)
    assert whole.simulated_requests == 3000
    assert sampled.loss.mean_s == pytest.approx(whole.loss.mean_s, rel=0.15)
    assert sampled.loss.most_s == pytest.approx(whole.loss.most_s, rel=0.3)


def test_the_bound_grows_with_the_job() -> None:
    assert max_loss_s(AUTO, 100) == 30
    assert max_loss_s(AUTO, 10_000) == pytest.approx(300)
    assert max_loss_s(PlanConfig(max_loss=7), 10_000) == 7


def with_turns_first(lengths: Lengths) -> tuple[Problem, list[Candidate]]:
    """Rows that fit side by side: turns first by assumption, in one step size, and mixed steps of a slower one."""
    problem = problem_of(lengths)
    candidates = ranked_candidates(problem)
    turns = next(each for each in candidates if each.mixing is Mixing.EXCLUSIVE)
    mixed = [each for each in candidates if each.mixing is Mixing.MIXED]
    return problem, [turns, max(mixed, key=lambda each: predict(problem, each).makespan_s)]


def test_turns_are_taken_only_within_the_bound() -> None:
    problem, candidates = with_turns_first(lengths_of(60, 1500, 20))
    turns, mixed = (predict(problem, candidate) for candidate in candidates)
    assert turns.makespan_s < mixed.makespan_s
    assert turns.loss.mean_s > mixed.loss.mean_s

    def mixing_within(max_loss: float) -> Mixing:
        bounded = replace(problem, plan=PlanConfig(max_loss=max_loss))
        return preferred(bounded, one_device._predictions(bounded, candidates)).candidate.mixing

    assert mixing_within(1.1 * turns.loss.mean_s) is Mixing.EXCLUSIVE
    assert mixing_within((turns.loss.mean_s + mixed.loss.mean_s) / 2) is Mixing.MIXED


def test_where_all_lose_too_much_seconds_are_not_paid_for_fewer_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, candidates = with_turns_first(lengths_of(60, 1500, 20))
    faster, slower = sorted((predict(problem, each) for each in candidates), key=lambda each: each.makespan_s)
    gap_s = slower.makespan_s - faster.makespan_s

    def chosen(saved_s: float) -> Candidate:
        """What is taken where a kill of the slower one loses so much less."""
        losses = {faster.candidate: Loss(100 + saved_s, 200), slower.candidate: Loss(100, 200)}
        monkeypatch.setattr(
            one_device, "predict", lambda problem, each: replace(predict(problem, each), loss=losses[each])
        )
        bounded = replace(problem, plan=PlanConfig(max_loss=1))
        return preferred(bounded, one_device._predictions(bounded, candidates)).candidate

    assert chosen(0.5 * gap_s) is faster.candidate
    assert chosen(1.5 * gap_s) is slower.candidate


@pytest.mark.parametrize(
    ("max_loss", "saved_s", "is_slower_taken"),
    [("auto", 5.0, False), ("auto", 20.0, True), (30.0, 5.0, True)],
)
def test_no_plan_ends_later_in_peace_and_after_a_kill(max_loss: Any, saved_s: float, is_slower_taken: bool) -> None:
    """A bound that nobody asked for is worth what it saves: 18 s are not paid to lose 5 less."""
    problem, candidates = with_turns_first(lengths_of(60, 1500, 20))
    problem = replace(problem, plan=PlanConfig(max_loss=max_loss))
    made = predict(problem, candidates[0])
    faster = replace(made, makespan_s=190.0, loss=Loss(29.0 + saved_s, 200))
    slower = replace(made, makespan_s=208.0, loss=Loss(29.0, 200))
    assert (preferred(problem, [faster, slower]) is slower) == is_slower_taken


def test_the_plan_says_what_a_kill_loses() -> None:
    lengths = lengths_of(80, 800, 120)
    plan = make_plan(lengths, LLAMA, A10)
    assert plan.to_dict()["at_risk_s"] == plan.at_risk_s
    assert 0 < plan.at_risk_s < plan.at_risk_most_s < plan.makespan_s
    assert f"a kill loses, on average {time_text(plan.at_risk_s)}" in " ".join(plan_table([plan]).split())
    assert "plan.max_loss" not in plan_table([plan])
    strict = make_plan(lengths, LLAMA, A10, plan=PlanConfig(max_loss=0.5))
    assert "more than plan.max_loss, 0.5 s" in plan_table([strict])


def test_the_last_token_of_a_prompt_may_come_as_a_decode() -> None:
    """As of a row that was parked in the midst of its prompt."""
    row, seen, scheduler = Sequence(Request(0, 0, 5, 1)), RowWork(), cast(Scheduler, None)
    seen.record(1.0, Batch([], [], [ScheduledChunk(row, 0, 4, False)], []), StepResult([], [], 1.0), scheduler, [])
    row.output_token_ids.append(0)
    seen.record(2.0, Batch([row], [4], [], []), StepResult([0], [True], 1.0), scheduler, [row])
    assert seen.loss(PlanConfig()).most_s == pytest.approx(2.0)


def test_a_bound_out_of_reach_is_missed_by_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming would be faster, with more rows side by side, and so would lose more."""

    def unsearched(problem: Problem, base: Prediction, *_: object) -> Prediction:
        return choice.choose_offload(problem, base)

    monkeypatch.setattr(one_device, "searched", unsearched)
    lengths, kv = lengths_of(30, 800, 120), KVConfig(device_memory=2**30)
    fast = make_plan(lengths, LLAMA, A10, kv=kv)
    safe = make_plan(lengths, LLAMA, A10, kv=kv, plan=PlanConfig(max_loss=0.5))
    assert (fast.offload.mode, safe.offload.mode) == ("stream", "none")
    assert 0.5 < safe.at_risk_s < fast.at_risk_s
    assert "with stream a kill loses more" in safe.offload.reason
    assert "a kill loses more than plan.max_loss, 0.5 s" in " ".join(plan_table([safe]).split())


@pytest.mark.parametrize(
    ("longer", "lost_s", "mode"),
    [(1.006, 90, "none"), (0.99, 90, "none"), (0.97, 90, "park"), (0.97, 110, "park"), (1.006, 25, "park")],
)
def test_nothing_is_parked_for_a_limit_that_it_does_not_reach(
    monkeypatch: pytest.MonkeyPatch, longer: float, lost_s: float, mode: str
) -> None:
    """Within 30 s it may take time; else it has to end clearly sooner, after a kill too."""
    problem = problem_of(lengths_of(40, 800, 120))
    plain = predict(problem, ranked_candidates(problem)[0])
    plain = replace(plain, makespan_s=1000.0, loss=Loss(100.0, 200.0))
    offload = OffloadPlan("park", "rows are parked", host_blocks=10)
    settings = replace(plain.candidate.settings, offload=offload)
    option = replace(
        plain,
        candidate=replace(plain.candidate, settings=settings),
        makespan_s=1000.0 * longer,
        loss=Loss(lost_s, 200.0),
    )
    monkeypatch.setattr(choice, "parked", lambda *_: option)
    monkeypatch.setattr(choice, "streamed", lambda *_, **__: "nothing is streamed")
    monkeypatch.setattr(choice, "_without_preemption", lambda problem, base: base)
    chosen = choice.choose_offload(problem, plain).candidate.settings.offload
    assert chosen.mode == mode
    assert f"makespan {longer_text(longer - 1)}" in chosen.reason.replace("would be ", "").replace("only ", "")


def test_a_plan_without_others_is_compared_with_none() -> None:
    only = EngineConfig(policy="static", chunk_tokens=512, max_num_seqs=8)
    text = plan_table([make_plan(lengths_of(30, 800, 120), LLAMA, A10, engine=only, plan=PlanConfig(max_loss=0.5))])
    assert "more than plan.max_loss, 0.5 s" in text
    assert "was tried" not in text
