"""The order in which rows start, planned over a bounded window of what is still to come.

    requests --> window (rows read, not started) --> ordered --> scheduler
                      ^                                 |
                      +--- half is handed out: refill --+

The solver sees each row as an item: its prompt, the tokens it is expected to produce, the KV capacity
(`vasuki_solvers`). In a window of known lengths long rows start early enough to end with the others, and in between
lengths are mixed, so that memory stays evenly full. Rows that cannot run, for an error or since no memory holds them,
are passed on at once: an order is of those that do, in a plan as in a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config_values import OutputLength, Quantile
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import USUAL, Request, Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.planner.ordering.output_length import ENOUGH_ROWS, OutputLengths
from vasuki.planner.plan import Solver
from vasuki_solvers import (
    Instance,
    PrefixGroup,
    greedy_order,
    greedy_schedule,
    group_together,
    local_search,
    prefix_groups,
    quick_bound,
    sharing_steps,
)
from vasuki_solvers.greedy import spread_order

WINDOW_ROWS = 32_768
FIRST_ROWS = 4_096
WINDOW_BYTES = 64_000_000  # of prompts and what is copied to the output, whatever the number of rows
PORTFOLIO_ROWS = 300  # beyond, trying variants of the greedy order gains less than a per cent
LOCAL_SEARCH_WORK = 400_000  # rows x moves
MOST_ROWS: dict[str, int] = {"milp": 32, "local_search": 2_000}  # of solvers that search
LEARN_AGAIN = 1.25  # times as many rows have ended
HEAD_START = 1.3  # of the most steps that a row may take: there may be longer ones
EARLY_MEMORY = 2  # rows that may be longest start first, up to this many times the KV memory at max_tokens
WORTH_GROUPING = 0.01  # of the steps that are counted for it: less is within what the count leaves out


@dataclass(frozen=True, slots=True)
class Capacity:
    """What rows are ordered for."""

    kv_tokens: int
    max_num_seqs: int
    chunk_tokens: int
    block_tokens: int = 1
    replicas: int = 1  # that have this capacity together; what rows share, each of them has to compute

    @property
    def row_tokens(self) -> int:
        """KV tokens that one row may come to hold."""
        return self.kv_tokens // self.replicas

    @classmethod
    def of(cls, settings: EngineSettings, replicas: int = 1) -> Capacity:
        """The capacity of `replicas` engines of these settings."""
        limits, n = settings.limits, replicas
        return cls(
            n * settings.kv_tokens, n * limits.max_num_seqs, n * limits.chunk_tokens, settings.block_tokens, replicas
        )


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order, and the solver that found it."""

    order: list[int]  # indices into the rows given
    solver: Solver


def solve_order(
    prompts: Ints,
    outputs: Ints,
    capacity: Capacity,
    solver: Solver,
    lengths: OutputLengths | None = None,
    limits: Ints | None = None,
) -> Ordered:
    """Order rows of these lengths, at once, since the run waits for it.

    What `milp` and `local_search` find is found beforehand (`few_rows`); rows that are ordered here, or again, have
    greedy's order. For many rows, and for outputs that `lengths` still learns, greedy sorts without trying variants.
    How early a row has to start follows then from the most that rows like it have come to, within its limit.
    """
    rows = len(prompts)
    if solver == "fifo" or rows < 2:
        return Ordered(list(range(rows)), solver)
    if solver == "prompt_length":
        return Ordered(np.argsort(prompts, kind="stable").tolist(), solver)
    instance = _instance(prompts, outputs, capacity)
    if lengths or rows > PORTFOLIO_ROWS:
        longest, head_start = None, 1.0
        if lengths and limits is not None:
            longest, head_start = lengths.longest(prompts, limits), HEAD_START
        order = spread_order(instance, quick_bound(instance).steps, head_start=head_start, longest=longest)
        if lengths and not lengths.knows_enough:
            order = _longest_ahead(order, prompts, outputs, capacity.kv_tokens)
        return Ordered(order.tolist(), "greedy")
    return Ordered(list(_greedy(prompts.tobytes(), outputs.tobytes(), capacity)), "greedy")


