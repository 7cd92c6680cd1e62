"""stdin, stdout and stderr of this process, made so that no run ends by them.

The parent process may have closed them, a reader may go away, a log's disk may be full: exit codes speak of rows only.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO

from vasuki.base.errors import Interrupted


class _Sink(io.FileIO):
    """Where a stream writes to. What cannot be written is let go, and `problem` says why."""

    problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # somebody has made the pipe one that does not wait
                select.select([], [self], [])
            return written
        except OSError as error:
            self.problem = error
            return memoryview(data).nbytes


def take_streams() -> None:
    """Open the streams that are closed, so that no file of ours gets their numbers, and let the others fail unheard.
    What stands in their place in a test stays."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  it stays
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def is_read() -> bool:
    """Whether a reader has taken all that was printed. Raises Interrupted if a disk has not: it may have room later."""
    sink = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    problem = sink.problem if isinstance(sink, _Sink) else None
    if problem is not None and not isinstance(problem, BrokenPipeError):
        raise Interrupted(f"cannot write to stdout: {problem.strerror}; run the same command again to go on")
    return problem is None


def _stream(number: int, before: TextIO | None) -> TextIO:
    sink = io.BufferedWriter(_Sink(number, "w", closefd=False))
    if not isinstance(before, io.TextIOWrapper):  # it was closed
        return io.TextIOWrapper(sink, errors="backslashreplace", line_buffering=True)
    return io.TextIOWrapper(sink, before.encoding, before.errors, line_buffering=before.line_buffering)
