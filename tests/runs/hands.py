"""What hands, scripts and tools that clean up do to the files of a job while it runs. `run_nursery` lets it happen."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

counting = threading.Event()  # set by the nursery when the run begins to count its parts: what comes later, it misses


def write_rows(file: Path, rows: pa.Table) -> None:
    """Write an input file, over what is there."""
    if file.suffix == ".parquet":
        pq.write_table(rows, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))


def read_rows(file: Path) -> pa.Table:
    """The rows of an input file."""
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return pa.Table.from_pylist([json.loads(line) for line in file.read_text().splitlines()])


def overwrite_inputs(job: Path, rng: random.Random) -> list[str]:
    """Other texts, of the same lengths, under the ids of every file."""
    files = sorted((job / "in").iterdir())
    for file in files:
        write_rows(file, turned_round(read_rows(file)))
    return [file.name for file in files]


def replace_input(job: Path, rng: random.Random) -> list[str]:
    """Another file in the place of one of them."""
    file = rng.choice(sorted((job / "in").iterdir()))
    other = job / f"other{file.suffix}"
    write_rows(other, turned_round(read_rows(file)))
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    os.replace(other, file)
    return [file.name]


def turned_round(rows: pa.Table) -> pa.Table:
    return pa.table({"id": rows["id"], "text": [text[::-1] for text in rows["text"].to_pylist()]})


def remove_parts(job: Path, rng: random.Random) -> list[str]:
    """One part, or all."""
    parts = sorted((job / "out").glob("part-*.parquet"))
    chosen = parts if rng.random() < 0.2 else parts and [rng.choice(parts)]
    for part in chosen:
        part.unlink()
    return [part.name for part in chosen]


def copy_part(job: Path, rng: random.Random) -> list[str]:
    """A part under the name that a desktop, a tool or a hurried person gives its copy."""
    parts = sorted((job / "out").glob("part-*.parquet"))
    if not parts:
        return []
    part = rng.choice(parts)
    copy = part.with_name(rng.choice([f"{part.stem} (copy).parquet", "old.parquet", "part-00040.parquet"]))
    if not copy.exists():
        os.link(part, copy)
    return [copy.name]


def break_manifest(job: Path, rng: random.Random) -> list[str]:
    """Half of one, or none that says anything."""
    file = job / "out" / "manifest.json"
    if not any((job / "out").glob("part-*.parquet")):
        return []
    text = file.read_bytes() if file.exists() else b'{"schema_version": 2, "job": {"model"'
    file.write_bytes(rng.choice([text[: len(text) // 2], b"", b"[]", b"null", b"{}"]))
    return [file.name]


def make_folder_again(job: Path, rng: random.Random) -> list[str]:
    """An output folder that is empty, in the place of the one there was."""
    if not any((job / "out").glob("part-*.parquet")):
        return []
    (job / "out").rename(job / f"moved-{rng.random()}")
    (job / "out").mkdir()
    return ["out"]


HANDS: dict[str, Callable[[Path, random.Random], list[str]]] = {
    "overwrite_inputs": overwrite_inputs,
    "replace_input": replace_input,
    "remove_parts": remove_parts,
    "copy_part": copy_part,
    "break_manifest": break_manifest,
    "make_folder_again": make_folder_again,
}


def lay_hands(job: Path, what: str, seed: int) -> None:
    """Do it, and leave word in the file `done` in the job's folder: to which files, and whether parts were counted
    then."""
    touched = HANDS[what](job, random.Random(seed))
    (job / "done").write_text(json.dumps({"files": touched, "counting": counting.is_set()}))


def clean_up(job: Path) -> None:
    """Remove what moved away."""
    for folder in job.glob("moved-*"):
        shutil.rmtree(folder)
