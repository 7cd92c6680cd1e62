"""Small arrays between host and device, while the device computes.

A plain copy to or from CUDA makes the host wait for all that the device has yet to compute. Through pinned memory the
copy takes its turn behind it, and the host goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays of one dimension and one dtype, in one copy."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    together = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return list(torch.split(together, [len(array) for array in arrays]))


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
