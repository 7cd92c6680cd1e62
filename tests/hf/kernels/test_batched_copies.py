"""Copies in one call of a driver: a stand-in for it reads the arrays as CUDA would, and moves the bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vasuki.hf.kernels import batched_copies
from vasuki.hf.kernels.batched_copies import BatchedCopies
from vasuki.hf.kv import block_copies
from vasuki.hf.kv.block_copies import copy_of, runs_of

STREAM = 77
_SIZES = ctypes.POINTER(ctypes.c_size_t)


class Driver:
    """`cuMemcpyBatchAsync` of CUDA 12.8 where all memory is the host's. It copies from the last to the first, as the
    order is free."""

    def __init__(self, refused: int | None = None) -> None:
        self.counts: list[int] = []
        self._refused = refused  # the copy that it stops at

    def __call__(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        indices: int,
        num_attributes: int,
        failed: int,
        stream: int,
    ) -> int:
        assert stream == STREAM
        assert num_attributes == 1
        assert ctypes.cast(indices, _SIZES)[0] == 0, "the first copy has the first attributes"
        order, *rest = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int * 6))[0]
        assert (order, rest) == (1, [0] * 5), "in the order of the stream, and no hints"
        self.counts.append(count)
        if self._refused is not None:
            ctypes.cast(failed, _SIZES)[0] = self._refused
            return 1
        arrays = (ctypes.cast(each, _SIZES)[:count] for each in (targets, sources, sizes))
        for target, source, size in reversed(list(zip(*arrays, strict=True))):
            ctypes.memmove(target, source, size)
        return 0


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Blocks of two pools, each at most once on either side."""
    count = draw(st.integers(0, 12))
    sources, targets = (
        draw(st.lists(st.integers(0, 15), min_size=count, max_size=count, unique=True)) for _ in range(2)
    )
    return sources, targets


@given(pairs())
def test_blocks_arrive_however_they_are_copied(blocks: tuple[list[int], list[int]]) -> None:
    sources, targets = blocks
    source, expected = torch.arange(16 * 6).view(16, 2, 3), torch.full((16, 2, 3), -1)
    one_by_one, at_once = expected.clone(), expected.clone()
    for here, there in zip(sources, targets, strict=True):
        expected[there] = source[here]
    runs = runs_of(sources, targets)
    assert runs.num_blocks == len(sources)
    num_bytes, copy = copy_of(source, one_by_one, runs)
    assert copy() == num_bytes == len(sources) * source[0].numel() * source.element_size()
    assert torch.equal(one_by_one, expected)
    driver = Driver()
    block_bytes = source[0].numel() * source.element_size()
    addresses = (at_once.data_ptr() + runs.targets * block_bytes, source.data_ptr() + runs.sources * block_bytes)
    BatchedCopies(driver)(*addresses, runs.counts * block_bytes, STREAM)
    assert torch.equal(at_once, expected)
    assert driver.counts == ([len(runs.counts)] if sources else [])


def test_neighbours_are_one_run_in_whatever_order_they_are_given() -> None:
    runs = runs_of([7, 3, 5, 4, 8], [17, 10, 12, 11, 9])
    assert [each.tolist() for each in runs] == [[3, 7, 8], [10, 17, 9], [3, 1, 1]]


def test_long_batches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_copies, "MOST_COPIES", 3)
    source, target, driver = torch.arange(8), torch.zeros(8, dtype=torch.int64), Driver()
    places = np.arange(8) * 8
    BatchedCopies(driver)(target.data_ptr() + places[::-1], source.data_ptr() + places, np.full(8, 8), STREAM)
    assert target.tolist() == list(range(7, -1, -1))
    assert driver.counts == [3, 3, 2]


def test_a_copy_that_is_refused_is_named() -> None:
    with pytest.raises(RuntimeError, match="CUDA error 1: copy 2 of 4 was refused"):
        BatchedCopies(Driver(refused=2))(np.ones(4, np.int64), np.ones(4, np.int64), np.ones(4, np.int64), STREAM)


@pytest.mark.parametrize(("major", "batched"), [(8, True), (9, True), (10, False), (12, False)])
def test_cards_that_crash_copy_one_by_one(major: int, batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def cuGetProcAddress_v2(name: bytes, address: Any, version: int, flags: Any, status: Any) -> int:  # noqa: N802
            assert (name, version) == (b"cuMemcpyBatchAsync", 12080)
            address._obj.value = 4096
            return 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    find = batched_copies.batched_copies.__wrapped__
    assert (find(torch.device("cuda")) is not None) == batched
    assert find(torch.device("cpu")) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # of a driver that is older
    assert find(torch.device("cuda")) is None


def test_tensors_of_a_device_go_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made up: the memory of its tensor is the host's."""
    driver = Driver()

    class OnDevice(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 0)

    monkeypatch.setattr(block_copies, "batched_copies", lambda device: BatchedCopies(driver))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": STREAM}))
    source = torch.arange(12).view(6, 2)
    target = torch.zeros(6, 2, dtype=torch.int64).as_subclass(OnDevice)
    num_bytes, copy = copy_of(source, target, runs_of([0, 1, 4], [2, 3, 0]))
    assert copy() == num_bytes == 3 * 16
    assert target.tolist() == [[8, 9], [0, 0], [0, 1], [2, 3], [0, 0], [0, 0]]
    assert driver.counts == [2]
