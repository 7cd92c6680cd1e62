"""Each trigger releases what is held back, in its turn; nothing is due before."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vasuki.arrivals import ArrivalAdmission, Gathering
from vasuki.engine.sequence import Request


def admission_of(**config: Any) -> ArrivalAdmission:
    return ArrivalAdmission(Gathering(**{"target_s": 1.0, "min_rows": 4, "max_rows": 4, **config}))


def arrive(admission: ArrivalAdmission, *at_s: float) -> None:
    for row, each_s in enumerate(at_s):
        admission.arrive(Request(row, row, 10, 8), each_s)


def rows_at(admission: ArrivalAdmission, now_s: float, waits: bool = True, idle: bool = False) -> list[int]:
    return [request.row for request in admission.take(now_s, waits, idle)]


@pytest.mark.parametrize("law", ["aimd", "load"])
def test_as_many_as_the_controller_says(law: str) -> None:
    admission = admission_of(controller=law)
    arrive(admission, 0.1, 0.1, 0.1)
    assert rows_at(admission, 0.2) == []
    arrive(admission, 0.3)
    assert rows_at(admission, 0.3) == [0, 1, 2, 0]
    assert len(admission) == 0


@pytest.mark.parametrize("law", ["aimd", "load"])
def test_the_timeout_counts_from_the_first_arrival(law: str) -> None:
    admission = admission_of(controller=law)
    arrive(admission, 0.1, 0.4)
    assert admission.next_look_s(0.4) == 0.6
    assert rows_at(admission, 0.599) == []
    assert rows_at(admission, 0.6) == [0, 1]
    assert admission.next_look_s(0.6) == math.inf


def test_a_deep_queue_caps_n() -> None:
    admission = admission_of(burst_rows=2)
    arrive(admission, 0.1, 0.1)
    assert rows_at(admission, 0.1) == [0, 1]


def test_fast_arrivals_wait_for_none() -> None:
    admission = admission_of(burst_rows_per_s=2, smoothing=1.0)
    arrive(admission, 0.1, 0.1, 0.9)
    assert rows_at(admission, 0.9, waits=False) == []
    assert rows_at(admission, 1.0) == [0, 1, 2]
    arrive(admission, 1.1)
    assert rows_at(admission, 1.1) == [0]


def test_a_busy_engine_is_given_one_batch_after_the_other() -> None:
    admission = admission_of(batch_rows=2)
    arrive(admission, 0.1, 0.1, 0.1, 0.1)
    assert rows_at(admission, 0.1, waits=False) == []
    assert [rows_at(admission, 0.2) for _ in range(3)] == [[0, 1], [2, 3], []]


def test_load_packs_what_gathered_while_the_engine_was_busy() -> None:
    """The paper's packs each burst by itself."""
    taken = {}
    for law in ("aimd", "load"):
        admission = admission_of(controller=law, min_rows=1, max_rows=1)
        for now_s in (0.1, 0.2, 0.3):
            arrive(admission, now_s)
            assert rows_at(admission, now_s, waits=False) == []
        taken[law] = [len(rows_at(admission, 0.4)) for _ in range(3)]
    assert taken == {"aimd": [1, 1, 1], "load": [3, 0, 0]}


def test_only_load_spares_rows_the_wait_for_others_beside_an_idle_device() -> None:
    for law, expected in (("aimd", []), ("load", [0])):
        admission = admission_of(controller=law)
        arrive(admission, 0.1)
        assert rows_at(admission, 0.1, idle=True) == expected
