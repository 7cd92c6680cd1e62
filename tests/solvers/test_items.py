from __future__ import annotations

import numpy as np
import pytest

from vasuki_solvers import InfeasibleItem, Instance, InvalidItem, Item, UnsupportedLimit, lower_bound
from vasuki_solvers.milp import milp_schedule


def test_an_item_holds_its_prompt_at_first_and_never_holds_its_last_token() -> None:
    held = [5, 6, 7]
    assert Item(5, 3).peak == held[-1]
    assert Item(5, 3).area == sum(held)


def test_arrays_and_items_describe_the_same_instance() -> None:
    instance = Instance(np.array([5, 2]), np.array([3, 1], np.int32), 10)
    assert instance.items == [Item(5, 3), Item(2, 1)]
    assert instance.peaks.tolist() == [item.peak for item in instance.items]
    assert instance.areas.tolist() == [item.area for item in instance.items]


def test_a_prompt_that_takes_several_steps_of_prefill_holds_its_place_meanwhile() -> None:
    instance = Instance.of([(10, 2), (4, 2)], 20, prefill_tokens_per_step=4)
    assert instance.min_waits.tolist() == [2, 0]
    assert instance.areas.tolist() == [10 + 10 + 10 + 11, 4 + 5]


def test_an_item_that_never_fits_is_named_with_what_it_would_need() -> None:
    with pytest.raises(InfeasibleItem, match=r"item 1 needs a capacity of 12 tokens .* capacity is 11") as caught:
        Instance.of([(3, 2), (10, 3)], 11)
    assert (caught.value.index, caught.value.needed, caught.value.capacity) == (1, 12, 11)
    assert len(Instance.of([(3, 2), (10, 3)], 12)) == 2


@pytest.mark.parametrize(
    ("items", "limits", "message"),
    [
        ([(3, 2), (0, 2)], {}, "item 1: prompts holds 0"),
        ([(3, -1)], {}, "item 0: durations holds -1"),
        ([(3.5, 1)], {}, "prompts must be whole numbers"),
        ([(3, 1)], {"capacity": 0}, "capacity is 0"),
        ([(3, 1)], {"max_parallel": 0}, "max_parallel is 0"),
        ([(3, 1)], {"prefill_tokens_per_step": -5}, "prefill_tokens_per_step is -5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    items: list[tuple[int, int]], limits: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidItem, match=message):
        Instance.of(items, **{"capacity": 100, **limits})


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidItem, match="2 prompts and 1 durations"):
        Instance(np.array([1, 2]), np.array([1]), 10)


def test_no_items_take_no_steps() -> None:
    assert lower_bound(Instance.of([], 10)).steps == 0


def test_the_milp_refuses_a_limit_it_does_not_model() -> None:
    with pytest.raises(UnsupportedLimit, match="prefill budget"):
        milp_schedule(Instance.of([(3, 2)], 10, prefill_tokens_per_step=2))
