"""Replicas as actors of a Ray cluster: the twin of `vasuki.runs.workers.processes`.

Ray places, watches and kills them, carries what is said, and knows which nodes are there. An actor belongs to a node
for life: one whose node has gone moves to room that others leave, or waits for a node that comes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vasuki.base.errors import Interrupted, one_line
from vasuki.base.units import duration, plural
from vasuki.runs.workers.messages import Failed, Ready, Setup, SetupOf, ToDriver, ToReplica
from vasuki.runs.workers.ray.actor import ReplicaThread, Said
from vasuki.runs.workers.ray.nodes import Nodes, Slot

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # at who is there
PATIENCE_S = 10.0  # with replicas that wait until others leave a node

F = TypeVar("F", bound=Callable[..., Any])


def _aside(group: str) -> Callable[[F], F]:
    """Let a method run at the same time as methods of other groups."""
    decorate: Callable[[F], F] = ray.method(concurrency_group=group)
    return decorate


class ReplicaActor(ReplicaThread):
    """Says itself which of its methods run side by side, since over `ray://` a call cannot."""

    @_aside("tell")
    def tell(self, message: ToReplica) -> None:
        super().tell(message)

    @_aside("hear")
    def hear(self) -> list[Said]:
        return super().hear()


_Actor = ray.remote(concurrency_groups={"tell": 1, "hear": 1})(ReplicaActor)


class Actors:
    """An actor for each slot, up to as many as the job wants. They end with this process, or with the `with` statement.

    Args:
        nodes: of the cluster.
        setup_of: what a replica is started with.
    """

    def __init__(self, nodes: Nodes, setup_of: SetupOf) -> None:
        self._nodes = nodes
        self._setup_of = setup_of
        self._slots: dict[int, Slot] = {}
        self._lost: set[int] = set()  # replicas without a slot
        self._spare: list[Slot] = []
        self._actors: dict[int, Any] = {}
        self._hearing: dict[Any, int] = {}
        self._on_trial: set[int] = set()  # that joined, and are not ready yet
        self._unplaced_s: dict[int, float] = {}  # replicas that have said nothing yet, and since when
        self._patience_s = PATIENCE_S
        self._looked_s = time.perf_counter()
        self._devices = 0
        self._is_out_of_reach = False  # the whole cluster, for good
        for slot in nodes.slots:
            self._settle(slot)

    @property
    def devices(self) -> int:
        """GPUs, or machines without: the most that were there at once."""
        return self._devices

    def start(self, index: int) -> bool:
        """Start a replica again: on its node, or in spare room; False if there is neither. Raises Interrupted if the
        cluster is gone."""
        with self._reaching():
            return self._start(index)

    def _start(self, index: int) -> bool:
        there = self._forget_spare()
        if self._slots[index].node not in there:
            if not self._spare:
                self._free(index)
                return False
            self._slots[index] = self._spare.pop(0)
        self._begin(index)
        return True

    def send(self, index: int, message: ToReplica) -> None:
        """Tell a replica something. One that has died is heard of by `receive`."""
        if not self._is_out_of_reach:
            with self._reaching():
                self._actors[index].tell.remote(message)

    def kill(self, index: int) -> None:
        """End a replica at once, which `receive` then tells of."""
        if not self._is_out_of_reach:
            with self._reaching():
                ray.kill(self._actors[index])

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        """What replicas say, after `timeout_s` at the latest; None from one that has ended. Raises Interrupted once if
        the cluster is gone, and all replicas have ended with it."""
        if self._is_out_of_reach:
            return [(index, None) for index in self._actors]
        with self._reaching():
            return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        now_s = time.perf_counter()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._nodes.ask()
            self._look_for_room(now_s)
        waiting = [*self._hearing, *self._nodes.asking]
        if not waiting:
            time.sleep(timeout_s)
            return []
        ray.wait(waiting, timeout=timeout_s)
        heard: list[tuple[int, ToDriver | None]] = []
        for answer in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
            if answer in self._hearing:
                index = self._hearing.pop(answer)
                heard += self._heard(index, answer)
            else:
                self._welcome(answer)
        return heard

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Interrupted):
            for index in self._actors:
                self.kill(index)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises Interrupted if the cluster turns out to be gone."""
        try:
            yield
        except (ConnectionError, Interrupted) as error:
            self._is_out_of_reach = True
            raise Interrupted(f"the Ray cluster is gone: {one_line(error).removesuffix('.')}") from None

    def _heard(self, index: int, answer: Any) -> list[tuple[int, ToDriver | None]]:
        said: list[Said]
        self._unplaced_s.pop(index, None)
        try:
            said = ray.get(answer)
        except RayError as error:  # it has died, or is out of reach; what it says from now on is lost
            log.warning("replica %d: %s", index, _reason(error))
            said = [None]
        heard: list[tuple[int, ToDriver | None]] = []
        for message in said:
            if isinstance(message, logging.LogRecord):
                log.handle(message)
            elif isinstance(message, Failed) and index in self._on_trial:
                log.warning("a node that joined cannot take part: %s", message.error)
                self.kill(index)
                self._free(index)
                return []
            else:
                if isinstance(message, Ready):
                    self._on_trial.discard(index)
                heard.append((index, message))
        if said and said[-1] is None:
            self.kill(index)
        else:
            self._listen(index)
        return heard

    def _look_for_room(self, now_s: float) -> None:
        """Say what replicas wait for that have not started, ever less often, and move them to room that is spare."""
        waiting = [index for index, since_s in self._unplaced_s.items() if now_s - since_s >= self._patience_s]
        if not waiting:
            self._patience_s = self._patience_s if self._unplaced_s else PATIENCE_S
            return
        free, there = self._nodes.free()
        log.warning(
            "%d of %s not started after %s: each needs %s, and of %d in the Ray cluster %d are free",
            len(waiting),
            "1 replica has" if len(self._slots) == 1 else f"{len(self._slots)} replicas have",
            duration(self._patience_s),
            plural(max(self._slots[index].cpus for index in waiting) or 1, "GPU" if self._nodes.on_gpus else "CPU"),
            there,
            free,
        )
        self._patience_s *= 2
        self._forget_spare()
        for index in waiting[: len(self._spare)]:
            self._hearing = {answer: other for answer, other in self._hearing.items() if other != index}
            self.kill(index)
            self._spare.append(self._slots[index])
            self._slots[index] = self._spare.pop(0)
            self._begin(index)

    def _welcome(self, answer: Any) -> None:
        """Give replicas to a node that has joined, as long as more are wanted."""
        slots, refused = self._nodes.answered(answer)
        if refused:
            log.warning("%s; it takes no part", refused)
        for slot in slots:
            if (index := self._settle(slot)) is not None:
                self._on_trial.add(index)
                log.warning("node %s has joined and gets replica %d", slot.host, index)

    def _settle(self, slot: Slot) -> int | None:
        """Start a replica in a slot, unless there are enough: then others move there when they lose theirs."""
        if len(self._slots) >= (float("inf") if self._nodes.most == "auto" else self._nodes.most):
            self._spare.append(slot)
            return None
        index = min(self._lost, default=len(self._slots))
        self._lost.discard(index)
        self._slots[index] = slot
        self._begin(index)
        held = self._slots.values()
        self._devices = max(self._devices, len(held) if self._nodes.on_gpus else len({slot.node for slot in held}))
        return index

    def _forget_spare(self) -> set[str]:
        """Forget spare room of nodes that are gone. Returns those that are there."""
        there = self._nodes.alive()
        self._spare = [slot for slot in self._spare if slot.node in there]
        return there

    def _free(self, index: int) -> None:
        del self._slots[index], self._actors[index]
        self._unplaced_s.pop(index, None)
        self._on_trial.discard(index)
        self._lost.add(index)

    def _begin(self, index: int) -> None:
        slot = self._slots[index]
        setup = _on_any_node(self._setup_of(slot.share, index, slot.here))
        actor = _Actor.options(
            num_gpus=1 if slot.share.gpu else 0,
            num_cpus=slot.cpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
        )
        self._actors[index] = actor.remote(setup, slot.host)
        self._unplaced_s[index] = time.perf_counter()
        self._listen(index)

    def _listen(self, index: int) -> None:
        self._hearing[self._actors[index].hear.remote()] = index


def _reason(error: RayError) -> str:
    """The reason in one of Ray's long messages, without its header, calls and guesses at causes."""
    told = [line for line in str(error).splitlines()[1:] if not line.startswith((" ", "\t"))]
    lines = [line for line in told if "Traceback (most recent" not in line]
    return " ".join(lines or [one_line(error)]).removeprefix("The actor is dead because ").partition(" Some common")[0]


def _on_any_node(setup: Setup) -> Setup:
    """The setup with the model's path as nodes find it, and the device that Ray gives."""
    config = setup.job.config
    model, engine = config.model, config.engine
    if (folder := Path(model.path).expanduser()).is_dir():
        model = model.model_copy(update={"path": os.path.abspath(folder)})
    engine = engine.model_copy(update={"device": "cuda" if setup.share.gpu else "cpu"})
    config = config.model_copy(update={"model": model, "engine": engine})
    return replace(setup, job=replace(setup.job, config=config))
