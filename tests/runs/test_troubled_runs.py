"""Disks that fill up, folders that can no longer be written to, handles that run out, clocks that go back: a run ends
with one clear line or not at all, and goes on when the trouble is over, to the answers of a run that had none."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from resumed_job import answers, job_into, reader_beside, said
from run_nursery import PHASES, Nursery, Order, set_read_only

from vasuki.io.location import Location
from vasuki.io.output.trace import read_trace

RUNS = max(4, int(os.environ.get("VASUKI_KILLS", "0")) // 4)  # of each trouble
AT_ONCE = ""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of half a megabyte at `folder`, where tests may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def troubled(
    nursery: Nursery, job: Path, event: str, rng: random.Random, most: int, expected: pa.Table
) -> Iterator[tuple[int, str]]:
    """Runs that meet with trouble, at once or in some phase. How each ended, and what it said."""
    for run in range(RUNS):
        phase = rng.choice([AT_ONCE, *PHASES]) if run else "commit"
        _, most_entries, seconds = PHASES.get(phase, ("", 1, 0.0))
        entries, delay_s = 1 + rng.randrange(most_entries), rng.uniform(0, seconds)
        with reader_beside(job, expected):
            code = nursery.run(Order(str(job), event, phase, entries, delay_s, rng.randrange(most)))
        words = said(job)
        assert len(words.splitlines()) == (code != 0), words
        assert words.startswith("vasuki: ") or not code, words
        yield code, words
    assert nursery.run(Order(str(job))) == 0
    assert answers(job).equals(expected)
    assert (job.parent / "out" / "_SUCCESS").exists()
    list(read_trace(Location.parse(str(job.parent / "out"))))


@pytest.mark.parametrize("seed", range(2))
def test_a_disk_that_fills_up(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, seed: int
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    with small_disk(tmp_path / "job" / "out"):
        for code, words in troubled(nursery, job, "fill_disk", random.Random(seed), 40_000, expected):
            assert code in (0, 2, 75)
            assert not code or "No space left on device" in words
            (tmp_path / "job" / "out" / "ballast").unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(2))
def test_files_that_may_not_grow(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, seed: int
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    for code, words in troubled(nursery, job, "limit_files", random.Random(seed), 10_000, expected):
        assert code in (0, 2, 75)
        assert not code or "File too large" in words


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    (tmp_path / "job" / "out").mkdir()
    if not (set_read_only(tmp_path / "job" / "out", True) and set_read_only(tmp_path / "job" / "out", False)):
        pytest.skip("no folder can be made read-only here")
    try:
        for code, words in troubled(nursery, job, "make_read_only", random.Random(3), 1, expected):
            assert code in (0, 2, 75)
            assert not code or "not permitted" in words or "Permission denied" in words
            set_read_only(tmp_path / "job" / "out", False)
    finally:
        set_read_only(tmp_path / "job" / "out", False)


@pytest.mark.parametrize("seed", range(2))
def test_handles_that_run_out(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, seed: int
) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    for code, words in troubled(nursery, job, "limit_handles", random.Random(seed), 12, expected):
        assert code in (0, 2, 4, 75)
        assert not code or "Too many open files" in words


def test_a_clock_that_goes_back(tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table) -> None:
    job = job_into(tmp_path / "job", tiny_model)
    for code, _ in troubled(nursery, job, "turn_clock_back", random.Random(5), 2, expected):
        assert code == 0
        (tmp_path / "job" / "out" / "_SUCCESS").unlink()
        next((tmp_path / "job" / "out").glob("part-*.parquet")).unlink()


@pytest.mark.parametrize("event", ["terminate", "hang_up"])
def test_a_signal_in_each_phase(
    tmp_path: Path, tiny_model: Path, nursery: Nursery, expected: pa.Table, event: str
) -> None:
    """It ends the run with 75, and with the number of rows that are left once some are written; with 0 if none is."""
    job = job_into(tmp_path / "job", tiny_model)
    for phase in PHASES:
        code = nursery.run(Order(str(job), event, phase))
        if phase in ("last rows", "manifest"):
            assert (code, said(job)) == (0, "")
            assert answers(job).equals(expected)
            shutil.rmtree(job.parent / "out")
            continue
        assert code == 75
        words = re.fullmatch(
            r"vasuki: stopped by a signal; (?:(\d+) rows are left, )?run the same .* to go on\n", said(job)
        )
        assert words, said(job)
        there = answers(job)
        assert words[1] is None or int(words[1]) == expected.num_rows - (0 if there is None else there.num_rows)
    assert nursery.run(Order(str(job))) == 0
    assert answers(job).equals(expected)
