"""What plans could still save at most: their distance from what no schedule beats under the cost model.

Two workloads on two cards for Llama-3-8B, with and without offload; and 64 translations of a model with 135 million
parameters on the generic CPU. Every figure is the mean over draws of the rows:

    known        vasuki, told how long outputs will be
    learned      vasuki, which only knows that a row has at most 4,096 tokens, and learns the rest
    first come   the same with rows in the order in which they come
    sarathi, vllm, orca, static-sorted   these policies, who know as little

    python scripts/reproduce/bound_table.py --lengths arxiv_summarization_lengths.csv --write

writes docs/data/bounds.json and the table in docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from job_lengths import books, summaries
from reproduce_table import lines as table_of

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import Simulated, simulate_plan

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "bounds.json", ROOT / "docs" / "planner.md"
ROWS, DRAWS = 1000, 5  # of the page
SMALL = shape_from_config(
    dict(model_type="llama", num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
         num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True), "135M"
)  # fmt: skip
LEARNED = PlanConfig()
FIRST_COME = PlanConfig(solver="fifo")
POLICIES = ("sarathi", "vllm", "orca", "static-sorted")
ENTRIES = {
    "known": ("vasuki", LEARNED),
    "learned": ("vasuki", LEARNED),
    "first come": ("vasuki", FIRST_COME),
    **{policy: (policy, LEARNED) for policy in POLICIES},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the table."""

    rows: str
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


TRANSLATIONS = Setting("64 short translations", "cpu", "none", SMALL, lambda seed: small_translations(64, seed))


def settings(trace: Path, rows: int) -> list[Setting]:
    """All lines of the table."""
    shape = named_shape("llama-3-8b")
    jobs: dict[str, Callable[[int], Lengths]] = {
        "summaries": lambda seed: summaries(trace, rows, seed),
        "translations": lambda seed: books(rows, seed),
    }
    large = [
        Setting(name, card, offload, shape, draw)
        for name, draw in jobs.items()
        for card in ("a10", "a40")
        for offload in ("none", "auto")
    ]
    return [*large, TRANSLATIONS]


def run(setting: Setting, lengths: Lengths, policy: str, plan_config: PlanConfig) -> Simulated:
    """Plan and simulate one job."""
    profile = find_profile(setting.card)
    engine, kv = EngineConfig(policy=policy), KVConfig(offload=setting.offload)
    plan = make_plan(lengths, setting.shape, profile, plan=plan_config, engine=engine, kv=kv)
    return simulate_plan(plan, lengths, setting.shape, profile, plan_config=plan_config)


def measure(setting: Setting, draws: int) -> dict[str, Any]:
    """A line as data, with the mean gap of each entry."""
    gaps: dict[str, list[float]] = {name: [] for name in ENTRIES}
    for seed in range(draws):
        lengths = setting.draw(seed)
        for name, (policy, plan_config) in ENTRIES.items():
            drawn = replace(lengths, known=name == "known")
            gaps[name].append(run(setting, drawn, policy, plan_config).plan.gap)
    offload = "any" if setting.offload == "auto" else "none"
    line = {"rows": setting.rows, "machine": setting.card.upper(), "offload": offload}
    return line | {name: round(float(np.mean(values)), 5) for name, values in gaps.items()}


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as Markdown."""
    entries = (f"`{name}`" if name in POLICIES else name for name in ENTRIES)
    return table_of(
        ("rows, machine", "offload", *entries),
        (
            (
                f"{line['rows']}, {line['machine']}",
                line["offload"],
                *(f"{line[name]:.1%}".replace("%", " %") for name in ENTRIES),
            )
            for line in lines
        ),
    )


def read() -> list[dict[str, Any]]:
    """The lines that are stored."""
    lines: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["gaps"]
    return lines


def data(lines: list[dict[str, Any]]) -> str:
    """docs/data/bounds.json with these lines."""
    gaps = ",\n  ".join(map(json.dumps, lines))
    return f'{{\n "draws": {DRAWS},\n "gaps": [\n  {gaps}\n ]\n}}\n'


def page(lines: list[dict[str, Any]]) -> str:
    """docs/planner.md with the table of these lines."""
    text, found = re.subn(
        r"^\| rows, machine \|.*?(?=\n\n|\n?\Z)",
        lambda _: table(lines),
        PAGE.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert found == 1, f"{PAGE.name} has one such table"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="a LENGTHS.csv for the summaries")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--write", action="store_true", help="into docs/, at full size")
    arguments = parser.parse_args()
    if arguments.write and (arguments.rows, arguments.draws) != (ROWS, DRAWS):
        parser.error(f"--write takes the {ROWS:,} rows and {DRAWS} draws of the page")
    lines = []
    for setting in settings(arguments.lengths, arguments.rows):
        lines.append(measure(setting, arguments.draws))
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines))
    if arguments.write:
        DATA.write_text(data(lines), encoding="utf-8")
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
