"""The output folder of a job: locked, checked, and read back so that a run continues where the last one ended.

    part-00000.parquet            rows, and in the footer which rows they are
    part-00001-0-of-4.parquet     the same, from `--shard 0/4`; shards may share a folder, also at the same time
    manifest.json  trace.jsonl    what the run did; shards have their own (trace-0-of-4.jsonl)
    _SUCCESS                      every input row is there
    .vasuki-journal.jsonl         tokens of rows in flight; shards have their own
    .vasuki.lock                  held while a run is on; the kernel lets go of it even after kill -9

In addition to its own manifest, each shard that ends writes a manifest.json that sums up all that have ended so far.

A whole run has the folder to itself. Shards keep out a whole run, their own double, and shards of another count, but
not one another. On an object store a lease keeps out a run's own double alone, parts are named after the run that wrote
them too, and rows that were answered twice all the same are left in one part.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vasuki.base.arrays import Ints
from vasuki.base.errors import InputError, JobFileError, OutputInUse, UnreadableError, one_line
from vasuki.io.location import Location, name_of_temporary, writing
from vasuki.io.output.answers import with_null_errors
from vasuki.io.output.doubles import without_doubles
from vasuki.io.output.journal import Journal, began_of
from vasuki.io.output.lock import FolderLock
from vasuki.io.output.manifest import MANIFEST, Manifest, RowCounts, after, merge, read_manifest
from vasuki.io.output.ownership import (
    SUCCESS,
    has_parts,
    is_broken_manifest,
    is_newer_manifest,
    is_own_journal,
    is_own_name,
    labelled_parts,
    refuse_fixed,
    refuse_foreign,
    refuse_irregular,
)
from vasuki.io.output.parts import NO_CONTENTS, PART_NAME, PartLabel, PartWriter, Totals, to_parquet
from vasuki.io.output.rewriting import LabelledPart, totals_of, without_failed
from vasuki.io.output.trace import TraceWriter, taken_by_runs
from vasuki.io.selection import WHOLE, DoneRows, Selection, Shard

log = logging.getLogger(__name__)

_WAY_OUT = "run with --fresh to replace it, or choose another output.path"
_THAT_VERSION = f"let that version finish it, {_WAY_OUT}"


class OutputFolder:
    """An open output folder. Close it, or use it in a `with` statement, to let go of its lock.

    Its life: `open`, nothing more if it `is_finished`, else `begin`, a `writer`, `finish` and `close`.
    """

    def __init__(self, place: Location, lock: FolderLock, shard: Shard, config_hash: str, fingerprint: str) -> None:
        self.place = place
        self.shard = shard
        self._lock = lock
        self._config_hash = config_hash
        self._input_fingerprint = fingerprint
        self._next_index = 0
        self.began = ""  # the time that prompts are told: that of the run which wrote first, set by open
        self._computed_on = ""  # set by writer
        self.was_computed_on: tuple[str, ...] = ()  # what the parts say that are there; set by open
        self._reuses = False
        self.earlier_parts: list[LabelledPart] = []  # of other states of the input; set by open
        self.contents = NO_CONTENTS  # what each row asks for, to be written into parts where that is wanted
        self.done = DoneRows(0)  # rows that earlier runs and other shards left; set by open, and by finish

    @classmethod
    def open(
        cls,
        path: str,
        *,
        num_rows: int,
        config_hash: str,
        input_fingerprint: str,
        shard: Shard = WHOLE,
        fresh: bool = False,
        retries_errors: bool = False,
        now: str = "",
        reuses: bool = False,
    ) -> OutputFolder:
        """Create or continue an output folder.

        Args:
            path: folder or URL.
            num_rows: of the whole input, whatever the shard.
            config_hash: of the job; parts already there must have the same.
            input_fingerprint: of the input; parts already there must have the same.
            shard: which rows this run will write.
            retries_errors: take rows that failed (of a shard: its own) out of the parts, so that they are left to do.
            fresh: delete what earlier runs wrote (of a shard: its own parts) and start over.
            reuses: parts of another state of the input may be there: they become `earlier_parts`.
            now: what the prompts of this run are told of the time, unless an earlier one has begun it.

        Raises:
            JobFileError: the path is not a folder or cannot be written.
            OutputInUse: another run is on, or the folder belongs to another job or holds what is not ours.
            UnreadableError: a part is damaged.
        """
        place, lock = _locked(path, shard)
        folder = cls(place, lock, shard, config_hash, input_fingerprint)
        try:
            with _refused(path):
                refuse_foreign(place)
                if fresh:
                    folder._delete_own_files()
                folder._delete_temporary_files()
                folder._delete_broken_manifests()
                folder._reuses = reuses
                folder._read_back(num_rows, retries_errors)
                folder.began = folder.began or now
                if not folder.is_finished:
                    place.refuse_unwritable()
                    refuse_fixed(place, shard.label)
        except BaseException:
            lock.release()
            raise
        return folder

    @classmethod
    def check(cls, path: str, *, num_rows: int, config_hash: str, input_fingerprint: str, reuses: bool = False) -> None:
        """Raise what `open` would for the whole input, and leave everything as it is."""
        place = usable_folder(path)
        if not (place / SUCCESS).exists():
            with _refused(path):
                refuse_fixed(place)
        folder = cls(place, FolderLock([]), WHOLE, config_hash, input_fingerprint)
        folder._reuses = reuses
        for part, label in folder._labels(with_pages=True):
            folder._done_rows([(part, label)], num_rows)

    @property
    def is_finished(self) -> bool:
        """Return whether an earlier run wrote every row of this share, and said so."""
        is_said = not self.done.is_complete or (self.place / SUCCESS).exists()
        return not self.rows_left and is_said and self.manifest.exists()

    @property
    def rows_left(self) -> int:
        """Rows of this share that are not in the output: when it was opened, and again once it is finished."""
        return self.shard.num_rows(self.done.num_rows) - self.done.count_in(self.shard)

    @property
    def selection(self) -> Selection:
        """The rows that are left to do."""
        return Selection(self.shard, self.done)

    @property
    def manifest(self) -> Location:
        """The location of this run's manifest."""
        return self.place / f"manifest{self.shard.label}.json"

    def grow(self, num_rows: int) -> None:
        """Note that the input has `num_rows` by now."""
        self.done.grow(num_rows)

    def traces(self, workers: int) -> list[Location]:
        """The trace files of this run, one for each worker, named as if each worked on a part of this share."""
        own, count = self.shard, self.shard.count * workers
        parts = [Shard(own.index * workers + worker, count) for worker in range(workers)]
        return [self.place / f"trace{part.label}.jsonl" for part in parts]

    def begin(self) -> None:
        """Say that the output is not complete. Call it when there is something to do. Raises Interrupted."""
        with writing(self.place):
            (self.place / SUCCESS).delete()

    def leave(self, rows: Ints) -> None:
        """Take all rows but these for done: they alone are left to do."""
        others = np.ones(self.done.num_rows, np.bool_)
        others[rows] = False
        self.done.add(np.flatnonzero(others))

    def writer(
        self, schema: Any, started_s: float = 0.0, max_loss_s: float = math.inf, computed_on: str = ""
    ) -> PartWriter:
        """A writer of this folder's parts. See `PartWriter` for the arguments."""
        self._computed_on = computed_on
        return PartWriter(
            self._next_part,
            schema,
            config_hash=self._config_hash,
            input_fingerprint=self._input_fingerprint,
            began=self.began,
            computed_on=computed_on,
            started_s=started_s,
            max_loss_s=max_loss_s,
            contents=self.contents,
            even_if_empty=self.done.num_rows == 0,
        )

    def answered_parts(self) -> list[LabelledPart]:
        """The parts that are there now, of this state of the input."""
        return list(self._labels())

    def add_copies(self, lines: Any, of_line: Ints) -> Totals:
        """Write lines that were copied as a part, of which the rows they answer are known, in order. Returns what they
        come to. Raises Interrupted."""
        rows = np.unique(of_line)
        contents = self.contents[rows] if len(self.contents) else self.contents
        own = self._config_hash, self._input_fingerprint
        totals = replace(totals_of(lines, of_line), copied=len(rows))
        label = PartLabel(*own, rows, totals, "", self.began, contents, self._computed_on)
        part = self._next_part()
        with writing(part):
            part.write_bytes(to_parquet([lines], label))
        return totals

    def journal(self) -> Journal:
        """What earlier runs of this share left of rows in flight, and the place to note it."""
        return Journal(
            self.place / f".vasuki-journal{self.shard.label}.jsonl",
            self._journals(),
            self._config_hash,
            self._input_fingerprint,
            self.selection,
            self._lock.refuse_lost,
            self.began,
        )

    def _journals(self) -> list[Location]:
        return [file for file in self.place.children() if is_own_journal(file.name, self.shard.label)]

    def _next_part(self) -> Location:
        self._lock.refuse_lost()
        owner = f"-{self._lock.owner}" if self._lock.owner else ""
        part = self.place / f"part-{self._next_index:05d}{self.shard.label}{owner}.parquet"
        self._next_index += 1
        return part

    def finish(self, manifest: Manifest, resumed_rows: int = 0, traces: Sequence[TraceWriter] = ()) -> Manifest:
        """Write the manifest, and `_SUCCESS` if every input row is there. Call it after the writer was closed.

        `rows` and the prompt and output `tokens` are counted from the parts, of earlier runs too, and filled
        in here. Returns the manifest as written; that of a shard counts the shard's own parts.

        Args:
            manifest: of the run that has ended.
            resumed_rows: that it began with tokens of an earlier run.
            traces: that it wrote, closed.

        Raises:
            Interrupted: the disk is full or the store cannot be reached.
        """
        self._lock.refuse_lost()
        with writing(self.place), self._lock.alone(self.place):
            labels = without_doubles(list(self._labels()))
            done = self._done_rows(labels, self.done.num_rows)
            own = [label for part, label in labels if self._is_own(part)]
            manifest = _counted(manifest, own, self.shard.num_rows(done.num_rows))
            if not self.shard.is_whole:
                manifest = replace(manifest, shard=str(self.shard))
            rows = max(0, done.count_in(self.shard) - self.done.count_in(self.shard))
            earlier = self._earlier()
            own_run = max((trace.run for trace in traces), default=0)
            killed = _killed(earlier, traces, own_run)
            manifest = after(earlier, manifest, rows, resumed_rows, killed)
            manifest = replace(manifest, traced_runs=own_run + (manifest.steps > 0))
            manifest.write(self.manifest)
            if not self.shard.is_whole:
                everything = [label for _, label in labels]
                _counted(merge(self._shard_manifests()), everything, done.num_rows).write(self.place / MANIFEST)
            if done.is_complete:
                for part, _ in self.earlier_parts:
                    part.delete()
                self.earlier_parts = []
                (self.place / SUCCESS).write_bytes(b"")
            self.done = done
        return manifest

    def stored(self, ids: set[str]) -> Iterator[dict[str, Any]]:
        """The answers in the parts to the rows of these ids, as lines of columns. Ids are text."""
        for part, _ in self._labels():
            with part.open() as stream:
                yield from with_null_errors(pq.read_table(stream, filters=[("id", "in", ids)])).to_pylist()

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_back(self, num_rows: int, retries_errors: bool) -> None:
        if any(map(is_newer_manifest, self.place.children())):
            raise OutputInUse(f"{self.place} holds the output of a newer version of vasuki; {_THAT_VERSION}")
        labels = list(self._labels(with_pages=True))
        if self._reuses:
            self.earlier_parts = earlier_parts_of(self.place, self._config_hash, self._input_fingerprint)
        told = [label.began for _, label in labels] + [began_of(file) for file in self._journals()]
        self.began = min(filter(None, told), default="")
        self.was_computed_on = tuple(dict.fromkeys(label.computed_on for _, label in labels if label.computed_on))
        with writing(self.place):
            labels = without_doubles(labels)
            if retries_errors:
                own = [(part, label) for part, label in labels if self._is_own(part)]
                if any(label.totals.failed for _, label in own):
                    (self.place / SUCCESS).delete()
                    labels = [pair for pair in labels if not self._is_own(pair[0])] + without_failed(own)
        self.done = self._done_rows(labels, num_rows)
        indices = [
            int(match["index"])
            for part, _ in [*labels, *self.earlier_parts]
            if self._is_own(part) and (match := PART_NAME.fullmatch(part.name))
        ]
        self._next_index = 1 + max(indices, default=-1)

    def _labels(self, with_pages: bool = False) -> Iterator[tuple[Location, PartLabel]]:
        """Every part in the folder now, whichever run wrote it; all belong to this job and this input."""
        for part, label in labelled_parts(self.place, with_pages):
            if not label.config_hash:
                raise OutputInUse(
                    f"{self.place} holds the output of another version of vasuki, which knows models and inputs in "
                    f"another way; {_THAT_VERSION}"
                )
            if label.config_hash != self._config_hash:
                what = "a job with another model, input, sampling or output columns"
                raise OutputInUse(f"{self.place} holds the output of {what} ({part.name}); {_WAY_OUT}")
            if label.input_fingerprint != self._input_fingerprint:
                if self._reuses and len(label.contents) == len(label.rows):
                    continue
                raise OutputInUse(f"{self.place} holds output for an input that has changed since; {_WAY_OUT}")
            yield part, label

    def _done_rows(self, labels: Sequence[tuple[Location, PartLabel]], num_rows: int) -> DoneRows:
        done = DoneRows(num_rows)
        for part, label in labels:
            try:
                done.add(label.rows)
            except ValueError as error:
                raise UnreadableError(f"{part} overlaps with other parts: {error}; run with --fresh") from None
        return done

    def _is_own(self, part: Location) -> bool:
        """Return whether this run writes parts of that name, or, without shards, has to count it."""
        match = PART_NAME.fullmatch(part.name)
        return self.shard.is_whole or (match is not None and match["label"] == self.shard.label)

    def _earlier(self) -> Manifest | None:
        """The manifest of the run before this one."""
        if not (earlier := self._read(self.manifest)):
            return None
        is_of_this = (earlier.config_hash, earlier.input_fingerprint) == (self._config_hash, self._input_fingerprint)
        return earlier if is_of_this and not earlier.simulated else None

    def _shard_manifests(self) -> list[Manifest]:
        pattern = re.compile(rf"manifest-\d+-of-{self.shard.count}\.json")
        files = [file for file in self.place.children() if pattern.fullmatch(file.name)]
        return [manifest for manifest in map(self._read, files) if manifest]

    def _read(self, file: Location) -> Manifest | None:
        """A manifest; None if it is not there, or says nothing: then it goes."""
        if not file.exists():
            return None
        try:
            return read_manifest(file)
        except InputError:
            if not self._deleted_as_broken(file):
                raise
            return None

    def _delete_own_files(self) -> None:
        """Delete what runs wrote: of a shard its own parts, manifest and trace, of a whole run all of them."""
        for file in self.place.children():
            if is_own_name(file.name, self.shard.label):
                file.delete()
        if self.shard.is_whole:  # those with other names too
            for part, _ in labelled_parts(self.place):
                part.delete()

    def _delete_broken_manifests(self) -> None:
        for file in self.place.children():
            self._deleted_as_broken(file)

    def _deleted_as_broken(self, file: Location) -> bool:
        """Delete a file if it is a manifest that says nothing: the parts have what it said of rows, and the run writes
        it again. Returns whether it was one."""
        if is_broken := is_broken_manifest(file):
            log.warning("%s is damaged; it is made again from the parts", file)
            file.delete()
        return is_broken

    def _delete_temporary_files(self) -> None:
        """Delete what a killed run left half-written. A shard leaves its siblings' files alone: they may be at work."""
        for file in self.place.children():
            name = name_of_temporary(file.name)
            part = PART_NAME.fullmatch(name)
            is_own_part = part and (self.shard.is_whole or part["label"] == self.shard.label)
            if is_own_part or is_own_journal(name, self.shard.label):
                file.delete()


