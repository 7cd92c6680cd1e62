"""How far from the bound the solvers end, on summaries, translations, tiny random sets and bins: a Markdown table.

    python scripts/bench/solver_table.py --lengths arxiv_summarization_lengths.csv [--quick] [--only proofs]

--lengths is a table with the columns num_prefill_tokens and num_decode_tokens. Translations are generated: prompts are
lognormal with a median of 665 tokens, outputs about 1.5 times as long, and both together at most 4,096 (a stand-in for
the Bilingual Web Book trace, which is not public). The last line is one JSON object with all rows,
which --output also writes into a file.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vasuki_solvers import (
    Instance,
    Schedule,
    best_fit_decreasing,
    fifo_schedule,
    first_fit_decreasing,
    forward_schedule,
    greedy_order,
    greedy_schedule,
    local_search,
    lower_bound,
    pack_exact,
    verify,
)
from vasuki_solvers.milp import SolverName, milp_schedule

# Llama-3-8B in bf16: 32 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes a token, 8.03 B parameters x 2 bytes.
KV_BYTES_PER_TOKEN = 131_072
WEIGHT_BYTES = 16.06e9
USABLE_SHARE = 0.9
MEMORY_BYTES = {"A10": 24e9, "A40": 48e9}
MAX_TOTAL_TOKENS = 4_096
SOLVERS: tuple[SolverName, ...] = ("cbc", "highs")


def kv_capacity_tokens(memory_bytes: float) -> int:
    return int((USABLE_SHARE * memory_bytes - WEIGHT_BYTES) // KV_BYTES_PER_TOKEN)


def summaries(path: Path, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    with path.open(newline="") as file:
        rows = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in csv.DictReader(file)]
    return [rows[i] for i in rng.choice(len(rows), count, replace=False)]


def translations(count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        prompt = int(rng.lognormal(6.5, 0.6))
        output = int(1.5 * prompt * rng.lognormal(0.0, 0.15))
        if prompt and output and prompt + output <= MAX_TOTAL_TOKENS:
            pairs.append((prompt, output))
    return pairs


def large_rows(lengths: Path, count: int, seeds: int, iterations: int) -> list[dict[str, object]]:
    """First come, greedy, greedy's order run online, and local search, against the lower bound."""
    rows: list[dict[str, object]] = []
    sources: dict[str, Callable[[np.random.Generator], list[tuple[int, int]]]] = {
        "summaries": lambda rng: summaries(lengths, count, rng),
        "translations": lambda rng: translations(count, rng),
    }
    for name, sample in sources.items():
        for gpu, memory_bytes in MEMORY_BYTES.items():
            for prefill in (None, 512):
                for seed in range(seeds):
                    items = sample(np.random.default_rng(seed))
                    instance = Instance.of(items, kv_capacity_tokens(memory_bytes), prefill_tokens_per_step=prefill)
                    bound = lower_bound(instance)
                    began_s = time.perf_counter()
                    greedy = greedy_schedule(instance, bound=bound)
                    greedy_s = time.perf_counter() - began_s
                    starts, waits = forward_schedule(instance, greedy_order(instance, bound=bound).tolist())
                    schedules = {
                        "fifo": fifo_schedule(instance, bound=bound),
                        "greedy": greedy,
                        "online": Schedule.build(instance, starts, waits, "greedy order, online", bound),
                        "local_search": local_search(greedy, iterations=iterations),
                    }
                    for schedule in schedules.values():
                        verify(schedule)
                    gaps = {f"{method}_gap": round(schedule.gap, 4) for method, schedule in schedules.items()}
                    row: dict[str, object] = {"set": name, "gpu": gpu, "prefill_tokens_per_step": prefill, "seed": seed}
                    row |= {"items": count, "bound_steps": bound.steps, "bound_reason": bound.reason}
                    rows.append(row | gaps | {"greedy_s": round(greedy_s, 3)})
    return rows


def tiny_row(count: int) -> dict[str, object]:
    """Random sets of eight items: mean distance from the proved optimum, before and after local search."""
    rng = np.random.default_rng(0)
    greedy_excess, searched_excess, fifo_excess, static_excess = [], [], [], []
    proved = 0
    for _ in range(count):
        prompts, durations = rng.integers(1, 31, 8), rng.integers(1, 21, 8)
        instance = Instance(prompts, durations, int(rng.integers(60, 120)))
        optimum = milp_schedule(instance, time_limit_s=60.0)
        greedy = greedy_schedule(instance, bound=optimum.bound)
        searched = local_search(greedy, iterations=500, seed=1)
        for schedule in (optimum, greedy, searched):
            verify(schedule)
        if not optimum.optimal:
            continue
        proved += 1
        greedy_excess.append(greedy.makespan / optimum.makespan - 1)
        searched_excess.append(searched.makespan / optimum.makespan - 1)
        fifo_excess.append(fifo_schedule(instance, bound=optimum.bound).makespan / optimum.makespan - 1)
        if proved <= 10:
            static = milp_schedule(instance, formulation="static", time_limit_s=20.0)
            static_excess.append(static.makespan / optimum.makespan - 1)
    means = {
        "fifo": fifo_excess,
        "greedy": greedy_excess,
        "local_search": searched_excess,
        "static_milp_of_10": static_excess,
    }
    return {"instances": count, "proved": proved} | {
        f"{method}_excess": round(float(np.mean(excess)), 4) for method, excess in means.items()
    }


