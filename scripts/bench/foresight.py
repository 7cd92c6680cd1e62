"""How far a machine that nobody has profiled is foreseen: runs of whole jobs against what they were planned to take.

    python scripts/bench/foresight.py JOB.yaml ... [--repeats 3] [--set KEY=VALUE] [--profiled]

Each repeat begins with an empty cache, so the first run of a model measures the machine, as a user's first run does;
the other jobs of the same repeat find what it measured. With `--profiled`, `vasuki profile` measures before the first
run. Jobs take turns. What is compared is the time from the plan to the last row, since loading is not predicted. Each
run says what the host of a virtual machine took away (`stolen_share`) and how busy other programs kept the processors
(`waiting`, the share of the last ten seconds in which somebody waited for one).

The last line is one JSON object: every run, each job's median error, and the median of those.
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

from vasuki.base.job_file import load_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="JOB.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job")
    parser.add_argument("--profiled", action="store_true", help="after `vasuki profile` of the first job's model")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {job: [] for job in options.jobs}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            environment = _unmeasured(folder)
            if options.profiled:
                _profile(options.jobs[0], folder)
            for job, its_runs in runs.items():
                its_runs.append(_run(job, options.set, folder / "out", environment))
                print(f"{Path(job).stem}: {_in_words(its_runs[-1])}", flush=True)
    medians = {job: statistics.median(abs(run["error"]) for run in its_runs) for job, its_runs in runs.items()}
    medians = {Path(job).stem: round(error, 4) for job, error in medians.items()}
    overall = round(statistics.median(medians.values()), 4)
    print(json.dumps({"runs": runs, "median_errors": medians, "median_error": overall}))


def _unmeasured(folder: Path) -> dict[str, str]:
    """The environment of a machine that was never measured; but kernels that are compiled stay so."""
    before = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    (folder / "vasuki").mkdir()
    for library in Path(before, "vasuki").glob("*.so"):
        (folder / "vasuki" / library.name).symlink_to(library)
    return {**os.environ, "VASUKI_PROFILES": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}


def _profile(job: str, folder: Path) -> None:
    output = folder / "this-machine.yaml"
    model = load_job(job).model.path
    subprocess.run([*_VASUKI, "profile", "--model", model, "--output", str(output)], check=True, capture_output=True)


_VASUKI = (sys.executable, "-m", "vasuki")


def _run(job: str, overrides: list[str], output: Path, environment: dict[str, str]) -> dict[str, Any]:
    settings = [text for each in (*overrides, f"output.path={output}") for text in ("--set", each)]
    command = [*_VASUKI, "run", job, "--fresh", "--quiet", "--json", *settings]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    manifest = json.loads(done.stdout)
    timings, predicted = manifest["timings"], manifest["predicted"]
    taken_s = timings["generate_s"]
    foreseen_s = predicted["makespan_s"]
    return {
        "foreseen_s": round(foreseen_s, 2),
        "taken_s": round(taken_s, 2),
        "error": round(foreseen_s / taken_s - 1, 4),
        "lower_bound_s": round(predicted["lower_bound_s"], 3),
        "source": predicted["source"],
        "stolen_share": round(manifest["device"]["stolen_share"], 3),
        "waiting": _waiting(),
    }


def _waiting() -> float:
    from vasuki.machines.here.pressure import cpu_pressure

    return round(cpu_pressure() / 100, 2)


def _in_words(run: dict[str, Any]) -> str:
    return (
        f"foreseen {run['foreseen_s']:.2f} s ({run['source']}), taken {run['taken_s']:.2f} s, {run['error']:+.1%}; "
        f"bound {run['lower_bound_s']:.2f} s, waiting {run['waiting']:.0%}, stolen {run['stolen_share']:.1%}"
    )


if __name__ == "__main__":
    main()
