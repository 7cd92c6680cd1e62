"""Operators of many sizes at once: `rooflines` and `operators` for arrays, whose costs hold arrays.

`LayerModel` and `RecurrentModel` only add and multiply what they are given, so they work with either kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vasuki.machines.cost_model.measured import RatioCurve
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.rooflines import ELEMENTWISE_SHARE, ROOFLINE_SHARPNESS, OperatorCost, Rooflines
from vasuki.machines.profile import ElementwiseOperator, HardwareProfile

TABLE = 4096  # tokens of the largest step that is looked at by itself
HUGE = 2.0**40  # tokens of a step of which all but the rates is negligible


class RooflineCurves(Rooflines):
    """`Rooflines` whose numbers of tokens, copies and bytes may be arrays."""

    def matmul(self, tokens: Any, k: int, n: int, copies: Any = 1) -> OperatorCost:
        rows = tokens / copies
        power_of_two = np.exp2(np.ceil(np.log2(np.maximum(1.0, rows))))
        tile_rows = np.minimum(self._tile, np.maximum(self._shortest_tile, power_of_two))
        row_tiles = copies * np.ceil(rows / tile_rows)
        padded_elements = np.minimum.reduce(
            [
                np.ceil(row_tiles * np.ceil(n / columns) / self._processors) * self._processors * tile_rows * columns
                for columns in self._tile_columns
            ]
        )
        compute_s = 2.0 * padded_elements * k / self._matmul_rate
        memory_bytes = self.dtype_bytes * (copies * k * n + tokens * (k + n))
        memory_s = memory_bytes / self._matmul_bandwidth
        return OperatorCost(self.kernel_s + _rooflines(compute_s, memory_s), compute_s, memory_s, memory_bytes)

    def elementwise(self, operator: ElementwiseOperator, tokens: Any, bytes_per_token: float) -> OperatorCost:
        memory_bytes = tokens * bytes_per_token
        memory_s = memory_bytes / (self._bandwidth * ELEMENTWISE_SHARE[operator])
        longest: Any = np.maximum(self.kernel_s, memory_s)
        return OperatorCost(longest, 0.0, memory_s, memory_bytes)

    def recurrence(self, flops: Any, memory_bytes: Any, kernels: int) -> OperatorCost:
        compute_s = flops / self._attention_rate
        memory_s = memory_bytes / (self._bandwidth * ELEMENTWISE_SHARE["activation"])
        longest: Any = np.maximum(kernels * self._eager_kernel_s, _rooflines(compute_s, memory_s))
        return OperatorCost(longest, compute_s, memory_s, memory_bytes)


def _rooflines(compute_s: Any, memory_s: Any) -> Any:
    """`roofline` of arrays, one of which is positive."""
    high, low = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
    return high * (1.0 + (low / high) ** ROOFLINE_SHARPNESS) ** (1.0 / ROOFLINE_SHARPNESS)


class OperatorCurves(OperatorModel):
    """`OperatorModel` whose numbers of tokens, copies and bytes may be arrays."""

    def __init__(self, profile: HardwareProfile, dtype: str, kv_dtype: str = "") -> None:
        super().__init__(profile, dtype, kv_dtype)
        self._rooflines = RooflineCurves(profile, dtype, kv_dtype)

    def expert_matmul(self, tokens: Any, k: int, n: int, used: Any) -> OperatorCost:
        copies: Any = np.maximum(1.0, np.rint(used))
        return self.matmul(tokens, k, n, copies)

    def ratio(self, curve: RatioCurve | None, size: Any) -> Any:
        return curve.at(size) if curve else 1.0


class OperatorRates(OperatorCurves):
    """What operators take of a step of `HUGE` tokens, so that it is their rates that count.

    Where ratios were measured, the least that any step larger than `TABLE` tokens has: no such step is faster, token by
    token.
    """

    def ratio(self, curve: RatioCurve | None, size: Any) -> Any:
        return np.array([curve.least_from(each * TABLE / HUGE) for each in np.atleast_1d(size)]) if curve else 1.0
