"""trace.jsonl: one line for each step. A resumed run goes on in the same file, under the next `run` number.

Lines reach the disk when parts are committed, so a trace knows no more than the output does. Object stores cannot
append: there the trace is kept in a local temporary file and put when the run ends, and a killed run leaves none. Since
each run that goes on fetches and puts it whole, it has an end there (`STORED_BYTES`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import IO, Any

from vasuki.base.errors import InputError
from vasuki.base.units import bytes_text
from vasuki.io.location import Location, open_own, writing

TRACE = "trace.jsonl"
STORED_BYTES = 256 * 2**20  # most of a trace in an object store: some 700,000 steps, of all runs
_FLUSH_BYTES = 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of the trace. Memory and sequences are counted after it."""

    t_s: float  # end of the step, since the run began to generate
    elapsed_s: float  # of this step
    prefill_tokens: int
    decode_tokens: int
    seqs: int  # in the batch
    waiting: int  # rows that have arrived and are not in the batch
    kv_device_bytes: int = 0
    kv_host_bytes: int = 0  # of parked sequences, and of the streamed layers of all others
    swapped_blocks: int = 0  # of sequences that changed tier in this step
    streamed_layers: int = 0  # that live on the host
    copied_bytes: int = 0  # KV that moved between the tiers in this step, streamed layers' included
    preempted: int = 0
    exposed_copy_s: float = 0.0
    hidden_copy_s: float = 0.0
    predicted_s: float = 0.0  # what the cost model said of this step; 0 without one
    finished: int = 0
    sampled_tokens: int = 0  # of output
    committed_rows: int = 0  # that became durable after it; set by the writer
    gathers: int = 0  # rows that are held back until this many have arrived; 0 where none are
    run: int = 0  # set by the writer: 0 for the first run in the folder


class TraceWriter:
    """Appends steps to a trace. Close it, or use it in a `with` statement.

    Attributes:
        place: of the trace.
        run: the number of this run in it.

    Raises Interrupted wherever it cannot be written.
    """

    def __init__(self, place: Location) -> None:
        self.place = place
        self._lines: list[bytes] = []
        self._last: StepRecord | None = None  # which may still be followed by a commit
        self._durable_rows = 0
        self._num_bytes = 0
        with writing(place):
            if place.is_local:
                self._file: IO[bytes] = open_own(place.path, "a+b")
            else:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                if place.exists():
                    with place.open_stream() as earlier:
                        shutil.copyfileobj(earlier, self._file)
            self.run = _last_run(self._file) + 1
        self._room_bytes = math.inf if place.is_local else STORED_BYTES - self._file.tell()

    def record(self, step: StepRecord) -> None:
        """Note a step."""
        self._write_last()
        self._last = step
        if self._num_bytes >= _FLUSH_BYTES:
            self._flush()

    def _write_last(self) -> None:
        if self._last is None:
            return
        values = asdict(self._last) | {"run": self.run}
        self._last = None
        line = json.dumps(
            {k: round(v, 7) if isinstance(v, float) else v for k, v in values.items()}, separators=(",", ":")
        )
        self._lines.append(line.encode() + b"\n")
        self._num_bytes += len(line)

    def flush(self, durable_rows: int = 0) -> None:
        """Hand what was noted to the operating system. Called when a part is committed, after which the run has
        `durable_rows` rows that are durable."""
        if self._last is not None:
            self._last = replace(self._last, committed_rows=max(0, durable_rows - self._durable_rows))
            self._durable_rows = max(self._durable_rows, durable_rows)
        self._write_last()
        self._flush()

    def _flush(self) -> None:
        """Hand lines over. What could be written in part is not written again behind that: a cut-off line must stay the
        last."""
        noted = b"".join(self._lines)
        self._lines.clear()
        self._num_bytes = 0
        if len(noted) > self._room_bytes:
            if self._room_bytes:
                log.warning(
                    "%s is full: of a trace in an object store %s are kept", self.place, bytes_text(STORED_BYTES)
                )
            self._room_bytes = 0
            return
        self._room_bytes -= len(noted)
        with writing(self.place):
            self._file.write(noted)
            self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        self.flush()
        with writing(self.place):
            if not self.place.is_local:
                self._file.seek(0)
                with self.place.replaced() as whole:
                    shutil.copyfileobj(self._file, whole)
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trace_files(place: Location) -> list[Location]:
    """A trace file itself, or the traces in a run folder: `trace.jsonl`, else its shards' traces.

    Raises:
        InputError: there is none.
    """
    files = [place]
    if place.is_folder():
        files = [place / TRACE]
        if not files[0].exists():
            files = [child for child in place.children() if child.name.startswith("trace-")]
    if not files or not files[0].exists():
        raise InputError(f"{place} has no {TRACE}" if place.is_folder() else f"{place} is not there")
    return files


def read_trace(place: Location) -> Iterator[StepRecord]:
    """Stream the steps of a trace file, or of the traces in a run folder.

    A last line that was cut off is left out.

    Raises:
        InputError: there is no trace, or a line is not a step.
    """
    names = {field.name for field in fields(StepRecord)}
    for file in trace_files(place):
        with file.open_stream() as stream:
            for line in _lines(stream):
                try:
                    values: dict[str, Any] = json.loads(line)
                    yield StepRecord(**{name: value for name, value in values.items() if name in names})
                except (ValueError, TypeError, AttributeError):
                    raise InputError(f"{file} holds a line that is not a step: {line[:80]!r}") from None


def taken_by_runs(files: Iterable[Location], runs: range) -> dict[int, tuple[float, int]]:
    """What runs of these numbers took, one after another, by the traces that they left: seconds to the end of the last
    step that was noted, and rows that became durable. Several files are of replicas, side by side.

    Raises:
        InputError: a line is not a step.
    """
    taken: dict[int, tuple[float, int]] = {}
    for file in files:
        for step in read_trace(file):
            if step.run in runs:
                longest_s, rows = taken.get(step.run, (0.0, 0))
                taken[step.run] = max(longest_s, step.t_s), rows + step.committed_rows
    return dict(sorted(taken.items()))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The whole lines of a trace."""
    rest = b""
    while data := stream.read(2**20):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _last_run(file: IO[bytes]) -> int:
    """Index of the last run in a trace, -1 if it is empty. A half-written last line is cut off first."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4096))
    tail = file.read()
    whole = tail.rfind(b"\n") + 1
    file.truncate(size - len(tail) + whole)
    file.seek(0, os.SEEK_END)
    lines = tail[:whole].splitlines()
    try:
        return int(json.loads(lines[-1])["run"]) if lines else -1
    except (ValueError, KeyError, TypeError):
        return 0
