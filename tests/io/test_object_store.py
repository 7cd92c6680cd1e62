"""Whole jobs over an S3 server process that freezes, loses connections and cuts uploads. `make test-s3` runs these."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from object_store import BUCKET, KEY, SECRET, ObjectStore, table_bytes
from tiny_job import WORDS, job_tree

SERVER = os.environ.get("VASUKI_MOTO", "")
NUM_ROWS = 60

pytestmark = pytest.mark.skipif(not SERVER, reason="make test-s3 runs these")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(Path(SERVER), tmp_path / "server.log")
    yield store
    store.close()


@pytest.fixture
def job(store: ObjectStore, tmp_path: Path, tiny_model: Path) -> Path:
    """A job from the store into the store."""
    texts = [" ".join(WORDS[row % 5 : row % 5 + 1 + row * 7 % 13]) for row in range(NUM_ROWS)]
    store.put("in/rows.parquet", table_bytes(pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts})))
    tree = job_tree(tiny_model, Path("rows"), Path("out"))
    tree["input"]["path"] = f"s3://{BUCKET}/in/*.parquet"
    tree["output"]["path"] = f"s3://{BUCKET}/out"
    tree["model"]["dtype"] = "float32"
    tree["sampling"]["max_tokens"] = 30
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


# Parts are committed often, and a lease is renewed and lapses sooner than with people's jobs.
PROGRAM = """
import sys
from vasuki.base import commits
from vasuki.io.output import lease
commits.COMMIT_S, lease.RENEW_S, lease.LAPSE_S, lease.SETTLE_S = 0.05, 0.5, 2.0, 0.2
if sys.argv[-1] == "--at-a-word":
    sys.argv.pop()
    import vasuki.runs.run, torch, transformers
    print("ready", flush=True)
    sys.stdin.readline()
import vasuki.__main__
"""


def start(store: ObjectStore, job: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "run", str(job), *options]
    return subprocess.Popen(
        command,
        env=store.environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(store: ObjectStore, job: Path, *options: str) -> tuple[int, str]:
    """How a run ended, and what it said."""
    with start(store, job, *options) as process:
        words, _ = process.communicate(timeout=900)
    return process.returncode, words


def answers(store: ObjectStore) -> dict[str, list[int]]:
    """What the rows got. Fails if one got two answers."""
    rows = [
        row
        for name in store.names("out")
        if name.rpartition("/")[2].startswith("part-")
        for row in pq.read_table(io.BytesIO(store.get(name))).to_pylist()
    ]
    found = {row["id"]: row["output_token_ids"] for row in rows}
    assert len(found) == len(rows), "a row has two answers"
    return found


def wait_for_parts(store: ObjectStore, count: int = 1) -> None:
    until = time.monotonic() + 600
    while sum("part-" in name for name in store.names("out")) < count:
        assert time.monotonic() < until, "no part came"
        time.sleep(0.02)


@pytest.fixture
def expected(store: ObjectStore, job: Path) -> dict[str, list[int]]:
    """The answers of a run that nothing disturbed."""
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    found = answers(store)
    assert len(found) == NUM_ROWS
    store.files.delete_dir_contents(f"{BUCKET}/out", missing_dir_ok=True)
    return found


def test_a_killed_run_goes_on(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    with start(store, job, "--quiet") as process:
        wait_for_parts(store)
        process.send_signal(signal.SIGKILL)
    assert not any(name.endswith("_SUCCESS") for name in store.names("out"))
    code, words = run(store, job)
    assert code == 0, words
    assert answers(store) == expected


def test_of_two_runs_one_ends(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    runs = [start(store, job, "--quiet", "--at-a-word") for _ in range(2)]
    for each in runs:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in runs:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    words = [run.communicate(timeout=900)[0] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 5], words
    assert "in use by process" in "".join(words)
    assert answers(store) == expected


def test_a_server_that_freezes_for_a_while(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    process = start(store, job)
    wait_for_parts(store)
    store.freeze()
    time.sleep(5)
    store.thaw()
    words, _ = process.communicate(timeout=900)
    assert process.returncode == 0, words
    assert answers(store) == expected


def test_a_server_that_goes_and_comes_back(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    process = start(store, job)
    wait_for_parts(store)
    store.proxy.lost_share = 1.0
    words, _ = process.communicate(timeout=900)
    assert process.returncode == 75, words
    last = words.strip().splitlines()[-1]
    assert last.startswith("vasuki: cannot write s3://bucket/out"), words
    assert "rows finished before it are kept" in last
    store.proxy.lost_share = 0.0
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    assert answers(store) == expected


def test_requests_that_are_lost(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.lost_share = 0.1
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    assert store.proxy.lost > 0
    assert answers(store) == expected


def test_answers_that_are_slow(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.delay_s = 0.1
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    assert answers(store) == expected


def test_uploads_that_end_half_way(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.cut_uploads = 2
    code, words = run(store, job, "--quiet")
    assert code in (0, 75), words
    assert store.proxy.cut == 2
    if code:
        code, words = run(store, job, "--quiet")
        assert code == 0, words
    assert answers(store) == expected


def test_keys_in_urls_are_nowhere(store: ObjectStore, job: Path) -> None:
    tree = yaml.safe_load(job.read_text())
    options = f"?endpoint_override=127.0.0.1:{store.proxy.port}&scheme=http&region=us-east-1"
    for section, name in (("input", "in/rows.parquet"), ("output", "out")):
        tree[section]["path"] = f"s3://{KEY}:{SECRET}@{BUCKET}/{name}{options}"
    job.write_text(yaml.safe_dump(tree))
    said = [run(store, job, "--json"), run(store, job), run(store, job, "--set", "sampling.max_tokens=3")]
    assert [code for code, _ in said] == [0, 0, 5]
    written = [store.get(name) for name in store.names("out")]
    for text in [*(words for _, words in said), *(data.decode(errors="replace") for data in written)]:
        assert KEY not in text
        assert SECRET not in text
    assert json.loads(store.get("out/manifest.json"))["job"]["output"]["path"].startswith(f"s3://{BUCKET}/out")


def test_a_missing_bucket_is_one_line(store: ObjectStore, job: Path) -> None:
    tree = yaml.safe_load(job.read_text())
    tree["input"]["path"] = "s3://no-such-bucket/in/*.parquet"
    job.write_text(yaml.safe_dump(tree))
    code, words = run(store, job)
    assert code == 4, words
    assert words.startswith("vasuki: input.path s3://no-such-bucket/in/*.parquet does not exist")
