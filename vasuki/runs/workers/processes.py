"""Replicas as processes of this machine, at the other ends of pipes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import subprocess
import sys
import threading

from vasuki.base.logs import run_id
from vasuki.machines.here.split import Share
from vasuki.runs.workers.messages import Setup, SetupOf, ToDriver, ToReplica


class Processes:
    """A process for each share of this machine. They end with this one, or at the end of a `with` statement.

    Each pipe has a thread for either direction: a replica that hangs, perhaps in the middle of a message, blocks only
    its own threads.
    """

    def __init__(self, setup_of: SetupOf, shares: list[Share]) -> None:
        self._setups = [setup_of(share, index, len(shares)) for index, share in enumerate(shares)]
        self._running: dict[int, _Process] = {}
        self._said: queue.SimpleQueue[tuple[int, ToDriver | None]] = queue.SimpleQueue()
        for index in range(len(shares)):
            self.start(index)

    @property
    def devices(self) -> int:
        """GPUs, or one CPU, which is paid for as a whole."""
        return len(self._setups) if self._setups[0].share.gpu else 1

    def start(self, index: int) -> bool:
        """Start a replica, at first, or again when it has been heard to end."""
        self._running[index] = _Process(index, self._setups[index], self._said)
        return True

    def send(self, index: int, message: ToReplica) -> None:
        """Tell a replica something. One that has died is heard of by `receive`."""
        self._running[index].to_say.put(message)

    def kill(self, index: int) -> None:
        """End a replica at once, which `receive` then tells of."""
        self._running[index].process.kill()

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        """What replicas say, after `timeout_s` at the latest; None from one that has ended."""
        try:
            said = [self._said.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._said.empty():
            said.append(self._said.get())
        return said

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._running.values():
            replica.process.kill()
        for replica in self._running.values():
            replica.process.wait()


class _Process:
    """A replica, and the threads that speak with it."""

    def __init__(self, index: int, setup: Setup, said: queue.SimpleQueue[tuple[int, ToDriver | None]]) -> None:
        self.to_say: queue.SimpleQueue[Setup | ToReplica | None] = queue.SimpleQueue()
        self.to_say.put(setup)
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vasuki.runs.workers.replica", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=os.environ | setup.share.environment | {"VASUKI_RUN_ID": run_id()},
            )
        threading.Thread(target=self._listen, args=(index, said), daemon=True).start()
        threading.Thread(target=self._talk, daemon=True).start()

    def _listen(self, index: int, said: queue.SimpleQueue[tuple[int, ToDriver | None]]) -> None:
        try:
            while True:
                said.put((index, self._connection.recv()))
        except (EOFError, OSError):
            self.process.kill()
            self.process.wait()
            self.to_say.put(None)
            said.put((index, None))

    def _talk(self) -> None:
        while (message := self.to_say.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return
