"""Which rows run in the next step.

Integers only: the scheduler sees lengths, blocks and a token budget, never a clock, a tensor or a price. Real runs and
simulated ones use it unchanged. Each call to `schedule` forms one batch under one token budget (Sarathi, section 4):

    1. decodes            every running sequence that is past its prompt computes one token
    2. running prefills   sequences in the middle of their prompt take what is left of the budget
    3. waiting rows       are admitted while budget, sequence slots and memory last

Rows lie in `queues`, with the blocks that they hold; `admission` says who may start, `preemption` who makes room. How a
baseline differs from vasuki is said by a `Policy`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

from vasuki.base.errors import OutOfMemory
from vasuki.engine.admission import AdmissionControl
from vasuki.engine.batch import Batch, ScheduledChunk, StepResult
from vasuki.engine.policy import Admission, Mixing
from vasuki.engine.preemption import Preemption
from vasuki.engine.queues import Queues
from vasuki.engine.sequence import FinishReason, Request, Sequence, Status
from vasuki.engine.settings import EngineSettings


class Scheduler:
    """Forms batches from waiting and running sequences.

    Attributes:
        queues: rows by status; also their pools of blocks, and counts of what happened.
        admission: who may start.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.policy = settings.policy
        self.limits = settings.limits
        self._num_blocks, self._lost_blocks = settings.num_blocks, settings.lost_blocks
        self.queues = Queues(settings)
        self.admission = AdmissionControl(settings, self.queues)
        self.step_tokens = 0  # budget of the step that was formed last; a static batch starts as a whole
        self._preemption = Preemption(settings.policy, self.queues, self.admission)
        self._ending: list[Sequence] = []  # for their length, with a last token that is not known yet

    # --- rows in -----------------------------------------------------------------------------------------------------

    def wants_more(self) -> bool:
        """Whether another request can be taken without holding more than the window; an urgent one always."""
        return len(self.queues.waiting) < self.limits.lookahead or self.queues.urgent_held_back()

    @property
    def is_idle(self) -> bool:
        """Whether all rows that it was given have ended, with all of their tokens."""
        return self.queues.is_empty() and not self._ending

    def add(self, request: Request) -> Sequence | None:
        """Queue a request. Returns a finished sequence instead if the request can never run, or has ended in an earlier
        run. One that an earlier run has begun waits like a preempted one: its tokens are known, nothing is computed.

        Raises OutOfMemory for one that could run in as much memory as was planned, and there is less.
        """
        progress = request.progress
        sequence = Sequence.going_on(request)
        reason = request.error
        if not reason:
            needed, bt, num_blocks = self.queues.maximum(sequence), self.queues.pool.block_tokens, self._num_blocks
            if needed > num_blocks:
                reason = (
                    f"needs KV memory for {needed * bt} tokens (prompt {request.num_prompt_tokens}, max_tokens "
                    f"{request.max_tokens}), the device has room for {num_blocks * bt}"
                )
                planned = num_blocks + self._lost_blocks
                if needed <= planned:
                    raise OutOfMemory(f"row {request.id!r} {reason} instead of {planned * bt}, since memory ran out")
        if reason:
            sequence.error, sequence.finish_reason, sequence.status = reason, FinishReason.ERROR, Status.FINISHED
            return sequence
        if progress.finish_reason is not None:
            sequence.finish_reason, sequence.status = progress.finish_reason, Status.FINISHED
            return sequence
        if progress.output_token_ids:
            self.queues.counters.recomputed_tokens += sequence.num_tokens
        self.queues.add(sequence)
        return None

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence of which tokens are still to come, those that ended for their length included."""
        yield from self.queues.live()
        yield from self._ending

    def snapshot(self) -> str:
        """Where all rows and blocks are, in a line."""
        queues = self.queues
        pools = [f"{queues.pool.num_held} of {queues.pool.capacity} blocks held"]
        if queues.host_pool is not None:
            pools.append(f"{queues.host_pool.num_held} of {queues.host_pool.num_blocks} on the host")
        rows = {
            "decoding": queues.decoding,
            "in their prompt": queues.prefilling,
            "parked": queues.parked,
            "waiting": queues.waiting,
        }
        counts = [f"{len(some)} {where}" for where, some in rows.items()]
        firsts = [
            f"first row {first.request.id!r} at {first.num_computed_tokens} of {first.num_tokens} tokens"
            for first in islice(self.unfinished(), 1)
        ]
        return "; ".join(["rows: " + ", ".join(counts), ", ".join(pools), *firsts])

    # --- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Form the next batch, or return None if nothing can run."""
        queues, mixing = self.queues, self.policy.mixing
        queues.swaps = []
        self._preemption.park_ahead()
        self.step_tokens = budget = self.admission.step_tokens() if self.policy.refill else sys.maxsize
        self._preemption.make_room_for_urgent(budget)
        decodes: list[Sequence] = []
        prefills: list[ScheduledChunk] = []
        if mixing is Mixing.MIXED:
            decodes = self._decodes()
            self._prefills(prefills, budget - len(decodes))
        else:
            if mixing is Mixing.PREFILL_FIRST or self.admission.in_prefill_phase():
                self._prefills(prefills, budget)
            if not prefills:
                self.admission.end_prefill_phase()
                decodes = self._decodes()
            if not (prefills or decodes):  # those that were to decode may have made room for a prompt
                self._prefills(prefills, budget)
        returning = self._preemption.bring_back()
        self._preemption.end_step()
        if not (returning or decodes or prefills):
            return None
        batch = Batch(decodes, [sequence.num_computed_tokens for sequence in decodes], prefills, queues.swaps)
        if queues.depth is not None:
            batch.depth = queues.depth.decide(batch, queues.wants_memory)
        return batch

    def _decodes(self) -> list[Sequence]:
        """Every sequence past its prompt, with room for its token. Where that is lacking, some make room."""
        queues, block_tokens = self.queues, self.queues.pool.block_tokens
        growing = [
            sequence
            for sequence in queues.decoding
            if sequence.num_computed_tokens >= len(sequence.block_table.device) * block_tokens
        ]
        self._preemption.make_room(growing)
        for sequence in growing:
            sequence.block_table.device += queues.pool.allocate(1)
        return queues.decoding[:]

    def _prefills(self, chunks: list[ScheduledChunk], budget: int) -> None:
        """Add prompt chunks to the batch: of urgent rows, then of running sequences, then of waiting ones."""
        queues, admission = self.queues, self.admission
        budget = self._urgent_prefills(chunks, budget)
        urgent = [chunk.sequence for chunk in chunks]
        for sequence in queues.prefilling[:]:
            if budget <= 0 or self._has_its_prompt(chunks):
                return
            if sequence in urgent:
                continue
            if self.policy.admission is Admission.CHUNK and not self._preemption.make_room_for(sequence, budget):
                break
            budget -= self._add_chunk(chunks, sequence, budget)
            if budget > 0 and not (chunks and chunks[-1].samples):
                queues.memory_is_tight = True  # which cut the prompt short
        may_start = admission.may_admit()
        while queues.waiting and budget > 0 and not self._has_its_prompt(chunks):
            sequence = queues.waiting[0]
            if not self.policy.chunked and sequence.num_tokens > budget and chunks:
                break  # a whole prompt larger than the budget gets a step of its own
            if may_start and not admission.fits(sequence, budget):
                may_start, queues.memory_is_tight = False, True
            if not may_start:
                if not admission.may_go_ahead(sequence):
                    break
                admission.ahead = sequence
            budget -= self._add_chunk(chunks, queues.start(), budget)

    def _has_its_prompt(self, chunks: list[ScheduledChunk]) -> bool:
        """Whether no other prompt may join the step."""
        return self.policy.one_prompt and bool(chunks)

    def _urgent_prefills(self, chunks: list[ScheduledChunk], budget: int) -> int:
        """Add prompt chunks of urgent rows, those that run first. Returns the tokens that are left."""
        queues = self.queues
        if not self.policy.urgent_first:
            return budget
        for sequence in queues.prefilling:
            if sequence.request.is_urgent and budget > 0:
                budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and queues.waiting and queues.waiting[0].request.is_urgent:
            sequence = queues.waiting[0]
            is_too_long = not self.policy.chunked and sequence.num_tokens > budget and bool(chunks)
            if is_too_long or not self.admission.fits(sequence, budget):
                break
            budget -= self._add_chunk(chunks, queues.start(), budget)
        return budget

    def _add_chunk(self, chunks: list[ScheduledChunk], sequence: Sequence, budget: int) -> int:
        """Schedule as much of the sequence's prompt as budget and free blocks allow. Returns the tokens taken."""
        pool, start = self.queues.pool, sequence.num_computed_tokens
        left = sequence.num_tokens - start
        table = sequence.block_table.device
        room = (len(table) + max(0, self.admission.spare_blocks())) * pool.block_tokens - start
        take = min(left, room, budget if self.policy.chunked else left)
        if take <= 0:
            return 0
        table += pool.allocate(pool.blocks_for(start + take) - len(table))
        chunks.append(ScheduledChunk(sequence, start, take, take == left))
        self.queues.prefixes.register(sequence, start + take)
        return take

    # --- what came of it ---------------------------------------------------------------------------------------------

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Record a batch that was computed before anything else was scheduled: `advance` and `settle`."""
        self.advance(batch)
        return self.settle(batch, result)

    def advance(self, batch: Batch) -> None:
        """Go on from a batch that is under way, as far as that needs none of its tokens.

        What ends for its length gives its memory back at once: whatever is launched later runs later.
        """
        for sequence in batch.decodes:
            sequence.num_computed_tokens += 1
        for sequence, _, num_tokens, samples in batch.prefills:
            sequence.num_computed_tokens += num_tokens
            if samples:
                self.queues.end_prompt(sequence)
        ended: list[Sequence] = []
        for sequence in batch.sampling:
            sequence.num_pending_tokens += 1
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                ended.append(sequence)
        for sequence in ended:
            self.queues.end(sequence, FinishReason.LENGTH)
        if ended:
            self._ending += ended
            self.queues.forget_ended()

    def settle(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Record the tokens of a batch that `advance` has seen. Returns the sequences that ended with it.

        The batch behind it may be under way already, with sequences that turn out to have stopped here. What it says of
        them is dropped.
        """
        finished: list[Sequence] = []
        stopped, sampling = False, batch.sampling
        for sequence, detail in zip(sampling, result.token_logprobs, strict=False):
            if sequence.num_pending_tokens:
                sequence.token_logprobs.append(detail)
        for sequence, value in zip(sampling, result.values, strict=False):
            sequence.value = value
        for sequence, token_id, logprob in zip(sampling, result.token_ids, result.logprobs, strict=False):
            if sequence.num_pending_tokens and token_id >= 0 and sequence.value is None:
                sequence.logprob += logprob
        for sequence, token_id, stops in zip(sampling, result.token_ids, result.stopped, strict=False):
            if not sequence.num_pending_tokens:
                continue
            sequence.num_pending_tokens -= 1
            if token_id < 0:
                sequence.error = result.problem
            elif sequence.value is None:
                sequence.output_token_ids.append(token_id)
            if stops:
                self.queues.end(sequence, FinishReason.ERROR if sequence.error else FinishReason.STOP)
                sequence.num_pending_tokens = 0
                stopped = True
            if sequence.finish_reason is not None and not sequence.num_pending_tokens:
                finished.append(sequence)
        if stopped:
            self.queues.forget_ended()
        if self._ending:
            self._ending = [sequence for sequence in self._ending if sequence.num_pending_tokens]
        self.queues.counters.finished += len(finished)
        return finished
