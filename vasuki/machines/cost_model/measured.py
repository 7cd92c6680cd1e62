"""What measured operators take over what their rooflines say, by size.

Times that follow such a ratio pass through every measured point and keep the roofline's steps in between.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.machines.cost_model.rooflines import Rooflines
from vasuki.machines.cost_model.work import causal_pairs
from vasuki.machines.measured_points import AttentionPoints, ElementwiseOperator, Measured
from vasuki.models.shape import DTYPE_BYTES


class RatioCurve:
    """A ratio by size: interpolated in log-log between points, constant beyond the ends."""

    def __init__(self, sizes: Sequence[float], ratios: Sequence[float]) -> None:
        self._log_sizes = [math.log(size) for size in sizes]
        self._log_ratios = [math.log(ratio) for ratio in ratios]

    def __call__(self, size: float) -> float:
        sizes, ratios = self._log_sizes, self._log_ratios
        position = math.log(size)
        index = bisect_right(sizes, position)
        if index == 0:
            return math.exp(ratios[0])
        if index == len(sizes):
            return math.exp(ratios[-1])
        low, high = sizes[index - 1], sizes[index]
        share = (position - low) / (high - low)
        return math.exp(ratios[index - 1] + share * (ratios[index] - ratios[index - 1]))

    @property
    def sizes(self) -> Floats:
        """Where it was measured."""
        return np.exp(self._log_sizes)

    def at(self, sizes: Floats) -> Floats:
        """The ratios of many sizes."""
        ratios: Floats = np.exp(np.interp(np.log(sizes), self._log_sizes, self._log_ratios))
        return ratios

    def least_from(self, size: float) -> float:
        """The least ratio of anything as large or larger."""
        larger = [ratio for at, ratio in zip(self._log_sizes, self._log_ratios, strict=True) if at >= math.log(size)]
        return min([self(size), *map(math.exp, larger)])

    @classmethod
    def mean(cls, curves: Sequence[RatioCurve]) -> RatioCurve:
        """Geometric mean, at the sizes of all curves."""
        sizes = sorted({size for curve in curves for size in curve._log_sizes})
        means = [sum(math.log(curve(math.exp(size))) for curve in curves) / len(curves) for size in sizes]
        return cls([math.exp(size) for size in sizes], [math.exp(mean) for mean in means])


@dataclass(frozen=True, slots=True)
class MeasuredRatios:
    """Ratios of one dtype. None stands for operators that were not measured."""

    matmul: dict[tuple[int, int], RatioCurve] = field(default_factory=dict)  # of (k, n), by rows
    any_matmul: RatioCurve | None = None  # of matrices that were not measured: the mean of those that were
    elementwise: dict[ElementwiseOperator, RatioCurve] = field(default_factory=dict)  # by bytes
    decode_attention: RatioCurve | None = None  # by pairs x heads, as the next
    chunk_attention: RatioCurve | None = None

    @classmethod
    def of(cls, measured: Measured, rooflines: Rooflines) -> MeasuredRatios:
        """Compare a profile's points with the rooflines of its device and of a dtype."""
        matmul = {
            (series.k, series.n): RatioCurve(
                series.tokens,
                [
                    us * 1e-6 / rooflines.matmul(t, series.k, series.n).total_s
                    for t, us in zip(series.tokens, series.us, strict=True)
                ],
            )
            for series in measured.matmul
            if DTYPE_BYTES.get(series.dtype) == rooflines.dtype_bytes
        }
        elementwise = {
            series.operator: RatioCurve(
                [t * series.bytes_per_token for t in series.tokens],
                [
                    us * 1e-6 / rooflines.elementwise(series.operator, t, series.bytes_per_token).total_s
                    for t, us in zip(series.tokens, series.us, strict=True)
                ],
            )
            for series in measured.elementwise
        }
        of_dtype = [each for each in measured.attention if DTYPE_BYTES.get(each.dtype) == rooflines.dtype_bytes]
        of_both = [
            each for each in of_dtype if DTYPE_BYTES.get(each.kv_dtype or each.dtype) == rooflines.kv_dtype_bytes
        ]
        any_matmul = RatioCurve.mean(list(matmul.values())) if matmul else None
        decodes, chunks = (_attention_ratio(of_both or of_dtype, rooflines, of_decodes) for of_decodes in (True, False))
        return cls(matmul, any_matmul, elementwise, decodes, chunks)


def _attention_ratio(series: Iterable[AttentionPoints], rooflines: Rooflines, of_decodes: bool) -> RatioCurve | None:
    """Make a curve over pairs x heads, of decodes or of longer chunks; equal sizes are averaged."""
    ratios: dict[float, list[float]] = defaultdict(list)
    for layout in series:
        for point in layout.points:
            if (point.tokens == 1) == of_decodes:
                pairs = point.sequences * causal_pairs(point.tokens, point.context)
                contexts = point.sequences * point.context
                heads = (layout.heads, layout.kv_heads, layout.head_dim)
                analytical = rooflines.attention(pairs, contexts, *heads)
                ratios[pairs * layout.heads].append(point.us * 1e-6 / analytical.total_s)
    sizes = sorted(ratios)
    return RatioCurve(sizes, [math.exp(np.mean(np.log(ratios[size]))) for size in sizes]) if sizes else None
