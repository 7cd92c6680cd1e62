"""Rows that wait together start by the length of their prompts, and before all that come later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vasuki.arrivals import ArrivalAdmission, FirstCome, Gathering, Rounds, admission_for
from vasuki.engine.policy import POLICIES
from vasuki.engine.sequence import Request


@given(
    rounds=st.lists(st.lists(st.integers(1, 5), max_size=6), max_size=8),
    busy=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_a_round_holds_what_came_while_the_last_one_started(rounds: list[list[int]], busy: list[bool]) -> None:
    admission, row, waiting = Rounds(), 0, []
    for now_s, (lengths, engine_waits) in enumerate(zip(rounds, busy, strict=False)):
        for length in lengths:
            admission.arrive(Request(row, row, length, 8), now_s)
            waiting.append((length, row))
            row += 1
        taken = [(request.num_prompt_tokens, request.row) for request in admission.take(now_s, engine_waits, False)]
        assert taken == (sorted(waiting) if engine_waits else []), "equal ones in order of arrival"
        waiting = [] if engine_waits else waiting
        assert len(admission) == len(waiting)


def test_first_come_first_served() -> None:
    admission = FirstCome()
    for row, length in enumerate([7, 3, 5]):
        admission.arrive(Request(row, row, length, 8), 0.0)
    assert [request.row for request in admission.take(0.0, False, False)] == [0, 1, 2]


def test_the_policy_says_how_rows_wait() -> None:
    kinds = {name: type(admission_for(policy, Gathering())) for name, policy in POLICIES.items()}
    assert kinds.pop("vasuki") is Rounds
    assert kinds.pop("prefill-packing") is ArrivalAdmission
    assert set(kinds.values()) == {FirstCome}
