"""What SIGTERM, SIGINT and SIGHUP do while vasuki works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopSignals:
    """Makes a signal end the work at once, by a KeyboardInterrupt, within a `with` statement.

    While there are rows to keep, within `deferred`, the first signal only asks for the end: see `asked`. In any thread
    but the main one, where Python takes no handlers, signals are left to whoever started the thread.
    """

    def __init__(self) -> None:
        self._is_deferred = False
        self._received = 0
        self._previous: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether the work should stop."""
        return self._received > 0

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal wait until somebody looks at `asked`, even after the `with` statement."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: Any) -> None:
        self._received += 1
        if self._received > 1 or not self._is_deferred:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
