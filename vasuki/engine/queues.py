"""Rows by status, with the blocks that they hold.

             start                          end
    waiting -------> running --------------------> finished
       ^   ^            |  ^  prefilling, then decoding
       |   +--- drop ---+  |
    add            park |  | unpark
                        v  |
                       parked

Each arrow is a method, and moves the row, its blocks and its status together. Nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from vasuki.engine.batch import Swap
from vasuki.engine.blocks import BlockPool
from vasuki.engine.depth_control import DepthControl
from vasuki.engine.prefixes import Prefixes
from vasuki.engine.sequence import FinishReason, Sequence, Status
from vasuki.engine.settings import EngineSettings


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


class Queues:
    """Every row that is not finished, and the pools that its blocks come from."""

    def __init__(self, settings: EngineSettings) -> None:
        block_tokens, host_blocks = settings.block_tokens, settings.offload.host_blocks
        rule = settings.offload.depth
        most_blocks = rule.most_blocks(settings.num_blocks) if rule else settings.num_blocks
        self.pool = BlockPool(most_blocks, block_tokens)
        self.depth = DepthControl(rule, settings.num_blocks, self.pool) if rule else None
        assert not (rule and settings.policy.shares_prefixes), "what nobody holds keeps no place when layers move"
        self.host_pool = BlockPool(host_blocks, block_tokens) if host_blocks else None
        self.prefixes = Prefixes(self.pool, settings.policy.shares_prefixes)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # past their prompt, in the order in which they got there
        self.parked: deque[Sequence] = deque()
        self.counters = Counters()
        self.swaps: list[Swap] = []  # of the batch being formed; emptied by Scheduler
        self.held_back: Callable[[], int] = lambda: 0  # rows that wait outside since they arrived; set by their source
        self.urgent_held_back: Callable[[], bool] = lambda: False  # whether one of them is urgent; likewise
        self.gathers = 0  # rows that are gathered before they come here; set by their source, 0 where none are
        self.maximum_blocks = 0  # what the running sequences would hold if all grew to max_tokens
        # Admission was refused for lack of memory, and nothing was freed since. Set by admission and preemption.
        self.memory_is_tight = False
        self._park_min_tokens = settings.offload.park_min_tokens

    # --- who is there ------------------------------------------------------------------------------------------------

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

    @property
    def num_waiting(self) -> int:
        """Rows that have arrived and don't run."""
        return len(self.waiting) + len(self.parked) + self.held_back()

    @property
    def wants_memory(self) -> bool:
        """Whether some row waits for memory, or will in the next step."""
        return self.memory_is_tight or self.pool.num_available < self.num_running

    def is_empty(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding or self.parked)

    def maximum(self, sequence: Sequence) -> int:
        """Blocks that the sequence holds at most."""
        return self.pool.blocks_for(sequence.request.peak_tokens)

    def may_park(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `num_tokens` computed tokens are worth keeping on the host, and have room there."""
        host = self.host_pool
        if host is None or num_tokens < self._park_min_tokens:
            return False
        return max(len(sequence.block_table.device), host.blocks_for(num_tokens)) <= host.num_available

    # --- arrows ------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A new row waits behind the others that are as urgent."""
        behind = len(self.waiting)
        while behind and self.waiting[behind - 1].urgency > sequence.urgency:
            behind -= 1
        self.waiting.insert(behind, sequence)
        self.prefixes.want(sequence)

    def start(self) -> Sequence:
        """The first waiting row runs, with the blocks that others have computed for it."""
        sequence = self.waiting.popleft()
        sequence.status = Status.RUNNING
        self.maximum_blocks += self.maximum(sequence)
        self.prefilling.append(sequence)
        self.prefixes.take_over(sequence)
        self.counters.shared_tokens += sequence.num_computed_tokens
        return sequence

    def end_prompt(self, sequence: Sequence) -> None:
        """The sequence decodes from now on."""
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A running sequence waits again, before all others that are as urgent, with nothing computed."""
        self._vacate(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        before = next((i for i, other in enumerate(self.waiting) if other.urgency >= sequence.urgency), None)
        self.waiting.insert(len(self.waiting) if before is None else before, sequence)
        self.prefixes.want(sequence)

    def park(self, sequence: Sequence) -> None:
        """A running sequence goes on waiting with its KV on the host."""
        assert self.host_pool is not None
        table = sequence.block_table
        table.host = self.host_pool.allocate(len(table.device))
        self.swaps.append(Swap(sequence, True, table.device, table.host))
        self._vacate(sequence)
        sequence.status = Status.PARKED
        self.parked.append(sequence)

    def unpark(self) -> None:
        """The first parked sequence runs again, from the next step on: its copy has this one to hide behind."""
        assert self.host_pool is not None
        sequence = self.parked.popleft()
        table = sequence.block_table
        table.device = self.pool.allocate(len(table.host))
        self.swaps.append(Swap(sequence, False, table.device, table.host))
        self.host_pool.release(table.host)
        table.host = []
        sequence.status = Status.RUNNING
        self.maximum_blocks += self.maximum(sequence)
        (self.prefilling if sequence.num_uncomputed_tokens > 1 else self.decoding).append(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take back what a sequence holds, wherever it is: nothing more will be computed for it.

        Running ones stay in their list until `forget_ended`.
        """
        sequence.finish_reason = reason
        if sequence.status is Status.RUNNING:
            self.maximum_blocks -= self.maximum(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:  # preempted before its last token was known
            self.waiting.remove(sequence)
            self.prefixes.unwant(sequence)
        elif sequence.status is Status.PARKED:  # likewise
            assert self.host_pool is not None
            self.parked.remove(sequence)
            self.host_pool.release(sequence.block_table.host)
            sequence.block_table.host = []
        sequence.status = Status.FINISHED

    def forget_ended(self) -> None:
        """Memory was freed: rows may start again."""
        self.decoding = [sequence for sequence in self.decoding if sequence.finish_reason is None]
        self.memory_is_tight = False

    def _vacate(self, sequence: Sequence) -> None:
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
        self.maximum_blocks -= self.maximum(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        table = sequence.block_table
        self.pool.release(table.device)
        table.device, table.num_keyed = [], 0

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree. Called after every step in tests."""
        self.pool.check_integrity(
            (sequence.block_table.device for sequence in self.live()),
            (key for sequence in self.waiting for key in self.prefixes.wanted(sequence)),
        )
        if self.host_pool is not None:
            self.host_pool.check_integrity(sequence.block_table.host for sequence in self.live())
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            held = len(sequence.block_table.device) * self.pool.block_tokens
            assert sequence.num_computed_tokens <= held, "computed tokens without a block"
        assert self.maximum_blocks == sum(map(self.maximum, self.running))
        assert all(not s.block_table.device and s.num_computed_tokens == 0 for s in self.waiting)