@lru_cache(maxsize=256)
def _greedy(prompts: bytes, outputs: bytes, capacity: Capacity) -> tuple[int, ...]:
    """The order of few rows, which planning asks for again and again as it tries ways to run them."""
    instance = _instance(np.frombuffer(prompts, np.int64), np.frombuffer(outputs, np.int64), capacity)
    return tuple(greedy_order(instance).tolist())


def searched_order(
    prompts: Ints, outputs: Ints, capacity: Capacity, solver: Literal["milp", "local_search"], time_limit_s: float
) -> list[int]:
    """The order of the shortest schedule that this solver finds in time, from greedy's on."""
    instance = _instance(prompts, outputs, capacity)
    if solver == "local_search":
        iterations = LOCAL_SEARCH_WORK // len(prompts)
        schedule = local_search(greedy_schedule(instance), iterations=iterations, time_budget_s=time_limit_s)
    else:
        from vasuki_solvers.milp import milp_schedule  # PuLP takes a while to import

        instance = replace(instance, prefill_tokens_per_step=None)
        schedule = milp_schedule(instance, time_limit_s=time_limit_s, threads=1)
    order: list[int] = schedule.order.tolist()
    return order


def _longest_ahead(order: Ints, prompts: Ints, outputs: Ints, kv_tokens: int) -> Ints:
    """The order with those rows first that may become the longest, as many as `EARLY_MEMORY` would hold.

    While nothing has been learned the longest row may fix the number of steps, and must not start late. More than a few
    such rows side by side would push each other out where memory is tight.
    """
    longest_first = order[np.argsort(-outputs[order], kind="stable")]
    held = np.cumsum((prompts + outputs)[longest_first])
    early = longest_first[: np.searchsorted(held, EARLY_MEMORY * kv_tokens)]
    return np.concatenate([early, order[~np.isin(order, early)]])


