"""When finished rows become durable: a part of them is committed when the time since the last one reaches

    max(5 s, 3 % of the time the run has taken so far, but no more than the loss that the job allows)

The run commits by this rule (`vasuki.io.output.parts`), and a plan foresees by it what a kill loses.
"""

from __future__ import annotations

import math

COMMIT_S = 5.0
COMMIT_SHARE = 0.03


def commit_interval_s(run_s: float, max_loss_s: float = math.inf) -> float:
    """Seconds between two parts after `run_s` seconds of a run that may lose `max_loss_s` of work."""
    return max(COMMIT_S, min(COMMIT_SHARE * run_s, max_loss_s))


def next_commit_s(committed_s: float, max_loss_s: float = math.inf) -> float:
    """The first moment after the last part, both in seconds since the run began, that is an interval away from it."""
    grown_s = COMMIT_SHARE / (1 - COMMIT_SHARE) * committed_s  # 3 % of the moment itself
    return committed_s + max(COMMIT_S, min(grown_s, max_loss_s))
