"""Replicas in virtual time, each a scheduler and a machine of its own, fed by the leases of real runs.

Machines may be of several kinds, and may be taken away at random moments. Then rows go on elsewhere with the tokens of
the last note, which a run writes with each part, and a new machine is asked for:

    replica 0   |boot|=== === === ==x    |boot|=== ===|
    replica 1   |boot|=== === === === === === === === =|
    notes            ^   ^      ^        ^          ^         x loses what came after the last one before it
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Vector
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vasuki.base.commits import next_commit_s
from vasuki.base.errors import SchedulerStalled
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import Observer, RunStats
from vasuki.engine.queues import Counters
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Progress, Request, Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.machines.cost_model import CostModel
from vasuki.simulator.fast_forward import FastForward
from vasuki.simulator.simulated_executor import SimulatedExecutor

ASK_BELOW = 16  # rows of a lease at hand: then the next one is asked for; the scheduler holds as many itself

Key = tuple[int, int]  # row and sample


class RowDispatcher(Protocol):
    """Hands out rows to replicas as real runs do, see `vasuki.planner.leases`."""

    @property
    def is_done(self) -> bool: ...

    def join(self, replica: int, speed: float = 1.0, row_token_s: float = 0.0) -> None: ...

    def leave(self, replica: int) -> list[Request]: ...

    def give_back(self, requests: list[Request]) -> None: ...

    def take(self, replica: int) -> list[Request]: ...

    def computed(self, replica: int, prompt_tokens: int, output_tokens: int, elapsed_s: float) -> None: ...

    def ended(self, replica: int, key: Key, output_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """What one replica runs on."""

    settings: EngineSettings
    cost_model: CostModel
    speed: float = 1.0  # expected, in units of whatever the leases reckon in
    row_token_s: float = 0.0  # what a row waits for its next token; 0 where all machines are equal
    interruptions_per_hour: float = 0.0
    boot_s: float = 0.0  # until it computes, at first and whenever it was replaced


@dataclass(slots=True)
class ReplicasResult:
    """How a job went."""

    makespan_s: float = 0.0  # boot included
    stats: RunStats = field(default_factory=RunStats)
    counters: Counters = field(default_factory=Counters)
    ended_s: list[float] = field(default_factory=list)  # `[machines]` when each had nothing more to do
    interruptions: int = 0


def simulate_replicas(
    leases: RowDispatcher,
    output_tokens: Vector[int],
    machines: Vector[SimulatedMachine],
    *,
    seed: int = 0,
    observers: Iterable[Observer] = (),
    on_ended: Callable[[Sequence], None] = lambda sequence: None,
) -> ReplicasResult:
    """Run all rows to their recorded ends. The same arguments give the same result to the last digit.

    Args:
        leases: hand out the rows.
        output_tokens: recorded length of each row, by `Request.row`.
        machines: one for each replica.
        seed: of the moments at which machines are taken away.
        observers: see every step, several at a time.
        on_ended: told of every row that ends, with or without an error.

    Raises:
        SchedulerStalled: work is left but no batch can be formed.
    """
    return _ReplicasSimulation(leases, output_tokens, machines, seed, list(observers), on_ended).run()


class _Replica:
    """A machine, and what runs on it while it is there."""

    def __init__(self, machine: SimulatedMachine, moments: np.random.Generator) -> None:
        self.machine = machine
        self.is_there = False
        self.taken_s = math.inf  # when it will be taken away
        self.peak_device_blocks = self.peak_host_blocks = 0
        self._moments = moments
        self.scheduler: Scheduler  # these are set whenever it starts
        self.executor: SimulatedExecutor
        self.at_hand: deque[Request]  # of a lease

    def start(self, now_s: float, output_tokens: Vector[int]) -> None:
        machine = self.machine
        self.is_there, self.at_hand = True, deque()
        self.scheduler = Scheduler(machine.settings)
        fast_forward = FastForward(self.scheduler)
        self.executor = SimulatedExecutor(machine.cost_model, output_tokens, machine.settings, fast_forward)
        self.executor.clock.now_s = now_s
        if rate := machine.interruptions_per_hour / 3600:
            self.taken_s = now_s + float(self._moments.exponential(1 / rate))

    def end(self, counters: Counters) -> None:
        """Add up what its scheduler has counted."""
        queues = self.scheduler.queues
        counters.add(queues.counters)
        self.peak_device_blocks = max(self.peak_device_blocks, queues.pool.peak_held)
        if queues.host_pool is not None:
            self.peak_host_blocks = max(self.peak_host_blocks, queues.host_pool.peak_held)


class _ReplicasSimulation:
    """One call of `simulate_replicas`."""

    def __init__(
        self,
        leases: RowDispatcher,
        output_tokens: Vector[int],
        machines: Vector[SimulatedMachine],
        seed: int,
        observers: list[Observer],
        on_ended: Callable[[Sequence], None],
    ) -> None:
        self._leases = leases
        self._output_tokens = output_tokens
        self._observers = observers
        self._on_ended = on_ended
        self._replicas = [
            _Replica(machine, np.random.default_rng([seed, index])) for index, machine in enumerate(machines)
        ]
        self._turns = [(machine.boot_s, index) for index, machine in enumerate(machines)]  # heap
        self._idle: list[int] = []
        self._notes: dict[Key, int] = {}  # output tokens of rows in flight
        self._note_s = 0.0  # when the next one is due
        self._notes_matter = any(machine.interruptions_per_hour for machine in machines)
        self.result = ReplicasResult(ended_s=[0.0] * len(machines))

    def run(self) -> ReplicasResult:
        """Run all to the end: the replica that is ready first takes its turn."""
        heapq.heapify(self._turns)
        for index in range(len(self._replicas)):  # before any of them takes rows: shares are of all
            self._join(index)
        while self._turns:
            now_s, index = heapq.heappop(self._turns)
            if self._leases.is_done:
                break
            replica = self._replicas[index]
            if not replica.is_there:
                replica.start(now_s, self._output_tokens)
            if self._notes_matter and now_s >= self._note_s:
                self._note(now_s)
            self._take_turn(index, replica, now_s)
        return self._summed_up()

    def _join(self, index: int) -> None:
        machine = self._replicas[index].machine
        self._leases.join(index, machine.speed, machine.row_token_s)

    def _take_turn(self, index: int, replica: _Replica, now_s: float) -> None:
        if replica.taken_s <= now_s:  # while it was idle
            self._take_away(index, replica, now_s)
            return
        executor = replica.executor
        executor.clock.now_s = now_s  # later than its last step, where it was idle
        self._fill(index, replica)
        batch = replica.scheduler.schedule()
        if batch is None:
            if left := len(list(replica.scheduler.queues.live())):
                raise SchedulerStalled(f"{left} sequences are left and none can run")
            self._idle.append(index)
            return
        step = executor.launch(batch)
        if executor.clock.now_s > replica.taken_s:
            self._take_away(index, replica, replica.taken_s)
            return
        self._step(index, replica, batch, step._replace(elapsed_s=executor.clock.now_s - now_s))
        heapq.heappush(self._turns, (executor.clock.now_s, index))

    def _fill(self, index: int, replica: _Replica) -> None:
        """Give a replica what it may start. Those that got nothing ask again once another has got rows."""
        if len(replica.at_hand) < ASK_BELOW and (lease := self._leases.take(index)):
            replica.at_hand.extend(lease)
            self._wake(replica.executor.clock.now_s)
        while replica.at_hand and replica.scheduler.wants_more():
            if (rejected := replica.scheduler.add(replica.at_hand.popleft())) is not None:
                self._end(index, rejected)

    def _step(self, index: int, replica: _Replica, batch: Batch, step: StepResult) -> None:
        """The loop of `engine.loop.drain`, for one replica of several."""
        result, scheduler, now_s = self.result, replica.scheduler, replica.executor.clock.now_s
        finished = scheduler.update(batch, step)
        result.stats.count(batch, step, scheduler)
        decodes = step.num_steps * batch.num_decode_tokens
        self._leases.computed(index, batch.num_prefill_tokens, decodes, step.elapsed_s)
        for sequence in finished:
            self._end(index, sequence)
        result.ended_s[index] = now_s
        for observer in self._observers:
            observer.record(now_s, batch, step, scheduler, finished)

    def _end(self, index: int, sequence: Sequence) -> None:
        request = sequence.request
        self._leases.ended(index, request.key, sequence.num_output_tokens)
        self._on_ended(sequence)

    def _note(self, now_s: float) -> None:
        """Write down how far the rows in flight are, as a run does with each part."""
        there = [replica for replica in self._replicas if replica.is_there]
        live = [sequence for replica in there for sequence in replica.scheduler.queues.live()]
        self._notes = {s.request.key: len(s.output_token_ids) for s in live}
        self._note_s = next_commit_s(now_s)

    def _take_away(self, index: int, replica: _Replica, now_s: float) -> None:
        """Take a machine away in the middle of a step, and hand out its rows again."""
        replica.end(self.result.counters)
        replica.is_there, replica.taken_s = False, math.inf
        self.result.interruptions += 1
        self._leases.give_back([self._as_noted(request) for request in self._leases.leave(index)])
        self._join(index)  # another one is on its way
        self._wake(now_s)
        heapq.heappush(self._turns, (now_s + replica.machine.boot_s, index))

    def _wake(self, now_s: float) -> None:
        """Let idle replicas ask again."""
        for waiting in self._idle:
            heapq.heappush(self._turns, (now_s, waiting))
        self._idle.clear()

    def _as_noted(self, request: Request) -> Request:
        known = max(self._notes.get(request.key, 0), len(request.progress.output_token_ids))
        return replace(request, progress=Progress((0,) * known)) if known else request

    def _summed_up(self) -> ReplicasResult:
        result, stats = self.result, self.result.stats
        for replica in self._replicas:
            if replica.is_there:
                replica.end(result.counters)
        result.makespan_s = stats.now_s = max(result.ended_s)  # replicas run side by side
        stats.peak_device_blocks = sum(replica.peak_device_blocks for replica in self._replicas)
        stats.peak_host_blocks = sum(replica.peak_host_blocks for replica in self._replicas)
        return result
