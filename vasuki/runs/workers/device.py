"""A model on a device of this process: how it is loaded, and how rows are computed with it. A run here and a replica
do so by the same steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vasuki.base.config import JobConfig
from vasuki.base.errors import ModelError
from vasuki.engine.loop import Observer, RunStats, Sink, drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.io.output.manifest import Bounds, Manifest, Timings
from vasuki.io.output.trace import StepRecord
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile import HardwareProfile
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.shape import ModelShape
from vasuki.planner import RunningPrediction
from vasuki.planner.plan import Plan
from vasuki.planner.rows_done import RowsDone
from vasuki.runs.foresight import MachineProfile, look_back
from vasuki.runs.manifests import run_manifest
from vasuki.runs.observers.tracer import StepTracer
from vasuki.runs.observers.watchdog import Watchdog
from vasuki.runs.placement import stays_on_host

if TYPE_CHECKING:
    from vasuki.hf.loading.load_model import LoadedModel


def load(config: JobConfig, fingerprint: str) -> tuple[LoadedModel, float]:
    """The model of a job, and the seconds that it took to load, without compiling.

    Raises ModelError, also if the model has another fingerprint by now.
    """
    started_s = time.perf_counter()
    from vasuki.hf.loading.load_model import load_model  # torch and transformers take seconds to import

    loaded = load_model(
        config.model,
        config.engine.device,
        partial(stays_on_host, config),
        config.engine.compile != "off",
        config.kv.dtype,
        config.engine.attention,
    )
    if model_fingerprint(config.model) != fingerprint:
        raise ModelError(f"model {config.model.path} changed while it was loaded; run again when it is whole")
    return loaded, time.perf_counter() - started_s - loaded.compile_s


class Computation:
    """The rows of a run, or a replica's part of them, computed with a loaded model.

    Args:
        config: the job.
        loaded: its model.
        plan: by which it runs.
        shape: of the model,
        profile: and of the machine, with which the plan was made.
        predicting: makes what foresees the end.

    Attributes:
        plan: with the settings that the executor has come to.
        loaded: the model, its weights where they live while it runs.
        prediction: of the time left.
        scheduler: of the rows.
        done: what the rows were.
        stats: of the steps.
        ended_s: when the last step was over; set by `compute`.
    """

    def __init__(
        self,
        config: JobConfig,
        loaded: LoadedModel,
        plan: Plan,
        shape: ModelShape,
        profile: HardwareProfile,
        predicting: Callable[[Plan, CostModel], RunningPrediction] = RunningPrediction,
    ) -> None:
        from vasuki.hf.loading.weights import place_weights
        from vasuki.hf.ragged_executor import build_executor

        cost_model = CostModel(shape, profile, plan.layout)
        self._config = config
        self.done = RowsDone(shape)
        self.stats = RunStats()
        self.loaded = place_weights(loaded, plan.layout.host_layers)
        self._started_s = self.ended_s = time.perf_counter()
        self._executor = build_executor(self.loaded, plan.settings, config.output.logprobs, cost_model=cost_model)
        self.plan = replace(plan, settings=self._executor.settings)
        self.prediction = predicting(self.plan, cost_model)
        self.scheduler = Scheduler(self.plan.settings)

    @property
    def taken_s(self) -> float:
        """What generating has taken."""
        return self.ended_s - self._started_s

    def compute(
        self,
        requests: Iterable[Request],
        sink: Sink,
        note: Callable[[StepRecord], None],
        should_stop: Callable[[], bool],
        observers: Iterable[Observer] = (),
    ) -> None:
        """Run requests to their ends; see `drain`, whose errors it raises.

        Args:
            requests: in the order in which they start.
            sink: takes the rows that end.
            note: takes each step, for the trace.
            should_stop: asked between two steps.
            observers: who else sees each step.
        """
        num_layers = self.loaded.kv_layout.num_layers
        tracer = StepTracer(note, self.plan.settings, self.loaded.token_bytes, num_layers, self.prediction)
        watchdog = Watchdog(self.prediction.step_s)
        watching: list[Observer] = [self.prediction, tracer, watchdog, self.done, *observers]
        gc.freeze()  # the collector need not walk through what was loaded, half a second in the midst of a job
        try:
            drain(requests, self.scheduler, self._executor, sink, watching, should_stop, self.stats)
        finally:
            gc.unfreeze()
            watchdog.close()

    def end(self, machine: MachineProfile | None, stolen_share: float) -> None:
        """Count the rows that are under way as far as they came, and doubt a profile that the steps contradict.

        Args:
            machine: what was planned with, where that was here.
            stolen_share: see `look_back`.
        """
        self.ended_s = time.perf_counter()
        self.done.count(self.scheduler.unfinished())
        if machine is not None:
            look_back(machine, self.prediction.pace, stolen_share)

    def manifest(
        self,
        config_hash: str,
        input_fingerprint: str,
        started_s: float,
        load_s: float,
        bounds: Bounds,
        num_tokens: int,
        energy_j: float | None,
        stolen_share: float,
    ) -> Manifest:
        """What was done, see `run_manifest`."""
        return run_manifest(
            self._config,
            config_hash,
            input_fingerprint,
            self.plan,
            self.loaded,
            self.stats,
            self.scheduler.queues.counters,
            Timings(
                load_s=load_s,
                plan_s=self.plan.plan_s,
                compile_s=self.loaded.compile_s,
                generate_s=self.taken_s,
                makespan_s=self.ended_s - started_s,
            ),
            bounds=bounds,
            num_tokens=num_tokens,
            energy_j=energy_j,
            stolen_share=stolen_share,
        )
