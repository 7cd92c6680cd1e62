"""Sampling: the right distribution, filtered as asked, and the same draw for a row wherever it is computed."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf import sampler
from vasuki.hf.sampler import sample, uniform
from vasuki.machines.memory_budget import DRAWING_BYTES


def sequence(row: int, sample_index: int = 0, output: int = 0, **sampling: Any) -> Sequence:
    request = Request(row, f"row-{row}", 1, 99, sampling=SamplingParams(**sampling), sample_index=sample_index)
    return Sequence(request, output_token_ids=[0] * output)


def test_temperature_zero_is_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [sequence(0), sequence(1)]).token_ids.tolist() == [1, 0]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [sequence(row, temperature=1.0) for row in range(20_000)]
    drawn = sample(probabilities.log().expand(len(rows), -1), rows).token_ids
    shares = torch.bincount(drawn, minlength=4) / len(rows)
    assert torch.allclose(shares, probabilities, atol=0.012)


def test_temperature_flattens() -> None:
    logits = torch.tensor([0.0, 2.0]).expand(5000, -1)
    shares = [
        sample(logits, [sequence(row, temperature=t) for row in range(5000)]).token_ids.sum().item() / 5000
        for t in (0.5, 4.0)
    ]
    assert shares[0] == pytest.approx(torch.sigmoid(torch.tensor(4.0)).item(), abs=0.02)
    assert shares[1] == pytest.approx(torch.sigmoid(torch.tensor(0.5)).item(), abs=0.02)


def test_top_k_and_top_p_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(3000, -1)

    def support(**sampling: Any) -> set[int]:
        rows = [sequence(row, temperature=1.0, **sampling) for row in range(3000)]
        return set(sample(logits, rows).token_ids.tolist())

    assert support(top_k=1) == {0}
    assert support(top_k=3) == {0, 1, 2}
    assert support(top_p=0.39) == {0}
    assert support(top_p=0.41) == {0, 1}
    assert support(top_p=0.9) == {0, 1, 2}
    assert support(top_k=2, top_p=0.99) == {0, 1}
    assert support() == {0, 1, 2, 3}


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))

    def drawn(top_k: int) -> list[int]:
        return sample(logits, [sequence(row, temperature=1.0, top_k=top_k) for row in range(50)]).token_ids.tolist()

    assert drawn(7) == drawn(8) == drawn(2**63) == drawn(2**200) == drawn(0)


def test_extreme_settings_come_near_their_limits() -> None:
    logits = torch.tensor([[0.0, 30.0, 29.0, -3e4]]).expand(200, -1)

    def support(**sampling: Any) -> set[int]:
        rows = [sequence(row, **{"temperature": 1e5, **sampling}) for row in range(200)]
        return set(sample(logits, rows).token_ids.tolist())

    assert support(temperature=1e300) == {0, 1, 2, 3}
    for temperature in (1e-29, 1e-30, 1e-45, 5e-324):
        assert support(temperature=temperature) == {1}
    assert support(top_p=5e-324) == {1}


@given(st.permutations(range(6)))
def test_a_row_draws_the_same_in_any_batch(order: list[int]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    rows = [sequence(row, temperature=0.9, top_p=0.8, seed=3) for row in range(6)]
    together = sample(logits, rows).token_ids.tolist()
    mixed = sample(logits[list(order)], [rows[row] for row in order]).token_ids.tolist()
    assert [together[row] for row in order] == mixed
    assert [sample(logits[row : row + 1], [rows[row]]).token_ids.item() for row in range(6)] == together


def test_seed_row_sample_and_position_each_change_the_draw() -> None:
    draws = [
        uniform(sequence(0)),
        uniform(sequence(1)),
        uniform(sequence(0, sample_index=1)),
        uniform(sequence(0, output=1)),
        uniform(sequence(0, seed=1)),
        uniform(sequence(0, seed=-(2**200))),
    ]
    assert len(set(draws)) == 6
    assert all(0 <= draw < 1 for draw in draws)


def test_logprobs_are_those_of_the_chosen_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    sampled = sample(logits, [sequence(0)], want_logprobs=True)
    assert sampled.logprobs.tolist() == pytest.approx([torch.log_softmax(logits, -1)[0, 1].item()])


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how many rows are drawn at a time nor their neighbours' settings decide a row's token."""
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    settings: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {},
        {"top_k": 30, "top_p": 0.5},
        {"temperature": 0.0},
    ]
    rows = [sequence(row, **{"temperature": 1.0, **settings[row % 5]}) for row in range(12)]
    whole = sample(logits, rows, want_logprobs=True)
    monkeypatch.setattr(sampler, "DRAWN_LOGITS", 150)
    sliced = sample(logits, rows, want_logprobs=True)
    alone = [sample(logits[row : row + 1], rows[row : row + 1]).token_ids.item() for row in range(12)]
    assert sliced.token_ids.tolist() == whole.token_ids.tolist() == alone
    assert torch.equal(sliced.logprobs, whole.logprobs)


def test_drawing_holds_no_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    draw = sampler._drawn

    def watched(logits: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(logits.numel())
        return draw(logits, *others)

    monkeypatch.setattr(sampler, "_drawn", watched)
    monkeypatch.setattr(sampler, "DRAWN_LOGITS", 150)
    sample(torch.randn(12, 50), [sequence(row, temperature=1.0) for row in range(12)])
    assert seen == [150] * 4


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operators return, while they live.

    Args:
        given: a tensor that is there already.
    """

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes = {given.untyped_storage()._cdata: 0}
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else [output]:
            storage = each.untyped_storage()
            if storage._cdata not in self._bytes:
                self._bytes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, storage._cdata)
        self.most_bytes = max(self.most_bytes, sum(self._bytes.values()))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 4000, "top_p": 0.9}, {"top_k": 15000}])
def test_drawing_holds_no_more_than_plans_set_aside(setting: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.randn(4, 20_000).to(dtype)
    with _Live(logits) as live:
        sample(logits, [sequence(row, temperature=0.7, **setting) for row in range(4)])
    small = 4 * sampler._SLICE * 32
    assert 4 * logits.numel() < live.most_bytes <= DRAWING_BYTES * logits.numel() + small


@given(
    units=st.lists(st.sampled_from([0, 0, 1, 3, 64]), min_size=1, max_size=40),
    number=st.integers(0, 2**20 - 1).map(lambda part: part / 2**20),
    size=st.sampled_from([4, 512]),
)
def test_a_token_is_drawn_where_the_sum_exceeds_its_number(units: list[int], number: float, size: int) -> None:
    """As by one sum over the whole vocabulary, which is exact for these."""
    shares = torch.tensor([units], dtype=torch.float32) / 64
    shares[0, len(units) // 2] = 1.0
    sums = shares.double().cumsum(-1)
    expected = int((sums[0] > number * sums[0, -1]).nonzero()[0])
    with mock.patch.object(sampler, "_SLICE", size):
        drawn = int(sampler._inverse(shares, torch.tensor([number], dtype=torch.float64)))
    assert drawn == expected


def test_rounding_draws_no_token_without_a_share() -> None:
    shares = torch.zeros(1, 2000)
    shares[0, 100:1700:7] = torch.rand(229, generator=torch.Generator().manual_seed(3))
    for number in (0.0, 0.5, 1 - 2.0**-53):
        drawn = int(sampler._inverse(shares, torch.tensor([number], dtype=torch.float64)))
        assert shares[0, drawn] > 0
