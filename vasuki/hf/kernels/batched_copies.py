"""Many copies between a device and pinned host memory in one call of the CUDA driver (12.8 and later).

A row's blocks lie scattered in every layer, and torch issues one copy in some 9 us: 1,700 of them keep the host for
longer than the link takes. The driver takes addresses and sizes of all of them at once, in arrays.

On cards from Blackwell on, long or frequent batches crash or hang (drivers of CUDA 13.0: vllm-project/vllm#49276,
InternLM/lmdeploy#4838), so there copies are issued one by one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch

from vasuki.base.arrays import Ints

_SINCE = 12080  # the version whose arguments these are; later ones lack one of them
_BLACKWELL = 10
_STREAM_ORDER = 1  # a source is read when its copy's turn has come in the stream
MOST_COPIES = 4096  # of a call


class _Attributes(ctypes.Structure):
    """What the driver is told of all copies: where managed memory should be stays open, as there is none."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchedCopies:
    """The driver's call.

    Args:
        call: `cuMemcpyBatchAsync`, with the arguments of CUDA 12.8.
    """

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, targets: Ints, sources: Ints, sizes: Ints, stream: int) -> None:
        """Queue copies of so many bytes from and to those addresses, in any order among themselves, behind what a
        stream of one's own was given before. Raises RuntimeError where the driver refuses them."""
        attributes, first_with_them, failed = _Attributes(_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        for first in range(0, len(sizes), MOST_COPIES):
            part = slice(first, first + MOST_COPIES)
            arrays = [np.ascontiguousarray(each[part], np.uint64) for each in (targets, sources, sizes)]
            code = self._call(
                *(array.ctypes.data for array in arrays),
                len(arrays[0]),
                ctypes.addressof(attributes),
                ctypes.addressof(first_with_them),
                1,
                ctypes.addressof(failed),
                stream,
            )
            if code:
                raise RuntimeError(f"CUDA error {code}: copy {failed.value} of {len(arrays[0])} was refused")


@functools.cache
def batched_copies(device: torch.device) -> BatchedCopies | None:
    """The call for a device, or None where its driver has none or it is not to be trusted."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= _BLACKWELL:
        return None
    try:
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (AttributeError, OSError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    flags = ctypes.c_uint64(0)
    if find(b"cuMemcpyBatchAsync", ctypes.byref(address), _SINCE, flags, ctypes.byref(status)) or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return BatchedCopies(ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address.value))
