"""Small arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vasuki.hf.kernels.transfer import to_device


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