def _killed(earlier: Manifest | None, traces: Sequence[TraceWriter], own_run: int) -> list[tuple[float, int]]:
    """What runs took that are in the traces, and in no manifest since they were killed: seconds, and rows."""
    known = earlier.traced_runs if earlier else 0
    if known is None or known >= own_run:
        return []
    try:
        return list(taken_by_runs([trace.place for trace in traces], range(known, own_run)).values())
    except InputError as error:
        log.warning("%s; the time of runs that were killed is left out", error)
        return []


def earlier_parts_of(place: Location, config_hash: str, input_fingerprint: str) -> list[LabelledPart]:
    """The parts of a job's folder that are of another state of its input, and say what their rows asked for."""
    parts = [(part, label) for part, label in labelled_parts(place) if label.config_hash == config_hash]
    others = [(part, label) for part, label in parts if label.input_fingerprint != input_fingerprint]
    return [(part, label) for part, label in others if 0 < len(label.rows) == len(label.contents)]


def dataset_of(path: str) -> Any:
    """The parts of a folder, as a `pyarrow.dataset.Dataset`. Raises OutputInUse or UnreadableError as `open` does."""
    from pyarrow import dataset as ds  # imports pandas where it is installed

    place = Location.parse(path)
    parts = [part.path for part, _ in labelled_parts(place)]
    return ds.dataset(parts, filesystem=place.filesystem, format="parquet")


