"""File locks that decide who may write to an output folder. The kernel releases them however the process ends.

    whole run     .vasuki.lock exclusive
    shard I/N     .vasuki.lock shared, .vasuki-I-of-N.lock exclusive, and no lock of another count held

Object stores have no locks, but a lease for each run or shard (`lease`).

The files stay behind: to delete a lock file is to race with a process that is about to lock it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from vasuki.base.errors import OutputLocked
from vasuki.io.location import Location, open_own
from vasuki.io.output.lease import Lease
from vasuki.io.selection import Shard

_WHOLE = ".vasuki.lock"
_SUMMARY = ".vasuki-summary.lock"
_SHARD = re.compile(r"\.vasuki-\d+-of-(\d+)\.lock")


class FolderLock:
    """The locks that a run holds; on an object store, its lease.

    Attributes:
        owner: tells this run from others where nothing but its lease keeps them apart; empty where locks do.
    """

    def __init__(self, files: list[IO[str]], lease: Lease | None = None) -> None:
        self._files = files
        self._lease = lease
        self.owner = lease.owner[:8] if lease else ""

    @classmethod
    def take(cls, place: Location, shard: Shard) -> FolderLock:
        """Lock a folder or refuse at once.

        Raises:
            OutputLocked: another run holds it.
            OSError: the folder cannot be written, or its file system has no locks.
        """
        if not place.is_local:
            return cls([], Lease.take(place, shard.label))
        lock = cls([])
        try:
            if shard.is_whole:
                lock._hold(place, _WHOLE, fcntl.LOCK_EX)
            else:
                lock._hold(place, _WHOLE, fcntl.LOCK_SH)
                lock._hold(place, f".vasuki{shard.label}.lock", fcntl.LOCK_EX)
                # Own lock first, then a look at the others: of two that start at once, at least one sees the other.
                lock._refuse_other_counts(place, shard)
        except BaseException:
            lock.release()
            raise
        return lock

    @staticmethod
    def refuse_held(place: Location) -> None:
        """Raise what `take` would for a whole run, and leave no lock file behind."""
        if not place.is_local:
            return
        file = place / _WHOLE
        if file.exists():
            with open_own(file.path, "a+") as held:
                _lock(held, fcntl.LOCK_EX, place)
        elif place.exists():
            with tempfile.TemporaryFile("a+", dir=place.path) as held:
                _flock(held, fcntl.LOCK_EX)

    def refuse_lost(self) -> None:
        """Raises OutputLocked if another run has taken the lease."""
        if self._lease:
            self._lease.refuse_lost()

    def release(self) -> None:
        if self._lease:
            self._lease.close()
        for file in self._files:
            file.close()
        self._files.clear()

    @contextlib.contextmanager
    def alone(self, place: Location) -> Iterator[None]:
        """Wait until no other shard is summing up the folder."""
        if not place.is_local:
            yield
            return
        with open_own((place / _SUMMARY).path, "a") as file:
            _flock(file, fcntl.LOCK_EX)
            yield

    def _hold(self, place: Location, name: str, kind: int) -> None:
        file = open_own((place / name).path, "a+")
        self._files.append(file)
        _lock(file, kind, place)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()

    def _refuse_other_counts(self, place: Location, shard: Shard) -> None:
        for child in place.children():
            match = _SHARD.fullmatch(child.name)
            if match and int(match[1]) != shard.count:
                with open_own(child.path, "a+") as file:
                    try:
                        _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise OutputLocked(
                            f"{place} is in use by a run of {match[1]} shards, not {shard.count}"
                        ) from None


def _lock(file: IO[str], kind: int, place: Location) -> None:
    """Lock a file or raise OutputLocked at once."""
    try:
        _flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputLocked(
            f"{place} is in use by {_holder(file)}; wait for it, or choose another output.path"
        ) from None


def _flock(file: IO[Any], kind: int) -> None:
    """Raises BlockingIOError if another process holds it, OSError where the file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        raise
    except OSError as error:
        what = "its file system has no locks, which keep two runs apart: mount it with them, or write to another one"
        raise OSError(error.errno, f"{what} ({error.strerror})") from None


def _holder(file: IO[str]) -> str:
    """Say who holds a lock, as its file has it."""
    try:
        file.seek(0)
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another run"
