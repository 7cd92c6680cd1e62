"""Rows that wait for a busy engine: in the order in which they came, or in rounds, the short prompts first.

    arrive --> round that gathers --(the engine has started all that it was given)--> round that starts

While the engine keeps up each row is a round of its own. Under load rows that came together start together, and one
short prompt after the other makes the mean wait shorter. No row is passed by one of a later round, so that a long
prompt waits for no more than what came before its own round began.
"""

from __future__ import annotations

import math

from vasuki.engine.sequence import Request


class FirstCome:
    """Rows between their arrival and the scheduler, given on at once. Times are seconds that never fall."""

    def __init__(self) -> None:
        self._held: list[Request] = []

    def __len__(self) -> int:
        """Rows that are here."""
        return len(self._held)

    @property
    def gathers(self) -> int:
        """How many rows are waited for before any is given on; 0 if none is."""
        return 0

    def arrive(self, request: Request, at_s: float) -> None:
        """Hold a row until it is asked for."""
        self._held.append(request)

    def take(self, now_s: float, engine_waits: bool, engine_idle: bool) -> list[Request]:
        """Rows for the engine, in the order in which they should start.

        Args:
            now_s: every row that has arrived by then is here.
            engine_waits: the engine has started all that it was given.
            engine_idle: it has nothing to do at all.
        """
        rows, self._held = self._held, []
        return rows

    def next_look_s(self, now_s: float) -> float:
        """When rows may be given on though nothing arrives and the engine does nothing."""
        return math.inf

    def idle(self, from_s: float, to_s: float) -> None:
        """Note that the engine had nothing to do."""

    def first_token(self, at_s: float, ttft_s: float) -> None:
        """Note that a row has its first token, `ttft_s` after it arrived."""


class Rounds(FirstCome):
    """Gives rows on in rounds, by the length of their prompts."""

    def take(self, now_s: float, engine_waits: bool, engine_idle: bool) -> list[Request]:
        """All that came while the last round started, once the engine has started it."""
        if not engine_waits:
            return []
        return sorted(super().take(now_s, engine_waits, engine_idle), key=lambda row: row.num_prompt_tokens)