def proof_rows(count: int, time_limit_s: float) -> list[dict[str, object]]:
    """How many sets of twenty items of up to forty steps each solver proves, at four degrees of crowding."""
    rows: list[dict[str, object]] = []
    for crowding in (0.8, 1.0, 1.25, 1.5):
        rng = np.random.default_rng(int(100 * crowding))
        instances = []
        for _ in range(count):
            prompts, durations = rng.integers(1, 61, 20), rng.integers(1, 41, 20)
            area = int((prompts * durations + durations * (durations - 1) // 2).sum())
            capacity = max(int(area / (crowding * durations.max())), int((prompts + durations).max()))
            instances.append(Instance(prompts, durations, capacity))
        rows += [{"crowding": crowding} | proof_row(instances, solver, time_limit_s) for solver in SOLVERS]
    return rows


def proof_row(instances: list[Instance], solver: SolverName, time_limit_s: float) -> dict[str, object]:
    """How many of these are proved, and how long the longest proof took; mean distance of the schedules from the bounds
    that need no solver, and from the best one."""
    proof_s, first_gaps, gaps = [], [], []
    for instance in instances:
        began_s = time.perf_counter()
        schedule = milp_schedule(instance, time_limit_s=time_limit_s, threads=2, solver=solver)
        if schedule.optimal:
            proof_s.append(time.perf_counter() - began_s)
        verify(schedule)
        first_gaps.append(schedule.makespan / lower_bound(instance).steps - 1)
        gaps.append(schedule.gap)
        print(solver, schedule, file=sys.stderr)
    return {
        "solver": solver,
        "time_limit_s": time_limit_s,
        "instances": len(instances),
        "proved": len(proof_s),
        "longest_proof_s": round(max(proof_s, default=0.0), 1),
        "first_gap": round(float(np.mean(first_gaps)), 4),
        "gap": round(float(np.mean(gaps)), 4),
    }


def packing_rows(lengths: Path) -> list[dict[str, object]]:
    """Bins of 4,096 tokens: three packers of the library, and the binpacking package where it is installed."""
    rng = random.Random(0)
    uniform = [rng.randint(1, 2_048) for _ in range(1_000)]
    prompts = [prompt for prompt, _ in summaries(lengths, 1_000, np.random.default_rng(0))]
    thirds = [rng.randint(1_000, 1_900) for _ in range(24)]
    rows: list[dict[str, object]] = []
    for name, sizes in (("uniform", uniform), ("summary prompts", prompts), ("24 near a third", thirds)):
        exact = pack_exact(sizes, MAX_TOTAL_TOKENS, max_nodes=20_000)
        row: dict[str, object] = {
            "lengths": name,
            "bound": exact.bound,
            "first_fit_decreasing": len(first_fit_decreasing(sizes, MAX_TOTAL_TOKENS).bins),
            "best_fit_decreasing": len(best_fit_decreasing(sizes, MAX_TOTAL_TOKENS).bins),
            "exact": len(exact.bins),
            "exact_proved": exact.optimal,
        }
        try:
            import binpacking
        except ImportError:
            row["binpacking"] = None
        else:
            row["binpacking"] = len(binpacking.to_constant_volume(sizes, MAX_TOTAL_TOKENS))
        rows.append(row)
    return rows


def million_row(count: int) -> dict[str, object]:
    """Seconds to order a very large set for an online scheduler."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(6.5, 0.8, count), 1, 3_000).astype(np.int64)
    durations = np.clip(rng.lognormal(5.2, 0.8, count), 1, 1_000).astype(np.int64)
    instance = Instance(prompts, durations, kv_capacity_tokens(MEMORY_BYTES["A40"]))
    began_s = time.perf_counter()
    greedy_order(instance)
    return {"items": count, "greedy_order_s": round(time.perf_counter() - began_s, 2)}


def markdown(rows: list[dict[str, object]]) -> str:
    def cell(key: str, value: object) -> str:
        return f"{value:.2%}" if isinstance(value, float) and key.endswith(("_gap", "_excess")) else str(value)

    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(cell(key, value) for key, value in row.items()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="CSV with num_prefill_tokens,num_decode_tokens")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sets, in about a minute")
    parser.add_argument("--only", choices=["large", "tiny", "proofs", "packing", "scale"], help="one of the tables")
    parser.add_argument("--sets", type=int, metavar="N", help="of each crowding, for proofs (5, with --quick 1)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="for one proof (60, with --quick 10)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="a file for all rows")
    arguments = parser.parse_args()
    quick = arguments.quick
    if not arguments.lengths.is_file():
        sys.exit(f"{arguments.lengths}: no such file")

    makers: dict[str, Callable[[], list[dict[str, object]]]] = {
        "large": lambda: large_rows(arguments.lengths, 1_000, 1 if quick else 3, 50 if quick else 1_000),
        "tiny": lambda: [tiny_row(10 if quick else 200)],
        "proofs": lambda: proof_rows(
            arguments.sets or (1 if quick else 5), arguments.time_limit or (10 if quick else 60)
        ),
        "packing": lambda: packing_rows(arguments.lengths),
        "scale": lambda: [million_row(100_000 if quick else 1_000_000)],
    }
    tables = {name: make() for name, make in makers.items() if arguments.only in (None, name)}
    for name, rows in tables.items():
        print(f"### {name}\n\n{markdown(rows)}")
    if arguments.output:
        arguments.output.write_text(json.dumps(tables, indent=1) + "\n")
    print(json.dumps(tables))


if __name__ == "__main__":
    main()
