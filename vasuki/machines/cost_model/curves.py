"""Operators of many sizes at once: `rooflines` and `operators` for arrays, whose costs hold arrays.

`LayerModel` and `RecurrentModel` only add and multiply what they are given, so they work with either kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vasuki.machines.cost_model.measured import RatioCurve
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.rooflines import OperatorCost, Rooflines, roofline
from vasuki.machines.profile import HardwareProfile

TABLE = 4096  # tokens of the largest step that is looked at by itself
HUGE = 2.0**40  # tokens of a step of which all but the rates is negligible


class RooflineCurves(Rooflines):
    """`Rooflines` of arrays."""

    ceil, log2, most, least = np.ceil, np.log2, np.maximum, np.minimum

    @staticmethod
    def roofline(compute_s: Any, memory_s: Any) -> Any:
        return np.asarray(np.frompyfunc(roofline, 2, 1)(compute_s, memory_s), np.float64)


class OperatorCurves(OperatorModel):
    """`OperatorModel` whose numbers of tokens, copies and bytes may be arrays."""

    def __init__(self, profile: HardwareProfile, dtype: str, kv_dtype: str = "", product_dtype: str = "") -> None:
        super().__init__(profile, dtype, kv_dtype, product_dtype)
        self._rooflines = RooflineCurves(profile, dtype, kv_dtype, product_dtype)

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
