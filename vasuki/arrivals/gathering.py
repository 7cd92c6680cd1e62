"""What decides how rows that arrive are gathered and packed, by the paper Dynamic Prefill Packing.

A job says the first four (`arrivals`), and `engine.chunk_tokens` where a batch may not have so many tokens; the others
are constants, which experiments vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vasuki.base.config import JobConfig

BATCH_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Gathering:
    """Symbols are the paper's; N is the number of rows to gather."""

    controller: Literal["load", "aimd"] = "load"
    packing: Literal["greedy", "exact"] = "greedy"
    target_s: float = 2.0  # the paper's SLO
    max_rows: int = 32  # N_max; equal to `min_rows`, it switches the controller off
    min_rows: int = 1  # N_min, and where N starts
    low: float = 0.8  # τ_low, as a share of the target: between it and `high`, N stays as it is
    high: float = 1.0  # τ_high: later first tokens are late
    smoothing: float = 0.3  # γ: weight of the newest epoch in the means of time to first token (S) and arrivals (λ)
    epoch_s: float = 1.0  # after which N is set again
    increase: int = 1  # α: rows by which N grows
    decrease: float = 0.5  # β: N shrinks to this share of itself
    busy: float = 0.85  # u*: share of an epoch from which the device counts as busy
    timeout: float = 0.5  # the longest that a row is held back, as a share of the target
    burst_rows: int = 32  # q_thresh: this many waiting rows start at once; below `max_rows` it caps N
    burst_rows_per_s: float = 32.0  # λ_thresh: from this λ on, no row is held back
    batch_tokens: int = BATCH_TOKENS  # T_max: prompt tokens of a batch; a longer prompt gets its own
    batch_rows: int = 32  # B_max

    @classmethod
    def of(cls, job: JobConfig) -> Gathering:
        """As a job says."""
        said, chunk_tokens = job.arrivals, job.engine.chunk_tokens
        batch_tokens = BATCH_TOKENS if chunk_tokens == "auto" else chunk_tokens
        four = (said.controller, said.packing, said.target_s, said.max_rows)
        return cls(*four, batch_tokens=batch_tokens)
