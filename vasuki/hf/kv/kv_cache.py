"""The tensors behind a block pool.

    layers[l]   [num_blocks, 2, block_tokens, num_kv_heads, head_dim]
                 ^           ^ keys, then values

Layers may differ in their heads. One block of one layer is contiguous, so moving it between tiers is one copy. A
position's *slot* is `block * block_tokens + offset`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from vasuki.base.errors import JobFileError
from vasuki.hf.kernels.float8 import UNSCALED, Scales, indexable, stored

Slots = TypeVar("Slots", np.ndarray, torch.Tensor)  # int64

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class PoolTooLarge(JobFileError):
    """The device has no memory for as many blocks."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of what one token leaves in the KV cache."""

    heads: tuple[tuple[int, int], ...]  # (num_kv_heads, head_dim) of each layer, (0, 0) if it does not attend
    dtype: torch.dtype
    scales: tuple[Scales, ...] = ()  # of each layer; none is scaled if there are none

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
        """Layers with equal heads."""
        return cls(((num_kv_heads, head_dim),) * num_layers, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.heads)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The sizes of heads, each once, rising."""
        return tuple(sorted({head_dim for _, head_dim in self.heads if head_dim}))

    def scales_of(self, layer: int) -> Scales:
        return self.scales[layer] if self.scales else UNSCALED

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in self.heads) * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer in one tier of memory.

    Raises PoolTooLarge, and JobFileError where the host does not pin as much.

    Args:
        buffer_of: layers that only visit this tier, and the buffer that each shares with others.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        pinned: bool = False,
        buffer_of: Mapping[int, int] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.buffer_of = dict(buffer_of or {})
        shapes = [(num_blocks, 2, block_tokens, *heads) for heads in layout.heads]
        # Zeroed, because kernels may read the unused tail of a block and a stray NaN would spread through 0 x NaN.
        zeros = pinned_zeros if pinned else _lazy_zeros if device.type == "cpu" else partial(_device_zeros, device)
        widest = max(map(math.prod, shapes))
        buffers = {buffer: zeros((widest,), layout.dtype) for buffer in sorted(set(self.buffer_of.values()))}
        self.layers = [
            buffers[self.buffer_of[layer]][: math.prod(shape)].view(shape)
            if layer in self.buffer_of
            else zeros(shape, layout.dtype)
            for layer, shape in enumerate(shapes)
        ]

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def moves(self) -> bool:
        """Whether layers pass through memory of which each block is the only copy, so that none is written twice."""
        return bool(self.buffer_of)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_tokens * self.layout.bytes_per_token

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Store keys and values `[num_tokens, num_kv_heads, head_dim]` at `rows` `[2, num_tokens]`, as made by
        `rows_of_slots`."""
        width = keys.shape[1] * keys.shape[2]
        flat = indexable(self.layers[layer]).view(-1, width)
        for states, at, scale in zip((keys, values), rows, self.layout.scales_of(layer), strict=True):
            flat.index_copy_(0, at, indexable(stored(states.reshape(-1, width), self.layout.dtype, scale)))

    def rows_of_slots(self, slots: Slots) -> Slots:
        """Rows of each slot's key and value in the `[num_blocks * 2 * block_tokens, ...]` view of a layer, for all
        layers: `[2, *slots.shape]`."""
        keys = slots + slots // self.block_tokens * self.block_tokens
        stack: Any = np.stack if isinstance(slots, np.ndarray) else torch.stack
        rows: Slots = stack([keys, keys + self.block_tokens])
        return rows

    def gather(
        self, layer: int, blocks: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, in order: each `[..., num_tokens, num_kv_heads, head_dim]`, in the
        type that they are kept in or in another.

        `blocks` is `[..., blocks_per_row]`, and `num_tokens = blocks_per_row * block_tokens`.
        """
        picked = indexable(self.layers[layer]).index_select(0, blocks.reshape(-1)).view(self.layout.dtype)
        picked = picked.to(dtype or self.layout.dtype).view(*blocks.shape, 2, *picked.shape[2:])
        parts = picked.unbind(blocks.dim())
        for states, scale in zip(parts, self.layout.scales_of(layer), strict=True):
            if scale != 1:
                states *= scale
        keys, values = parts
        return keys.flatten(-4, -3), values.flatten(-4, -3)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in page-locked host memory: as much as is asked for, where torch's own allocator takes up to twice that.

    Raises JobFileError where the system does not lock as much.
    """
    if not (num_bytes := math.prod(shape) * dtype.itemsize):
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = _Locked(-1, num_bytes, flags=_ANONYMOUS)
        zeros = torch.frombuffer(memory, dtype=dtype).view(shape)
        _touch(memory, zeros)
        memory.lock(zeros.data_ptr())
    except (OSError, torch.cuda.CudaError) as error:
        _forget_error()
        reason = str(error).splitlines()[0]
        raise JobFileError(f"kv.host_memory: the system cannot pin that much memory ({reason}); lower it") from None
    return zeros


class _Locked(mmap.mmap):
    """Memory that a device may copy from and to, until nobody refers to it."""

    _address = 0

    def lock(self, address: int) -> None:
        """Lock all of this memory, which begins at that address. Raises CudaError."""
        torch.cuda.check_error(_runtime().cudaHostRegister(address, len(self), 0))
        self._address = address

    def __del__(self) -> None:
        if self._address:
            torch.cuda.synchronize()  # copies may be under way, such as weights fetched for a step that never comes
            _runtime().cudaHostUnregister(self._address)


def _touch(memory: mmap.mmap, zeros: torch.Tensor) -> None:
    """Have the system find memory for all of it, in large pages and by all of torch's threads. Locking would do so page
    by page, in one thread."""
    with suppress(AttributeError, OSError):  # of systems without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    zeros.zero_()


def _forget_error() -> None:
    """Take back the last error of CUDA, which the next kernel would else be blamed for: torch clears what it raises."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _device_zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Raises PoolTooLarge where the device does not have as much."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise PoolTooLarge(f"kv.device_memory: that much is not there ({reason}); lower it") from None


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory page by page, as they are written. `torch.zeros` would touch a large pool at once.

    NumPy's zeros would ask for huge pages: the system then gathers free memory for each, several times as slowly.
    Raises PoolTooLarge where the system does not promise as much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:  # which the system refuses
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=_ANONYMOUS)
    except OSError as error:
        raise PoolTooLarge(f"kv.device_memory: that much is not there ({error.strerror}); lower it") from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)
