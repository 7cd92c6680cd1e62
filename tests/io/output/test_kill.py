"""kill -9 at random points, run again: the same rows, once each."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_ROWS = 600

RUN = """
import sys, time
sys.path.insert(0, sys.argv[1])
import rooms
from vasuki.base.job_file import load_job
from vasuki.io.selection import Shard

finished = rooms.finished
def slowly(*arguments):
    time.sleep(0.0005)
    return finished(*arguments)
rooms.finished = slowly
print("started", flush=True)
rooms.run(load_job(sys.argv[2]), Shard.parse(sys.argv[3]), step_s=0.4)
"""


IDS = [f"id-{i}" for i in range(NUM_ROWS)]
TEXTS = ["x" * (i % 40) for i in range(NUM_ROWS)]


def command(tmp_path: Path, shard: str = "0/1") -> list[str]:
    """How to run a job over `NUM_ROWS` rows in another process."""
    pq.write_table(pa.table({"id": IDS, "text": TEXTS}), tmp_path / "in.parquet", row_group_size=100)
    (tmp_path / "job.yaml").write_text(
        f"model: {{path: m}}\ninput: {{path: {tmp_path}/in.parquet, id: id, prompt: '{{text}}', chat: false}}\n"
        f"output: {{path: {tmp_path}/out, columns: [text]}}\n"
    )
    return [sys.executable, "-c", RUN, str(Path(__file__).parents[1]), str(tmp_path / "job.yaml"), shard]


def check_rows(tmp_path: Path) -> None:
    """Every row is in the output, once, and right."""
    parts = [pq.read_table(part) for part in (tmp_path / "out").glob("part-*.parquet")]
    rows = pa.concat_tables(parts).sort_by("id").to_pylist()
    expected = [(row_id, text, text.upper()) for row_id, text in sorted(zip(IDS, TEXTS, strict=True))]
    assert [(row["id"], row["text"], row["output"]) for row in rows] == expected
    assert all((row["error"] == "prompt is empty") == (not row["text"]) for row in rows)


@pytest.mark.parametrize("seed", [11, 12])
def test_every_row_once_whenever_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    runs = kills = 0
    while not (tmp_path / "out" / "_SUCCESS").exists():
        runs += 1
        assert runs < 30
        with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if kills < 4:
                time.sleep(rng.uniform(0.05, 0.35))
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
        seen = [
            row_id
            for part in (tmp_path / "out").glob("part-*.parquet")
            for row_id in pq.read_table(part)["id"].to_pylist()
        ]
        assert len(seen) == len(set(seen)), "after each kill, what is there is whole and there once"
    assert kills >= 2
    check_rows(tmp_path)


def test_shards_at_the_same_time(tmp_path: Path) -> None:
    commands = [command(tmp_path, f"{i}/3") for i in range(3)]
    shards = [subprocess.Popen(shard, stdout=subprocess.DEVNULL) for shard in commands]
    assert [process.wait() for process in shards] == [0, 0, 0]
    assert (tmp_path / "out" / "_SUCCESS").exists()
    check_rows(tmp_path)
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["rows"]
    assert rows == {"total": NUM_ROWS, "succeeded": NUM_ROWS - TEXTS.count(""), "failed": TEXTS.count("")}
