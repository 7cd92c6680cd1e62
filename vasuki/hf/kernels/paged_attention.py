"""The CPU's attention over paged blocks: a compiled kernel, made for the sizes of a model's heads and for its types."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vasuki.hf.kernels import levels, native
from vasuki.hf.kernels.float8 import UNSCALED, Scales
from vasuki.hf.kernels.levels import Level

_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16"}


class PagedKernel:
    """Calls compiled libraries on torch tensors.

    Args:
        libraries: one for each size of head.

    Attributes:
        functions: that write and attend, for the smallest heads.
        tile_tokens: of a prompt's tile at most: enough to pay for what it copies, few enough to keep many cores busy.
        output_tile_tokens: of an output's, which another kernel serves, one by one: so they are served when they are
            generated, and a row that is computed again is to come to the same.
    """

    tile_tokens = 32
    output_tile_tokens = 1

    def __init__(self, libraries: Mapping[int, ctypes.CDLL]) -> None:
        self._write: dict[int, Any] = {}
        self._attend: dict[int, Any] = {}
        for head_dim, library in libraries.items():
            write, attend = library.vasuki_paged_write, library.vasuki_paged_attention
            write.restype = attend.restype = None
            write.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 5
            attend.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 8 + [ctypes.c_float] * 2
            self._write[head_dim], self._attend[head_dim] = write, attend
        self.functions = [self._write[min(libraries)], self._attend[min(libraries)]]

    @functools.cached_property
    def addresses(self) -> list[ctypes.c_void_p]:
        """Addresses of these functions, for kernels that compute layers whose heads are all of one size."""
        return [ctypes.cast(function, ctypes.c_void_p) for function in self.functions]

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
        cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Store keys and values `[num_tokens, num_kv_heads, head_dim]`. Its plain twin is `KVCache.write`; of
        `rows` it reads the keys' half. No type that it stores has scales."""
        _, _, block_tokens, num_kv_heads, head_dim = cache.shape
        keys, values = keys.flatten(1), values.flatten(1)  # without a copy, unless heads lie apart
        self._write[head_dim](
            keys.data_ptr(),
            values.data_ptr(),
            rows.data_ptr(),
            cache.data_ptr(),
            rows.shape[-1],
            keys.stride(0),
            values.stride(0),
            block_tokens,
            num_kv_heads,
        )

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        tiles: torch.Tensor,
        longest: int,
        tables: torch.Tensor,
        sinks: torch.Tensor | None,
        window: int | None,
        scaling: float,
        softcap: float | None,
        out: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Serve `tiles` of the packed `query`, writing their rows of `out`. Shapes as in paged_attention.cpp.

        All tensors are contiguous, but for the query, whose tokens may lie apart; indices are int64.
        """
        sinks = None if sinks is None else sinks.float()
        query = query.flatten(1)  # without a copy, unless heads lie apart
        _, _, block_tokens, num_kv_heads, head_dim = cache.shape
        self._attend[head_dim](
            query.data_ptr(),
            cache.data_ptr(),
            tiles.data_ptr(),
            tables.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            len(tiles),
            longest,
            tables.shape[1],
            block_tokens,
            query.stride(0),
            out.shape[1],
            num_kv_heads,
            window or 0,
            scaling,
            softcap or 0.0,
        )


def load_kernel(
    head_dims: Iterable[int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    rounds: bool = False,
    level: Level | None = None,
) -> PagedKernel | None:
    """The attention of a model on a CPU; None if it cannot be had, and attention runs on torch operators.

    Args:
        head_dims: numbers of a head, in whatever sizes the model's layers have.
        dtype: of queries and outputs.
        kv_dtype: of the cache, if it is another.
        rounds: whether what several tokens multiply is rounded to bfloat16, as in a model that computes in it.
        level: of instructions; that of the environment if None.

    Raises:
        JobFileError: the environment asks for one that cannot be had.
    """
    level = level or levels.chosen()
    element, cached = _ELEMENTS.get(dtype), _ELEMENTS.get(kv_dtype or dtype)
    libraries = {}
    for head_dim in head_dims:
        if element is None or cached is None or head_dim % 8:
            return None
        types = (f"-DHEAD_DIM={head_dim}", f"-DELEMENT={element}", f"-DCACHED={cached}", f"-DROUNDS={int(rounds)}")
        # -ffast-math lets sums be reordered, which vectorises them.
        library = native.load("paged_attention.cpp", level, ("-ffast-math", "-fno-associative-math", *types))
        if library is None:
            return None
        libraries[head_dim] = library
    return PagedKernel(libraries)
