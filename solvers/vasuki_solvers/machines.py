"""Items on machines of several kinds: how soon all can be done at best.

An item takes a machine of kind k its own time p(k, i), so a kind may be fast at some items and slow at others
(unrelated machines). If items could be cut into pieces, the best makespan T would be a linear program, whose dual is

    T = max over weights w >= 0 with sum_k count(k) w(k) = 1   of   sum_i min_k w(k) p(k, i)

Whatever the weights, the right side is a lower bound of every schedule (weak duality), so they need not be the best.
Machines that differ by speed alone (uniform machines) have their best weights at 1 / p, and T is the work over the sum
of speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 200


def makespan_bound(times: npt.NDArray[np.float64], counts: Sequence[int]) -> float:
    """A time that no schedule beats.

    Args:
        times: `[kinds, items]` what an item takes on a machine of each kind.
        counts: machines of each kind, at least one.
    """
    machines = np.asarray(counts, float)
    weights = 1 / np.maximum(times.sum(axis=1), 1e-300)
    weights /= machines @ weights
    best = 0.0
    for number in range(1, ROUNDS + 1):
        kind = np.argmin(weights[:, None] * times, axis=0)
        loads = np.bincount(kind, weights=times[kind, np.arange(times.shape[1])], minlength=len(machines)) / machines
        bound = float((machines * weights) @ loads)
        best = max(best, bound)
        spread = loads.max() - loads.min()
        if len(machines) == 1 or spread <= 1e-4 * bound:
            break
        # A kind that has more to do than the others should cost more: a step along the subgradient, in logarithms.
        weights = weights * np.exp((loads - bound) / (loads.max() * number**0.5))
        weights /= machines @ weights
    return best
