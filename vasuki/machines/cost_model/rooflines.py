"""Time of an operator from its arithmetic and its memory traffic alone.

With c seconds of computing at the achievable rate and m seconds of memory traffic at the achievable bandwidth it takes
(c^3 + m^3)^(1/3), which is max(c, m) except near the ridge. The constants below hold for every card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from vasuki.machines.measured_points import ElementwiseOperator
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import DTYPE_BYTES

ROOFLINE_SHARPNESS = 3.0  # exponent of the roofline; infinity is max(compute, memory)
TILE_COLUMNS = (2.0, 1.0, 0.5, 0.25)  # widths of output tiles to choose from, in units of the profile's tile rows
PRODUCT_SHARE = 0.8  # assumed: of what matmuls reach of their peak, those in 8 bits reach of theirs
SHORTEST_TILE = 1 / 8  # fewer tokens than a tile are padded to a power of two, down to this share of a tile
# Share of the memory bandwidth that each elementwise operator reaches, each a kernel of its own as in Vidur's profiles.
# There "rope" writes no KV; with it, it is assumed to be as fast.
ELEMENTWISE_SHARE: dict[ElementwiseOperator, float] = {
    "norm": 0.34,
    "rope": 0.45,
    "activation": 0.50,
    "residual": 0.95,
    "embedding": 0.15,
}


def roofline(compute_s: float, memory_s: float) -> float:
    """Time of an operator from the times that computing and memory traffic would take alone."""
    high, low = (compute_s, memory_s) if compute_s > memory_s else (memory_s, compute_s)
    if high == 0.0:
        return 0.0
    return float(high * (1.0 + (low / high) ** ROOFLINE_SHARPNESS) ** (1.0 / ROOFLINE_SHARPNESS))


@dataclass(slots=True)
class OperatorCost:
    """Time of an operator, or of several that run one after the other, on one device."""

    total_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: OperatorCost) -> OperatorCost:
        return OperatorCost(
            self.total_s + other.total_s,
            self.compute_s + other.compute_s,
            self.memory_s + other.memory_s,
            self.memory_bytes + other.memory_bytes,
        )

    def scaled(self, factor: float) -> OperatorCost:
        """The cost of `factor` such operators."""
        return OperatorCost(
            factor * self.total_s, factor * self.compute_s, factor * self.memory_s, factor * self.memory_bytes
        )

    def slowed(self, factor: float) -> OperatorCost:
        """Return the operator with its time multiplied."""
        return OperatorCost(factor * self.total_s, factor * self.compute_s, factor * self.memory_s, self.memory_bytes)


class Rooflines:
    """Single operators on one device at the profile's achievable rates.

    Tokens, copies, pairs, contexts and bytes are numbers here, and arrays where a subclass has the arithmetic
    of arrays.

    Args:
        profile: the device.
        dtype: of weights and activations; it decides the rates.
        kv_dtype: of KV, where it is another.
        product_dtype: of a layer's products, where it is another.

    Raises:
        ProfileError: the profile has no rate for one of them.
    """

    ceil: Any = staticmethod(math.ceil)
    log2: Any = staticmethod(math.log2)
    most: Any = staticmethod(max)
    least: Any = staticmethod(min)
    roofline: Any = staticmethod(roofline)

    def __init__(self, profile: HardwareProfile, dtype: str, kv_dtype: str = "", product_dtype: str = "") -> None:
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self.kv_dtype_bytes = DTYPE_BYTES[kv_dtype or dtype]
        self.product_dtype_bytes = DTYPE_BYTES[product_dtype or dtype]
        self.kernel_s = profile.overheads.kernel_us * 1e-6  # the shortest kernel
        self._eager_kernel_s = max(self.kernel_s, profile.overheads.launch_us * 1e-6)
        peak, efficiency = profile.peak_flops(dtype), profile.efficiency
        self._bandwidth = profile.memory_bytes_per_s
        self._matmul_bandwidth = self._bandwidth * efficiency.bandwidth
        self._matmul_rate = peak * efficiency.matmul
        self._product_rate = self._matmul_rate
        if product_dtype:
            self._product_rate = profile.peak_flops(product_dtype) * efficiency.matmul * PRODUCT_SHARE
        self._attention_rate = peak * efficiency.attention
        self._kv_bandwidth = self._bandwidth * efficiency.kv_read
        self._processors, self._tile = profile.processors, profile.tile_rows
        self._shortest_tile = max(1, round(self._tile * SHORTEST_TILE))
        self._tile_columns = [max(1, round(self._tile * share)) for share in TILE_COLUMNS]

    def matmul(self, tokens: Any, k: int, n: int, copies: Any = 1) -> OperatorCost:
        """`copies` products `[tokens / copies, k] x [k, n]` with different weights, as one kernel.

        Rows and columns are padded to tiles, and tiles run in waves of one for each processor, so time rises in steps.
        Of the tile widths the best is taken, as matmul libraries do.
        """
        return self._multiplied(tokens, k, n, copies, self.dtype_bytes, self._matmul_rate)

    def product(self, tokens: Any, k: int, n: int) -> OperatorCost:
        """One of a layer's products, once both sides are rounded to its type."""
        return self._multiplied(tokens, k, n, 1, self.product_dtype_bytes, self._product_rate)

    def _multiplied(self, tokens: Any, k: int, n: int, copies: Any, number_bytes: int, rate: float) -> OperatorCost:
        rows = tokens / copies
        ceil, processors = self.ceil, self._processors
        power_of_two = 2.0 ** ceil(self.log2(self.most(1.0, rows)))
        tile_rows = self.least(self._tile, self.most(self._shortest_tile, power_of_two))
        row_tiles = copies * ceil(rows / tile_rows)
        padded_elements = reduce(
            self.least,
            [
                ceil(row_tiles * math.ceil(n / columns) / processors) * processors * tile_rows * columns
                for columns in self._tile_columns
            ],
        )
        compute_s = 2.0 * padded_elements * k / rate
        memory_bytes = number_bytes * (copies * k * n + tokens * k) + self.dtype_bytes * tokens * n
        memory_s = memory_bytes / self._matmul_bandwidth
        return OperatorCost(self.kernel_s + self.roofline(compute_s, memory_s), compute_s, memory_s, memory_bytes)

    def elementwise(self, operator: ElementwiseOperator, tokens: Any, bytes_per_token: float) -> OperatorCost:
        """A memory-bound operator."""
        memory_bytes = tokens * bytes_per_token
        memory_s = memory_bytes / (self._bandwidth * ELEMENTWISE_SHARE[operator])
        return OperatorCost(self.most(self.kernel_s, memory_s), 0.0, memory_s, memory_bytes)

    def pair_s(self, heads: float, head_dim: int) -> float:
        """Compute seconds of attention for one (query, key) pair."""
        return 4 * heads * head_dim / self._attention_rate

    def kv_read_s(self, kv_heads: float, head_dim: int) -> float:
        """Memory seconds of attention for one token of context."""
        return 2 * kv_heads * head_dim * self.kv_dtype_bytes / self._kv_bandwidth

    def attention_s(self, heads: float, kv_heads: float, head_dim: int) -> Callable[[float, float], float]:
        """A function of the sums of chunks' (query, key) pairs and contexts: seconds of one layer of attention."""
        kernel_s, pair_s, read_s = self.kernel_s, self.pair_s(heads, head_dim), self.kv_read_s(kv_heads, head_dim)

        def seconds(pairs: float, context_tokens: float) -> float:
            return float(kernel_s + roofline(pairs * pair_s, context_tokens * read_s))

        return seconds

    def attention(
        self, pairs: float, context_tokens: float, heads: float, kv_heads: float, head_dim: int
    ) -> OperatorCost:
        """One layer of attention, given the sums of its chunks' (query, key) pairs and contexts."""
        compute_s = pairs * self.pair_s(heads, head_dim)
        memory_s = context_tokens * self.kv_read_s(kv_heads, head_dim)
        memory_bytes = 2 * kv_heads * head_dim * self.kv_dtype_bytes * context_tokens
        total_s = self.attention_s(heads, kv_heads, head_dim)(pairs, context_tokens)
        return OperatorCost(total_s, compute_s, memory_s, memory_bytes)

    def recurrence(self, flops: Any, memory_bytes: Any, kernels: int, launched: bool) -> OperatorCost:
        """What a recurrent layer does between its matrices: as arithmetic like attention, else like an activation.

        Its many small kernels run no faster than they are launched, unless they are replayed.
        """
        compute_s = flops / self._attention_rate
        memory_s = memory_bytes / (self._bandwidth * ELEMENTWISE_SHARE["activation"])
        kernel_s = self._eager_kernel_s if launched else self.kernel_s
        total_s = self.most(kernels * kernel_s, self.roofline(compute_s, memory_s))
        return OperatorCost(total_s, compute_s, memory_s, memory_bytes)
