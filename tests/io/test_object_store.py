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


def of_the_output(store: ObjectStore, command: str, *options: str) -> tuple[int, str]:
    """How a command on the output folder ended, and what it said."""
    line = [sys.executable, "-m", "vasuki", command, f"s3://{BUCKET}/out", *options]
    done = subprocess.run(line, env=store.environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def export(store: ObjectStore, file: Path, *options: str) -> tuple[int, str]:
    return of_the_output(store, "export", "--to", str(file), *options)


def parts(store: ObjectStore) -> list[str]:
    return [name for name in store.names("out") if name.rpartition("/")[2].startswith("part-")]


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
    rows = [row for name in parts(store) for row in pq.read_table(io.BytesIO(store.get(name))).to_pylist()]
    found = {row["id"]: row["output_token_ids"] for row in rows}
    assert len(found) == len(rows), "a row has two answers"
    return found


def wait_for_parts(store: ObjectStore, name: str = "part-") -> None:
    """Until there is an object of the output with this in its name."""
    until = time.monotonic() + 600
    while not any(name in there for there in store.names("out")):
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


def run_to_end(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    """Run once more, to the answers of a run that nothing disturbed."""
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    assert answers(store) == expected


def test_a_killed_run_goes_on(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    with start(store, job, "--quiet") as process:
        wait_for_parts(store)
        process.send_signal(signal.SIGKILL)
    assert not any(name.endswith("_SUCCESS") for name in store.names("out"))
    code, words = run(store, job)
    assert code == 0, words
    assert answers(store) == expected


def test_rows_are_verified_there(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    run_to_end(store, job, expected)
    code, words = of_the_output(store, "verify", "--all")
    assert (code, f"{NUM_ROWS} of {NUM_ROWS} rows are equal to the bit" in words) == (0, True), words
    name = parts(store)[0]
    part = bytearray(store.get(name))
    part[len(part) // 3] ^= 1
    store.put(name, bytes(part))
    code, words = of_the_output(store, "verify", "--all")
    assert code == 3, words


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
    run_to_end(store, job, expected)


def test_requests_that_are_lost(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.lost_share = 0.1
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    assert store.proxy.lost > 0
    assert answers(store) == expected


def test_answers_that_are_slow(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.delay_s = 0.1
    run_to_end(store, job, expected)


def test_uploads_that_end_half_way(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    store.proxy.cut_uploads = 2
    code, words = run(store, job, "--quiet")
    assert code in (0, 75), words
    assert store.proxy.cut == 2
    if code:
        code, words = run(store, job, "--quiet")
        assert code == 0, words
    assert answers(store) == expected


def test_an_input_that_is_overwritten_while_it_is_read(
    store: ObjectStore, job: Path, expected: dict[str, list[int]]
) -> None:
    """One of two objects, with as many rows of the same lengths, once both have been surveyed."""
    rows = pq.read_table(io.BytesIO(store.get("in/rows.parquet")))
    halves = {"in/a.parquet": rows.slice(0, 30), "in/b.parquet": rows.slice(30)}
    for name, half in halves.items():
        store.put(name, table_bytes(half))
    store.files.delete_file(f"{BUCKET}/in/rows.parquet")
    turned = halves["in/b.parquet"].set_column(1, "text", [[text[::-1] for text in rows["text"].to_pylist()[30:]]])
    process = start(store, job, "--quiet")
    wait_for_parts(store, ".vasuki-lease")  # which is taken after the survey, and before the model is loaded
    store.put("in/b.parquet", table_bytes(turned))
    words, _ = process.communicate(timeout=900)
    assert process.returncode == 4, words
    last = words.splitlines()[-1]
    assert last.startswith(f"vasuki: input changed while it was read: s3://{BUCKET}/in/b.parquet; all other rows are ")
    assert "the output lacks 30 rows until it is as it was" in last
    assert answers(store) == {name: answer for name, answer in expected.items() if int(name[1:]) < 30}
    store.put("in/b.parquet", table_bytes(halves["in/b.parquet"]))
    run_to_end(store, job, expected)


def test_parts_that_are_removed_meanwhile(
    store: ObjectStore, job: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    process = start(store, job, "--quiet")
    wait_for_parts(store)
    store.files.delete_file(f"{BUCKET}/{parts(store)[0]}")
    words, _ = process.communicate(timeout=900)
    assert process.returncode == 75, words
    there = answers(store)
    left = NUM_ROWS - len(there)
    assert f"s3://bucket/out lacks {left} row" in words.splitlines()[-1]
    assert not any(name.endswith("_SUCCESS") for name in store.names("out"))
    assert all(expected[name] == answer for name, answer in there.items())
    code, words = export(store, tmp_path / "all.jsonl")
    assert (code, f"{len(there)} of {NUM_ROWS} rows" in words) == (4, True), words
    code, words = export(store, tmp_path / "some.jsonl", "--partial")
    assert (code, len((tmp_path / "some.jsonl").read_text().splitlines())) == (0, len(there)), words
    run_to_end(store, job, expected)


def test_a_copy_of_a_part_goes_and_the_part_stays(
    store: ObjectStore, job: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    before = parts(store)
    store.put("out/a copy.parquet", store.get(before[0]))
    code, words = export(store, tmp_path / "all.jsonl")
    assert (code, "holds rows twice" in words) == (4, True), words
    code, words = run(store, job, "--quiet")
    assert (code, "in other parts too, with equal answers" in words) == (0, True), words
    assert parts(store) == before
    assert not any("copy" in name for name in store.names("out"))
    assert answers(store) == expected
    code, words = export(store, tmp_path / "all.jsonl")
    assert (code, len((tmp_path / "all.jsonl").read_text().splitlines())) == (0, NUM_ROWS), words


def test_parts_of_two_jobs_are_not_exported_as_one(
    store: ObjectStore, job: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    run_to_end(store, job, expected)
    stranger = "out/part-00040.parquet"
    code, words = run(
        store, job, "--quiet", "--set", "sampling.max_tokens=2", "--set", f"output.path=s3://{BUCKET}/other"
    )
    assert code == 0, words
    other = next(name for name in store.names("other") if name.rpartition("/")[2].startswith("part-"))
    store.put(stranger, store.get(other))
    for right, (code, words) in ((4, export(store, tmp_path / "all.jsonl")), (5, run(store, job, "--quiet"))):
        assert code == right, words
        assert "part-00040.parquet" in words.splitlines()[-1]
    assert not (tmp_path / "all.jsonl").exists()
    store.files.delete_file(f"{BUCKET}/{stranger}")
    run_to_end(store, job, expected)


def test_a_part_without_permission_is_not_called_damaged(
    store: ObjectStore, job: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    store.proxy.denied = parts(store)[0].rpartition("/")[2]
    for code, words in (export(store, tmp_path / "all.jsonl"), run(store, job, "--quiet")):
        assert code == 4, words
        last = words.splitlines()[-1]
        assert last.startswith(f"vasuki: cannot read s3://{BUCKET}/{parts(store)[0]}: ")
        assert "damaged" not in last
        assert "delete" not in last
    store.proxy.denied = ""
    assert answers(store) == expected
    assert run(store, job, "--quiet")[0] == 0


def test_a_broken_manifest_is_made_again(store: ObjectStore, job: Path, expected: dict[str, list[int]]) -> None:
    code, words = run(store, job, "--quiet")
    assert code == 0, words
    whole = store.get("out/manifest.json")
    store.put("out/manifest.json", whole[: len(whole) // 2])
    code, words = run(store, job, "--quiet")
    assert (code, "manifest.json is damaged; it is made again from the parts" in words) == (0, True), words
    assert json.loads(store.get("out/manifest.json"))["rows"]["succeeded"] == NUM_ROWS
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
