"""How far simulated fleets end behind what no schedule on them beats: 1 to 64 cards, up to three kinds, known lengths.

    python scripts/bench/fleets.py --fleets 200

The gap of a fleet has in it what a single card loses with as many rows; `alone` is that, the mean of its kinds by the
work that they do. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import cache

import numpy as np

from vasuki.base.config import KVConfig
from vasuki.base.job_file import parse_job
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.renting.bound import fleet_bound_s, row_prices
from vasuki.planner.simulated import Member, simulate_fleet

CARDS = ("a10", "a40", "a100", "h100", "l4", "rtx4090")
SHAPE = named_shape("llama-3-8b")
KV = KVConfig(offload="none")
PLAN = parse_job(
    {
        "model": {"shape": SHAPE.name},
        "input": {"path": "-", "prompt_token_ids": "-"},
        "output": {"path": "-"},
    }
).plan


def lengths_of(rows: int, seed: int) -> Lengths:
    """Prompts of some hundred tokens, and answers of which few are long."""
    random = np.random.default_rng(seed)
    outputs = np.minimum(100, random.lognormal(3.2, 0.7, rows)).astype(np.int64) + 1
    return Lengths(random.integers(50, 800, rows), outputs, known=True)


@cache
def planned(card: str, rows: int) -> Plan:
    """A card with a number of rows of its own."""
    return make_plan(lengths_of(rows, seed=0), SHAPE, find_profile(card), plan=PLAN, kv=KV)


def fleet_gap(kinds: list[str], counts: list[int], rows_each: int, seed: int) -> tuple[float, float]:
    """The gap of a fleet that has `rows_each` rows for each card, and its cards' gaps alone."""
    cards = sum(counts)
    lengths = lengths_of(rows_each * cards, seed)
    plans = [planned(kind, rows_each) for kind in kinds]
    schedules = [plan.any_schedule for plan in plans]
    job = JobSums.of_lengths(SHAPE, lengths)
    wholes_s = [each.least_s(job) for each in schedules]
    alone_s = min(each.least_s(job.slowest(SHAPE)) for each in schedules)
    if len(kinds) == 1:
        bound_s = max(alone_s, wholes_s[0] / counts[0])
    else:
        bound_s = fleet_bound_s([row_prices(lengths, each) for each in schedules], counts, alone_s)
    speeds = np.array(counts) / np.array(wholes_s)
    whole = replace(plans[0], requests=len(lengths), makespan_s=bound_s, layout=Layout(data_parallel=cards))
    members = [
        Member(plan, CostModel(SHAPE, find_profile(kind)), count)
        for plan, kind, count in zip(plans, kinds, counts, strict=True)
    ]
    played = simulate_fleet(whole, members, lengths, plan_config=PLAN)
    return played.plan.makespan_s / bound_s - 1, float(speeds @ [plan.gap for plan in plans] / speeds.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--rows", type=int, default=200, help="for each card")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started_s, gaps, alone = time.perf_counter(), [], []
    for number in range(arguments.fleets):
        random = np.random.default_rng([arguments.seed, number])
        cards = int(np.exp(random.uniform(0, np.log(65))))
        kinds = random.choice(CARDS, size=min(cards, int(random.integers(1, 4))), replace=False).tolist()
        counts = (1 + random.multinomial(cards - len(kinds), np.ones(len(kinds)) / len(kinds))).tolist()
        gap, one = fleet_gap(kinds, counts, arguments.rows, number)
        gaps.append(gap)
        alone.append(one)
        fleet = " + ".join(f"{count} {kind}" for kind, count in zip(kinds, counts, strict=True))
        print(f"{fleet:40} {gap:6.1%} from the bound, its cards alone {one:6.1%}", flush=True)
    more = np.array(gaps) - np.array(alone)
    figures = {
        "fleets": len(gaps),
        "rows_each": arguments.rows,
        "gap": {"mean": np.mean(gaps), "p95": np.quantile(gaps, 0.95), "most": max(gaps)},
        "alone": {"mean": np.mean(alone), "most": max(alone)},
        "more_than_alone": {"mean": more.mean(), "p95": np.quantile(more, 0.95), "most": more.max()},
        "within_5_percent": np.mean(np.array(gaps) <= 0.05),
        "elapsed_s": time.perf_counter() - started_s,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
