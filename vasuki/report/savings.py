"""What another schedule could have saved of a run, by its manifest; the one place that decides what is claimed.

The bound is at the pace of the run's own steps, so no run beats it, whether its machine was faster or slower than the
cost model: what is left between them is the schedule's, and the time between steps.
"""

from __future__ import annotations

from vasuki.io.output.manifest import Manifest


def could_save(manifest: Manifest) -> float | None:
    """The share of the time after loading that another schedule could have saved, at most; None if nothing is known."""
    bound_s, taken_s = manifest.bounds.schedule_s, manifest.timings.foreseen_s
    return max(0.0, 1 - bound_s / taken_s) if bound_s and taken_s else None


def knowing_saves(manifest: Manifest) -> float | None:
    """The share that knowing the lengths beforehand would have saved, about; None if nothing is known."""
    added = manifest.bounds.uncertainty
    return None if added is None else added / (1 + added)
