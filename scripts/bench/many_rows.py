"""What a run holds on the host however many rows it has: memory, threads and open files of `vasuki run`, over time.

    python scripts/bench/many_rows.py --rows 1000000 [--tokens 1] [--seqs 1024]

All of a run is real but its steps, which compute nothing and return a token for each row; the shipped model lends its
tokenizer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from vasuki.base.job_file import load_job
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.settings import EngineSettings

MODEL = Path(__file__).parents[2] / "models" / "dates"
SAMPLES = 20  # of the memory, over a run


class IdleExecutor:
    """An executor that computes nothing, and looks now and then what the process holds."""

    steps_ahead = 0
    settings: EngineSettings  # as a run is told

    def __init__(self, every_rows: int) -> None:
        self._every_rows = every_rows
        self._rows = self.steps = 0
        self._ended_s = time.perf_counter()
        self.held: list[dict[str, int]] = []

    def launch(self, batch: Batch) -> StepResult:
        before_s, self._ended_s = self._ended_s, time.perf_counter()
        self.steps += 1
        self._rows += sum(chunk.samples for chunk in batch.prefills)
        if self._rows >= self._every_rows * len(self.held):
            self.held.append({"rows": self._rows, "steps": self.steps} | held_now())
            print(*(f"{name} {value:,}" for name, value in self.held[-1].items()), flush=True)
        num = batch.num_samples
        return StepResult([5] * num, [False] * num, elapsed_s=self._ended_s - before_s)


def held_now() -> dict[str, int]:
    """What this process holds: memory that is resident, threads, and open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def write_job(folder: Path, rows: int, tokens: int, seqs: int) -> Path:
    """A job over a number of generated rows."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "in.parquet", schema) as writer:
        for start in range(0, rows, 100_000):
            ids = range(start, min(rows, start + 100_000))
            writer.write_table(pa.table({"id": ids, "text": [f"row {row}" for row in ids]}))
    tree: dict[str, Any] = {
        "model": {"path": str(MODEL)},
        "input": {"path": str(folder / "in.parquet"), "id": "id", "prompt": "{text}"},
        "output": {"path": str(folder / "out")},
        "sampling": {"max_tokens": tokens, "ignore_eos": True},
        "engine": {"max_num_seqs": seqs, "chunk_tokens": 16 * seqs},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def measure(rows: int, tokens: int, seqs: int) -> dict[str, Any]:
    """Run a number of rows. Returns what the process held before, while, and after."""
    from vasuki.hf import ragged_executor
    from vasuki.machines.here.measured import MEASURE_VARIABLE
    from vasuki.runs.options import RunOptions
    from vasuki.runs.run import run_job

    executor = IdleExecutor(max(1, rows // SAMPLES))

    def build(loaded: Any, settings: EngineSettings, *_: Any, **__: Any) -> Any:
        executor.settings = settings
        return executor

    ragged_executor.build_executor = build
    os.environ[MEASURE_VARIABLE] = "off"  # of a machine whose steps take no time
    with tempfile.TemporaryDirectory() as folder:
        job = load_job(str(write_job(Path(folder), rows, tokens, seqs)))
        before = held_now()
        manifest = run_job(job, RunOptions(quiet=True)).manifest
        return {
            "rows": manifest.rows.succeeded,
            "steps": executor.steps,
            "run_s": round(manifest.timings.makespan_s, 1),
            "before": before,
            "while": executor.held,
            "after": held_now(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the generated input")
    parser.add_argument("--tokens", type=int, default=1, help="of each answer")
    parser.add_argument("--seqs", type=int, default=1024, help="rows that run side by side")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rows, arguments.tokens, arguments.seqs)))


if __name__ == "__main__":
    main()
