"""What a kill costs: the work of rows that have not been committed by then, which the next run does again.

    work ^                      / time spent so far
         |                    /
         |                  / |
         |                /   |  lost, if the run is killed now
         |              /     |
         |            /    ___|___
         |          /     |         work of committed rows: a stair with a step for each part
         |        /   ____|
         |      /    |
         |----/------+-----------------> time

A step's time is shared out to the tokens that it computes, so a row's work is the time of its tokens. Rows are
committed as the run does it (`vasuki.base.commits`), and the kill may come at any moment of the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.base.commits import next_commit_s
from vasuki.base.config import PlanConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence

MAX_LOSS_S = 30.0
MAX_LOSS_SHARE = 0.03  # of the makespan
_MOST_ENDS = 10_000  # that stand for rows which were not simulated


def max_loss_s(config: PlanConfig, makespan_s: float) -> float:
    """Seconds of work that a kill of such a job may lose, in expectation."""
    return max(MAX_LOSS_S, MAX_LOSS_SHARE * makespan_s) if config.max_loss == "auto" else config.max_loss


def commits_within_s(config: PlanConfig) -> float:
    """Seconds that parts may be apart at most, where the job says so."""
    return math.inf if config.max_loss == "auto" else config.max_loss


@dataclass(frozen=True, slots=True)
class Loss:
    """Seconds of work that a kill loses."""

    mean_s: float  # over the moments of the job
    most_s: float

    @classmethod
    def of(cls, ends_s: Floats, work_s: Floats, config: PlanConfig) -> Loss:
        """The loss of a job from 0 to its last row's end.

        Args:
            ends_s: `[rows]` when each row ends, never falling.
            work_s: `[rows]` time that each has taken of the steps; in all as long as the job.
            config: may ask for more frequent commits.
        """
        if not len(ends_s):
            return cls(0.0, 0.0)
        makespan_s, done_s = float(ends_s[-1]), np.concatenate([[0.0], np.cumsum(work_s)])
        rows, now_s, area, most_s = 0, 0.0, 0.0, 0.0
        while rows < len(ends_s):
            now_s = next_commit_s(now_s, commits_within_s(config))
            if (ended := int(np.searchsorted(ends_s, now_s, side="right"))) == rows:  # nothing to commit yet
                now_s = float(ends_s[rows])
                ended = int(np.searchsorted(ends_s, now_s, side="right"))
            now_s = min(now_s, makespan_s)
            most_s = max(most_s, now_s - done_s[rows])
            area += (done_s[ended] - done_s[rows]) * (makespan_s - now_s)  # work times the time that it was safe
            rows = ended
        return cls(max(0.0, makespan_s / 2 - area / makespan_s) if makespan_s else 0.0, float(most_s))


@dataclass(slots=True)
class RowWork:
    """An engine observer that notes when rows end, and what time of the steps each has taken; and what time of all
    steps went to those that carry prompts.

    A decoding row takes part in nearly every step with decodes, so one clock serves all rows: it counts a token's
    share of each of these steps. A row has taken what passed on it since its prompt ended; if it had to wait, the share
    of that which its tokens are of the steps. Work that is done again counts twice, as it takes twice the time.
    """

    all_s: float = 0.0
    prompts_s: float = 0.0  # of steps that carry prompts
    ends_s: list[float] = field(default_factory=list)
    _work_s: list[float] = field(default_factory=list)
    _clock_s: float = 0.0
    _decode_steps: int = 0
    _taken_s: dict[Sequence, float] = field(default_factory=dict)  # by rows that run
    _starts: dict[Sequence, tuple[float, int, int]] = field(
        default_factory=dict
    )  # clock, steps and tokens at the start

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.all_s += result.elapsed_s
        prefills = batch.prefills
        token_s = result.elapsed_s / max(1, batch.num_tokens if prefills else len(batch.decodes))
        if batch.decodes:
            self._clock_s += token_s
            self._decode_steps += result.num_steps
        if prefills:
            self.prompts_s += result.elapsed_s
        for sequence, _, num_tokens, _ in prefills:
            if sequence in self._starts:  # it made room, and is computed again
                self._stop(sequence)
            self._taken_s[sequence] = self._taken_s.get(sequence, 0.0) + num_tokens * token_s
            # At every chunk: of a prompt that waited on the host, the last token comes back as a decode.
            self._starts[sequence] = (self._clock_s, self._decode_steps, sequence.num_output_tokens)
        for sequence in finished:
            self._stop(sequence)
            self.ends_s.append(now_s)
            self._work_s.append(self._taken_s.pop(sequence))

    def _stop(self, sequence: Sequence) -> None:
        """Add what a row has taken of the decodes."""
        clock_s, steps, tokens = self._starts.pop(sequence)
        if passed := self._decode_steps - steps:
            share = min(1.0, (sequence.num_output_tokens - tokens) / passed)
            self._taken_s[sequence] += share * (self._clock_s - clock_s)

    def loss(self, config: PlanConfig, missing_s: float = 0.0, missing_rows: int = 0) -> Loss:
        """What a kill loses of the rows that were seen, or of a job that has more in its midst.

        Args:
            config: see `Loss.of`.
            missing_s: by which the job is longer.
            missing_rows: that end in this time.
        """
        ends_s, work_s = np.array(self.ends_s), np.array(self._work_s)
        if not len(ends_s) or not work_s.sum():
            return Loss(0.0, 0.0)
        work_s *= ends_s[-1] / work_s.sum()
        if missing_rows and missing_s > 0:
            middle = _typical_moment(ends_s, work_s)
            count = min(missing_rows, _MOST_ENDS)
            between_s = ends_s[middle] + missing_s * np.arange(1, count + 1) / count
            ends_s = np.concatenate([ends_s[: middle + 1], between_s, ends_s[middle + 1 :] + missing_s])
            work_s = np.insert(work_s, middle + 1, np.full(count, missing_s / count))
        return Loss.of(ends_s, work_s, config)


def _typical_moment(ends_s: Floats, work_s: Floats) -> int:
    """The row in the middle half at whose end as much work is in flight as there usually is."""
    first, last = len(ends_s) // 4, 1 + len(ends_s) * 3 // 4
    in_flight_s = (ends_s - np.cumsum(work_s))[first:last]
    return first + int(np.argmin(np.abs(in_flight_s - in_flight_s.mean())))
