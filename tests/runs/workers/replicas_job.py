"""A job for several replicas, and what is looked at while it runs; here and in a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tiny_job import WORDS, job_tree

from vasuki.machines.here.split import Share
from vasuki.runs.options import RunOptions

NUM_ROWS = 60
QUIET = RunOptions(quiet=True)
HERE = tuple(os.sched_getaffinity(0))
SHARES = [Share(processors=HERE[:1], threads=1), Share(processors=HERE[-1:], threads=1)]


def job_into(folder: Path, model: Path) -> Path:
    """A job with short rows and long ones, into an output folder of its own."""
    folder.mkdir()
    texts = [" ".join(WORDS[row % 5 : row % 5 + 1 + row * 7 % 13]) for row in range(NUM_ROWS)]
    limits = [70 if row % 7 == 0 else 3 + row % 11 for row in range(NUM_ROWS)]
    within = [0.0 if row == 5 else 1e6 if row == 9 else None for row in range(NUM_ROWS)]
    ids = [f"r{row}" for row in range(NUM_ROWS)]
    table = pa.table({"id": ids, "text": texts, "limit": limits, "within": within})
    pq.write_table(table, folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / "out")
    tree["sampling"] = {"max_tokens": {"column": "limit"}, "n": 2, "temperature": 0.5}
    tree["model"]["dtype"] = "float32"
    tree["input"]["deadline"] = "within"
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def answers(job: Path) -> pa.Table:
    parts = sorted((job.parent / "out").glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts]).sort_by(
        [("id", "ascending"), ("sample", "ascending")]
    )


def count_parts(job: Path) -> int:
    return len(list((job.parent / "out").glob("part-*.parquet")))


def is_stopped_amid_rows(driver: subprocess.Popen[bytes], job: Path) -> bool:
    """Stop the driver. Whether some rows are answered by then, and the journal has tokens of others."""
    driver.send_signal(signal.SIGSTOP)
    journal = job.parent / "out" / ".vasuki-journal.jsonl"
    if not (journal.exists() and count_parts(job)):
        return False
    begun = {f"r{json.loads(line.split(b' ', 1)[1])['row']}" for line in journal.read_bytes().splitlines()[1:]}
    return bool(begun - set(answers(job)["id"].to_pylist()))


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
