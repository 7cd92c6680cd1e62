"""Whom to preempt when memory runs out, and when preempted rows resume."""

from __future__ import annotations

from vasuki.engine.admission import AdmissionControl
from vasuki.engine.policy import Admission, Policy
from vasuki.engine.queues import Queues
from vasuki.engine.sequence import Sequence, Status


class Preemption:
    """Moves running sequences out of the way, to the host if that is worth it, and back."""

    def __init__(self, policy: Policy, queues: Queues, admission: AdmissionControl) -> None:
        self._policy = policy
        self._queues = queues
        self._admission = admission
        self._has_preempted = False  # in this step

    def make_room(self, growing: list[Sequence]) -> None:
        """Preempt until each of the growing sequences finds a block. Preempted ones are taken from the list."""
        pool = self._queues.pool
        while len(growing) > pool.num_available:
            victim = self._victim(self._queues.running)
            self._preempt(victim)
            if victim in growing:
                growing.remove(victim)

    def make_room_for(self, sequence: Sequence, budget: int) -> bool:
        """Preempt those that came last until the next chunk of a sequence that is in its prompt finds blocks. Returns
        whether it still runs: it may have been preempted already, or be the last itself. Those before it have their
        place in the step already."""
        queues, pool, table = self._queues, self._queues.pool, sequence.block_table
        end = sequence.num_computed_tokens + min(budget, sequence.num_uncomputed_tokens)
        needed = pool.blocks_for(end) - len(table.device)
        while sequence.status is Status.RUNNING and needed > pool.num_available:
            self._preempt(self._victim(queues.prefilling[queues.prefilling.index(sequence) :]))
        return sequence.status is Status.RUNNING

    def make_room_for_urgent(self, budget: int) -> None:
        """Preempt until the first waiting row, if it is urgent, may start with `budget` tokens of its prompt. Only rows
        that are less urgent have to go."""
        queues = self._queues
        if not (self._policy.urgent_first and queues.waiting and queues.waiting[0].request.is_urgent):
            return
        sequence = queues.waiting[0]
        while not self._admission.fits(sequence, budget):
            victim = self._victim(queues.running)
            if victim.urgency <= sequence.urgency:
                break
            self._preempt(victim)

    def end_step(self) -> None:
        """Where a row needs no more than a chunk's blocks, those that just left may start again in the next step."""
        if self._has_preempted and self._policy.admission is Admission.CHUNK:
            self._queues.memory_is_tight = False
        self._has_preempted = False

    def _victim(self, running: list[Sequence]) -> Sequence:
        """Which of them to give up, of the least urgent: the cheapest to bring back, or the last that came."""
        least = max(sequence.urgency for sequence in running)
        among = [sequence for sequence in running if sequence.urgency == least]
        if self._policy.evicts_least_computed:
            return min(reversed(among), key=lambda sequence: sequence.num_computed_tokens)
        return among[-1]

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's device blocks, keeping its KV on the host if that is worth it and there is room."""
        queues, counters = self._queues, self._queues.counters
        queues.memory_is_tight = self._has_preempted = True
        if queues.may_park(sequence, sequence.num_computed_tokens):
            queues.park(sequence)
            counters.preemptions_swap += 1
        else:
            counters.preemptions_recompute += 1
            counters.recomputed_tokens += sequence.num_computed_tokens
            queues.drop(sequence)

    def park_ahead(self) -> None:
        """Park the row that went ahead when its prompt is computed. It stays if by now it could start."""
        queues, sequence = self._queues, self._admission.ahead
        if sequence is None or sequence in queues.prefilling:
            return
        self._admission.ahead = None
        stays = queues.num_running == 1 or not (queues.parked or queues.memory_is_tight)
        is_running = sequence.status is Status.RUNNING
        if is_running and not stays and queues.may_park(sequence, sequence.num_computed_tokens):
            queues.park(sequence)
            queues.counters.prefilled_ahead += 1

    def bring_back(self) -> bool:
        """Let parked sequences return while memory would let them start. Returns whether any came."""
        queues, came = self._queues, False
        while queues.parked and not (queues.memory_is_tight and queues.num_running):
            if not self._admission.fits(queues.parked[0]):
                queues.memory_is_tight = True  # until something ends
                break
            queues.unpark()
            came = True
        return came
