"""Rows in flight -> `.vasuki-journal.jsonl`: the tokens that they have so far, so that a kill does not lose them.

It is rewritten with each part, with the rows that run then, and is gone when none do. It is never appended to: it
has a few bytes for each token of the running rows, object stores cannot append, and so no row that has ended stays.

    {"version": 2, "config_hash": ..., "input_fingerprint": ..., "began": "2026-11-25T07:30:00"}
    8c736521 {"row": 17, "sample": 0, "prompt": 4157704578, "logprob": -3.25, "finish_reason": null, "tokens": "..."}

Each line of a row begins with its own CRC-32, and has that of its prompt's tokens. A line that does not fit its sum is
left out: that row starts again, and so does one whose prompt has other tokens by now.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vasuki.engine.sequence import FinishReason, Progress, Request, TokenLogprob
from vasuki.engine.sequence import Sequence as Row
from vasuki.io.location import Location, writing
from vasuki.io.selection import Selection

JOURNAL_VERSION = 2

log = logging.getLogger(__name__)

Key = tuple[int, int]  # row and sample


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of a row in flight."""

    progress: Progress
    prompt: int  # sum over the tokens of its prompt


class Journal:
    """What earlier runs left of rows in flight, and the place to note it again.

    Args:
        place: of the file.
        earlier: files to go on from, `place` among them where it exists.
        config_hash: of the job; a file of another one is not read.
        input_fingerprint: of the input, likewise.
        selection: the rows that this run works on.
        before_write: called before each write; raises where another run has taken the folder.
        began: the time that prompts are told.
    """

    def __init__(
        self,
        place: Location,
        earlier: Sequence[Location],
        config_hash: str,
        input_fingerprint: str,
        selection: Selection,
        before_write: Callable[[], None] = lambda: None,
        began: str = "",
    ) -> None:
        self._place = place
        self._began = {"began": began}
        self._header = {
            "version": JOURNAL_VERSION,
            "config_hash": config_hash,
            "input_fingerprint": input_fingerprint,
        }
        self._before_write = before_write
        self._earlier = list(earlier)
        self._is_closed = False
        self._left: dict[Key, _Left] = {}  # by row and sample, of requests that are not started yet
        for file in earlier:
            self._left |= {key: left for key, left in self._read(file) if selection.wants(key[0])}
        self.resumed_rows = len({row for row, _ in self._left})
        if self._left:
            tokens = sum(len(left.progress.output_token_ids) for left in self._left.values())
            log.info("going on with %d rows that have %d tokens already", self.resumed_rows, tokens)

    def resume(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests, those that were in flight with the tokens that they had, if their prompt is what it was."""
        for request in requests:
            left = self._left.get(request.key)
            if left is None or request.error:
                yield request
            elif left.prompt == _sum_of(request):
                yield replace(request, progress=left.progress)
            else:
                log.warning("row %s had another prompt when it was begun: it starts again", request.id)
                del self._left[request.key]
                yield request

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
        in_flight = self._left | {row.request.key: _Left(row.progress, _sum_of(row.request)) for row in rows}
        lines = [_line(*key, left) for key, left in sorted(in_flight.items(), key=lambda item: item[0])]
        lines = [line for line in lines if line]
        self._before_write()
        with writing(self._place):
            if lines:
                self._place.write_bytes(b"\n".join([json.dumps(self._header | self._began).encode(), *lines, b""]))
            for file in self._earlier:
                if not lines or file.path != self._place.path:
                    file.delete()
        self._earlier = [self._place] if lines else []

    def close(self) -> None:
        """Leave the file as it is from now on: a step was cut short, and what is known of its rows may be half."""
        self._is_closed = True

    def _read(self, file: Location) -> Iterator[tuple[Key, _Left]]:
        """Every whole record of a file of this job."""
        try:
            header, *lines = file.read_bytes().split(b"\n")
            is_ours = json.loads(header).items() >= self._header.items()
        except (OSError, ValueError, AttributeError):
            is_ours = False
        if not is_ours:
            log.warning("%s is damaged, or of another job or version: rows that were in flight start again", file)
            return
        for line in filter(None, lines):
            try:
                yield _record(line)
            except (ValueError, KeyError, TypeError):
                log.warning("%s holds a damaged record: its row starts again", file)


def began_of(file: Location) -> str:
    """The time that prompts of a journal's rows were told; empty where it does not say."""
    try:
        return str(json.loads(file.read_bytes().split(b"\n")[0]).get("began", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _sum_of(request: Request) -> int:
    """A checksum of a prompt's tokens."""
    return zlib.crc32(np.asarray(request.prompt_token_ids, dtype="<i4").tobytes())


def _line(row: int, sample: int, left: _Left) -> bytes:
    """A record; empty for a row that has no token yet."""
    progress = left.progress
    if not (progress.output_token_ids or progress.failed_tries or progress.value is not None):
        return b""
    tokens = np.array(progress.output_token_ids, dtype="<i4").tobytes()
    record: dict[str, Any] = {
        "row": row,
        "sample": sample,
        "prompt": left.prompt,
        "logprob": progress.logprob,
        "finish_reason": progress.finish_reason,
        "tokens": base64.b64encode(tokens).decode(),
    }
    if progress.token_logprobs:
        record["token_logprobs"] = progress.token_logprobs
    if progress.value is not None:
        record["value"] = progress.value
    if progress.failed_tries:
        record["failed_tries"] = progress.failed_tries
    text = json.dumps(record).encode()
    return b"%08x %s" % (zlib.crc32(text), text)


def _record(line: bytes) -> tuple[Key, _Left]:
    """What a line of a row says. Raises ValueError, KeyError or TypeError for anything that `_line` did not write."""
    checksum, _, text = line.partition(b" ")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("its sum differs")
    record = json.loads(text)
    tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4").tolist()
    reason = record["finish_reason"]
    ended = None if reason is None else FinishReason(reason)
    kept = record.get("token_logprobs", ())
    likely = (TokenLogprob(logprob, tuple((each, of) for each, of in likeliest)) for logprob, likeliest in kept)
    failed = record.get("failed_tries", 0)
    progress = Progress(tuple(tokens), record["logprob"], ended, tuple(likely), failed, record.get("value"))
    return (record["row"], record["sample"]), _Left(progress, record["prompt"])
