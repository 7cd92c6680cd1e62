"""Who runs in the next step.

Integers only: the scheduler sees lengths, blocks and a token budget, never a clock, a tensor or a price. Real runs and
simulated ones use it unchanged. Each call to `schedule` forms one batch under one token budget (Sarathi, section 4):

    1. decodes            every running sequence that is past its prompt, and has room for it, computes one token
    2. running prefills   sequences in the middle of their prompt take what is left of the budget
    3. waiting rows       are admitted while budget, sequence slots and memory last

Under `Admission.AHEAD` a row for which memory does not last may start all the same, one at a time, if its prompt fits:
it is parked as soon as that is computed, and comes back as parked rows do (Baton's prefilled queries, section 4.3).

How a baseline differs from vasuki is said by a `Policy`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import repeat

import numpy as np

from vasuki.engine.batch import Batch, ScheduledChunk, StepResult, Swap
from vasuki.engine.blocks import BlockPool
from vasuki.engine.policy import Admission, Mixing, Policy
from vasuki.engine.sequence import FinishReason, Request, Sequence, Status
from vasuki.engine.settings import EngineSettings, Limits


@dataclass(slots=True)
class Counters:
    """What happened so far, for the manifest."""

    recomputed_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    prefilled_ahead: int = 0  # rows that waited on the host with their prompt computed
    shared_tokens: int = 0  # prompt tokens found in blocks of another row
    finished: int = 0  # rows that ended

    def add(self, other: Counters) -> None:
        """Count what happened elsewhere too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Scheduler:
    """Forms batches from waiting and running sequences, and owns their blocks."""

    def __init__(self, policy: Policy, limits: Limits, pool: BlockPool, host_pool: BlockPool | None = None) -> None:
        self.policy = policy
        self.limits = limits
        self.pool = pool
        self.host_pool = host_pool
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # past their prompt, in the order in which they got there
        self.parked: deque[Sequence] = deque()
        self.counters = Counters()
        self._swaps: list[Swap] = []  # of the batch being formed
        self._ahead: Sequence | None = None  # runs until its prompt is computed, without room for what follows
        self._maximum_blocks = 0  # what the running sequences would hold if all grew to max_tokens
        self.memory_is_tight = False  # admission was refused for lack of memory, and nothing was freed since
        self._filling = True  # in a prefill phase, when exclusive

    @classmethod
    def build(cls, settings: EngineSettings) -> Scheduler:
        """A fresh scheduler with empty pools."""
        block_tokens, host_blocks = settings.block_tokens, settings.host_blocks
        host_pool = BlockPool(host_blocks, block_tokens) if host_blocks else None
        return cls(settings.policy, settings.limits, BlockPool(settings.num_blocks, block_tokens), host_pool)

    # --- rows in, rows out -------------------------------------------------------------------------------------------

    def wants_more(self) -> bool:
        """Whether another request can be taken without holding more than the window."""
        return len(self.waiting) < self.limits.lookahead

    def add(self, request: Request) -> Sequence | None:
        """Queue a request. Returns a finished sequence instead if the request can never run."""
        sequence = Sequence(request)
        reason = request.error
        if not reason:
            needed = self._maximum(sequence)
            if needed > self.pool.num_blocks:
                bt = self.pool.block_tokens
                reason = (
                    f"needs KV memory for {needed * bt} tokens (prompt {request.num_prompt_tokens}, max_tokens "
                    f"{request.max_tokens}), the device has room for {self.pool.num_blocks * bt}"
                )
        if reason:
            sequence.error, sequence.finish_reason, sequence.status = reason, FinishReason.ERROR, Status.FINISHED
            return sequence
        self.waiting.append(sequence)
        self.pool.want(self._shareable(sequence))
        return None

    def is_empty(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding or self.parked)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def running(self) -> list[Sequence]:
        """Every sequence that holds device blocks, those that came last at the end."""
        return self.decoding + self.prefilling

    def live(self) -> Iterator[Sequence]:
        """Every sequence that is not finished."""
        yield from self.running
        yield from self.parked
        yield from self.waiting

    # --- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Form the next batch, or return None if nothing can run."""
        self._swaps = []
        self._park_ahead()
        budget = self.limits.chunk_tokens if self.policy.refill else sys.maxsize  # a static batch starts as a whole
        decodes: list[Sequence] = []
        prefills: list[ScheduledChunk] = []
        if self.policy.mixing is Mixing.MIXED:
            decodes = self._decodes()
            self._prefills(prefills, budget - len(decodes))
        else:
            if self.policy.mixing is Mixing.PREFILL_FIRST or self._in_prefill_phase():
                self._prefills(prefills, budget)
            if not prefills:
                self._filling = False
                decodes = self._decodes()
        if not self._unpark() and not decodes and not prefills:
            return None
        return Batch(decodes, [sequence.num_computed_tokens for sequence in decodes], prefills, self._swaps)

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
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
        ended = False
        for sequence in _sampling(batch):
            sequence.num_pending_tokens += 1
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                self._end(sequence, FinishReason.LENGTH)
                ended = True
        if ended:
            self._forget_ended()

    def settle(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Record the tokens of a batch that `advance` has seen. Returns the sequences that ended with it.

        The batch behind it may be under way already, with sequences that turn out to have stopped here. What it says of
        them is dropped.
        """
        finished: list[Sequence] = []
        stopped = False
        logprobs = result.logprobs or repeat(0.0)
        sampled = zip(_sampling(batch), result.token_ids, result.stopped, logprobs, strict=False)
        for sequence, token_id, stops, logprob in sampled:
            if not sequence.num_pending_tokens:
                continue
            sequence.output_token_ids.append(token_id)
            sequence.num_pending_tokens -= 1
            sequence.logprob += logprob
            if stops:
                self._end(sequence, FinishReason.STOP)
                sequence.num_pending_tokens = 0
                stopped = True
            if sequence.finish_reason is not None and not sequence.num_pending_tokens:
                finished.append(sequence)
        if stopped:
            self._forget_ended()
        self.counters.finished += len(finished)
        return finished

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take back what a sequence holds, wherever it is: nothing more will be computed for it."""
        sequence.finish_reason = reason
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:  # preempted before its last token was known
            self.waiting.remove(sequence)
            self.pool.unwant(self._shareable(sequence))
        elif sequence.status is Status.PARKED:  # likewise
            assert self.host_pool is not None
            self.parked.remove(sequence)
            self.host_pool.release(sequence.block_table.host)
            sequence.block_table.host = []
        sequence.status = Status.FINISHED

    def _forget_ended(self) -> None:
        self.decoding = [sequence for sequence in self.decoding if sequence.finish_reason is None]
        self.memory_is_tight = False

    # --- decodes -----------------------------------------------------------------------------------------------------

    def _decodes(self) -> list[Sequence]:
        """Every sequence past its prompt that has room for its token.

        When the pool is exhausted, some may stall until others end: those with the least computed, since the others
        are nearer to that. Beyond `Limits.stalled_share` of them, sequences are preempted. One always goes on.
        """
        pool, block_tokens = self.pool, self.pool.block_tokens
        growing = [
            sequence
            for sequence in self.decoding
            if sequence.num_computed_tokens >= len(sequence.block_table.device) * block_tokens
        ]
        while len(growing) > pool.num_available + int(self.limits.stalled_share * len(self.decoding)):
            victim = self._victim()
            self._preempt(victim)
            if victim in growing:
                growing.remove(victim)
        stalled: set[Sequence] = set()
        if len(growing) > pool.num_available:
            growing.sort(key=lambda sequence: -sequence.num_computed_tokens)
            growing, stalled = growing[: pool.num_available], set(growing[pool.num_available :])
        for sequence in growing:
            sequence.block_table.device += pool.allocate(1)
        return [sequence for sequence in self.decoding if sequence not in stalled] if stalled else self.decoding[:]

    # --- prefills ----------------------------------------------------------------------------------------------------

    def _prefills(self, chunks: list[ScheduledChunk], budget: int) -> None:
        """Add prompt chunks to the batch, of running sequences first, then of waiting ones."""
        may_start = self.may_admit()
        for sequence in self.prefilling:
            if budget <= 0:
                return
            budget -= self._add_chunk(chunks, sequence, budget)
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if not self.policy.chunked and sequence.num_tokens > budget and chunks:
                break  # a whole prompt larger than the budget gets a step of its own
            if may_start and not self._fits(sequence):
                may_start, self.memory_is_tight = False, True
            if not may_start:
                if not self._may_go_ahead(sequence):
                    break
                self._ahead = sequence
            self._admit(self.waiting.popleft())
            budget -= self._add_chunk(chunks, sequence, budget)

    def may_admit(self) -> bool:
        """Whether a waiting row could start, as far as policy, slots and what is known about memory say."""
        if self.memory_is_tight or self.parked or self.num_running >= self.limits.max_num_seqs:
            return False
        return self.policy.refill or not self.num_running

    def _add_chunk(self, chunks: list[ScheduledChunk], sequence: Sequence, budget: int) -> int:
        """Schedule as much of the sequence's prompt as budget and free blocks allow. Returns the tokens taken."""
        start = sequence.num_computed_tokens
        left = sequence.num_tokens - start
        table = sequence.block_table.device
        room = (len(table) + self.pool.num_available) * self.pool.block_tokens - start
        take = min(left, room, budget if self.policy.chunked else left)
        if take <= 0:
            return 0
        table += self.pool.allocate(self.pool.blocks_for(start + take) - len(table))
        chunks.append(ScheduledChunk(sequence, start, take, take == left))
        self.register_prefix(sequence, start + take)
        return take

    def _in_prefill_phase(self) -> bool:
        if not self._filling:
            self._filling = self.pool.num_available >= self.limits.prefill_threshold * self.pool.num_blocks
        return self._filling or not self.num_running

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._maximum_blocks += self._maximum(sequence)
        self.prefilling.append(sequence)
        self._share_prefix(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._maximum_blocks -= self._maximum(sequence)

    def _maximum(self, sequence: Sequence) -> int:
        """Blocks the sequence holds in the step that samples its last possible token, which itself is never stored."""
        return self.pool.blocks_for(sequence.request.num_prompt_tokens + sequence.request.max_tokens - 1)

    def _fits(self, sequence: Sequence, ahead: Sequence | None = None) -> bool:
        """Whether memory and slots allow the sequence to start now, or to go `ahead`. An empty batch takes any row,
        `add` having checked it."""
        pool = self.pool
        if not self.num_running:
            return True
        if self.num_running >= self.limits.max_num_seqs:
            return False
        if self.policy.padded:  # the cache has as many columns for every row as for the longest
            widest = max(map(self._maximum, [*self.running, sequence]))
            return (self.num_running + 1) * widest <= pool.num_blocks
        if self._maximum_blocks + self._maximum(sequence) <= pool.num_blocks:
            return True
        if self.policy.admission is Admission.PROMPT:
            promised = sum([pool.blocks_for(s.num_tokens) - len(s.block_table.device) for s in self.prefilling])
            watermark = max(1, pool.num_blocks // 100)
            return pool.blocks_for(sequence.num_tokens) + promised + watermark <= pool.num_available
        if self.policy.admission is Admission.MAXIMUM:
            return False
        if pool.num_held + pool.blocks_for(sequence.num_tokens) > pool.num_blocks:
            return False
        return peak_blocks([*self.running, sequence], pool.block_tokens, ahead or self._ahead) <= pool.num_blocks

    # --- prefilling ahead --------------------------------------------------------------------------------------------

    def _may_go_ahead(self, sequence: Sequence) -> bool:
        """Whether a row that may not start can have its prompt computed in the room that others have yet to grow into.

        If they need it sooner, it is the first to make room.
        """
        if self.policy.admission is not Admission.AHEAD or self._ahead:
            return False
        return self._may_park(sequence, sequence.num_tokens) and self._fits(sequence, ahead=sequence)

    def _park_ahead(self) -> None:
        """Park the row that went ahead when its prompt is computed. It stays if by now it could start."""
        sequence = self._ahead
        if sequence is None or sequence in self.prefilling:
            return
        self._ahead = None
        stays = self.num_running == 1 or not (self.parked or self.memory_is_tight)
        if sequence.status is Status.RUNNING and not stays and self._may_park(sequence, sequence.num_computed_tokens):
            self._park(sequence)
            self.counters.prefilled_ahead += 1

    # --- prefix sharing ----------------------------------------------------------------------------------------------
    # While a row waits, the pool knows what it wants to begin with, and keeps that longer than what nobody wants.

    def _shareable(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a waiting row could take over. At least one token is left to compute."""
        if not self.policy.shares_prefixes:
            return []
        if not sequence.prefix_keys:
            sequence.prefix_keys = prefix_keys(sequence.request, self.pool.block_tokens)
        return sequence.prefix_keys[: (sequence.num_tokens - 1) // self.pool.block_tokens]

    def _share_prefix(self, sequence: Sequence) -> None:
        """Take over blocks that already hold the beginning of the prompt.

        A block counts as soon as the chunk that fills it is scheduled: within a step every layer writes the keys and
        values of all chunks before any chunk attends.
        """
        table, wanted = sequence.block_table, self._shareable(sequence)
        for key in wanted:
            block = self.pool.acquire(key)
            if block is None:
                break
            table.device.append(block)
        self.pool.unwant(wanted)
        table.num_keyed = len(table.device)
        sequence.num_computed_tokens = len(table.device) * self.pool.block_tokens
        self.counters.shared_tokens += sequence.num_computed_tokens

    def register_prefix(self, sequence: Sequence, computed: int) -> None:
        table = sequence.block_table
        full = min(computed // self.pool.block_tokens, len(sequence.prefix_keys))
        while table.num_keyed < full:
            self.pool.register(table.device[table.num_keyed], sequence.prefix_keys[table.num_keyed])
            table.num_keyed += 1

    # --- preemption --------------------------------------------------------------------------------------------------

    def _victim(self) -> Sequence:
        """The running sequence to give up: the cheapest to bring back, or simply the last that came."""
        if self.policy.evicts_least_computed:
            return min(reversed(self.running), key=lambda sequence: sequence.num_computed_tokens)
        return (self.prefilling or self.decoding)[-1]

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's device blocks, keeping its KV on the host if that is worth it and there is room."""
        self.memory_is_tight = True
        if self._may_park(sequence, sequence.num_computed_tokens):
            self._park(sequence)
            self.counters.preemptions_swap += 1
        else:
            self.counters.preemptions_recompute += 1
            self.counters.recomputed_tokens += sequence.num_computed_tokens
            self._vacate(sequence)
            sequence.num_computed_tokens = 0
            sequence.status = Status.WAITING
            self.waiting.appendleft(sequence)
            self.pool.want(self._shareable(sequence))

    def _may_park(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether so many computed tokens are worth keeping on the host, and have room there."""
        host, threshold = self.host_pool, self.limits.swap_min_tokens
        if host is None or threshold is None or num_tokens < threshold:
            return False
        return max(len(sequence.block_table.device), host.blocks_for(num_tokens)) <= host.num_available

    def _park(self, sequence: Sequence) -> None:
        assert self.host_pool is not None
        table = sequence.block_table
        table.host = self.host_pool.allocate(len(table.device))
        self._swaps.append(Swap(sequence, True, table.device, table.host))
        self._vacate(sequence)
        sequence.status = Status.PARKED
        self.parked.append(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
        self._leave(sequence)
        self._release(sequence)

    def _unpark(self) -> bool:
        """Bring parked sequences back while memory would let them start. Returns whether any came.

        They run from the next step on: the copy has this one to hide behind.
        """
        came = False
        while self.parked and self.host_pool is not None and not (self.memory_is_tight and self.num_running):
            if not self._fits(self.parked[0]):
                self.memory_is_tight = True  # until something ends
                break
            sequence = self.parked.popleft()
            table = sequence.block_table
            table.device = self.pool.allocate(len(table.host))
            self._swaps.append(Swap(sequence, False, table.device, table.host))
            self.host_pool.release(table.host)
            table.host = []
            sequence.status = Status.RUNNING
            self._maximum_blocks += self._maximum(sequence)
            (self.prefilling if sequence.num_uncomputed_tokens > 1 else self.decoding).append(sequence)
            came = True
        return came

    def _release(self, sequence: Sequence) -> None:
        table = sequence.block_table
        self.pool.release(table.device)
        table.device, table.num_keyed = [], 0

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree. Called after every step in tests."""
        self.pool.check_integrity(
            (sequence.block_table.device for sequence in self.live()),
            (key for sequence in self.waiting for key in self._shareable(sequence)),
        )
        if self.host_pool is not None:
            self.host_pool.check_integrity(sequence.block_table.host for sequence in self.live())
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            held = len(sequence.block_table.device) * self.pool.block_tokens
            assert sequence.num_computed_tokens <= held, "computed tokens without a block"
        assert self._maximum_blocks == sum(map(self._maximum, self.running))
        assert all(not s.block_table.device and s.num_computed_tokens == 0 for s in self.waiting)


def _sampling(batch: Batch) -> Iterator[Sequence]:
    yield from batch.decodes
    yield from (chunk.sequence for chunk in batch.prefills if chunk.samples)


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


def prefix_keys(request: Request, block_tokens: int) -> list[bytes]:
    """A digest for each full block of the prompt that covers all tokens up to its end."""
    token_ids = request.prompt_token_ids
    keys: list[bytes] = []
    previous = b""
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        block = np.asarray(token_ids[end - block_tokens : end], dtype=np.int32).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=16).digest()
        keys.append(previous)
    return keys
