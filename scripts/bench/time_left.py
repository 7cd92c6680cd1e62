"""How well a run knows its time left: the error of what the progress line shows, by how much of the job is done.

    python scripts/bench/time_left.py JOB.yaml ... [--set KEY=VALUE]

Errors are shares of the whole run, medians over the steps of each tenth of it. The last line is one JSON object: of
each job the tenths, and the median over all steps after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from vasuki.base.job_file import load_job
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.planner import TimeLeft
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job

TENTHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="JOB.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job")
    options = parser.parse_args()
    report = {Path(job).stem: _errors(job, tuple(options.set)) for job in options.jobs}
    for job, errors in report.items():
        print(job, " ".join(f"{error:.0%}" for error in errors["by_tenth"]))
    print(json.dumps(report))


def _errors(job: str, overrides: tuple[str, ...]) -> dict[str, list[float]]:
    seen: list[tuple[float, float]] = []  # (when, seconds left as shown)
    record = TimeLeft.record

    def watched(
        self: TimeLeft,
        now_s: float,
        batch: Batch,
        result: StepResult,
        scheduler: Scheduler,
        finished: list[Sequence],
    ) -> None:
        record(self, now_s, batch, result, scheduler, finished)
        seen.append((time.perf_counter(), self.left_s))

    TimeLeft.record = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            manifest = run_job(
                load_job(job, (*overrides, f"output.path={folder}/out")), RunOptions(quiet=True)
            ).manifest
    finally:
        TimeLeft.record = record  # type: ignore[method-assign]
    ended_s, total_s = seen[-1][0], manifest.timings.generate_s
    tenths: list[list[float]] = [[] for _ in range(TENTHS)]
    for now_s, left_s in seen:
        done = 1 - (ended_s - now_s) / total_s
        tenths[min(TENTHS - 1, max(0, int(done * TENTHS)))].append(abs(left_s - (ended_s - now_s)) / total_s)
    later = [error for tenth in tenths[1:] for error in tenth]
    return {
        "by_tenth": [round(statistics.median(tenth), 4) if tenth else 0.0 for tenth in tenths],
        "median_after_a_tenth": [round(statistics.median(later), 4) if later else 0.0],
    }


if __name__ == "__main__":
    main()
