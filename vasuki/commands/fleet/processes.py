"""Replicas as processes of this machine, at the other ends of pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import cast

from vasuki.commands.fleet.messages import Setup, ToDriver, ToReplica
from vasuki.commands.logs import run_id


class Processes:
    """A process for each setup. They end with this one, or at the end of a `with` statement."""

    def __init__(self, setups: Sequence[Setup]) -> None:
        self._setups = setups
        self._running: dict[int, tuple[subprocess.Popen[bytes], Connection]] = {}
        for index in range(len(setups)):
            self.start(index)

    def start(self, index: int) -> None:
        """Start a replica, at first or again."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", "vasuki.commands.fleet.replica", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=os.environ | self._setups[index].share.environment | {"VASUKI_RUN_ID": run_id()},
            )
        self._running[index] = process, ours
        self.send(index, self._setups[index])

    def send(self, index: int, message: ToReplica | Setup) -> None:
        """Tell a replica something. One that has died is heard of by `receive`."""
        with contextlib.suppress(OSError, KeyError):
            self._running[index][1].send(message)

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        """What replicas say, after `timeout_s` at the latest; None from one that has ended."""
        index_of = {connection: index for index, (_, connection) in self._running.items()}
        said: list[tuple[int, ToDriver | None]] = []
        for connection in cast("list[Connection]", wait(list(index_of), timeout_s)):
            index = index_of[connection]
            try:
                said.append((index, connection.recv()))
            except (EOFError, OSError):
                self._end(index)
                said.append((index, None))
        return said

    def _end(self, index: int) -> None:
        process, connection = self._running.pop(index)
        connection.close()
        process.kill()
        process.wait()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for index in list(self._running):
            self._end(index)
