"""What plans could still save at most: their distance from what no schedule beats under the cost model.

Two workloads on two cards for Llama-3-8B, those of `planner_table.py`, with and without offload; and 64 translations of
a model with 135 million parameters on the generic CPU. Every figure is the mean over draws of the rows:

    known        vasuki, told how long outputs will be
    learned      vasuki, which only knows that a row has at most 4,096 tokens, and learns the rest
    first come   the same with rows in the order in which they come
    vllm         as vLLM does it at present: rows as they come, chunked prompts beside decodes

    python scripts/reproduce/bound_table.py --lengths arxiv_summarization_lengths.csv  # the table in docs/planner.md

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planner_table import KNOWN, LEARNED, MODEL, books, summaries

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.units import duration
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import Simulated, simulate_plan

SMALL = shape_from_config(
    dict(model_type="llama", num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
         num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True), "135M"
)  # fmt: skip
FIRST_COME = LEARNED.model_copy(update={"solver": "fifo"})
ENTRIES = {
    "known": ("vasuki", KNOWN),
    "learned": ("vasuki", LEARNED),
    "first come": ("vasuki", FIRST_COME),
    "vllm": ("vllm", LEARNED),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the table."""

    name: str
    card: str
    offload: str  # "none" or "auto"
    shape: ModelShape
    draw: Callable[[int], Lengths]  # by seed


def small_translations(rows: int, seed: int) -> Lengths:
    """`[rows]` short ones, at most 400 tokens each way."""
    random = np.random.default_rng(seed)
    prompts, outputs = (
        np.clip(random.lognormal(np.log(median), 0.6, rows).astype(np.int64), 16, 400) for median in (110, 140)
    )
    return Lengths(prompts, outputs, None, np.full(rows, 400))


def run(setting: Setting, lengths: Lengths, policy: str, plan_config: PlanConfig) -> Simulated:
    """Plan and simulate one job."""
    profile = find_profile(setting.card)
    engine, kv = EngineConfig(policy=policy), KVConfig(offload=setting.offload)
    plan = make_plan(lengths, setting.shape, profile, plan=plan_config, engine=engine, kv=kv)
    return simulate_plan(plan, lengths, setting.shape, profile, plan_config=plan_config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="a LENGTHS.csv for the summaries")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    shape, rows = named_shape(MODEL), arguments.rows
    jobs: dict[str, Callable[[int], Lengths]] = {
        "summaries": lambda seed: summaries(arguments.lengths, rows, seed),
        "translations": lambda seed: books(rows, seed),
    }
    settings = [
        Setting(name, card, offload, shape, draw)
        for name, draw in jobs.items()
        for card in ("a10", "a40")
        for offload in ("none", "auto")
    ]
    settings.append(Setting("64 short translations", "cpu", "none", SMALL, lambda seed: small_translations(64, seed)))

    records = []
    print("| rows, machine | offload | no schedule beats | " + " | ".join(ENTRIES) + " | datasheet |")
    print("|---" * (len(ENTRIES) + 4) + "|")
    for setting in settings:
        gaps: dict[str, list[float]] = {name: [] for name in (*ENTRIES, "datasheet")}
        bounds_s, modes = [], []
        for seed in range(arguments.draws):
            lengths = setting.draw(seed)
            for name, (policy, plan_config) in ENTRIES.items():
                plan = run(setting, lengths, policy, plan_config).plan
                gaps[name].append(plan.gap)
                if name == "known":
                    bounds_s.append(plan.schedule_bound_s)
                    modes.append(plan.offload.mode)
                    gaps["datasheet"].append(plan.makespan_s / plan.lower_bound_s - 1)
        means = {name: float(np.mean(values)) for name, values in gaps.items()}
        cells = " | ".join(f"{gap:.1%}".replace("%", " %") for gap in means.values())
        where = "any" if setting.offload == "auto" else "none"
        print(
            f"| {setting.name}, {setting.card} | {where} | {duration(float(np.mean(bounds_s)))} | {cells} |", flush=True
        )
        records.append(
            {
                "rows": setting.name,
                "card": setting.card,
                "offload": where,
                "bound_s": bounds_s,
                "modes": modes,
                "gaps": gaps,
            }
        )
    print(json.dumps({"model": MODEL, "rows": rows, "draws": arguments.draws, "table": records}))


if __name__ == "__main__":
    main()
