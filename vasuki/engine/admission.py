"""What may start: a waiting row, a prefill phase, a prompt ahead of its row.

`policy.Admission` says how much memory a row must find. What may start ahead is a row that finds less, whose prompt is
computed in the room that others have yet to grow into, and waits on the host (Baton's prefilled queries, section 4.3).
"""

from __future__ import annotations

import sys

import numpy as np

from vasuki.engine.policy import Admission
from vasuki.engine.queues import Queues
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings

GROWTH_STEPS = 32


class AdmissionControl:
    """Answers for the rows of one scheduler. It moves none of them."""

    def __init__(self, settings: EngineSettings, queues: Queues) -> None:
        self.ahead: Sequence | None = None  # runs until its prompt is computed, without room for more; set by Scheduler
        self._policy = settings.policy
        self._limits = settings.limits
        self._prefills_ahead = settings.offload.prefills_ahead
        self._queues = queues
        self._pool = queues.pool
        self._filling = True  # in a prefill phase, when exclusive

    def may_admit(self) -> bool:
        """Whether a waiting row could start, as far as policy, slots and what is known about memory say."""
        queues = self._queues
        if queues.memory_is_tight or queues.parked or queues.num_running >= self._limits.max_num_seqs:
            return False
        return self._policy.refill or not queues.num_running

    @property
    def keeps_some(self) -> bool:
        """Whether prompts leave blocks to decodes: unless all rows fit with all their growth, those that decodes take
        in the next `GROWTH_STEPS`, one each at most. By then some row has usually ended."""
        queues = self._queues
        return self._policy.admission is Admission.ROOM and queues.maximum_blocks > self._pool.capacity

    def spare_blocks(self) -> int:
        """Blocks that prompts may take now."""
        available, size = self._pool.num_available, self._pool.block_tokens
        if not self.keeps_some:
            return available
        decoding = self._queues.decoding
        if size <= GROWTH_STEPS:
            return available - len(decoding)
        return available - sum([-row.num_computed_tokens % size < GROWTH_STEPS for row in decoding])

    def step_tokens(self) -> int:
        """The budget of the next step: prompts hurry while memory has room for another row."""
        limits = self._limits
        if not limits.short_step_tokens or self.spare_blocks() * self._pool.block_tokens >= limits.usual_row_tokens:
            return limits.chunk_tokens
        return limits.short_step_tokens

    def fits(self, sequence: Sequence, budget: int = sys.maxsize, ahead: Sequence | None = None) -> bool:
        """Whether memory and slots allow the sequence to start now, with `budget` tokens, or to go `ahead`.
        An empty batch takes any row, `Scheduler.add` having checked it."""
        pool, queues, admission = self._pool, self._queues, self._policy.admission
        if not queues.num_running:
            return True
        if queues.num_running >= self._limits.max_num_seqs:
            return False
        if self._policy.waves:  # the cache grows by a column for every row until the last of the wave ends
            wave = [*queues.running, sequence]
            columns = max(row.request.num_prompt_tokens for row in wave) + max(row.expected_tokens for row in wave) - 1
            return len(wave) * pool.blocks_for(columns) <= pool.num_blocks
        if admission is Admission.ALL_LAYERS and queues.depth is not None:
            return pool.blocks_for(sequence.num_tokens) + self._promised_blocks() <= queues.depth.spare_whole_blocks
        if queues.maximum_blocks + queues.maximum(sequence) <= pool.capacity:
            return True
        if admission is Admission.CHUNK:
            return pool.blocks_for(min(budget, sequence.num_tokens)) <= pool.num_available
        if admission is Admission.ROOM:
            return pool.blocks_for(min(budget, sequence.num_tokens)) <= self.spare_blocks()
        if admission in (Admission.PROMPT, Admission.ALL_LAYERS):
            watermark = max(1, pool.capacity // 100)
            return pool.blocks_for(sequence.num_tokens) + self._promised_blocks() + watermark <= pool.num_available
        if admission is Admission.MAXIMUM:
            return False
        if pool.num_held + pool.blocks_for(sequence.num_tokens) > pool.num_blocks:
            return False
        return peak_blocks([*queues.running, sequence], pool.block_tokens, ahead or self.ahead) <= pool.num_blocks

    def _promised_blocks(self) -> int:
        """Blocks that rows in their prompt still lack for it."""
        blocks_for = self._pool.blocks_for
        return sum([blocks_for(row.num_tokens) - len(row.block_table.device) for row in self._queues.prefilling])

    def may_go_ahead(self, sequence: Sequence) -> bool:
        """Whether a row that may not start can have its prompt computed in the room that others have yet to grow into.

        If they need it sooner, it is the first to make room.
        """
        if not self._prefills_ahead or self.ahead:
            return False
        return self._queues.may_park(sequence, sequence.num_tokens) and self.fits(sequence, ahead=sequence)

    def in_prefill_phase(self) -> bool:
        """Whether prompts have their turn, where they take turns with decodes."""
        if not self._filling:
            self._filling = self._pool.num_available >= self._limits.prefill_threshold * self._pool.num_blocks
        return self._filling

    def end_prefill_phase(self) -> None:
        """End the prompts' turn; the next one starts when enough memory is free."""
        self._filling = False


def peak_blocks(sequences: list[Sequence], block_tokens: int, ahead: Sequence | None = None) -> int:
    """Most blocks that the sequences will hold together, if each grows a token a step and ends when expected; the one
    that goes `ahead` with its prompt.

    Between two ends the total only grows, so it peaks in the last step of one of them. With the sequences ordered by
    remaining steps r_1 >= r_2 >= ..., the j longest-lived are all there in step r_j and hold

        sum(i <= j) ceil((tokens_i + r_j) / block_tokens)

    of which the blocks' rounding is bounded by block_tokens - 1 each.
    """
    outputs = np.array([sequence.num_output_tokens for sequence in sequences])
    tokens = outputs + np.array([sequence.request.num_prompt_tokens for sequence in sequences])
    expected = np.array([1 if sequence is ahead else sequence.expected_tokens for sequence in sequences])
    remaining = np.maximum(1, expected - outputs)
    order = np.argsort(-remaining)
    alive = np.arange(1, len(sequences) + 1)
    totals = np.cumsum(tokens[order]) + alive * (remaining[order] - 1 + block_tokens - 1)
    return int(totals.max()) // block_tokens
