"""A model on a device of this process, from loading it to the manifest of what was done: a run here and a replica go
through the same steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from vasuki.base.errors import ModelError
from vasuki.engine.loop import Observer, RunStats, Sink, drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.io.output.manifest import Bounds, Manifest, Timings
from vasuki.io.output.trace import StepRecord
from vasuki.machines.cost_model import CostModel
from vasuki.machines.here.device import local_device
from vasuki.machines.here.measured import Tokens, look_back
from vasuki.machines.here.stolen_time import StolenTime
from vasuki.models.fingerprint import model_fingerprint
from vasuki.models.mapped_weights import MappedWeights
from vasuki.models.shape import ModelShape
from vasuki.planner import TimeLeft
from vasuki.planner.plan import Plan
from vasuki.planner.rows_done import RowsDone
from vasuki.runs.manifests import run_manifest
from vasuki.runs.observers.tracer import StepTracer
from vasuki.runs.observers.watchdog import Watchdog
from vasuki.runs.opening import JobKey
from vasuki.runs.placement import Placement, placed_as_loaded, refuse_8_bits, refuse_backend
from vasuki.runs.workers.messages import Planned
from vasuki.runs.workload import shape_of

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel


def load(job: JobKey) -> tuple[LoadedModel, float]:
    """The model of a job, and the seconds that it took to load, without compiling.

    Raises ModelError, also if the model has another fingerprint by now, and JobFileError as `refuse_8_bits`.
    """
    config = job.config
    started_s = time.perf_counter()
    shape = shape_of(config)
    refuse_backend(config, shape)  # in the words of `vasuki check`, before anything is loaded
    if "float8" in (config.kv.dtype, config.model.quantization):  # else a device is looked for where one is needed
        refuse_8_bits(config, shape, local_device(config.engine.device).generation)
    from vasuki.hf.device.device import device_of
    from vasuki.hf.loading.load_model import load_model  # torch and transformers take seconds to import
    from vasuki.hf.loading.varying import why_rows_vary

    loaded = load_model(
        config.model,
        config.engine.device,
        lambda weight_bytes, device: device_of(device).weights_wait(config.engine, config.kv, weight_bytes),
        config.engine.compile != "off",
        config.kv.dtype,
        config.engine.attention,
        task=config.task,
    )
    mapped = MappedWeights(config.model)
    if model_fingerprint(config.model) != job.model_fingerprint:
        raise ModelError(f"model {config.model.path} changed while it was loaded; run again when it is whole")
    if config.reads and loaded.backend != "ragged" and not loaded.encodes:
        raise ModelError(f"{config.model.path}: texts are read in packed steps, which its backend does not have")
    if config.output.reasoning:
        loaded.tokenizer.refuse_without_reasoning()
    loaded = replace(loaded, mapped=mapped, varies=why_rows_vary(loaded))
    return loaded, time.perf_counter() - started_s - loaded.compile_s


class Device:
    """A loaded model on a device of this process. Call `place`, `begin`, `compute`, `end` and `manifest` in that order;
    `place` is left out where another device of this kind was planned for.

    Args:
        job: whose model it is.
        loaded: the model.
        load_s: what loading took.
        started_s: of the run, on `time.perf_counter`'s clock.

    Attributes:
        loaded: the model, its weights where they live while it runs.
        placement: that was planned for here.
        plan: with the settings that the executor has come to; set by `begin`, as what follows.
        time_left: as foreseen, and how fast steps were.
        scheduler: of the rows.
        done: sums over the rows that ended.
        stats: of the steps.
    """

    plan: Plan
    time_left: TimeLeft
    scheduler: Scheduler
    done: RowsDone
    _shape: ModelShape  # likewise

    def __init__(self, job: JobKey, loaded: LoadedModel, load_s: float, started_s: float) -> None:
        from vasuki.hf.device.energy import EnergyMeter

        self._job = job
        self.loaded = loaded
        self._load_s = load_s
        self._started_s = started_s
        self._energy = EnergyMeter(loaded.device)
        self._stolen = StolenTime()
        self.placement: Placement | None = None
        self.stats = RunStats()

    def place(self, tokens: Tokens) -> Placement:
        """The model on this machine, measured for about that many tokens. Raises as `placed_as_loaded`."""
        self.placement = placed_as_loaded(self._job.config, self.loaded, tokens)
        return self.placement

    def begin(
        self,
        planned: Planned,
        time_left_of: Callable[[Plan, CostModel], TimeLeft] = TimeLeft,
    ) -> None:
        """Make everything ready to run by a plan; `time_left_of` makes what foresees the end."""
        from vasuki.hf.loading.weights import place_weights
        from vasuki.hf.ragged_executor import build_executor

        plan, output = planned.plan, self._job.config.output
        cost_model = CostModel(planned.shape, planned.profile, plan.layout)
        self._shape, self.done = planned.shape, RowsDone(planned.shape)
        self.loaded = place_weights(self.loaded, plan.layout.host_layers)
        self._begun_s = self._ended_s = time.perf_counter()
        self._executor = build_executor(
            self.loaded,
            plan.settings,
            bool(output.logprobs),
            cost_model=cost_model,
            alternatives=output.alternatives,
        )
        if self._job.config.constraint or self._job.config.constraint_column:
            self._executor.be_constrained()
        self.plan = replace(plan, settings=self._executor.settings)
        self.time_left = time_left_of(self.plan, cost_model)
        self.scheduler = Scheduler(self.plan.settings)

    @property
    def taken_s(self) -> float:
        """What generating has taken; set by `end`."""
        return self._ended_s - self._begun_s

    @property
    def kv_share(self) -> float:
        """The share of the KV blocks that is held."""
        pool = self.scheduler.queues.pool
        return pool.num_held / pool.num_blocks

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
            observers: see each step as well.
        """
        from vasuki.hf.device.host import quick_turns

        num_layers = self.loaded.kv_layout.num_layers
        tracer = StepTracer(note, self.plan.settings, self.loaded.token_bytes, num_layers, self.time_left)
        watchdog = Watchdog(self.time_left.step_s)
        watching: list[Observer] = [self.time_left, tracer, watchdog, self.done, *observers]
        gc.freeze()  # the collector need not walk through what was loaded, half a second in the midst of a job
        try:
            with quick_turns() if self.loaded.device.type == "cuda" else nullcontext():
                drain(requests, self.scheduler, self._executor, sink, watching, should_stop, self.stats)
        finally:
            gc.unfreeze()
            watchdog.close()

    def end(self) -> None:
        """Count the rows that are under way as far as they came, and doubt a profile that the steps contradict."""
        self._ended_s = time.perf_counter()
        self.done.count(self.scheduler.unfinished())
        if self.placement is not None:
            look_back(self.placement.machine, self.time_left.pace, self._stolen.share)

    def manifest(self, bounds: Bounds, num_tokens: int) -> Manifest:
        """What was done, see `run_manifest`."""
        return run_manifest(
            self._job,
            self.plan,
            self.loaded,
            self._shape,
            self.stats,
            self.scheduler.queues.counters,
            Timings(
                load_s=self._load_s,
                plan_s=self.plan.plan_s,
                compile_s=self.loaded.compile_s,
                generate_s=self.taken_s,
                makespan_s=self._ended_s - self._started_s,
            ),
            bounds=bounds,
            num_tokens=num_tokens,
            energy_j=self._energy.energy_j,
            stolen_share=self._stolen.share,
        )
