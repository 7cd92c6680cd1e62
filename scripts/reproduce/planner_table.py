"""Policies side by side in virtual time: makespan, distance from the lower bound, batch, preemptions.

Two workloads on three cards for Llama-3-8B:

    arxiv   prompt and output lengths of a summarisation trace, a LENGTHS.csv given by --lengths
    books   translation of book chapters, made up: prompts log-normal around 900 tokens (sigma 0.5, 50 to 2,500),
            outputs 1.5 times as long, give or take 15 % (log-normal), together at most 4,096 tokens

No scheduler knows how long an output will be, only that a row has at most 4,096 tokens. `vasuki` learns it, `vasuki,
known` is told, and `vasuki, max` expects the most. Other policies take 512 tokens a step (whole prompts where they
don't split them), `sarathi, tuned` what vasuki's plan chose.

    python scripts/reproduce/planner_table.py --lengths arxiv_summarization_lengths.csv  # figures in docs/planner.md
    python scripts/reproduce/planner_table.py --lengths arxiv_summarization_lengths.csv --quick

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vasuki.base.config import EngineConfig, PlanConfig
from vasuki.base.units import duration
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, read_lengths
from vasuki.planner.simulated import Simulated, simulate_plan

MODEL = "llama-3-8b"
CARDS = ("a10", "a40", "rtx4090")
CONTEXT = 4096
LEARNED, MAXIMUM = PlanConfig(), PlanConfig(output_length="max")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    name: str
    policy: str
    plan: PlanConfig = LEARNED
    known: bool = False  # outputs are
    tuned: bool = False  # with the step size of vasuki's plan


ENTRIES = (
    Entry("vasuki", "vasuki"),
    Entry("vasuki, known", "vasuki", known=True),
    Entry("vasuki, max", "vasuki", MAXIMUM),
    Entry("sarathi", "sarathi"),
    Entry("sarathi, tuned", "sarathi", tuned=True),
    Entry("orca", "orca"),
    Entry("vllm", "vllm"),
    Entry("vllm-v0", "vllm-v0"),
    Entry("static", "static"),
    Entry("static-sorted", "static-sorted"),
)


def books(rows: int, seed: int = 0) -> Lengths:
    """Chapters to translate, `[rows]`."""
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(np.log(900), 0.5, rows), 50, 2500).astype(np.int64)
    outputs = np.clip(prompts * 1.5 * random.lognormal(0, 0.15, rows), 1, CONTEXT - prompts).astype(np.int64)
    return _capped(Lengths(prompts, outputs))


def summaries(path: Path, rows: int, seed: int = 0) -> Lengths:
    """Random rows of a trace, `[rows]`."""
    lengths = read_lengths(path)
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:rows]
    return _capped(lengths.take(np.sort(chosen)))


def _capped(lengths: Lengths) -> Lengths:
    limits = np.maximum(1, CONTEXT - lengths.prompt_tokens)
    return Lengths(lengths.prompt_tokens, np.minimum(lengths.output_tokens, limits), None, limits)


def run(lengths: Lengths, card: str, entry: Entry, chunk_tokens: int | None) -> Simulated:
    """Plan and simulate one line. `chunk_tokens` is used by tuned entries."""
    shape, profile = named_shape(MODEL), find_profile(card)
    engine = EngineConfig(policy=entry.policy, chunk_tokens=(chunk_tokens if entry.tuned else None) or "auto")
    lengths = replace(lengths, known=entry.known)
    plan = make_plan(lengths, shape, profile, plan=entry.plan, engine=engine)
    return simulate_plan(plan, lengths, shape, profile, plan_config=entry.plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="a LENGTHS.csv for the workload arxiv")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="300 rows, on the A10 alone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, cards = (300, CARDS[:1]) if arguments.quick else (arguments.rows, CARDS)
    workloads = {"arxiv": summaries(arguments.lengths, rows, arguments.seed), "books": books(rows, arguments.seed)}

    records = []
    print("| workload | card | policy | step | makespan | above bound | against vasuki | batch | preempted | offload |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for workload, lengths in workloads.items():
        for card in cards:
            vasuki: Simulated | None = None
            for entry in ENTRIES:
                started_s = time.process_time()
                simulated = run(lengths, card, entry, vasuki.plan.chunk_tokens if vasuki else None)
                vasuki = vasuki or simulated
                plan, result = simulated.plan, simulated.to_dict()
                preempted = sum(result["preemptions"].values())
                bound_s = vasuki.plan.lower_bound_s
                print(
                    f"| {workload} | {card} | {entry.name} | {plan.chunk_tokens} | {duration(plan.makespan_s)} "
                    f"| {plan.makespan_s / bound_s - 1:.0%} | {plan.makespan_s / vasuki.plan.makespan_s - 1:+.1%} "
                    f"| {result['batch']['mean_seqs']:.1f} | {preempted:,} | {plan.offload.mode} |",
                    flush=True,
                )
                record = {key: result[key] for key in ("makespan_s", "steps", "batch", "preemptions", "plan_s")}
                record |= {"workload": workload, "card": card, "policy": entry.name, "lower_bound_s": bound_s}
                records.append(record | {"cpu_s": round(time.process_time() - started_s, 2)})
    print(json.dumps({"model": MODEL, "rows": rows, "seed": arguments.seed, "runs": records}))


if __name__ == "__main__":
    main()
