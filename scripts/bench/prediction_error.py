"""How far predicted makespans are from measured ones on this machine: profile it, run three jobs, compare.

    python scripts/bench/prediction_error.py --model models/dates [--rows 64] [--repeats 3] [--profile FILE] [--quick]

    summaries      long prompts, short outputs
    translations   outputs a little longer than prompts
    mixed          one long prompt, one long output and two short rows in turn
    512            a number: prompts of that many tokens and 16 output tokens; doubled again and again (`--jobs 512 1024
                   2048 4096`) such jobs show what attention costs over long contexts

Lengths are log-normal, scaled down where the model's context is short; every row generates exactly as many tokens as
the plan was told. The profile is measured first, with this model's matrices, unless one is given. What is compared is
the time from the plan to the last row: loading is not predicted. Measure on a machine with nothing else to do.

A shared machine is now faster, now slower. So a fixed product is timed before and after the profile and every run, and
each error comes with what it would be if the machine had run that product throughout as fast as during the profile:
that is what the model is off by, while the error itself is what a user meets. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from vasuki.base.errors import VasukiError
from vasuki.base.job_file import load_job
from vasuki.hf.profiler import profile_machine
from vasuki.machines.profile_writing import write_profile
from vasuki.models.config_json import shape_from_config
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job

FULL_CONTEXT = 2048  # tokens that the lengths below are made for
JOBS = ("summaries", "translations", "mixed")
REFERENCE_S = 1.0  # for which the fixed product is repeated
Ints = npt.NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--rows", type=int, default=64, help="of each job")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each job")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), type=_job, help=f"of {', '.join(JOBS)}, or a number")
    parser.add_argument("--profile", type=Path, help="use this one instead of measuring")
    parser.add_argument("--quick", action="store_true", help="measure the profile in seconds, and coarsely")
    options = parser.parse_args()
    try:
        print(json.dumps(_compare(options)))
    except VasukiError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


def _job(name: str) -> str:
    if name not in JOBS and not (name.isdecimal() and int(name)):
        raise argparse.ArgumentTypeError(f"'{name}' is neither a number nor one of {', '.join(JOBS)}")
    return name


def _compare(options: argparse.Namespace) -> dict[str, Any]:
    shape = shape_from_config(options.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile, paced_s = options.profile, None
        if profile is None:
            before_s = _reference_s()
            measured = profile_machine(folder=Path(options.model), quick=options.quick, progress=True)
            paced_s = (before_s + _reference_s()) / 2
            profile = folder / f"{measured.name}.yaml"
            write_profile(measured, profile)
        report: dict[str, list[dict[str, float]]] = {job: [] for job in options.jobs}
        for repeat in range(options.repeats):
            for job, runs in report.items():
                table = folder / f"{job}.parquet"
                prompts, outputs = _lengths(job, options.rows, shape.max_context_tokens)
                _write(table, prompts, outputs, shape.vocab_size)
                runs.append(_compared(options.model, table, profile, folder / f"{job}-{repeat}", paced_s))
                print(f"{job}: {len(prompts)} rows, {_in_words(runs[-1])}", flush=True)
    return report


def _compared(model: str, table: Path, profile: Path, output: Path, paced_s: float | None) -> dict[str, float]:
    """One run against its prediction; `paced_s`: seconds of the fixed product when the profile was measured."""
    before_s = _reference_s()
    predicted_s, measured_s = _run(model, table, profile, output)
    reference_s = (before_s + _reference_s()) / 2
    run = {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "reference_ms": reference_s * 1e3,
    }
    if paced_s is not None:
        run["error_at_pace"] = predicted_s * reference_s / paced_s / measured_s - 1
    return {key: round(value, 4) for key, value in run.items()}


def _in_words(run: dict[str, float]) -> str:
    text = f"predicted {run['predicted_s']:.2f} s, measured {run['measured_s']:.2f} s, {run['error']:+.1%}"
    return text + (f" ({run['error_at_pace']:+.1%} at the profile's pace)" if "error_at_pace" in run else "")


def _reference_s() -> float:
    """Median seconds of a product that reads as much memory as it computes, as steps of some decodes do."""
    import torch  # after vasuki.hf, which says how its threads wait

    rows, weight = torch.ones(16, 4096), torch.ones(4096, 4096)
    timings = []
    until_s = time.perf_counter() + REFERENCE_S
    while time.perf_counter() < until_s:
        started_s = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        timings.append(time.perf_counter() - started_s)
    return statistics.median(timings)


def _lengths(job: str, rows: int, context: int) -> tuple[Ints, Ints]:
    """`[rows]` prompt and output tokens."""
    if job.isdecimal():
        return np.full(rows, int(job)), np.full(rows, 16)
    rng = np.random.default_rng(len(job))
    scale = min(1.0, context / FULL_CONTEXT)

    def draw(count: int, median: float, sigma: float, most: int) -> Ints:
        tokens = np.minimum(rng.lognormal(np.log(median), sigma, count), most) * scale
        return np.maximum(4, tokens).astype(np.int64)

    if job == "summaries":
        return draw(rows, 350, 0.7, 1500), draw(rows, 40, 0.6, 128)
    if job == "translations":
        return draw(rows, 110, 0.6, 400), draw(rows, 140, 0.6, 400)
    quarter = -(-rows // 4)
    prompts = np.concatenate([draw(quarter, 900, 0.3, 1500), draw(3 * quarter, 60, 0.5, 200)])
    outputs = np.concatenate([draw(quarter, 24, 0.4, 64), draw(quarter, 220, 0.4, 400), draw(2 * quarter, 24, 0.4, 64)])
    order = rng.permutation(len(prompts))[:rows]
    return prompts[order], outputs[order]


def _write(table: Path, prompts: Ints, outputs: Ints, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, vocab_size, count).tolist() for count in prompts]
    columns = {"id": list(range(len(prompts))), "prompt_token_ids": tokens, "max_tokens": outputs.tolist()}
    pq.write_table(pa.table(columns), table)


def _run(model: str, table: Path, profile: Path, output: Path) -> tuple[float, float]:
    """Predicted and measured seconds between the plan and the last row."""
    job = {
        "model": {"path": model},
        "input": {"path": str(table), "id": "id", "prompt_token_ids": "prompt_token_ids"},
        "output": {"path": str(output)},
        "sampling": {"max_tokens": {"column": "max_tokens"}, "ignore_eos": True},
        "plan": {"gpu": str(profile), "output_length": "max"},
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(job))
    manifest = run_job(load_job(path), RunOptions(quiet=True)).manifest
    timings, predicted_s = manifest.timings, manifest.predicted.makespan_s
    assert predicted_s is not None, "runs are planned"
    return predicted_s, timings.generate_s


if __name__ == "__main__":
    main()
