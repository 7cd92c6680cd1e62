"""The process of a replica: a model on its own device, and the engine's loop over rows that the driver hands out."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

from vasuki.base.errors import Interrupted, VasukiError
from vasuki.base.logs import log, set_up_logs
from vasuki.base.streams import take_streams
from vasuki.io.output.manifest import Bounds
from vasuki.models.layout import Layout
from vasuki.planner.lengths import Lengths
from vasuki.runs.placement import plan_for
from vasuki.runs.workers.device import Device, load
from vasuki.runs.workers.messages import (
    Begin,
    Failed,
    Over,
    PlanFor,
    Planned,
    Ready,
    Setup,
    ToDriver,
    ToReplica,
)
from vasuki.runs.workers.rows_on_loan import DriverLink, RowsOnLoan
from vasuki.runs.workload import tokens_of


def main() -> None:
    """Run rows until the driver says that none are left. Ends with the driver, however that one ends."""
    take_streams()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # all get them; the driver says what happens then
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    setup: Setup = connection.recv()
    setup.share.enter()
    set_up_logs(quiet=True, log_format="json" if setup.json_logs else "text")
    log.handlers[0].addFilter(partial(signed, setup.index))
    driver = _PipeToDriver(connection)
    try:
        Replica(driver, setup).run()
    except VasukiError as error:
        driver.send(Failed(error))


def signed(index: int, record: logging.LogRecord) -> bool:
    """Let a line say which replica it comes from."""
    record.msg = f"replica {index}: {record.msg}"
    return True


class _PipeToDriver:
    """The driver at the other end of a pipe.

    What it says is read by a thread of its own, so that neither side ever waits with a full pipe for the other to read,
    and so that the process ends with the driver even in the midst of a step.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._said: queue.SimpleQueue[ToReplica] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def send(self, message: ToDriver) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(Interrupted.exit_code)

    def wait(self) -> ToReplica:
        return self._said.get()

    def said(self) -> Iterator[ToReplica]:
        while not self._said.empty():
            yield self._said.get()

    def _listen(self) -> None:
        while True:
            try:
                self._said.put(self._connection.recv())
            except (EOFError, OSError):
                os._exit(Interrupted.exit_code)


class Replica:
    """A replica's life, wherever it runs."""

    def __init__(self, driver: DriverLink, setup: Setup) -> None:
        self.driver = driver
        self.setup = setup
        self.started_s = time.perf_counter()

    def run(self) -> None:
        """Load, plan if asked to, and run rows.

        Raises:
            VasukiError: as a run on one device does.
        """
        job = self.setup.job
        loaded, load_s = load(job)
        device = Device(job, loaded, load_s, self.started_s)
        self.driver.send(Ready(loaded.device_name, loaded.max_context, loaded.vocab_size, loaded.computed_on))
        message = self.driver.wait()
        if isinstance(message, PlanFor):
            self.driver.send(self._planned_for(device, message.lengths))
            message = self.driver.wait()
        if isinstance(message, Begin):
            device.begin(message.planned)
            self._generate(device)

    def _planned_for(self, device: Device, lengths: Lengths) -> Planned:
        placement = device.place(tokens_of(lengths))
        planned = partial(placement.plan, layout=Layout(data_parallel=self.setup.replicas))
        return Planned(plan_for(lengths, planned), placement.shape, placement.profile)

    def _generate(self, device: Device) -> None:
        rows = RowsOnLoan(self.driver, device.scheduler, device.loaded.tokenizer.decode)
        try:
            device.compute(rows, rows, rows.steps.append, rows.should_stop)
        except Interrupted:
            if not rows.is_stopped:
                raise
        rows.last_words()
        device.end()
        manifest = device.manifest(Bounds(), rows.num_tokens)  # bounds are for all replicas together
        self.driver.send(Over(manifest, device.done.sums, device.time_left.whole_pace))


if __name__ == "__main__":
    main()
