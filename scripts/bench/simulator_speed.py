"""What simulating a job takes: processor time and memory of `vasuki simulate`, a Markdown table.

    python scripts/bench/simulator_speed.py --data DIR [--rows 100000] [--policies vasuki sarathi ...] [--only NAME ...]

DIR holds `arxiv_summarization_lengths.csv` (summaries) and `azure_conv_arrivals.csv` (chats), Vidur's public traces,
whose rows are repeated as often as it takes; short rows have 10 to 99 prompt and 2 to 63 output tokens. Every cell is a
process of its own, planning included. Processor time, because others may share the machine. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.engine.policy import POLICIES
from vasuki.planner.lengths import OUTPUT_COLUMN, PROMPT_COLUMN, read_lengths

JOBS = {  # name -> (lengths, options)
    "summaries, A10": ("summaries", "--gpu a10"),
    "summaries streamed, A10": ("summaries", "--gpu a10 --set kv.offload=stream"),
    "summaries, Mistral-7B, A10": ("summaries", "--gpu a10 --set model.shape=mistral-7b"),
    "chats, H200": ("chats", "--gpu h200"),
    "short rows, A10": ("short", "--gpu a10"),
    "summaries, 4 A100 as replicas": ("summaries", "--gpu a100 --dp 4"),
    "summaries, 2 A100 as stages": ("summaries", "--gpu a100 --pp 2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=JOBS, metavar="NAME", help="some of the jobs")
    options = parser.parse_args()
    print("| job | " + " | ".join(options.policies) + " |")
    print("|---" * (len(options.policies) + 1) + "|")
    report = []
    with tempfile.TemporaryDirectory() as folder:
        for job in options.only:
            lengths, arguments = JOBS[job]
            table = Path(folder) / f"{lengths}.csv"
            if not table.exists():
                _write(table, *_rows(lengths, options.rows, options.data))
            cells = []
            for policy in options.policies:
                seconds, peak_mb = _simulate(table, [*arguments.split(), "--policy", policy])
                cells.append(f"{seconds:.0f} s, {peak_mb:.0f} MB")
                report.append({"job": job, "policy": policy, "cpu_s": round(seconds, 1), "peak_mb": round(peak_mb)})
            print(f"| {job} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"rows": options.rows, "runs": report}))


def _rows(name: str, count: int, data: Path) -> tuple[Ints, Ints]:
    """`[count]` prompt and output tokens."""
    if name == "short":
        rng = np.random.default_rng(0)
        return rng.integers(10, 100, count), rng.integers(2, 64, count)
    trace = read_lengths(
        data / {"summaries": "arxiv_summarization_lengths.csv", "chats": "azure_conv_arrivals.csv"}[name]
    )
    chosen = np.arange(count) % len(trace)
    return trace.prompt_tokens[chosen], trace.output_tokens[chosen]


def _write(path: Path, prompts: Ints, outputs: Ints) -> None:
    rows = "\n".join(f"{prompt},{output}" for prompt, output in zip(prompts, outputs, strict=True))
    path.write_text(f"{PROMPT_COLUMN},{OUTPUT_COLUMN}\n{rows}\n")


def _simulate(table: Path, arguments: list[str]) -> tuple[float, float]:
    """Processor seconds and most memory in MB of one process."""
    command = [sys.executable, "-m", "vasuki", "simulate", str(table), "--set", "model.shape=llama-3-8b", *arguments]
    process = subprocess.Popen(
        [*command, "--quiet"], stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
