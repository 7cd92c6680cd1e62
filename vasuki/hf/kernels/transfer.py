"""Small arrays between host and device, while the device computes.

A plain copy to or from CUDA makes the host wait for all that the device has yet to compute. Through pinned memory the
copy takes its turn behind it, and the host goes on.
"""

from __future__ import annotations

import math
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


Shapes = dict[str, tuple[tuple[int, ...], type[np.integer[Any]]]]  # of arrays by name, with their types
_TYPES = {np.int32: torch.int32, np.int64: torch.int64}


class Staged:
    """Arrays that one copy brings, step by step, to memory of the device that stays.

    The host writes into two pieces of pinned memory by turns: while the copy of one waits for what the device has yet
    to compute, the next step's is written.

    Args:
        device: where to.
        shapes: of each array. Of the last one the first rows may be sent alone.

    Attributes:
        there: the arrays on the device, zeros until something is sent.
    """

    def __init__(self, device: torch.device, shapes: Shapes) -> None:
        begin, begins = 0, {}
        for name, (shape, dtype) in shapes.items():
            begins[name] = begin
            begin += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._last, (shape, dtype) = begins[name], shapes[name]
        self._row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        self._memory = torch.zeros(begin, dtype=torch.uint8, device=device)
        self.there: dict[str, torch.Tensor] = {}
        self._pieces = [_Piece(begin, device) for _ in range(2)]
        for name, (shape, dtype) in shapes.items():
            part = slice(begins[name], begins[name] + math.prod(shape) * np.dtype(dtype).itemsize)
            self.there[name] = self._memory[part].view(_TYPES[dtype]).view(shape)
            for piece in self._pieces:
                piece.arrays[name] = piece.bytes[part].view(dtype).reshape(shape)

    def here(self) -> dict[str, np.ndarray]:
        """Where the host writes what is sent next. It finds there what it wrote two times before."""
        self._pieces.reverse()
        return self._pieces[0].free()

    def send(self, rows: int) -> None:
        """Copy all arrays, but of the last one these rows."""
        self._pieces[0].copy_to(self._memory, self._last + rows * self._row_bytes)


class _Piece:
    """Memory of the host that is written again when its last copy is done."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory, self.bytes = staging(num_bytes, device)
        self.arrays: dict[str, np.ndarray] = {}
        self._copied: Any = None

    def free(self) -> dict[str, np.ndarray]:
        """Its arrays, once they may be written."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.arrays

    def copy_to(self, memory: torch.Tensor, num_bytes: int) -> None:
        """Copy the first bytes, behind what the device has yet to compute."""
        memory[:num_bytes].copy_(self._memory[:num_bytes], non_blocking=True)
        if memory.is_cuda:
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


def staging(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
    """Zeros on the host, from where a device copies; twice the same memory."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return memory, memory.numpy()


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
