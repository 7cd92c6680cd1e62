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

from vasuki.engine.batch import Batch
from vasuki.engine.policy import Admission, Mixing
from vasuki.engine.scheduler import Scheduler


class FastForward:
    """Looks ahead of one scheduler, and takes it there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def most_steps(self, batch: Batch) -> int:
        """How often a batch that was just formed can run before anything could be decided differently, if nothing ends
        or arrives.

        Not the most there could be, but nothing short of a decision ever depends on where a run of steps is cut.
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
        steps, chunk_tokens, num_decodes = sys.maxsize, 0, len(batch.decodes)
        if prefills:
            sequence, start, chunk_tokens, _ = prefills[0]
            if budget > 0:  # memory, not the budget, cut the chunk
                return 1
            steps = (sequence.num_tokens - start - 1) // chunk_tokens
        # In block_tokens steps a decode fills one block and a chunk of c tokens c of them: available blocks tell
        # for how many such rounds there are blocks. After them every decode may need a block at once, and chunks take
        # what is left. The budget of a step and the room of its chunk stay what they are while so much stays free.
        available, block_tokens = queues.pool.num_available, queues.pool.block_tokens
        if prefills:
            available -= self._kept_blocks()
        rounds = (available - 1) // max(1, num_decodes + chunk_tokens)
        spare = available - 1 - rounds * (num_decodes + chunk_tokens) - num_decodes
        sure = rounds * block_tokens + (max(0, spare) * block_tokens // chunk_tokens if chunk_tokens else 0)
        if sure > 0 or prefills:
            return max(1, min(steps, sure))
        # Fewer blocks are left than there are decodes: the step in which they are used up follows from the places left
        # in the last blocks.
        places = sorted([-(start + 1) % block_tokens for start in batch.starts])
        return 1 + places[available] if available < len(places) else 1

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

    def _kept_blocks(self) -> int:
        """Blocks that prompts leave to decodes, at most, and those without which the steps would be short."""
        scheduler, pool, limits = self._scheduler, self._scheduler.queues.pool, self._scheduler.limits
        others = len(scheduler.queues.decoding) if scheduler.policy.admission is Admission.ROOM else 0
        hurries = limits.short_step_tokens and scheduler.step_tokens == limits.chunk_tokens
        return others + (pool.blocks_for(limits.usual_row_tokens) if hurries else 0)
