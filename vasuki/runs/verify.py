"""Whether the answers of a finished run are what the job gives: some of its rows, computed again and alone.

    manifest ─ job ─ input ─ parts ─ rows that are asked for ─ computed alone, into a folder of their own ─ compared

On CPUs a row has the same bits whatever it is computed with (docs/same-answers.md), so every row has to be equal; on a
GPU, and where a plan says that rows vary, some may differ.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.errors import InputError, JobFileError
from vasuki.base.job_file import parse_job
from vasuki.base.units import duration
from vasuki.io.location import Location
from vasuki.io.output.manifest import Manifest, read_manifest
from vasuki.io.output.ownership import labelled_parts
from vasuki.io.output.rewriting import LabelledPart, read_part, succeeded_rows
from vasuki.models.fingerprint import model_fingerprint
from vasuki.runs.opening import opened
from vasuki.runs.options import RunOptions
from vasuki.runs.rows.table import TableRows
from vasuki.runs.run import loaded, run_to_end
from vasuki.runs.signals import StopSignals
from vasuki.runs.workers.here import Here
from vasuki.runs.workload import model_tokenizer

ROWS = 20  # that are verified where nothing is said
TOLD = 10  # rows that differ are told one by one, at most
TOLD_CHARACTERS = 60  # of a value, at most


@dataclass(frozen=True, slots=True)
class Difference:
    """A row of which something differs."""

    id: str | int
    column: str  # the first that differs
    stored: str
    again: str
    token: int | None = None  # the first that differs of an output, from 0

    def __str__(self) -> str:
        where = f"{self.column}, token {self.token}" if self.token is not None else self.column
        return f"row {self.id!r}: {where}: stored {self.stored}, computed again {self.again}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of it."""

    rows: int  # that were computed again
    equal: int
    finished: int  # rows of the output, without those that failed
    differences: list[Difference]
    broken: list[str]  # what is wrong with parts that are not whole
    computed_on: str  # by the runs that wrote the rows; empty where they did not say
    verified_on: str
    why_rows_vary: str  # there; empty where they do not
    taken_s: float

    @property
    def is_right(self) -> bool:
        return self.rows == self.equal and not self.broken

    def to_dict(self) -> dict[str, Any]:
        """The object that `verify --json` prints."""
        return asdict(self) | {"is_right": self.is_right}

    def lines(self) -> list[str]:
        """For people."""
        of_all = f"{self.equal} of {self.rows} rows are equal to the bit, of {self.finished} finished ones"
        lines = [f"{of_all}; computed again in {duration(self.taken_s)}"]
        lines += [str(each) for each in self.differences[:TOLD]]
        if len(self.differences) > TOLD:
            lines.append(f"... and {len(self.differences) - TOLD} others")
        lines += self.broken
        if self.computed_on not in ("", self.verified_on):
            lines.append(f"computed on {self.computed_on}, verified on {self.verified_on}: 16-bit answers may differ")
        if self.why_rows_vary:
            lines.append(f"here rows vary with those beside them: {self.why_rows_vary}")
        return lines


def verify(path: str, rows: float = ROWS, quiet: bool = False, trusts_code: bool = False) -> Verified:
    """Compute finished rows of an output folder again, alone, and compare.

    Args:
        path: the folder.
        rows: how many, evenly spread over those that have not failed; infinite for all.
        quiet: without a progress bar.
        trusts_code: whether code that comes with the model may run.

    Raises:
        InputError: there is no manifest, or the input has changed since.
        JobFileError: the job's model has changed since, or the job is none that this version runs.
    """
    started_s = time.perf_counter()
    place = Location.parse(path)
    manifest = read_manifest(place)
    config = _job_of(manifest, place, trusts_code)
    fingerprint = model_fingerprint(config.model)
    undated = config.model_copy(update={"input": config.input.model_copy(update={"date": "auto"})})
    if manifest.config_hash not in (config.config_hash(fingerprint), undated.config_hash(fingerprint)):
        raise JobFileError(f"{config.model.path} is not the model that wrote {path}: its files have changed since")
    broken: list[str] = []
    parts = list(labelled_parts(place, with_pages=True, broken=broken))
    if any(label.config_hash != manifest.config_hash for _, label in parts):
        raise InputError(f"{place} holds parts of another job than its manifest.json says")
    parts = [each for each in parts if each[1].input_fingerprint == manifest.input_fingerprint]  # no older answers
    finished = np.unique(np.concatenate([np.empty(0, np.int64), *(succeeded_rows(*each) for each in parts)]))
    count = int(min(rows, len(finished)))
    chosen = finished[((np.arange(count) + 0.5) * len(finished) / max(1, count)).astype(np.int64)]
    began = next((label.began for _, label in parts if label.began), "")
    here = why = ""
    differences: list[Difference] = []
    if count:
        with tempfile.TemporaryDirectory(prefix="vasuki-verify-") as folder:
            alone = _alone(config, folder, began)
            here, why = _compute(alone, chosen, manifest.input_fingerprint, fingerprint, quiet)
            again = _lines(list(labelled_parts(Location.parse(folder))), chosen)
        differences = list(_differences(_lines(parts, chosen), again, config))
    told = dict.fromkeys(label.computed_on for _, label in parts if label.computed_on)
    taken_s = time.perf_counter() - started_s
    return Verified(
        count, count - len(differences), len(finished), differences, broken, "; ".join(told), here, why, taken_s
    )


