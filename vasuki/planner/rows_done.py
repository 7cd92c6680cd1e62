"""Rows that a run has done, counted while they end: what a bound asks about them, in memory that does not grow.

A row that an earlier run has begun counts as what is left of it: its tokens so far are computed with its prompt. One
that is still under way at the end counts as far as it came.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths

KEPT_ROWS = 4096  # whose lengths are kept one by one


class RowsDone:
    """Counts rows, as an engine observer.

    Args:
        shape: of the model.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._folded = JobSums.of(shape, [], [])
        self._rows: list[tuple[int, int, int, int]] = []  # since then: prompt, what it shares, output, its limit
        self._kept: list[tuple[int, int, int, int]] | None = self._rows

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Count the rows that ended in a step."""
        self.count(finished)

    def count(self, rows: Iterable[Sequence]) -> None:
        """Count rows as far as they have come."""
        for row in rows:
            known = len(row.request.progress.output_token_ids)
            if (output := len(row.output_token_ids) - known) > 0:
                prompt = row.num_prompt_tokens + known
                self._rows.append((prompt, row.num_shared_tokens, output, row.request.max_tokens - known))
        if len(self._rows) > KEPT_ROWS:
            self._kept = None
            self._folded, self._rows = self.sums, []

    @property
    def sums(self) -> JobSums:
        """Sums over finished rows; a shared prefix counts for the row that computed it."""
        prompts, shared, outputs, _ = np.array(self._rows, np.int64).reshape(len(self._rows), 4).T
        return self._folded + JobSums.of(self._shape, prompts, outputs, np.maximum(1, prompts - shared))

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of the rows, as far as they came; None where there were too many to keep."""
        if not self._kept:
            return None
        prompts, _, outputs, limits = np.array(self._kept, np.int64).T
        return Lengths(prompts, outputs, None, limits)
