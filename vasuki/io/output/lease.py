"""Who may write to an output in an object store, which has no locks: a lease that its holder renews.

    .vasuki-lease.json    {"owner": ..., "beat": ..., "pid": ..., "host": ...}

pyarrow has no put on condition (S3's If-None-Match). So a lease is written, and read back when another run that wrote
at the same time has written too: the last one holds it. A lease that is found is watched: one that changes has a living
holder, and one that does not for `LAPSE_S` seconds had one that was killed. No clocks are compared.

That keeps two runs apart unless a put takes longer than `SETTLE_S`. Then the one that lost finds out when it renews its
lease, and ends. So names of parts differ from run to run, and rows that both have answered are settled afterwards
(`doubles`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from vasuki.base.errors import OutputLocked
from vasuki.io.location import Location

RENEW_S = 10.0
LAPSE_S = 35.0  # three renewals may fail
SETTLE_S = 2.0

log = logging.getLogger(__name__)


class Lease:
    """A lease that is held, and renewed in a thread of its own until it is closed."""

    def __init__(self, file: Location, place: Location) -> None:
        self.owner = uuid.uuid4().hex
        self._file = file
        self._place = place
        self._beat = 0
        self._taken_by = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @classmethod
    def take(cls, place: Location, label: str) -> Lease:
        """Take the lease of a folder, or of one of its shards.

        Raises:
            OutputLocked: another run holds it.
            OSError: the store cannot be written to.
        """
        file = place / f".vasuki-lease{label}.json"
        if found := _read(file):
            log.info("%s has a lease of %s; waiting %g s to see if it is renewed", place, _holder(found), LAPSE_S)
            looked_s = time.monotonic()
            while time.monotonic() - looked_s < LAPSE_S:
                time.sleep(min(1.0, RENEW_S / 2))
                now = _read(file)
                if now is None:  # it has ended
                    break
                if now != found:
                    raise _refusal(place, now)
        lease = cls(file, place)
        lease._write()
        time.sleep(SETTLE_S)
        now = _read(file)
        if now is None or now["owner"] != lease.owner:
            raise _refusal(place, now or {})
        lease._thread.start()
        return lease

    def refuse_lost(self) -> None:
        """Raises OutputLocked if another run has taken the lease."""
        if self._taken_by:
            raise OutputLocked(f"{self._place} was taken over by {self._taken_by}; this run ends")

    def close(self) -> None:
        """Let go of it."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):  # then it lapses
            if not self._taken_by:
                self._file.delete()

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the store may be back next time
                found = _read(self._file)
                if found and found["owner"] != self.owner:
                    self._taken_by = _holder(found)
                    return
                self._write()

    def _write(self) -> None:
        self._beat += 1
        holder = {"owner": self.owner, "beat": self._beat, "pid": os.getpid(), "host": socket.gethostname()}
        self._file.write_bytes(json.dumps(holder).encode())


def _read(file: Location) -> dict[str, Any] | None:
    """The holder of a lease; None if there is none. A lease that cannot be understood has a holder without a name."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    return found if isinstance(found, dict) and "owner" in found else {"owner": ""}


def _holder(found: dict[str, Any]) -> str:
    return f"process {found['pid']} on {found['host']}" if {"pid", "host"} <= found.keys() else "another run"


def _refusal(place: Location, found: dict[str, Any]) -> OutputLocked:
    return OutputLocked(f"{place} is in use by {_holder(found)}; wait for it, or choose another output.path")
