"""A job of this runner in a benchmark: its rows, and the seconds that it took."""

from __future__ import annotations

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
