"""The process of a replica: a model on its own device, and the engine's loop over rows that the driver hands out."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vasuki.base.errors import Interrupted, ModelError, VasukiError
from vasuki.base.logs import log, set_up_logs
from vasuki.engine.loop import Observer, RunStats, drain
from vasuki.engine.scheduler import Scheduler
from vasuki.io.output.manifest import Bounds, Timings
from vasuki.machines.cost_model import CostModel
from vasuki.machines.stolen_time import StolenTime
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.layout import Layout
from vasuki.planner import RunningPrediction
from vasuki.planner.rows_done import RowsDone
from vasuki.runs.foresight import MachineProfile, look_back, tokens_of
from vasuki.runs.manifests import run_manifest
from vasuki.runs.observers.tracer import StepTracer
from vasuki.runs.observers.watchdog import Watchdog
from vasuki.runs.placement import placed_as_loaded, stays_on_host
from vasuki.runs.run import plan_for
from vasuki.runs.workers.messages import (
    Begin,
    Failed,
    Foresee,
    Foreseen,
    Over,
    Ready,
    Setup,
    ToDriver,
    ToReplica,
)
from vasuki.runs.workers.rows_on_loan import Driver, RowsOnLoan

if TYPE_CHECKING:
    from vasuki.hf.loading.load_model import LoadedModel


def main() -> None:
    """Run rows until the driver says that none are left. Ends with the driver, however that one ends."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal sends them to all; the driver says what happens then
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

    def __init__(self, driver: Driver, setup: Setup) -> None:
        self.driver = driver
        self.setup = setup
        self.config = setup.config
        self.started_s = time.perf_counter()
        self.stolen = StolenTime()
        self.load_s = 0.0
        self.machine: MachineProfile | None = None  # that this replica has planned for

    def run(self) -> None:
        """Load, plan if asked to, and run rows.

        Raises:
            VasukiError: as a run on one device does.
        """
        loaded = self._load()
        self.driver.send(Ready(loaded.device_name, loaded.max_context, loaded.vocab_size))
        message = self.driver.wait()
        if isinstance(message, Foresee):
            self.driver.send(self._foresee(loaded, message))
            message = self.driver.wait()
        if isinstance(message, Begin):
            self._generate(loaded, message.foreseen)

    def _load(self) -> LoadedModel:
        from vasuki.hf.loading.load_model import load_model

        config = self.config
        loaded = load_model(
            config.model,
            config.engine.device,
            partial(stays_on_host, config),
            config.engine.compile != "off",
            config.kv.dtype,
            config.engine.attention,
        )
        if model_fingerprint(config.model) != self.setup.model_fingerprint:
            raise ModelError(f"model {config.model.path} changed while it was loaded; run again when it is whole")
        self.load_s = time.perf_counter() - self.started_s - loaded.compile_s
        return loaded

    def _foresee(self, loaded: LoadedModel, asked: Foresee) -> Foreseen:
        placement = placed_as_loaded(self.config, loaded, tokens_of(asked.lengths))
        self.machine = placement.machine
        planned = partial(placement.plan, layout=Layout(data_parallel=self.setup.replicas))
        return Foreseen(plan_for(asked.lengths, planned), placement.shape, placement.profile)

    def _generate(self, loaded: LoadedModel, foreseen: Foreseen) -> None:
        from vasuki.hf.device.energy import EnergyMeter
        from vasuki.hf.loading.weights import place_weights
        from vasuki.hf.ragged_executor import build_executor

        plan = foreseen.plan
        cost_model = CostModel(foreseen.shape, foreseen.profile, plan.layout)
        done = RowsDone(foreseen.shape)
        loaded = place_weights(loaded, plan.layout.host_layers)
        energy, stats = EnergyMeter(loaded.device), RunStats()
        executor = build_executor(loaded, plan.settings, self.config.output.logprobs, cost_model=cost_model)
        plan = replace(plan, settings=executor.settings)
        prediction, scheduler = RunningPrediction(plan, cost_model), Scheduler(plan.settings)
        rows = RowsOnLoan(self.driver, scheduler, loaded.tokenizer.decode)
        num_layers = loaded.kv_layout.num_layers
        tracer = StepTracer(rows.steps.append, plan.settings, loaded.token_bytes, num_layers, prediction)
        watchdog = Watchdog(prediction.step_s)
        observers: list[Observer] = [prediction, tracer, watchdog, done]
        generate_started_s = time.perf_counter()
        gc.freeze()
        try:
            drain(rows, scheduler, executor, rows, observers, rows.should_stop, stats)
        except Interrupted:
            if not rows.is_stopped:
                raise
        finally:
            watchdog.close()
        rows.last_words()
        done.count(scheduler.unfinished())
        if self.machine is not None:
            look_back(self.machine, prediction.pace, self.stolen.share)
        now_s = time.perf_counter()
        manifest = run_manifest(
            self.config,
            self.setup.config_hash,
            self.setup.input_fingerprint,
            plan,
            loaded,
            stats,
            scheduler.queues.counters,
            Timings(
                load_s=self.load_s,
                plan_s=plan.plan_s,
                compile_s=loaded.compile_s,
                generate_s=now_s - generate_started_s,
                makespan_s=now_s - self.started_s,
            ),
            bounds=Bounds(),  # are for all replicas together
            num_tokens=rows.num_tokens,
            energy_j=energy.energy_j,
            stolen_share=self.stolen.share,
        )
        self.driver.send(Over(manifest, done.sums, prediction.whole_pace))


if __name__ == "__main__":
    main()
