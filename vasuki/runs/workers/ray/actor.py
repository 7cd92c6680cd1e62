"""What an actor holds: a replica in a thread of its own, so that it can be spoken with while it computes."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from functools import partial
from logging.handlers import QueueHandler

from vasuki.base.errors import ModelError, VasukiError
from vasuki.base.logs import log
from vasuki.models.fingerprint import model_fingerprint
from vasuki.runs.workers.messages import Failed, Setup, ToDriver, ToReplica
from vasuki.runs.workers.replica import Replica, signed

Said = ToDriver | logging.LogRecord | None  # None: the last word


class ReplicaThread:
    """A replica, and letter boxes for both directions; to the replica it is the driver."""

    def __init__(self, setup: Setup, host: str) -> None:
        self._told: queue.SimpleQueue[ToReplica] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._is_placed = False
        os.environ.pop("OMP_NUM_THREADS", None)  # of Ray: 1 with a GPU
        if not setup.share.gpu:  # which GPU it is has been said by Ray
            os.environ.update(setup.share.environment)
        threading.Thread(target=self._run, args=(setup, host), daemon=True).start()

    def tell(self, message: ToReplica) -> None:
        """Tell the replica something."""
        self._told.put(message)

    def hear(self) -> list[Said]:
        """What the replica and its log have said since, once there is something. The first call returns an empty list
        at once, which says that the actor is placed."""
        if not self._is_placed:
            self._is_placed = True
            return []
        said = [self._said.get()]
        while not self._said.empty():
            said.append(self._said.get())
        return said

    def send(self, message: ToDriver) -> None:
        self._said.put(message)

    def wait(self) -> ToReplica:
        return self._told.get()

    def said(self) -> Iterator[ToReplica]:
        while not self._told.empty():
            yield self._told.get()

    def _run(self, setup: Setup, host: str) -> None:
        handler = QueueHandler(self._said)
        handler.addFilter(partial(signed, setup.index))
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.WARNING)
        try:
            setup.share.enter()
            job = setup.job
            if model_fingerprint(job.config.model) != job.model_fingerprint:
                raise ModelError(f"model {job.config.model.path} differs from the driver's")
            Replica(self, setup).run()
        except VasukiError as error:
            self.send(Failed(type(error)(f"{error} (on node {host})")))
        except BaseException:
            log.exception("a bug of vasuki (on node %s)", host)
        self._said.put(None)