def _instance(prompts: Ints, outputs: Ints, capacity: Capacity) -> Instance:
    """Rows as items. Blocks are filled to half of the last one on average, so that much is added to a prompt."""
    prompts = np.maximum(1, prompts) + capacity.block_tokens // 2
    limit = max(int(prompts.max()), capacity.kv_tokens)
    outputs = np.clip(outputs, 1, np.maximum(1, limit - prompts + 1))
    running = min(capacity.max_num_seqs, int(limit / float(np.mean(prompts + outputs / 2))))
    budget = max(1, capacity.chunk_tokens - min(running, capacity.chunk_tokens // 2))  # what decodes leave
    return Instance(prompts, outputs, limit, capacity.max_num_seqs, budget)


class PlannedOrder:
    """An iterator of requests in the order in which they should start.

    Args:
        requests: in any order; read as far as the window reaches.
        capacity: what they are ordered for.
        solver: see `solve_order`; `fifo` reads nothing ahead.
        lengths: learns from rows that end and estimates those that wait; None leaves the requests' own estimates.
        window_rows: rows held at most.
        window_bytes: that they take at most, though always one row.
        order: indices of all rows that can run, where an order was found beforehand; the window's rows are not solved
            again then.
        shares: whether rows share what their prompts begin with, so that they gain by standing together.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        capacity: Capacity,
        *,
        solver: Solver = "greedy",
        lengths: OutputLengths | None = None,
        window_rows: int = WINDOW_ROWS,
        window_bytes: int = WINDOW_BYTES,
        order: tuple[int, ...] = (),
        shares: bool = True,
    ) -> None:
        self._source = iter(requests)
        self._capacity = capacity
        self._solver: Solver = solver
        self._lengths = lengths
        self._window_rows = window_rows
        self._window_bytes = window_bytes
        self._found = order
        self._shares = shares and solver not in ("fifo", "prompt_length")
        self._failed: deque[Request] = deque()
        self._rows: list[Request] = []  # of the window, since it was filled last
        self._groups: list[PrefixGroup] = []  # of rows whose prompts share a prefix
        self._ordered: deque[int] = deque()  # those that have not started
        self._expected: Ints = np.zeros(0, np.int64)  # output tokens of all of them
        self._held_tokens = self._held_outputs = 0  # of prompts, and expected
        self._held_bytes = 0
        self._fill_rows = min(FIRST_ROWS, window_rows)  # the window opens step by step: the first rows must not wait
        self._refill_below = 0  # rows left in the window at which it is filled up
        self._learn_again_at = ENOUGH_ROWS
        self._is_exhausted = False
        self.solved = Ordered([], solver)  # the solver's answer for the most rows that the window has held

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if self._solver == "fifo" and self._lengths is None:
            return next(self._source)
        if self._failed:
            return self._failed.popleft()
        if len(self._ordered) <= self._refill_below and not self._is_exhausted:
            self._refill()
            if self._failed:
                return self._failed.popleft()
        if not self._ordered:
            raise StopIteration
        row = self._ordered.popleft()
        request, expected = self._rows[row], int(self._expected[row])
        self._held_tokens -= request.num_prompt_tokens
        self._held_bytes -= request.num_bytes
        self._held_outputs -= expected
        return request if expected == request.expected_tokens else replace(request, estimated_tokens=expected)

    @property
    def ahead(self) -> tuple[int, int, int]:
        """Rows of the window, their prompt tokens, and the output tokens expected of them."""
        return len(self._ordered), self._held_tokens, self._held_outputs

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Learn from a step, as an engine observer."""
        self.learn(finished, scheduler.queues.live())

    def learn(self, finished: Iterable[Sequence], live: Iterable[Sequence]) -> None:
        """Learn from rows that ended. As their number grows, also look at those that the scheduler holds, which keeps
        estimates from being too short, revise what is expected of these, and order again what has not started."""
        lengths = self._lengths
        if lengths is None:
            return
        for sequence in finished:
            if not sequence.error:
                lengths.observe(sequence.num_prompt_tokens, sequence.num_output_tokens)
        if lengths.rows < self._learn_again_at:
            return
        self._learn_again_at = int(LEARN_AGAIN * lengths.rows)
        held = list(live)
        lengths.watch((sequence.num_prompt_tokens, sequence.num_output_tokens) for sequence in held)
        expected = self._expect([sequence.request for sequence in held])
        for sequence, tokens in zip(held, expected.tolist(), strict=True):
            sequence.expected_tokens = tokens
        self._order(list(self._ordered))

    def _refill(self) -> None:
        """Read up to a full window and order all of it again."""
        rows = [self._rows[row] for row in self._ordered]
        failed_bytes = 0
        while len(rows) < self._fill_rows and (not rows or self._held_bytes < self._window_bytes):
            request = next(self._source, None)
            if request is None:
                self._is_exhausted = True
                break
            if request.error or request.peak_tokens > self._capacity.row_tokens:
                self._failed.append(request)
                failed_bytes += request.num_bytes
                if len(self._failed) >= self._fill_rows or self._held_bytes + failed_bytes >= self._window_bytes:
                    break
                continue
            rows.append(request)
            self._held_tokens += request.num_prompt_tokens
            self._held_bytes += request.num_bytes
        self._fill_rows = min(2 * self._fill_rows, self._window_rows)
        self._rows, self._groups = rows, self._sharing(rows)
        self._order(list(range(len(rows))))
        self._refill_below = len(rows) // 2

    def _order(self, rows: list[int]) -> None:
        """Order these rows of the window by what is expected of them now."""
        prompts, self._expected = _prompts(self._rows), self._expect(self._rows)
        self._held_outputs = int(self._expected[rows].sum())
        solved = self._solve(prompts[rows], self._expected[rows], _limits(self._rows)[rows])
        if len(rows) >= len(self.solved.order):
            self.solved = solved
        order = [rows[index] for index in solved.order]
        if self._groups:
            order = self._together(order, _instance(prompts, self._expected, self._capacity))
        if any(self._rows[row].urgency != USUAL for row in order):
            order.sort(key=lambda row: self._rows[row].urgency)
        self._ordered = deque(order)

    def _solve(self, prompts: Ints, expected: Ints, limits: Ints) -> Ordered:
        if len(self._found) == len(prompts):
            return Ordered(list(self._found), self._solver)
        solver: Solver = "greedy" if self._found else self._solver  # the order found is that of other rows
        return solve_order(prompts, expected, self._capacity, solver, self._lengths, limits)

    def _expect(self, rows: list[Request]) -> Ints:
        """`[rows]` output tokens."""
        if self._lengths is None:
            return np.array([request.expected_tokens for request in rows], dtype=np.int64)
        return self._lengths.estimates(_prompts(rows), _limits(rows))

    def _sharing(self, rows: list[Request]) -> list[PrefixGroup]:
        """Groups of rows that may gain by standing together, because their prompts share a prefix.

        What all rows share needs no bringing together. Nor does anything if one replica's memory holds the prompts of
        the window together with all running rows: then it keeps what was computed until the next row wants it.
        """
        if not self._shares or not any(len(request.prompt_token_ids) for request in rows):
            return []
        prompts, capacity = _prompts(rows) + self._capacity.block_tokens, self._capacity
        running = np.sort(prompts + _limits(rows))[-capacity.max_num_seqs :]
        if capacity.replicas == 1 and prompts.sum() + running.sum() <= capacity.kv_tokens:
            return []
        groups = prefix_groups((request.prompt_token_ids for request in rows), min_shared=capacity.block_tokens)
        while len(groups) == 1 and len(groups[0].members) == len(rows):
            groups = list(groups[0].subgroups)
        return groups

    def _together(self, order: list[int], instance: Instance) -> list[int]:
        """The solved `order` of some rows of the window, an item each, where rows with a common prefix stand together,
        so that what they share is computed and held once, if that gains enough. Groups of which some row always runs
        gain nothing, but on several replicas: apart, each of these would compute what they share."""
        together = group_together(order, self._groups)
        if self._capacity.replicas > 1:
            return together
        apart_steps, together_steps = (sharing_steps(instance, each, self._groups) for each in (order, together))
        return together if apart_steps > (1 + WORTH_GROUPING) * together_steps else order


def _prompts(rows: list[Request]) -> Ints:
    return np.array([request.num_prompt_tokens for request in rows], dtype=np.int64)


def _limits(rows: list[Request]) -> Ints:
    return np.array([request.max_tokens for request in rows], dtype=np.int64)


def order_requests(
    requests: Iterable[Request],
    settings: EngineSettings,
    *,
    solver: Solver = "greedy",
    known: bool = False,
    output_length: OutputLength = "auto",
    window_rows: int = WINDOW_ROWS,
    order: tuple[int, ...] = (),
    replicas: int = 1,
) -> PlannedOrder:
    """Requests in the order that the policy wants: vasuki's is planned, the others take rows as they come.

    known: whether requests say how long their outputs become; else `output_length` says what is expected of them.
    order: indices of all rows that can run, where planning found an order for them.
    replicas: that share the requests, each of these settings.

    Make the result an observer of the run as well, which is how it learns output lengths.
    """
    policy = settings.policy
    lengths: OutputLengths | None = None
    if policy.sorted_prompts:
        solver = "prompt_length"
    elif not policy.ordered or (policy.as_they_come and not order):
        solver = "fifo"
    if known or not policy.ordered:
        pass
    elif output_length == "auto":
        lengths = OutputLengths()
    elif isinstance(output_length, Quantile):
        lengths = OutputLengths(output_length.quantile)
    return PlannedOrder(
        requests,
        Capacity.of(settings, replicas),
        solver=solver,
        lengths=lengths,
        window_rows=window_rows,
        order=order,
        shares=settings.policy.shares_prefixes,
    )
