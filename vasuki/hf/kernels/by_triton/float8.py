"""Numbers of 8 bits in Triton kernels, by arithmetic on bytes; they are read by the card's instructions where it has
them, since decodes read at the rate of its memory.

The plain twin is `kernels.float8.stored`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.float8 import Scales, indexable

_ADA = (8, 9)  # the first generation with instructions for them


def to_read(cache: torch.Tensor) -> torch.Tensor:
    """A cache as kernels read it: bytes where the card knows no numbers of 8 bits."""
    return cache if _has_instructions(cache.device) else indexable(cache)


def factors(scales: Scales) -> tuple[float, float]:
    """What numbers are multiplied by before they are kept."""
    return 1 / scales.key, 1 / scales.value


@functools.cache
def _has_instructions(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _ADA


@triton.jit
def kept(x, factor, cache):
    """Numbers as `cache`, a pointer, keeps them. `factor` is one by the scale: cards divide less exactly."""
    if cache.dtype.element_ty == tl.uint8:
        x = _bytes(x.to(tl.float32) * factor)
    return x.to(cache.dtype.element_ty)


@triton.jit
def read(x, like):
    """What was kept, in the type of `like`, still to be multiplied by its scale."""
    if x.dtype == tl.uint8:
        x = _floats(x)
    return x.to(like.dtype)


@triton.jit
def _bytes(x):
    """float32 -> 8 bits, to the nearest, or the even one of two; what is larger than all, to the largest."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 they are 2^-9 apart, as all numbers are next to 2^14.
    below = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    number = tl.where(size < (121 << 23), below, rounded)
    number = tl.where(x != x, 0x7F, number)  # no number
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _floats(x):
    """8 bits -> float32."""
    byte = x.to(tl.uint32)
    size = byte & 0x7F
    number = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, 2 * number - 0.015625, number)  # below 2^-6
    number = tl.where(size == 0x7F, float("nan"), number)
    return tl.where(byte > 0x7F, -number, number)
