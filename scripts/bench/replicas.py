"""One job on two replicas against two shards side by side, a core each.

    python scripts/bench/replicas.py [--rows 400] [--long 160] [--short 16] [--rounds 3]

Every other row is long, so that one shard has all of those: what replicas gain by that is the mean of the shards' times
over the longer one. With `--short` as long as `--long` there is nothing to gain, and the ratio is what replicas cost.
Runs alternate; medians count. The last line is JSON.
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

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--long", type=int, default=160, help="output tokens of every other row")
    parser.add_argument("--short", type=int, default=16, help="of the rows between")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        job = _write_job(Path(name), options.rows, options.long, options.short)
        rounds = [_round(job) for _ in range(options.rounds)]
    ratio, predicted = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"replicas take {ratio:.3f} of the shards' time; by the skew it is {predicted:.3f}")
    print(json.dumps({"rounds": rounds, "ratio": ratio, "predicted": predicted}))


def _write_job(folder: Path, rows: int, long: int, short: int) -> Path:
    limits = [short if row % 2 else long for row in range(rows)]
    texts = [f"{1 + row % 28} May {1900 + row % 100}" for row in range(rows)]
    pq.write_table(pa.table({"text": texts, "limit": limits}), folder / "in.parquet")
    job = {
        "model": {"path": str(ROOT / "models" / "dates")},
        "input": {"path": str(folder / "in.parquet"), "prompt": "{text}"},
        "output": {"path": "-"},
        "sampling": {"max_tokens": {"column": "limit"}, "ignore_eos": True},
        "engine": {"device": "cpu"},
        "kv": {"device_memory": "256MiB"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def _round(job: Path) -> tuple[float, float]:
    """Time of the replicas over that of the slower shard, and what the skew predicts."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    shards = [_start(job, f"shards-{index}", {core}, "--shard", f"{index}/2") for index, core in enumerate(cores)]
    apart_s = [_generate_s(job, run, f"shards-{index}") for index, run in enumerate(shards)]
    together_s = _generate_s(job, _start(job, "replicas", set(cores), "--replicas", "2"), "replicas")
    print(f"shards {apart_s[0]:.2f} s and {apart_s[1]:.2f} s, replicas {together_s:.2f} s", flush=True)
    return together_s / max(apart_s), statistics.mean(apart_s) / max(apart_s)


def _start(job: Path, name: str, cores: set[int], *options: str) -> subprocess.Popen[bytes]:
    output = ["--set", f"output.path={job.parent / name}", "--fresh", "--quiet"]
    return subprocess.Popen(
        [sys.executable, "-m", "vasuki", "run", str(job), *output, *options],
        env=os.environ | {"OMP_NUM_THREADS": str(len(cores)), "VASUKI_MEASURE": "off"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def _generate_s(job: Path, run: subprocess.Popen[bytes], name: str) -> float:
    if run.wait():
        raise SystemExit(f"{name} failed")
    manifest = min((job.parent / name).glob("manifest*.json"))  # of a shard its own, else the only one
    return float(json.loads(manifest.read_text())["timings"]["generate_s"])


if __name__ == "__main__":
    main()
