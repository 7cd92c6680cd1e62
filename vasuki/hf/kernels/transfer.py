"""Small arrays between host and device, while the device computes.

A plain copy to or from CUDA makes the host wait for all that the device has yet to compute. Through pinned memory the
copy takes its turn behind it, and the host goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ALIGNED_BYTES = 16  # from where each array begins: a kernel is compiled again for addresses that are not so round


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays of one dimension and one dtype, in one copy."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    step = max(1, _ALIGNED_BYTES // arrays[0].itemsize)
    rooms = [-(-len(array) // step) * step for array in arrays]
    together = torch.empty(sum(rooms), dtype=torch.from_numpy(arrays[0][:0]).dtype, pin_memory=True)
    for array, part in zip(arrays, torch.split(together, rooms), strict=True):
        part[: len(array)] = torch.from_numpy(array)
    there = together.to(device, non_blocking=True)
    return [part[: len(array)] for array, part in zip(arrays, torch.split(there, rooms), strict=True)]


class ToHost:
    """Tensors on their way to the host, from when they are computed."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # to pinned memory
        self._arrived: Any = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
