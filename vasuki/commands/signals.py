"""What SIGTERM and SIGINT do while vasuki works."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopSignals:
    """Within a `with` statement a signal ends the work at once, by a KeyboardInterrupt.

    While there are rows to keep, within `questions`, the first signal is only a question, to be `asked` between two
    steps.
    """

    def __init__(self) -> None:
        self._are_questions = False
        self._received = 0
        self._previous: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether the work should stop."""
        return self._received > 0

    @contextmanager
    def questions(self) -> Iterator[None]:
        """See above. A question that nobody got to ask is still there afterwards."""
        self._are_questions = True
        try:
            yield
        finally:
            self._are_questions = False

    def _handle(self, number: int, frame: Any) -> None:
        self._received += 1
        if self._received > 1 or not self._are_questions:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
