"""Files of a job that are changed, removed, copied and broken while it runs: no run ends with a wrong answer, without a
row that it does not tell of, or with a line that is not true.

`make test-kill` troubles 300 runs. What moment and which files is drawn from a seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hands import HANDS, clean_up, read_rows, remove_parts, write_rows
from resumed_job import NUM_ROWS, answers, job_into, reader_beside, said
from run_nursery import PHASES, Nursery, Order

from vasuki.io.location import Location
from vasuki.io.output.manifest import RowCounts, read_manifest

RUNS = max(7, int(os.environ.get("VASUKI_KILLS", "0")) * 3 // 4)  # of each kind of input
FILES = 4
ON_INPUTS = ("overwrite_inputs", "replace_input")

ROWS = r"([\d,]+) rows?"
LACKS_UNTIL = re.compile(rf"vasuki: (.+); all other rows are answered, the output lacks {ROWS} until it is as it was")
LACKS = re.compile(rf"vasuki: out lacks {ROWS}, removed while the job ran; run the same command again to go on")
GONE = re.compile(
    rf"vasuki: cannot write out.*: what lay there was removed while the job ran(; {ROWS} are left, run the same .*)?"
)
OF_ANOTHER = re.compile("vasuki: out holds output for an input that has changed since; run with --fresh .*")
DOUBLE = re.compile(r"[\d:]+ out/(.+): ([\d,]+) rows are in other parts too, with equal answers")
TRACE_GONE = re.compile(r"[\d:]+ out/trace\.jsonl is not there; the time of runs that were killed is left out")
BROKEN = re.compile(r"[\d:]+ out/manifest\.json is damaged; it is made again from the parts")


def job_of_files(folder: Path, model: Path, kind: str) -> Path:
    """The job over the same rows in several files."""
    job = job_into(folder, model)
    rows = read_rows(folder / "in.parquet")
    (folder / "in").mkdir()
    for index in range(FILES):
        each = NUM_ROWS // FILES
        write_rows(folder / "in" / f"{index}.{kind}", rows.slice(index * each, each))
    tree = yaml.safe_load(job.read_text())
    tree["input"]["path"], tree["output"]["path"] = "in", "out"
    job.write_text(yaml.safe_dump(tree))
    return job


def rows_there(job: Path) -> pa.Table:
    """Whatever readers find in the output, rows that lie in a copy twice."""
    tables = []
    for part in sorted((job.parent / "out").glob("*.parquet")):
        with contextlib.suppress(FileNotFoundError):  # removed just now
            tables.append(pq.read_table(part))
    return pa.concat_tables(tables or [pa.table({"id": pa.array([], pa.string())})])


def ids_there(job: Path) -> set[str]:
    return set(rows_there(job)["id"].to_pylist())


def has_broken_manifest(job: Path) -> bool:
    file = job.parent / "out" / "manifest.json"
    try:
        return file.exists() and not json.loads(file.read_bytes())
    except ValueError:
        return True


def has_doubles(job: Path) -> bool:
    return bool(rows_there(job).num_rows > len(ids_there(job)))


def check_words(
    job: Path, order: Order, code: int, was_broken: bool, was_double: bool, inputs: dict[str, pa.Table]
) -> None:
    """Compare each line that a run left with what is there. `inputs` are the files' rows before it."""
    *warnings, last = ["", *said(job).splitlines()]
    if not code and last:
        warnings.append(last)
    done = job.parent / "done"
    trouble: dict[str, Any] = json.loads(done.read_text()) if done.exists() else {"files": [], "counting": False}
    there, was_counted = ids_there(job), trouble["counting"]
    missing = NUM_ROWS - len(there)
    for line in filter(None, warnings):
        if double := DOUBLE.fullmatch(line):
            assert was_double or order.event == "copy_part"
            assert 0 < int(double[2]) <= NUM_ROWS
        elif TRACE_GONE.fullmatch(line):
            assert order.event == "make_folder_again"
        else:
            assert BROKEN.fullmatch(line), line
            assert was_broken or order.event == "break_manifest"
    is_success = (job.parent / "out" / "_SUCCESS").exists()
    assert was_counted or code == 5 or is_success == (not code), last
    if code == 0:
        assert was_counted or not missing
        if not was_counted:
            assert read_manifest(Location.parse(str(job.parent / "out"))).rows == RowCounts(NUM_ROWS, NUM_ROWS, 0)
            assert rows_there(job).num_rows == NUM_ROWS
    elif code == 4:
        assert order.event in ON_INPUTS
        words = LACKS_UNTIL.fullmatch(last)
        assert words, last
        names: set[str] = set(re.findall(r"in/(\d\.\w+)", str(words[1])))
        assert names.issubset(trouble["files"])
        of_names = {row_id for name in names for row_id in inputs[name]["id"].to_pylist()}
        assert {f"r{row}" for row in range(NUM_ROWS)} - there <= of_names
        assert int(words[2]) == missing
    elif code == 5:
        assert order.event in ON_INPUTS
        assert not order.phase, last
        assert OF_ANOTHER.fullmatch(last), last
    else:
        assert code == 75
        assert order.event in ("remove_parts", "make_folder_again")
        if words := GONE.fullmatch(last):  # in the moment between
            assert order.event == "make_folder_again"
            return
        words = LACKS.fullmatch(last)
        assert words, last
        assert was_counted or int(words[1]) == missing


def drawn(job: Path, rng: random.Random) -> Order:
    """A run, and what happens to its files at some moment."""
    event = rng.choice([*HANDS, "kill"])
    phases = ["load", "load", "plan", "prompts"] if event in ON_INPUTS else list(PHASES)
    phase = rng.choice(phases)
    if event != "kill" and rng.random() < 0.2:
        phase = ""  # before the run looks at anything
    _, most_entries, seconds = PHASES.get(phase, ("", 1, 0.0))
    entries, delay_s = 1 + rng.randrange(most_entries), rng.uniform(0, seconds)
    return Order(str(job), event, phase, entries, delay_s, rng.randrange(2**30), most_wall_s=600.0)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_no_run_is_wrong_or_silent_whatever_is_done_to_its_files(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, kind: str
) -> None:
    rng = random.Random(kind)
    job = job_of_files(tmp_path / "job", tiny_model, kind)
    inputs = {file.name: read_rows(file) for file in (tmp_path / "job" / "in").iterdir()}
    for _ in range(RUNS):
        order = drawn(job, rng)
        if order.event in ON_INPUTS and not order.phase and not ids_there(job):
            continue  # that would be the job of another input
        (tmp_path / "job" / "done").unlink(missing_ok=True)
        was_broken, was_double = has_broken_manifest(job), has_doubles(job)
        with reader_beside(job, expected, rows_there):
            code = nursery.run(order)
        if code != -signal.SIGKILL:
            check_words(job, order, code, was_broken, was_double, inputs)
        for name, rows in inputs.items():
            write_rows(tmp_path / "job" / "in" / name, rows)
        if (tmp_path / "job" / "out" / "_SUCCESS").exists() and len(ids_there(job)) == NUM_ROWS:
            if rng.random() < 0.3:
                shutil.rmtree(tmp_path / "job" / "out")
            else:
                remove_parts(tmp_path / "job", rng)
        clean_up(tmp_path / "job")
    assert nursery.run(Order(str(job))) == 0
    assert answers(job).equals(expected)
    assert len(list((tmp_path / "job" / "out").glob("*.parquet"))) == len(
        list((tmp_path / "job" / "out").glob("part-*.parquet"))
    )
