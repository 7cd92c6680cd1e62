"""A waiting time over all rows, in five figures or fewer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds: the mean, and what 50, 95 and 99 rows of 100 stay within."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float] | array[float]) -> Percentiles | None:
        """None if there is no row."""
        if not seconds:
            return None
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
        return cls(float(np.mean(seconds)), p50, p95, p99)
