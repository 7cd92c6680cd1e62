"""Rows are handed out once each, in order, in leases that shrink, to each replica its share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.engine.sequence import Request
from vasuki.planner.leases import MOST_ROWS, Leases, Work

WORK = Work(prompt_token_s=1.0, output_token_s=1.0)


@dataclass
class Queue:
    """An order that knows all of its rows."""

    rows: deque[Request]

    def __next__(self) -> Request:
        if not self.rows:
            raise StopIteration
        return self.rows.popleft()

    @property
    def ahead(self) -> tuple[int, int, int]:
        prompts, outputs = ([getattr(row, name) for row in self.rows] for name in ("num_prompt_tokens", "max_tokens"))
        return len(self.rows), sum(prompts), sum(outputs)


def leases_of(lengths: list[int], replicas: int) -> Leases:
    return leases_of_rows(deque(Request(row, row, 1, tokens) for row, tokens in enumerate(lengths)), replicas)


def leases_of_rows(rows: deque[Request], replicas: int) -> Leases:
    leases = Leases(Queue(rows), WORK, len(rows), job_s=1.0)
    for replica in range(replicas):
        leases.join(replica)
    return leases


@dataclass
class Replica:
    """Computes its rows one after the other, `speed` tokens a second."""

    speed: float
    now_s: float = 0.0
    rows: deque[Request] = field(default_factory=deque)
    groups: set[tuple[int, ...]] = field(default_factory=set)  # beginnings of the prompts that it had


def play(leases: Leases, speeds: list[float]) -> tuple[list[Replica], list[int]]:
    """Run all rows in virtual time. Returns the replicas, and the rows in the order in which they were handed out."""
    replicas, handed = [Replica(speed) for speed in speeds], []
    while not leases.is_done:
        for index in sorted(range(len(replicas)), key=lambda index: replicas[index].now_s):
            replica = replicas[index]
            if not replica.rows:
                taken = leases.take(index)
                handed += [request.row for request in taken]
                replica.groups |= {tuple(request.prompt_token_ids[:16]) for request in taken}
                replica.rows.extend(taken)
            if replica.rows:
                request = replica.rows.popleft()
                elapsed_s = (1 + request.max_tokens) / replica.speed
                replica.now_s += elapsed_s
                leases.computed(index, 1, request.max_tokens, elapsed_s)
                leases.ended(index, (request.row, 0), request.max_tokens)
                break
        else:
            raise AssertionError("rows wait and nobody gets any")
    return replicas, handed


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=300),
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6),
)
def test_every_row_is_handed_out_once_in_order_and_replicas_end_together(
    lengths: list[int], speeds: list[float]
) -> None:
    lengths.sort(reverse=True)
    replicas, handed = play(leases_of(lengths, len(speeds)), speeds)
    assert handed == list(range(len(lengths)))
    # List scheduling on uniform machines: nobody idles by more than what one row takes on the slowest, and here, since
    # speeds are not known beforehand, what a first lease takes there.
    ideal_s = sum(1 + tokens for tokens in lengths) / sum(speeds)
    first_s = min(MOST_ROWS, -(-len(lengths) // 4)) * (1 + lengths[0]) / min(speeds)
    assert max(replica.now_s for replica in replicas) <= ideal_s + first_s + (1 + lengths[0]) / min(speeds)


def test_replicas_of_different_speed_end_within_three_per_cent() -> None:
    rng = np.random.default_rng(3)
    lengths = sorted(rng.integers(10, 400, 3000).tolist(), reverse=True)
    replicas, _ = play(leases_of(lengths, 4), [1.0, 1.0, 2.0, 3.5])
    ends = [replica.now_s for replica in replicas]
    assert max(ends) - min(ends) <= 0.03 * max(ends)


@pytest.mark.parametrize("seed", range(20))
def test_replicas_of_one_speed_end_within_three_per_cent_whatever_the_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replicas = int(rng.integers(2, 9))
    lengths = rng.lognormal(4, rng.uniform(0.2, 1.2), int(rng.integers(200, 500)) * replicas).clip(1, 2000).astype(int)
    played, _ = play(leases_of(sorted(lengths.tolist(), reverse=True), replicas), [1.0] * replicas)
    ends = [replica.now_s for replica in played]
    assert max(ends) - min(ends) <= 0.03 * max(ends)


def test_one_that_comes_first_leaves_the_others_their_share() -> None:
    leases = leases_of([100] * 40, replicas=2)
    taken = 0
    while lease := leases.take(0):
        taken += len(lease)
    assert taken == 20


def test_leases_shrink() -> None:
    leases = leases_of([10] * 2000, replicas=2)
    sizes = []
    while not leases.is_done:
        for replica in (0, 1):
            lease = leases.take(replica)
            sizes += [len(lease)] if lease else []
            for request in lease:
                leases.computed(replica, 1, 10, 1.0)
                leases.ended(replica, (request.row, 0), 10)
    assert sizes[0] == MOST_ROWS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


@given(st.integers(2, 30), st.integers(2, 12), st.integers(0, 8))
def test_rows_that_begin_alike_stay_together(groups: int, members: int, shared_by_all: int) -> None:
    common = [7] * shared_by_all
    rows = deque(
        Request(number, number, shared_by_all + 9, 5, np.array([*common, *[group] * 8, 100 + number], np.int32))
        for number, group in enumerate(group for group in range(groups) for _ in range(members))
    )
    leases = Leases(Queue(rows), WORK, groups * members, job_s=1.0)
    leases.join(0)
    lease = leases.take(0)
    most = min(MOST_ROWS, -(-groups * members // 4))
    if most // 2 >= members:  # the end of a group lies within reach
        assert len(lease) % members == 0


@pytest.mark.parametrize(("groups", "members", "replicas", "most"), [(100, 10, 4, 10), (500, 4, 8, 20)])
def test_few_replicas_compute_what_another_has(groups: int, members: int, replicas: int, most: int) -> None:
    """If the next replica to ask took the rest of a group, its shared prefix would be computed 21 and 47 times more."""
    outputs = sorted(np.random.default_rng(1).integers(10, 100, groups).tolist(), reverse=True)
    rows = deque(
        Request(number, number, 18, outputs[group], np.array([*[7] * 8, *[group] * 8, number], np.int32))
        for number, group in enumerate(group for group in range(groups) for _ in range(members))
    )
    played, handed = play(leases_of_rows(rows, replicas), [1 + index / 1000 for index in range(replicas)])
    assert sorted(handed) == list(range(groups * members))
    assert sum(len(replica.groups) for replica in played) - groups <= most
    ends = [replica.now_s for replica in played]
    assert max(ends) - min(ends) <= 0.03 * max(ends)


def test_no_row_is_kept_for_a_slow_replica_that_leaves_it_to_a_faster_one() -> None:
    outputs = [5, 5, 300, *[4] * 46]
    beginnings = [[3] * 16] * 6 + [[4] * 16] * 43
    rows = deque(
        Request(row, row, 16, tokens, np.array(begins, np.int32))
        for row, (tokens, begins) in enumerate(zip(outputs, beginnings, strict=True))
    )
    leases = Leases(Queue(rows), WORK, len(rows), job_s=1.0)
    leases.join(0, speed=1.0, row_token_s=1.0)
    leases.join(1, speed=10.0, row_token_s=0.1)
    assert [request.row for request in leases.take(0)] == [0, 1]
    assert 2 in [request.row for request in leases.take(1)]


def test_what_a_dead_replica_held_comes_first() -> None:
    leases = leases_of([10] * 100, replicas=2)
    lost, kept = leases.take(0), leases.take(1)
    leases.ended(0, (lost[0].row, 0), 10)
    leases_kept, held = kept, leases.leave(0)
    assert held == lost[1:]
    leases.give_back(held)
    again = []
    while not leases.is_done:
        lease = leases.take(1)
        again += lease
        for request in [*kept, *lease]:
            leases.ended(1, (request.row, 0), 10)
        kept = []
    assert again[: len(held)] == held
    assert {lost[0].row, *(row.row for row in [*leases_kept, *again])} == set(range(100))


def test_a_slow_replica_leaves_a_long_row_that_a_faster_one_would_end_sooner() -> None:
    rows = deque(Request(row, row, 1, tokens) for row, tokens in enumerate([100, 5, 5, 5]))
    leases = Leases(Queue(rows), Work(1.0, 1.0), 4, job_s=1.0)
    leases.join(0, speed=1.0, row_token_s=1.0)
    leases.join(1, speed=10.0, row_token_s=0.1)
    slow = leases.take(0)
    assert slow
    assert all(request.max_tokens == 5 for request in slow)
    assert next(request.max_tokens for request in leases.take(1)) == 100


def test_a_slow_replica_counts_what_it_holds_before_it_starts_a_long_row() -> None:
    leases = leases_of([5, 5, 25, *[5] * 42], replicas=0)
    leases.join(0, speed=1.0, row_token_s=1.0)
    leases.join(1, speed=10.0, row_token_s=0.1)
    assert [request.row for request in leases.take(0)] == [0, 1]
    later = leases.take(0)  # behind 12 seconds, and 29 are what the other one takes for all that is left
    assert later
    assert 2 not in [request.row for request in later]
    assert leases.take(1)[0].row == 2
