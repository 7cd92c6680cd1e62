"""Whether twice the rows take twice the time and no more memory.

    python scripts/bench/scaling.py [--job jobs/quickstart.yaml] [--rows 1000 10000 100000] [--repeats 1]

The job's rows are repeated as often as it takes, under new ids, and every run is a process of its own. Start-up is the
time from the start of the command to its first step, less loading the model. `times` is how many times as long a run
took as the run of the size before, in the same round, because machines change speed between rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("jobs/quickstart.yaml"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all sizes; medians count")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {rows: _write_job(options.job, rows, folder / str(rows)) for rows in options.rows}
        runs: dict[int, list[dict[str, Any]]] = {rows: [] for rows in jobs}
        for repeat in range(options.repeats):
            for rows, job in jobs.items():
                runs[rows].append(_run(job, folder / f"out-{rows}-{repeat}"))
    print(f"{'rows':>9} {'generate, s':>12} {'ms a row':>9} {'times':>6} {'start-up, s':>12} {'peak, MiB':>10}")
    report = []
    before: list[dict[str, Any]] = []
    for rows, results in runs.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        times = [own["generate_s"] / other["generate_s"] for own, other in zip(results, before, strict=False)]
        before = results
        report.append({"rows": rows, **medians, "times": times})
        print(
            f"{rows:>9,} {medians['generate_s']:>12.2f} {medians['generate_s'] / rows * 1e3:>9.3f} "
            f"{format(statistics.median(times), '.3f') if times else '':>6} {medians['startup_s']:>12.2f} "
            f"{medians['peak_mib']:>10.0f}"
        )
    print(json.dumps(report))


def _write_job(job: Path, rows: int, folder: Path) -> Path:
    """The job over its own rows, repeated."""
    folder.mkdir()
    tree = yaml.safe_load(job.read_text())
    table = pq.read_table(tree["input"]["path"])
    repeated = pa.concat_tables([table] * -(-rows // len(table))).slice(0, rows)
    place = repeated.schema.get_field_index(tree["input"]["id"])
    repeated = repeated.set_column(place, tree["input"]["id"], pa.array(range(rows)))
    tree["input"]["path"] = str(folder / "rows.parquet")
    pq.write_table(repeated, tree["input"]["path"])
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _run(job: Path, output: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "vasuki", "run", str(job), "--quiet", "--set", f"output.path={output}"]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    timings = json.loads((output / "manifest.json").read_text())["timings"]
    return {
        "generate_s": timings["generate_s"],
        "startup_s": timings["makespan_s"] - timings["generate_s"] - timings["load_s"],
        "peak_mib": usage.ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