@contextmanager
def simulated_folder(path: str) -> Iterator[Location]:
    """The run folder of a simulation, locked as that of a run. An older simulation there may be overwritten.

    Raises:
        JobFileError: the path is not a folder or cannot be written.
        OutputInUse: a run is on, or has left its output there.
    """
    place, lock = _locked(path, WHOLE)
    try:
        refuse_foreign(place)
        manifest = place / MANIFEST
        if has_parts(place) or (manifest.exists() and not read_manifest(manifest).simulated):
            raise OutputInUse(f"{place} holds the output of a real run; choose another output.path")
        yield place
    finally:
        lock.release()


def writable_folder(path: str) -> Location:
    """The folder at `path`, which is left as it is. Raises JobFileError if it cannot be written."""
    with _refused(path):
        place = _folder_at(path)
        place.refuse_unwritable()
    return place


def usable_folder(path: str) -> Location:
    """The folder at `path`, which is left as it is. Raises what `OutputFolder.open` would, whatever the job."""
    place = writable_folder(path)
    with _refused(path):
        refuse_irregular(place)
        FolderLock.refuse_held(place)
        refuse_foreign(place)
    return place


def _locked(path: str, shard: Shard) -> tuple[Location, FolderLock]:
    """The folder at `path`, made if there is none, and its lock. Raises JobFileError or OutputInUse."""
    with _refused(path):
        place = _folder_at(path)
        place.make_folder()
        refuse_irregular(place)
        lock = FolderLock.take(place, shard)
    return place, lock


def _folder_at(path: str) -> Location:
    """Return the location of the folder, which need not exist. Raises JobFileError if a file is there."""
    place = Location.parse(path)
    if place.is_file():
        raise JobFileError(f"output.path {path} is a file; name a folder")
    return place


@contextmanager
def _refused(path: str) -> Iterator[None]:
    """Turns all that a file system says against a folder into a JobFileError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise JobFileError(f"cannot write to output.path {path}: {one_line(error)}") from None


def _counted(manifest: Manifest, labels: Sequence[PartLabel], num_rows: int) -> Manifest:
    """`manifest` with rows and tokens as the labels count them."""
    totals = sum((label.totals for label in labels), Totals())
    rows = RowCounts(num_rows, totals.succeeded, totals.failed)
    return replace(
        manifest,
        rows=rows,
        copied_rows=totals.copied,
        tokens=replace(manifest.tokens, prompt=totals.prompt_tokens, output=totals.output_tokens),
    )
