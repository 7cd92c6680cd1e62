"""A job of this runner in a benchmark: its rows, and the seconds that it took; and real texts to make one of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vasuki.base.config import JobConfig
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job


def answers(config: JobConfig) -> list[dict[str, Any]]:
    """Run a job whose ids are numbers. Returns its rows, by these."""
    run_job(config, RunOptions(quiet=True))
    rows = [row for part in Path(config.output.path).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: int(row["id"]))


def seconds_taken(config: JobConfig) -> float:
    """What a job took once its model was loaded. Prints what was foreseen beside it."""
    manifest = json.loads((Path(config.output.path) / "manifest.json").read_text())
    foreseen_s, taken_s = manifest["predicted"]["makespan_s"], manifest["timings"]["generate_s"]
    print(f"foreseen {foreseen_s:.1f} s, taken {taken_s:.1f} s", flush=True)
    return float(taken_s)


def options_of(description: str | None, limit: int) -> argparse.ArgumentParser:
    """A parser for a benchmark of a model on the first texts of some rows, which `texts_of` reads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--limit", type=int, default=limit)
    parser.add_argument("--characters", type=int, default=300)
    return parser


def texts_of(options: argparse.Namespace) -> list[str]:
    """The column `text` of these rows, as far as the options go."""
    lines = Path(options.rows).read_text().splitlines()[: options.limit]
    return [json.loads(line)["text"][: options.characters] for line in lines]