def _job_of(manifest: Manifest, place: Location, trusts_code: bool) -> JobConfig:
    """The job of a manifest. Raises InputError or JobFileError."""
    if manifest.simulated:
        raise InputError(f"{place} is a simulation: it has no answers")
    config = parse_job(manifest.job, f"{place}: the job in its manifest")
    if config.model.trust_remote_code and not trusts_code:
        raise JobFileError(f"{config.model.path} brings code of its own; if you trust it, add --trust-remote-code")
    return config


def _alone(config: JobConfig, folder: str, began: str) -> JobConfig:
    """The job, one row at a time and each by itself, into a folder of its own."""
    dated = {"date": began} if began else {}
    each = {"duplicates": "each", "unchanged": "compute", "priority": "", "deadline": ""}
    sections = {
        "input": config.input.model_copy(update=each | dated),
        "output": config.output.model_copy(update={"path": folder}),
        "engine": config.engine.model_copy(update={"max_num_seqs": 1, "replicas": 1}),
    }
    return config.model_copy(update=sections)


def _compute(alone: JobConfig, rows: Ints, input_fingerprint: str, fingerprint: str, quiet: bool) -> tuple[str, str]:
    """Compute these rows. Returns on what, and why rows may vary there. Raises InputError if the input is another."""
    options = RunOptions(quiet=quiet)
    with StopSignals() as signals, opened(alone, options, fingerprint) as job:
        if job.key.input_fingerprint != input_fingerprint:
            raise InputError(f"{alone.input.path} has changed since: its rows are no longer those that were answered")
        job.folder.leave(rows)
        model, load_s = loaded(job.key, options)
        run_to_end(job, rows_of := TableRows(job), Here(job, rows_of, lambda: (model, load_s)), signals)
        return model.computed_on, model.varies


def _lines(parts: Sequence[LabelledPart], rows: Ints) -> dict[int, list[dict[str, Any]]]:
    """What parts hold of some rows, by row: a line for each sample. Of a row that is there twice, the first."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for part, label in parts:
        here = np.setdiff1d(np.intersect1d(rows, label.rows), list(found))
        if len(here):
            table, of_line = read_part(part, label)
            lines = np.flatnonzero(np.isin(of_line, here))
            for row, line in zip(of_line[lines].tolist(), table.take(lines).to_pylist(), strict=True):
                found[row].append(line)
    return found


def _differences(
    stored: dict[int, list[dict[str, Any]]], again: dict[int, list[dict[str, Any]]], config: JobConfig
) -> Iterator[Difference]:
    """The first difference of each row that has one."""
    for row, lines in stored.items():
        others = again.get(row, [])
        if len(lines) != len(others):
            yield Difference(lines[0]["id"], "sample", f"{len(lines)} lines", str(len(others)))
            continue
        for line, other in zip(lines, others, strict=True):
            names = [name for name, value in line.items() if not _same(value, other.get(name))]
            if names:
                was, came = _short(line[names[0]]), _short(other.get(names[0]))
                yield Difference(line["id"], names[0], was, came, _first_token(config, line, other))
                break


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal to the bit: NaN is, and 0.0 is not -0.0."""
    return repr(value) == repr(other)


def _first_token(config: JobConfig, line: dict[str, Any], other: dict[str, Any]) -> int | None:
    """Number of the first token that differs between two outputs; None if they are the same text."""
    if line.get("output") == other.get("output") or not isinstance(line.get("output"), str):
        return None
    one, two = (each.get("output_token_ids") for each in (line, other))
    if one is None or two is None:
        tokenizer = model_tokenizer(config)
        one, two = (tokenizer.encode_plain(each["output"] or "") for each in (line, other))
    return next(
        (at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= TOLD_CHARACTERS else text[:TOLD_CHARACTERS] + "..."
