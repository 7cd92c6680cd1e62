"""Runs of steps in which nothing is decided, taken as one.

Most steps only repeat the one before: every decode goes on by a token and a prompt by a chunk. The scheduler would form
the same batch again until a row ends, arrives, is admitted or has to make room. How many steps lie before that follows
from its queues and from the blocks that are left:

    batch      schedule ---- n - 1 steps that are skipped ---- the n-th, which the loop sees ----> settle
    decodes    token t         t + 1 ... t + n - 1              t + n
    prompt     chunk c         c + 1 ... c + n - 1              c + n

This belongs to the simulator alone: a real run computes every step. Of the scheduler it reads its queues, what may be
admitted, and the pool. It writes what `advance` and `settle` would write in the steps that it skips.
"""

from __future__ import annotations

import sys

from vasuki.engine.admission import GROWTH_STEPS
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.policy import Mixing
from vasuki.engine.scheduler import Scheduler


class FastForward:
    """Looks ahead of one scheduler, and takes it there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def most_steps(self, batch: Batch, until_end: int = sys.maxsize) -> int:
        """How often a batch that was just formed runs before anything is decided differently, if nothing arrives and
        the first row ends in `until_end` steps: that is the most it says.

        Where a run of steps is cut short nothing changes, as the scheduler then forms the same batch again.
        """
        scheduler, queues, prefills = self._scheduler, self._scheduler.queues, batch.prefills
        waits_urgently = bool(queues.waiting) and queues.waiting[0].request.is_urgent
        if waits_urgently or batch.swaps or len(prefills) > 1 or (prefills and prefills[0].samples):
            return 1
        budget = self._budget_left(batch)
        may_admit = bool(queues.waiting) and budget > 0 and scheduler.admission.may_admit()
        may_return = bool(queues.parked) and not queues.memory_is_tight
        next_round = not queues.waiting and queues.held_back() > 0
        if may_admit or may_return or next_round:
            return 1
        if not prefills:
            return self._steps_of_decodes(batch.starts, until_end)
        if budget > 0:  # memory, not the budget, cut the chunk
            return 1
        return self._steps_beside(prefills[0], batch.starts, until_end)

    def _steps_of_decodes(self, starts: list[int], most: int) -> int:
        """Steps for whose tokens there are blocks.

        In each round of `block_tokens` steps every decode fills one. After the rounds for which there are enough, the
        places left in their last blocks say who is first to need another.
        """
        pool = self._scheduler.queues.pool
        rounds, rest = divmod(pool.num_available, len(starts))
        sure = rounds * pool.block_tokens
        if sure >= most:
            return most
        places = sorted([-(start + 1) % pool.block_tokens for start in starts])
        return min(most, sure + 1 + places[rest])

    def _steps_beside(self, chunk: ScheduledChunk, starts: list[int], most: int) -> int:
        """Steps in which a prompt goes on by the same chunk beside the same decodes: until its last chunk, which may be
        a shorter one, or until memory decides. Counted step by step, as prompts may take what decodes leave just then.
        """
        queues, admission, limits = self._scheduler.queues, self._scheduler.admission, self._scheduler.limits
        size, available = queues.pool.block_tokens, queues.pool.num_available
        sequence, computed, num_tokens, _ = chunk
        held = len(sequence.block_table.device)
        kept = available - admission.spare_blocks()
        by_growth = admission.keeps_some and size > GROWTH_STEPS
        needs = [0] * size  # decodes that take a block in a step, by the step's number
        for start in starts:
            needs[-start % size] += 1
        hurries = self._scheduler.step_tokens == limits.chunk_tokens
        most = min(most, (sequence.num_tokens - computed - 1) // num_tokens)
        for step in range(1, most):
            computed += num_tokens
            if by_growth:
                kept += needs[(step + GROWTH_STEPS - 1) % size] - needs[(step - 1) % size]
            if limits.short_step_tokens and hurries != ((available - kept) * size >= limits.usual_row_tokens):
                return step
            available -= needs[step % size]
            if available < 0 or (held + max(0, available - kept)) * size < computed + num_tokens:
                return step
            blocks = max(0, queues.pool.blocks_for(computed + num_tokens) - held)
            held += blocks
            available -= blocks
        return most

    def skip(self, batch: Batch, steps: int) -> None:
        """Advance the batch's sequences by `steps` steps; the batch's own step is still to come.

        Each token is 0, as all are in a simulation. The batch has a block for its own token already, and `most_steps`
        has made sure of the others.
        """
        queues, zeros = self._scheduler.queues, [0] * steps
        pool, block_tokens = queues.pool, queues.pool.block_tokens
        for sequence, start in zip(batch.decodes, batch.starts, strict=True):
            if -(start + 1) % block_tokens < steps:  # places left in its last block
                table = sequence.block_table.device
                table += pool.allocate(pool.blocks_for(start + 1 + steps) - len(table))
            sequence.num_computed_tokens += steps
            sequence.output_token_ids += zeros
        for sequence, start, num_tokens, _ in batch.prefills:
            table, end = sequence.block_table.device, start + (1 + steps) * num_tokens
            table += pool.allocate(pool.blocks_for(end) - len(table))
            sequence.num_computed_tokens += steps * num_tokens
            queues.prefixes.register(sequence, end)

    def _budget_left(self, batch: Batch) -> int:
        """Tokens that the step has left for prompts; none where prompts wait for the next phase."""
        scheduler = self._scheduler
        if scheduler.policy.mixing is Mixing.MIXED:
            return scheduler.step_tokens - batch.num_tokens
        if scheduler.policy.mixing is Mixing.EXCLUSIVE and not batch.prefills:
            return 0
        return scheduler.step_tokens - batch.num_prefill_tokens
