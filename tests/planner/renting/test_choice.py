"""Fleets are chosen by forecasts, and simulated runs, which are disturbed at random, bear them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from vasuki.base.job_file import parse_job
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.planner.renting import Choice, Fleet, fleet_end, flip_of
from vasuki.runs.renting import Market, fleet_choices, parse_fleets, play
from vasuki.runs.workload import Workload

TREE = {
    "model": {"shape": "llama-3-8b"},
    "input": {"path": "-", "prompt_token_ids": "-"},
    "output": {"path": "-"},
    "engine": {"chunk_tokens": 512},
    "kv": {"offload": "none"},
}


@cache
def workload(rows: int = 100, at_most: bool = False) -> Workload:
    random = np.random.default_rng(5)
    outputs = np.full(rows, 300) if at_most else random.integers(50, 400, rows)
    lengths = Lengths(random.integers(100, 900, rows), outputs, known=not at_most)
    return Workload(parse_job(TREE), named_shape("llama-3-8b"), lengths)


def chosen(
    *gpus: str, deadline_s: float | None = None, market: Market | None = None, of: Workload | None = None
) -> list[Choice]:
    market = market or Market(boot_s=0)
    return fleet_choices(of or workload(), parse_fleets(gpus), 1, deadline_s, market)


@cache
def disturbed(gpus: str) -> Fleet:
    """A fleet that loses a machine in most of its short runs."""
    rates = {name: 30.0 for name in ("a10", "a40") if name in gpus}
    market = Market(on_spot=True, interruptions_per_hour=rates, boot_s=20)
    return next(choice.fleet for choice in chosen(gpus, market=market) if choice.fleet.on_spot)


@pytest.mark.parametrize("gpus", ["a10", "a10+a40"])
def test_disturbed_runs_end_as_foreseen(gpus: str) -> None:
    fleet = disturbed(gpus)
    ends = fleet_end(fleet, error=0.0)  # a simulation takes as long as it is predicted to
    calm = play(Choice(fleet_end(Fleet(fleet.members))), workload(), seed=0)
    assert calm.plan.makespan_s == pytest.approx(ends.calm_s, rel=0.05)
    runs = [play(Choice(ends), workload(), seed) for seed in range(40)]
    ends_s = np.array([run.plan.makespan_s for run in runs])
    noise_s = ends_s.std() / len(runs) ** 0.5
    assert abs(ends_s.mean() - ends.mean_s) <= 0.02 * ends.mean_s + 2 * noise_s
    interruptions = [run.interruptions for run in runs]
    assert np.mean(interruptions) == pytest.approx(ends.interruptions, abs=0.5)
    for deadline_s in (1.1 * ends.calm_s, 1.8 * ends.calm_s):
        assert (ends_s <= deadline_s).mean() == pytest.approx(ends.in_time(deadline_s), abs=0.15)
    assert {run.result.written.rows for run in runs} == {len(workload().lengths)}
    assert sum(run.recomputed_tokens for run in runs) > 0


def test_no_schedule_saves_the_time_until_machines_compute() -> None:
    at_once, later = (play(chosen("a10+a40", market=Market(boot_s=boot_s))[0], workload(), 0) for boot_s in (0, 500))
    assert later.plan.makespan_s == pytest.approx(500 + at_once.plan.makespan_s)
    assert later.plan.schedule_bound_s == pytest.approx(500 + at_once.plan.schedule_bound_s)
    assert later.plan.lower_bound_s == pytest.approx(500 + at_once.plan.lower_bound_s)


def test_a_share_takes_what_its_plan_says_and_all_shares_make_the_job() -> None:
    (choice,) = chosen("a10:5")
    ((card, count),) = choice.fleet.members
    pace = card.pace
    for halving, plan in enumerate(pace.plans):
        assert pace.seconds(0.5**halving) == pytest.approx(max(plan.makespan_s, pace.least_s))
    shares = np.geomspace(1e-3, 1.0, 50)
    times = [pace.seconds(share) for share in shares]
    assert (np.diff(times) >= 0).all()
    assert [pace.share(seconds) for seconds in times] == pytest.approx(list(shares), rel=1e-3)
    assert count * pace.share(choice.plan.makespan_s) == pytest.approx(1.0, rel=1e-3)
    assert choice.plan.makespan_s >= choice.plan.schedule_bound_s > choice.plan.lower_bound_s


def test_the_cheapest_that_holds_comes_first() -> None:
    alone = chosen("a40")[0].end.quantile_s(0.9)
    easy = chosen("a10:4", "a40:2", deadline_s=1.1 * alone)
    assert easy[0].fleet.label == "1 a40"
    assert [choice.amount for choice in easy if choice.holds] == sorted(
        choice.amount for choice in easy if choice.holds
    )
    together = chosen("a40:2")[0].end.quantile_s(0.9)
    tight = chosen("a10:4", "a40:2", deadline_s=1.02 * together)[0]
    assert tight.holds
    assert tight.fleet.replicas > 1
    none = chosen("a10:4", "a40:2", deadline_s=0.05 * alone)
    assert not none[0].holds
    assert [choice.in_time for choice in none] == sorted((choice.in_time for choice in none), reverse=True)  # type: ignore[type-var]


def test_cards_of_the_next_kind_are_added_where_the_cheapest_are_too_few() -> None:
    together = chosen("a40:1+a10:1")[0].end.quantile_s(0.9)
    best = chosen("a10:1", "a40:1", deadline_s=1.02 * together)[0]
    assert best.fleet.label == "1 a40 + 1 a10"
    assert best.holds


def test_a_deadline_holds_more_surely_the_later_it_is() -> None:
    ends = chosen("a10:2")[0].end
    chances = [ends.in_time(share * ends.calm_s) for share in (0.5, 0.9, 1.0, 1.1, 2.0)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01 < 0.3 < chances[2] < 0.7 < 0.99 < chances[-1]
    within = ends.in_time(1.25 * ends.calm_s) - ends.in_time(ends.calm_s / 1.25)
    assert within == pytest.approx(0.9, abs=0.02)  # a datasheet's predictions are within 25 %, nine times of ten


def test_unknown_outputs_spread_the_end() -> None:
    known, unknown = (chosen("a10", of=workload(100, at_most))[0].end for at_most in (False, True))
    assert unknown.ends_s.std() / unknown.mean_s > 1.5 * known.ends_s.std() / known.mean_s
    assert unknown.mean_s < 0.8 * unknown.calm_s  # a plan takes them as long as they may be


def cheapest(prices: dict[str, float]) -> Sequence[Choice]:
    return chosen("a10:2", "a40:2", deadline_s=1e6, market=Market(prices, boot_s=0))


def test_the_answer_flips_at_the_price_that_is_told() -> None:
    before = cheapest({})
    flip = flip_of(before)
    assert flip is not None
    assert flip.card == before[0].fleet.members[0][0].name
    assert cheapest({flip.card: 0.99 * flip.per_hour})[0].fleet.label == before[0].fleet.label
    assert cheapest({flip.card: 1.01 * flip.per_hour})[0].fleet.label == flip.other.fleet.label


def test_spot_is_cheaper_unless_machines_are_taken_away_all_the_time() -> None:
    def best(rate: float) -> Choice:
        market = Market(on_spot=True, interruptions_per_hour={"a10": rate}, boot_s=300)
        return chosen("a10:2", deadline_s=1e6, market=market)[0]

    assert best(0.1).fleet.on_spot
    assert not best(1000.0).fleet.on_spot
