"""A job with the same answers however often it is started again, and a reader of them who never waits."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tiny_job import WORDS, job_tree

NUM_ROWS = 48


def job_into(folder: Path, model: Path, max_tokens: int = 24, changes: Mapping[str, Any] | None = None) -> Path:
    """A job over the same rows into an output folder of its own; `changes` are of its sections."""
    folder.mkdir()
    texts = [" ".join(WORDS[row % 5 : row % 5 + 1 + row * 7 % 13]) for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"id": [f"r{row}" for row in range(NUM_ROWS)], "text": texts}), folder / "in.parquet")
    tree = job_tree(model, folder / "in.parquet", folder / "out")
    tree["sampling"] = {"max_tokens": max_tokens}
    tree["model"]["dtype"] = "float32"
    for section, keys in (changes or {}).items():
        tree[section] = {**tree.get(section, {}), **keys}
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return folder / "job.yaml"


def answers(job: Path) -> pa.Table:
    """What is in the output, each row once, by id."""
    parts = sorted((job.parent / "out").glob("part-*.parquet"))
    if not parts:
        return None
    table = pa.concat_tables([pq.read_table(part) for part in parts]).sort_by("id")
    assert len(set(table["id"].to_pylist())) == table.num_rows, "a row is there twice"
    return table


def said(job: Path) -> str:
    """What a run left on stderr, but for slow steps, which a busy machine has."""
    lines = (job.parent / "stderr").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"[\d:]+ step \d+ (took|has taken) ", line))


def parts_there(job: Path) -> list[tuple[str, int, int]]:
    """The files of answers: a name, which file that is, and when it was written."""
    there = []
    with suppress(FileNotFoundError), os.scandir(job.parent / "out") as entries:  # of what has gone just now
        for entry in entries:
            if entry.name.endswith(".parquet"):
                status = entry.stat()
                there.append((entry.name, status.st_ino, status.st_mtime_ns))
    return sorted(there)


@contextmanager
def reader_beside(job: Path, expected: pa.Table, read_answers: Callable[[Path], pa.Table] = answers) -> Iterator[None]:
    """Read the output whenever it has changed: each row that is there, ever, is as it will be in the end."""
    whole = {row["id"]: row for row in expected.to_pylist()}
    ended, failure = threading.Event(), []

    def read() -> None:
        known: list[tuple[str, int, int]] = []
        try:
            while not ended.wait(0.005):
                there = parts_there(job)
                if there != known and (table := read_answers(job)):
                    assert all(row == whole[row["id"]] for row in table.to_pylist())
                known = there
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failure:
        raise failure[0]
