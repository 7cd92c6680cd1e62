"""Rows that arrive line by line: appended to a JSONL file, or sent through a pipe and noted in such a file first.

    pipe --> whole lines --> noted in the file, on disk --> rows        (a killed run's successor reads the file first)
    file that grows ------------------------------------> rows

A row is as old as its line, and its number is its place in the file. Half a line waits for its rest. A thread reads
them, so that they are noted, and their waiting counts, while nobody asks for rows yet.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import IO, Any

import pyarrow as pa

from vasuki.base.config import CsvConfig, JobConfig
from vasuki.base.errors import InputError, JobFileError
from vasuki.io.formats.jsonl import parse_line
from vasuki.io.formats.sources import BLOCK_BYTES, BLOCK_ROWS, Block
from vasuki.io.formats.text import Malformed
from vasuki.io.input.columns import BATCH_URL, carried_columns, id_column, needed_columns
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.tables import stored_text
from vasuki.io.location import Location
from vasuki.io.selection import EVERY_ROW, Selection

BY_LINE = ("auto", "jsonl", "openai-batch")  # formats of which a line is a row
LOOK_S = 0.05  # between two looks at a file that has not grown
BLOCKS_AHEAD = 4  # read, and not asked for
_PIPE_BYTES = 2**16

log = logging.getLogger(__name__)


class FollowedRows:
    """The rows of a stream: what a `RequestStream` reads in place of an `InputTable`. A row whose id came before is
    left out where lines come through a pipe, and fails in a file.

    Args:
        job: its format is JSON Lines, or requests for a batch API.
        path: of the file, which grows; of a pipe, where its lines are noted.
        pipe: file descriptor; None to follow the file.
        started_s: the moment, on the monotonic clock, from which the rows' arrivals are counted.

    Attributes:
        num_rows: read so far; at first those that are in the file already.
        repeated: ids that came again through the pipe; the code that answers them removes them.
        started_s: as given.
        source: where they come from, in words.

    Raises:
        JobFileError: of no such format, or a pipe whose rows have no ids.
        InputError: the file cannot be read.
    """

    def __init__(self, job: JobConfig, path: str, pipe: int | None = None, started_s: float = 0.0) -> None:
        if job.input.format not in BY_LINE:
            raise JobFileError(f"input.format: rows that arrive line by line are jsonl, not {job.input.format}")
        if job.input.csv != CsvConfig():
            raise JobFileError("input.csv goes with CSV files, not with rows that arrive line by line")
        self.columns = (*needed_columns(job), *((BATCH_URL,) if job.input.format == "openai-batch" else ()))
        self.id_column = id_column(job)
        self.carried_types = dict.fromkeys(carried_columns(job), pa.string())
        self.id_type = pa.string() if self.id_column else pa.int64()
        self.fingerprint = "rows that arrive" if pipe is not None else f"rows appended to {os.path.basename(path)}"
        if pipe is not None and not self.id_column:
            raise JobFileError("--stdin needs input.id: a line that is sent again is known by it")
        self.source = job.input.path if pipe is None else "standard input"
        self._path = path
        self._pipe = pipe
        self.started_s = started_s
        self._ids: set[str] = set()
        self._stopped = threading.Event()
        self.repeated: deque[Any] = deque()
        self.num_rows = self._noted_rows()
        self._ahead: Prefetch[Block] | None = None  # once reading has begun

    def begin(self, selection: Selection = EVERY_ROW) -> None:
        """Read the wanted rows from now on."""
        self._ahead = Prefetch(self._read(selection), BLOCKS_AHEAD)

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and forget what was read. Nobody may be asking for rows."""
        self.stop()
        if self._ahead is not None:
            self._ahead.close()

    def blocks(self, selection: Selection = EVERY_ROW) -> Iterator[Block]:
        """The wanted rows, as they arrive, until the pipe ends or somebody stops it.

        Raises:
            InputError: the file has become unreadable or shorter.
        """
        if self._ahead is None:
            self.begin(selection)
        assert self._ahead is not None
        yield from self._ahead

    def _read(self, selection: Selection) -> Generator[Block, None, None]:
        self.num_rows = number = 0
        with ExitStack() as files:
            try:
                lines = files.enter_context(open(self._path, "a+b" if self._pipe is not None else "rb"))
                lines.seek(0)
                for some, noted in self._arriving(lines):
                    block = Block([], {name: [] for name in self.columns})
                    block.arrived_s = time.monotonic() - self.started_s
                    fresh = []
                    for line in some:
                        number += 1
                        if line.isspace() or not line:
                            continue
                        if self._add(block, line, number, selection):
                            fresh.append(line)
                    if fresh and not noted:
                        lines.write(b"".join(line + b"\n" for line in fresh))
                        lines.flush()
                        os.fsync(lines.fileno())
                    if block.rows:
                        yield block
            except OSError as error:
                raise InputError(f"cannot follow {self._path}: {error.strerror or error}") from None

    def ids(self, block: Block) -> list[Any]:
        """The ids of a block's rows, as they came."""
        return block.ids(self.id_column) if self.id_column else list(block.rows)

    def carried(self, block: Block) -> dict[str, list[Any]]:
        """The values to copy to the output, as text: nobody knows what the next row has."""
        return {name: [stored_text(value) for value in block.columns[name]] for name in self.carried_types}

    def _noted_rows(self) -> int:
        """Rows that are in the file. Half a line at its end is none, as in `_read`."""
        try:
            with open(self._path, "rb") as lines:
                return sum(self._ends_whole(line) if line[-1:] != b"\n" else not line.isspace() for line in lines)
        except FileNotFoundError:
            if self._pipe is not None:
                return 0
            raise InputError(f"{self._path} does not exist") from None
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror or error}") from None

    def _add(self, block: Block, line: bytes, number: int, selection: Selection) -> bool:
        """Make a row of a line. Returns False if it came before."""
        values: dict[str, Any] = {}
        problem = ""
        try:
            values = parse_line(line, number)
        except Malformed as error:
            problem, values = str(error), dict(error.values)
        if self.id_column and not problem:
            value = values.get(self.id_column)
            if value is None or value == "":
                problem = f"the row has no id: its '{self.id_column}' is null or empty"
            elif (text := str(stored_text(value))) in self._ids:
                if self._pipe is not None:
                    self.repeated.append(value)
                    return False
                problem = f"its id {text!r} is that of an earlier row"
            else:
                self._ids.add(text)
        row, self.num_rows = self.num_rows, self.num_rows + 1
        if selection.wants(row):
            block.rows.append(row)
            for name in self.columns:
                block.columns[name].append(values.get(name))
            if problem:
                block.malformed[row] = problem
                block.lines[row] = number
        return True

    def _arriving(self, file: IO[bytes]) -> Iterator[tuple[list[bytes], bool]]:
        """Whole lines as they come, without their ends, and whether they are in the file."""
        rest = b""
        while not self._stopped.is_set():
            data = file.read(BLOCK_BYTES)
            if data:
                *lines, rest = (rest + data).split(b"\n")
                if self._ends_whole(rest):
                    lines, rest = [*lines, rest], b""
                yield from ((some, True) for some in _in_blocks(lines))
            elif self._pipe is not None:
                break
            else:
                if os.fstat(file.fileno()).st_size < file.tell():
                    raise InputError(f"{self._path} has become shorter while it was followed")
                self._stopped.wait(LOOK_S)
        if self._pipe is not None:
            if rest:
                log.warning("%s ends in half a line, which is left out; send that row again", self._path)
                file.truncate(file.tell() - len(rest))
            yield from ((some, False) for some in self._from_pipe(self._pipe))
        elif rest:
            log.error("%s ends in half a line, which waits for its rest: %s", self._path, _start(rest))

    def _ends_whole(self, line: bytes) -> bool:
        """Whether the end of the file, after its last line break, is a row. One that we noted has a line break."""
        return self._pipe is None and is_whole(line)

    def _from_pipe(self, pipe: int) -> Iterator[list[bytes]]:
        rest = b""
        while not self._stopped.is_set():
            if not select.select([pipe], [], [], LOOK_S)[0]:
                continue
            data = os.read(pipe, _PIPE_BYTES)
            if not data:
                if rest:
                    yield [rest]  # which is a row, or becomes an error
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from _in_blocks(lines)
        if rest:
            log.error("stopped in the middle of a line, which is left out; send that row again: %s", _start(rest))


def half_line(file: Location) -> str:
    """The beginning of the line that a JSONL file breaks off in; empty if it does not. Raises OSError."""
    if not file.is_local or not file.name.lower().endswith((".jsonl", ".ndjson")):
        return ""
    with file.open() as stream:
        stream.seek(max(0, stream.size() - BLOCK_BYTES))
        last = bytes(stream.read()).rpartition(b"\n")[2]
    return "" if not last.strip() or is_whole(last) else _start(last)


def is_whole(line: bytes) -> bool:
    """Whether a line without an end is a row: no object of JSON begins another one."""
    try:
        return bool(parse_line(line, 0)) if line.rstrip().endswith(b"}") else False
    except Malformed:
        return False


def _in_blocks(lines: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(lines), BLOCK_ROWS):
        yield lines[start : start + BLOCK_ROWS]


def _start(line: bytes) -> str:
    text = line[:60].decode("utf-8", errors="replace")
    return text + ("..." if len(line) > 60 else "")
