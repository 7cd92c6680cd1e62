"""Small arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vasuki.hf.kernels import transfer
from vasuki.hf.kernels.transfer import Shapes, Staged, to_device

CPU = torch.device("cpu")
SHAPES: Shapes = {"ids": ((3,), np.int64), "lengths": ((5,), np.int32), "tables": ((4, 2), np.int64)}


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32, np.int32])
def test_each_array_begins_where_kernels_are_compiled_for(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a multiple of 16 bytes, however long those before it are. The device is made up."""
    empty, copies = torch.empty, []

    def pinned(count: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(count, dtype=dtype)

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda"
        assert non_blocking
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    arrays = [np.arange(count, dtype=dtype) + count for count in (5, 0, 1, 8, 3)]
    there = to_device(torch.device("cuda"), *arrays)
    assert [part.tolist() for part in there] == [array.tolist() for array in arrays]
    assert len(copies) == 1
    assert all((part.data_ptr() - copies[0].data_ptr()) % 16 == 0 for part in there)
    assert {part.dtype for part in there} == {torch.from_numpy(arrays[0]).dtype}


def test_arrays_come_as_they_were_written_but_rows_that_are_not_sent_stay() -> None:
    staged = Staged(CPU, SHAPES)
    assert {name: tuple(array.shape) for name, array in staged.there.items()} == {n: s for n, (s, _) in SHAPES.items()}
    assert all(array.data_ptr() % 16 == 0 for array in staged.there.values()), (
        "kernels are compiled for round addresses"
    )
    for step in range(1, 4):
        here = staged.here()
        here["ids"][:] = [step, 2, 3]
        here["lengths"][:] = step
        here["tables"][:] = step
        staged.send(step)
        assert staged.there["ids"].tolist() == [step, 2, 3]
        assert staged.there["lengths"].tolist() == [step] * 5
        assert staged.there["tables"][:, 0].tolist() == [step] * step + [0] * (4 - step)


def test_the_host_finds_what_it_wrote_two_times_before() -> None:
    staged = Staged(CPU, SHAPES)
    for step in range(1, 6):
        here = staged.here()
        assert here["ids"].tolist() == [max(0, step - 2)] * 3
        here["ids"][:] = step
        staged.send(0)


def test_memory_is_written_again_when_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies here run when somebody waits for them, as late as a device may."""
    pending: dict[int, Any] = {}

    class Late:
        def __init__(self, piece: Any) -> None:
            self.piece = piece

        def synchronize(self) -> None:
            if run := pending.pop(id(self.piece), None):
                run()

    def copy_to(piece: Any, memory: torch.Tensor, num_bytes: int) -> None:
        assert id(piece) not in pending, "a copy that is under way is written over"
        pending[id(piece)] = lambda: memory[:num_bytes].copy_(piece._memory[:num_bytes])
        piece._copied = Late(piece)

    monkeypatch.setattr(transfer._Piece, "copy_to", copy_to)
    staged, arrived = Staged(CPU, SHAPES), []
    for step in range(1, 6):
        staged.here()["ids"][:] = step
        arrived.append(int(staged.there["ids"][0]))
        staged.send(4)
    assert arrived == [0, 0, 1, 2, 3]
