"""Rows in flight -> `.vasuki-journal.jsonl`: the tokens that they have so far, so that a kill does not lose them.

It is written anew beside each part, with the rows that run then, and is gone when none do. It is never appended to: it
has a few bytes for each token of the running rows, object stores cannot append, and so no row that has ended stays.

    {"version": 1, "config_hash": ..., "input_fingerprint": ...}
    8c736521 {"row": 17, "sample": 0, "logprob": -3.25, "finish_reason": null, "tokens": "..."}

Each line of a row begins with its own CRC-32. A line that does not fit its sum is left out: that row begins anew.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from vasuki.engine.sequence import FinishReason, Progress, Request
from vasuki.engine.sequence import Sequence as Row
from vasuki.io.location import Location, writing
from vasuki.io.selection import Selection

JOURNAL_VERSION = 1

log = logging.getLogger(__name__)


class Journal:
    """What earlier runs left of rows in flight, and the place to note it again.

    Args:
        place: of the file.
        earlier: files to go on from, `place` among them where it exists.
        config_hash: of the job; a file of another one is not read.
        input_fingerprint: of the input, likewise.
        selection: the rows that this run works on.
        before_write: called before each write; raises where another run has taken the folder.
    """

    def __init__(
        self,
        place: Location,
        earlier: Sequence[Location],
        config_hash: str,
        input_fingerprint: str,
        selection: Selection,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._place = place
        self._header = {
            "version": JOURNAL_VERSION,
            "config_hash": config_hash,
            "input_fingerprint": input_fingerprint,
        }
        self._before_write = before_write
        self._earlier = list(earlier)
        self._is_closed = False
        self._left: dict[tuple[int, int], Progress] = {}  # by row and sample, of requests that are not started yet
        for file in earlier:
            self._left |= {key: progress for key, progress in self._read(file) if selection.wants(key[0])}
        self.resumed_rows = len({row for row, _ in self._left})
        if self._left:
            tokens = sum(len(progress.output_token_ids) for progress in self._left.values())
            log.info("going on with %d rows that have %d tokens already", self.resumed_rows, tokens)

    def resume(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests, those that were in flight with the tokens that they had."""
        for request in requests:
            progress = self._left.get(request.key)
            yield replace(request, progress=progress) if progress and not request.error else request

    def started(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests as they go to the scheduler, which knows of their tokens from then on."""
        return map(self._start, requests)  # goes on behind a StopIteration, where more may arrive

    def _start(self, request: Request) -> Request:
        self._left.pop(request.key, None)
        return request

    def write(self, rows: Iterable[Row]) -> None:
        """Note how far these have come, and those that are not started yet. Raises Interrupted."""
        if self._is_closed:
            return
        in_flight = self._left | {row.request.key: row.progress for row in rows}
        lines = [_line(*key, progress) for key, progress in sorted(in_flight.items(), key=lambda item: item[0])]
        lines = [line for line in lines if line]
        self._before_write()
        with writing(self._place):
            if lines:
                self._place.write_bytes(b"\n".join([json.dumps(self._header).encode(), *lines, b""]))
            for file in self._earlier:
                if not lines or file.path != self._place.path:
                    file.delete()
        self._earlier = [self._place] if lines else []

    def close(self) -> None:
        """Leave the file as it is from now on: a step was cut short, and what is known of its rows may be half."""
        self._is_closed = True

    def _read(self, file: Location) -> Iterator[tuple[tuple[int, int], Progress]]:
        """Every whole record of a file of this job."""
        try:
            header, *lines = file.read_bytes().split(b"\n")
            is_ours = json.loads(header) == self._header
        except (OSError, ValueError):
            is_ours = False
        if not is_ours:
            log.warning("%s is damaged or of another job: rows that were in flight begin anew", file)
            return
        for line in filter(None, lines):
            try:
                yield _record(line)
            except (ValueError, KeyError, TypeError):
                log.warning("%s holds a damaged record: its row begins anew", file)


def _line(row: int, sample: int, progress: Progress) -> bytes:
    """A record; empty for a row that has no token yet."""
    if not progress.output_token_ids:
        return b""
    tokens = np.array(progress.output_token_ids, dtype="<i4").tobytes()
    record = {
        "row": row,
        "sample": sample,
        "logprob": progress.logprob,
        "finish_reason": progress.finish_reason,
        "tokens": base64.b64encode(tokens).decode(),
    }
    text = json.dumps(record).encode()
    return b"%08x %s" % (zlib.crc32(text), text)


def _record(line: bytes) -> tuple[tuple[int, int], Progress]:
    """Raises ValueError, KeyError or TypeError for anything that `_line` did not write."""
    checksum, _, text = line.partition(b" ")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("its sum differs")
    record = json.loads(text)
    tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4").tolist()
    reason = record["finish_reason"]
    progress = Progress(tuple(tokens), record["logprob"], None if reason is None else FinishReason(reason))
    return (record["row"], record["sample"]), progress
