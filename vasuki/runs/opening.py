"""A job opened for a run: its input, and its output folder, which is locked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vasuki.base.config import JobConfig
from vasuki.base.errors import InputError, Interrupted, TooManyRowErrors
from vasuki.base.units import plural
from vasuki.base.urls import without_keys
from vasuki.engine.policy import runnable_policy
from vasuki.io.input.followed import FollowedRows
from vasuki.io.input.tables import InputTable, open_table
from vasuki.io.output.known_answers import KnownAnswers
from vasuki.io.output.manifest import Manifest, read_manifest
from vasuki.io.output.output_folder import OutputFolder, dataset_of
from vasuki.io.output.parts import Totals
from vasuki.io.output.rewriting import LabelledPart
from vasuki.io.selection import WHOLE, Selection, Shard
from vasuki.models.fingerprint import model_fingerprint
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.observers.progress import busy_if_slow
from vasuki.runs.options import RunOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    manifest: Manifest
    max_error_fraction: float

    @property
    def answers(self) -> Any:
        """The rows of the output folder, as a `pyarrow.dataset.Dataset`."""
        return dataset_of(self.manifest.job["output"]["path"])

    def raise_for_errors(self) -> None:
        """Raises TooManyRowErrors if more rows failed than the job allows."""
        rows = self.manifest.rows
        allowed = Fraction(str(self.max_error_fraction)) * rows.total  # of the decimal as written, which no float is
        if rows.failed > allowed:
            raise TooManyRowErrors(
                f"{rows.failed} of {rows.total} rows failed, errors.max_fraction allows {self.max_error_fraction:g}; "
                "the column `error` says why"
            )


@dataclass(frozen=True, slots=True)
class JobKey:
    """A job, and what decides whether another run goes on with it."""

    config: JobConfig
    config_hash: str
    input_fingerprint: str
    model_fingerprint: str


@dataclass(frozen=True, slots=True)
class OpenJob:
    """All that a run needs to know before it has a model."""

    key: JobKey
    options: RunOptions
    table: InputTable | FollowedRows
    folder: OutputFolder
    known: KnownAnswers | None  # rows that need not be computed
    started_s: float  # on `time.perf_counter`'s clock

    @property
    def selection(self) -> Selection:
        """The rows to compute."""
        chosen = self.folder.selection
        return replace(chosen, left_out=self.known.is_known) if self.known else chosen

    @property
    def rows_to_compute(self) -> int:
        return self.folder.rows_left - (self.known.count if self.known else 0)

    @property
    def config(self) -> JobConfig:
        return self.key.config

    @property
    def finished(self) -> Outcome | None:
        """What the run has been if an earlier one did it all."""
        if not self.folder.is_finished:
            return None
        log.info("nothing to do: %s is complete", self.config.output.path)
        return self.outcome(read_manifest(self.folder.manifest))

    def copies(self, schema: Any, should_stop: Callable[[], bool]) -> Iterator[Totals]:
        """Write the rows that were not computed, once all others are durable; see `KnownAnswers.write`."""
        if self.known and self.known.count:
            assert isinstance(self.table, InputTable)
            yield from self.known.write(self.table, self.folder, schema, should_stop)

    def outcome(self, manifest: Manifest) -> Outcome:
        """How a run with this manifest ended."""
        return Outcome(manifest, self.config.errors.max_fraction)

    def refuse_gaps(self) -> None:
        """Say why rows of this share are not in the output, although the run has come to its end.

        Raises:
            InputError: input files could not be read to their ends.
            Interrupted: parts have been removed meanwhile.
        """
        if not self.folder.rows_left:
            return
        left = plural(self.folder.rows_left, "row")
        if isinstance(self.table, InputTable) and self.table.unread:
            problems = "; ".join(map(str, self.table.unread))
            raise InputError(f"{problems}; all other rows are answered, the output lacks {left} until it is as it was")
        raise Interrupted(f"{self.folder.place} lacks {left}, removed while the job ran; {Interrupted.goes_on}")


def read_table(config: JobConfig) -> InputTable:
    """The input of a job. Tells how far it is, if it takes a while. Raises as `open_table`."""
    with busy_if_slow(f"reading {without_keys(config.input.path)}") as far:

        def on_file(index: int, files: int) -> None:
            far.share = index / files
            far.words = f"file {index + 1:,}/{files:,}" if files > 1 else ""

        return open_table(config, on_file)


@contextmanager
def opened(
    config: JobConfig,
    options: RunOptions,
    fingerprint: str = "",
    arriving: FollowedRows | None = None,
) -> Iterator[OpenJob]:
    """Open what a job reads and writes; whatever can be refused without a model is refused.

    Args:
        config: the job.
        options: how to run it this time.
        fingerprint: of its model, where that is loaded already.
        arriving: rows that arrive, in place of the job's table.

    Raises:
        VasukiError: as described in `vasuki.base.errors`.
    """
    started_s = time.perf_counter()
    runnable_policy(config.engine.policy, config.engine.attention, rows_arrive=arriving is not None)
    refuse_ignored(config)
    shard = Shard.parse(options.shard)
    table = read_table(config) if arriving is None else arriving
    fingerprint = fingerprint or model_fingerprint(config.model)
    config_hash = config.config_hash(fingerprint)
    with OutputFolder.open(
        config.output.path,
        num_rows=table.num_rows,
        config_hash=config_hash,
        input_fingerprint=table.fingerprint,
        shard=shard,
        fresh=options.fresh,
        retries_errors=options.retries_errors,
        now=config.input.now.isoformat(timespec="seconds"),
        reuses=config.input.unchanged == "reuse",
    ) as folder:
        if arriving is None:  # rows that arrive are told when they do
            dated = config.input.model_copy(update={"date": folder.began})
            config = config.model_copy(update={"input": dated})
        key = JobKey(config, config_hash, table.fingerprint, fingerprint)
        known = None if folder.is_finished or not isinstance(table, InputTable) else _known(config, table, folder)
        yield OpenJob(key, options, table, folder, known, started_s)


def _known(config: JobConfig, table: InputTable, folder: OutputFolder) -> KnownAnswers | None:
    """The rows that this run need not compute; None where none is looked for."""
    done = folder.done.within(0, table.num_rows)
    known = known_answers(config, table, folder.earlier_parts, folder.shard, done)
    if known and config.input.unchanged == "reuse":
        folder.contents = known.contents.hashes
    return known


def known_answers(
    config: JobConfig,
    table: InputTable,
    earlier: list[LabelledPart],
    shard: Shard = WHOLE,
    done: NDArray[np.bool_] | None = None,
) -> KnownAnswers | None:
    """See `KnownAnswers.of`; None where none is looked for."""
    if not config.input.computes_equal_rows_once and config.input.unchanged == "compute":
        return None
    with busy_if_slow("looking for equal rows"):
        nothing = np.zeros(table.num_rows, np.bool_)
        return KnownAnswers.of(table, config, shard, nothing if done is None else done, earlier)
