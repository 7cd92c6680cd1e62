"""What a command line says of a run and the job does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vasuki.runs.observers.metrics import Metrics


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job this time."""

    shard: str = "0/1"
    fresh: bool = False  # without what earlier runs wrote
    retries_errors: bool = False
    quiet: bool = False  # without a progress bar
    max_time_s: float = math.inf  # after the start, the run stops
    deadline_s: float = math.inf  # after the start; a warning says when it will not hold
    cluster: str | None = None  # address of a Ray cluster, to run there
    metrics: Metrics | None = None  # to count into


AS_USUAL = RunOptions()
