"""Rows for replicas: handed out in the planned order, a few at a time, so that all end together.

    planned order --> lease --> replica 0  |===========|
                  --> lease --> replica 1  |===========|
                  --> lease --> replica 2  |===========|  half as fast: half the rows

Two rules. A replica never holds more than its share, by speed, of all that is left to do, so none is left with work at
the end that others could have done (list scheduling on uniform machines, where each takes the next job as it gets
free; the share is what keeps one that has room for everything from taking it). And a lease is at most a quarter of the
replica's share of the rows that wait, so that leases shrink towards the end (guided self-scheduling, Polychronopoulos
and Kuck 1987). Within a lease and a half, it ends where neighbours share the shortest prefix, so that rows with a
common prefix go to the same replica. Where it has to end among such rows, the rest of them waits for that replica as
long as there are others to hand out.

Nothing here knows of processes or clocks: real and simulated replicas are served by the same rules.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings
from vasuki.machines.cost_model import CostModel
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan

Key = tuple[int, int]  # row and sample

MOST_ROWS = 64  # of a lease: what is handed out cannot be ordered again
LEASES_AHEAD = 4  # that a replica's share of the waiting rows makes
TRUSTED_SHARE = 0.05  # of the job: so long has a replica to run until its own speed counts half


class Order(Protocol):
    """Rows in the order in which they should start, such as a `PlannedOrder`."""

    def __next__(self) -> Request: ...

    @property
    def ahead(self) -> tuple[int, int, int]:
        """Rows that are known to follow, their prompt tokens, and the output tokens expected of them."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a token takes one replica, in seconds by the cost model: the measure by which shares are fair."""

    prompt_token_s: float
    output_token_s: float
    row_token_s: float = 0.0  # what a row waits for its next token in such steps

    @classmethod
    def of(cls, cost: CostModel, plan: Plan) -> Work:
        """In full steps of prompts, and in steps of as many decodes as run side by side."""
        settings, rows = plan.settings, max(1, plan.requests)
        prompt, output = max(1, plan.prompt_tokens // rows), max(1, plan.output_tokens_estimate // rows)
        seqs = _running(settings, prompt + output // 2, math.ceil(rows / plan.layout.data_parallel))
        chunk = min(settings.limits.chunk_tokens, prompt * seqs)
        chunk_s, decodes_s = (
            cost.step_time_s(cost.work(chunks, contexts))
            for chunks, contexts in (([chunk], [chunk]), ([1] * seqs, [prompt + output // 2] * seqs))
        )
        return cls(chunk_s / chunk, decodes_s / seqs, decodes_s)

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        return prompt_tokens * self.prompt_token_s + output_tokens * self.output_token_s

    def speed(self, other: Work, lengths: Lengths) -> float:
        """How many times as fast as another one a replica does such rows."""
        row = float(lengths.prompt_tokens.sum()), float(lengths.output_tokens.sum())
        return other.seconds(*row) / self.seconds(*row) if len(lengths) else 1.0

    def of_row(self, request: Request) -> float:
        """What is expected of a row that nothing was computed of; what an earlier run has of it counts as prompt."""
        if request.error:
            return 0.0
        known = len(request.progress.output_token_ids)
        return self.seconds(request.num_prompt_tokens + known, max(0, request.expected_tokens - known))


def _running(settings: EngineSettings, tokens: int, rows: int) -> int:
    """Rows, of `rows`, that run at a time if each holds `tokens`."""
    return max(1, min(settings.limits.max_num_seqs, rows, settings.kv_tokens // max(1, tokens)))


@dataclass(slots=True)
class _Hand:
    """What one replica has in hand, and what it has done, in seconds of work."""

    expected_speed: float = 1.0
    row_token_s: float = 0.0
    held: dict[Key, Request] = field(default_factory=dict)
    held_s: float = 0.0
    computed_s: float = 0.0
    of_ended_s: float = 0.0  # of what was computed, for rows that have ended
    elapsed_s: float = 0.0  # in steps

    @property
    def left_s(self) -> float:
        """Work left in what it holds."""
        return max(0.0, self.held_s - max(0.0, self.computed_s - self.of_ended_s))


@dataclass(frozen=True, slots=True)
class _Rest:
    """Waiting rows that share a prefix with the rows of a lease that ended among them."""

    replica: int  # whose lease that was
    shared: int  # tokens of that prefix


class Leases:
    """Hands out rows, and keeps the books of which replica holds which.

    Args:
        order: where rows come from.
        work: what tokens take.
        num_requests: that `order` has in all, about.
        job_s: what the job takes, about: how long it takes to trust a measured speed depends on it.
    """

    def __init__(self, order: Order, work: Work, num_requests: int, job_s: float) -> None:
        self._order = order
        self._work = work
        self._unseen = num_requests
        self._prior_s = max(1e-9, TRUSTED_SHARE * job_s)
        self._next: deque[Request] = deque()  # read from the order, or given back
        self._rests: dict[Key, _Rest] = {}  # by the first row of each
        self._hands: dict[int, _Hand] = {}
        self._computed_s = self._expected_s = 0.0  # by all hands together, and in their time if speeds were as expected
        self._is_exhausted = False

    def join(self, replica: int, speed: float = 1.0, row_token_s: float = 0.0) -> None:
        """Let a replica take part from now on.

        Args:
            replica: its number.
            speed: expected of it, in seconds of work done in one.
            row_token_s: as in its own `Work`; 0 where all are equal.
        """
        self._hands[replica] = _Hand(speed, row_token_s)

    def leave(self, replica: int) -> list[Request]:
        """Remove a replica. Returns what it held, to be given back as far as it got."""
        hand = self._hands.pop(replica)
        self._computed_s -= hand.computed_s
        self._expected_s -= hand.expected_speed * hand.elapsed_s
        return list(hand.held.values())

    def give_back(self, requests: list[Request]) -> None:
        """Hand these out again, before all others."""
        self._next.extendleft(reversed(requests))
        self._unseen += len(requests)

    def take(self, replica: int) -> list[Request]:
        """The next rows for a replica; none while it holds its share of what is left."""
        hand = self._hands[replica]
        if not self._has(1):
            return []
        portion = self.speed(replica) / sum(map(self.speed, self._hands))
        fair_s = portion * self.left_s - hand.left_s
        if fair_s <= 0 and hand.held:
            return []
        most = min(MOST_ROWS, math.ceil(portion * max(len(self._next), self._unseen) / LEASES_AHEAD))
        self._has(most + most // 2)
        lease: list[Request] = []
        left: list[Request] = []  # for faster replicas
        longest_tokens = self._longest_tokens(replica)
        if longest_tokens < math.inf:
            self._has(MOST_ROWS)
        kept = self._keep_for_others(replica)
        rows = self._cut(most)
        while self._next and len(lease) < rows:
            request = self._next.popleft()
            self._rests.pop(request.key, None)
            if request.expected_tokens > longest_tokens:
                left.append(request)
                continue
            work_s = self._work.of_row(request)
            if lease and work_s > fair_s:
                left.append(request)
                break
            fair_s -= work_s
            hand.held[request.key] = request
            hand.held_s += work_s
            lease.append(request)
        self._next.extendleft(reversed(left))
        if lease and self._next and self._next[0].expected_tokens <= longest_tokens:
            self._rests[self._next[0].key] = _Rest(replica, _shared(lease[-1], self._next[0]))
        self._next.extendleft(reversed(kept))
        self._unseen = max(0, self._unseen - len(lease))
        return lease

    def _keep_for_others(self, replica: int) -> list[Request]:
        """Take away the first rows that share a prefix with what other replicas hold, while there are others in
        sight."""
        kept: list[Request] = []
        others = self._hands.keys() - {replica}
        while (rest := self._rests.get(self._next[0].key)) and rest.replica in others:
            self._has(MOST_ROWS)
            ends = (end for end, pair in enumerate(itertools.pairwise(self._next), 1) if _shared(*pair) < rest.shared)
            if (end := next(ends, None)) is None:
                break
            kept += [self._next.popleft() for _ in range(end)]
        return kept

    def _longest_tokens(self, replica: int) -> float:
        """Output tokens of a row that a replica may start behind what it holds: one that it would end later than faster
        ones could end all that is left is for those."""
        hand = self._hands[replica]
        faster = [other for other, its in self._hands.items() if its.row_token_s < hand.row_token_s]
        if not faster:
            return math.inf
        their_s, own_s = self.left_s / sum(map(self.speed, faster)), hand.left_s / self.speed(replica)
        return (their_s - own_s) / hand.row_token_s

    def computed(self, replica: int, prompt_tokens: int, output_tokens: int, elapsed_s: float) -> None:
        """Note what a replica has computed, in `elapsed_s` seconds of steps."""
        hand = self._hands[replica]
        work_s = self._work.seconds(prompt_tokens, output_tokens)
        hand.computed_s += work_s
        hand.elapsed_s += elapsed_s
        self._computed_s += work_s
        self._expected_s += hand.expected_speed * elapsed_s

    def ended(self, replica: int, key: Key, output_tokens: int) -> None:
        """Note that a row has ended with `output_tokens`."""
        hand = self._hands[replica]
        request = hand.held.pop(key)
        hand.held_s -= self._work.of_row(request)
        known = len(request.progress.output_token_ids)
        if not request.error:
            hand.of_ended_s += self._work.seconds(request.num_prompt_tokens + known, max(0, output_tokens - known))

    def speed(self, replica: int) -> float:
        """Seconds of work that a replica does in one; at first what was expected, as far off as all are on average."""
        pace = self._computed_s / self._expected_s if self._expected_s > 0 else 1.0
        hand = self._hands[replica]
        expected = (pace if pace > 0 else 1.0) * hand.expected_speed
        return (hand.computed_s + expected * self._prior_s) / (hand.elapsed_s + self._prior_s)

    def holds(self, replica: int) -> bool:
        """Whether a replica has rows in hand."""
        return bool(self._hands[replica].held)

    @property
    def left_s(self) -> float:
        """Work left of all rows, in seconds of one replica."""
        return self._waiting_s() + sum([hand.left_s for hand in self._hands.values()])

    @property
    def time_left_s(self) -> float:
        """How long all replicas take for that, at their speeds so far."""
        return self.left_s / max(1e-9, sum(map(self.speed, self._hands)))

    @property
    def is_done(self) -> bool:
        """Whether every row was handed out and has ended."""
        return not self._has(1) and not any(hand.held for hand in self._hands.values())

    def _has(self, rows: int) -> bool:
        """Whether `rows` rows wait; reads them if need be."""
        while len(self._next) < rows and not self._is_exhausted:
            request = next(self._order, None)
            if request is None:
                self._is_exhausted = True
            else:
                self._next.append(request)
        return len(self._next) >= rows

    def _waiting_s(self) -> float:
        """Work of rows that wait: of those that are known, and of the others as if they were like them."""
        rows, prompt_tokens, output_tokens = self._order.ahead
        known_s = sum(map(self._work.of_row, self._next)) + self._work.seconds(prompt_tokens, output_tokens)
        known = len(self._next) + rows
        return known_s * (1 if self._is_exhausted else max(1.0, self._unseen / known)) if known else 0.0

    def _cut(self, most: int) -> int:
        """Rows of a lease of about `most`, so that it ends where neighbours have least in common."""
        waiting = len(self._next)
        if waiting <= most:
            return waiting
        ends = range(most // 2 + 1, min(waiting, most + most // 2 + 1))
        return min(ends, key=lambda end: (_shared(self._next[end - 1], self._next[end]), abs(end - most)), default=most)


def _shared(one: Request, other: Request) -> int:
    """Tokens of the common prefix of two prompts."""
    length = min(len(one.prompt_token_ids), len(other.prompt_token_ids))
    if not length:
        return 0
    differs = np.asarray(one.prompt_token_ids[:length]) != np.asarray(other.prompt_token_ids[:length])
    return int(np.argmax(differs)) if differs.any() else length
