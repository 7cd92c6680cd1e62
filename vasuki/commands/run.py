"""The composition root of `vasuki run`: a JobConfig becomes a run.

    open_table ─ OutputFolder ─ load_model ─ RequestStream ─ make_plan ─ order_requests ─ drain ─ RowSink ─ manifest

Whatever can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import logging
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from vasuki.base.config import JobConfig, KVConfig
from vasuki.base.errors import InputError, Interrupted, TooManyRowErrors
from vasuki.base.units import duration, percent_text
from vasuki.commands.foresight import (
    MachineProfile,
    expected,
    look_back,
    profile_for_run,
    rough_tokens,
    shape_in_use,
)
from vasuki.commands.progress import Progress
from vasuki.commands.signals import StopSignals
from vasuki.commands.step_tracer import StepTracer
from vasuki.commands.workload import first_rows, lengths_of
from vasuki.engine.loop import Observer, RunStats, drain
from vasuki.engine.scheduler import Counters, Scheduler
from vasuki.engine.sequence import Request
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import InputTable, open_table
from vasuki.io.output.answers import answer_schema
from vasuki.io.output.manifest import (
    BatchStats,
    Cost,
    KVStats,
    Manifest,
    Prediction,
    PreemptionCounts,
    Timings,
    TokenCounts,
    now_utc,
    read_manifest,
)
from vasuki.io.output.output_folder import OutputFolder
from vasuki.io.output.parts import PartWriter
from vasuki.io.output.sink import RowSink
from vasuki.io.output.trace import TraceWriter
from vasuki.io.selection import Shard
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import footprint, within_host_memory
from vasuki.machines.price import CostEstimate
from vasuki.machines.stolen_time import StolenTime
from vasuki.models.shape import ModelShape
from vasuki.planner import OFFLOAD_MODES, RunningPrediction, make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering.planned_order import order_requests
from vasuki.planner.plan import Plan

if TYPE_CHECKING:
    import torch

    from vasuki.hf.device.energy import EnergyMeter
    from vasuki.hf.loading.load_model import LoadedModel

log = logging.getLogger(__name__)

NOTHING_TO_RUN = Lengths(np.ones(1, np.int64), np.ones(1, np.int64))  # stands in where none of the first rows can run
PLANNED_REQUESTS = 4096  # read before the first step to plan from; a larger input is taken to go on like them


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    manifest: Manifest
    max_error_fraction: float

    def raise_for_errors(self) -> None:
        """Raises TooManyRowErrors if more rows failed than the job allows."""
        rows = self.manifest.rows
        allowed = Fraction(str(self.max_error_fraction)) * rows.total  # of the decimal as written, which no float is
        if rows.failed > allowed:
            raise TooManyRowErrors(
                f"{rows.failed} of {rows.total} rows failed, errors.max_fraction allows {self.max_error_fraction:g}; "
                "the column `error` says why"
            )


def run_job(config: JobConfig, shard: str = "0/1", fresh: bool = False, quiet: bool = False) -> Outcome:
    """Run what is left of a job. See `Runner.run`."""
    with StopSignals() as signals:
        return Runner(signals, quiet).run(config, shard, fresh)


class Runner:
    """Runs one job after another of those that share a model, which stays loaded.

    Args:
        signals: that stop a run, and whoever has several.
        quiet: without a progress bar.
    """

    def __init__(self, signals: StopSignals, quiet: bool = False) -> None:
        self.signals = signals
        self.quiet = quiet
        self._loaded: LoadedModel | None = None  # while no run has it
        self._load_s = 0.0  # in the run at hand
        self._has_run = False

    def run(self, config: JobConfig, shard: str = "0/1", fresh: bool = False) -> Outcome:
        """Run what is left of a job.

        The first SIGTERM or SIGINT while rows are generated makes finished ones durable and raises Interrupted.

        Raises:
            VasukiError: as described in `vasuki.base.errors`; finished rows are durable whatever is raised.
            KeyboardInterrupt: a signal before that, or a second one.
        """
        started_s = time.perf_counter()
        own_shard = Shard.parse(shard)
        table = open_table(config)
        with OutputFolder.open(
            config.output.path,
            num_rows=table.num_rows,
            config_hash=config.config_hash,
            input_fingerprint=table.fingerprint,
            shard=own_shard,
            fresh=fresh,
        ) as folder:
            if folder.is_finished:
                log.info("nothing to do: %s is complete", config.output.path)
                return Outcome(read_manifest(folder.manifest), config.errors.max_fraction)
            rows_left = own_shard.num_rows(table.num_rows) - folder.done.count_in(own_shard)
            loaded = self._kept() or self._load(config)
            self._has_run = True
            run = _Run(config, table, folder, rows_left, self.quiet, started_s, self._load_s)
            manifest = run.to_end(loaded, self.signals)
        self._loaded = None if run.weights_on_host else loaded  # which would have to be put together again
        return Outcome(manifest, config.errors.max_fraction)

    def load(self, config: JobConfig) -> None:
        """Load the model that the jobs share now; the first run does otherwise. Raises ModelError."""
        self._loaded = self._load(config)

    def _load(self, config: JobConfig) -> LoadedModel:
        started_s = time.perf_counter()
        log.info("loading %s", config.model.path)
        from vasuki.hf.device.memory import room_bytes  # torch and transformers take seconds to import
        from vasuki.hf.loading.load_model import load_model

        engine, kv = config.engine, config.kv

        def stays_on_host(weight_bytes: int, device: torch.device) -> bool:
            if engine.weights_on_host != "auto":
                return engine.weights_on_host > 0
            return weight_bytes >= room_bytes(device, kv.device_memory)

        loaded = load_model(config.model, engine.device, stays_on_host, engine.compile != "off", kv.dtype)
        self._load_s = time.perf_counter() - started_s - loaded.compile_s
        log.info("loaded %s on %s in %s", config.model.path, loaded.device, duration(self._load_s))
        return loaded

    def _kept(self) -> LoadedModel | None:
        """The model if it is there. The device gets back the memory of the run before in any case."""
        if self._has_run:
            from vasuki.hf.device.memory import give_back

            give_back()
        if self._loaded is None:
            return None
        loaded, self._loaded, self._load_s = replace(self._loaded, compile_s=0.0), None, 0.0
        return loaded


class _Run:
    """One run, and what is measured of it."""

    def __init__(
        self,
        config: JobConfig,
        table: InputTable,
        folder: OutputFolder,
        rows_left: int,
        quiet: bool,
        started_s: float,
        load_s: float,
    ) -> None:
        self.config = config
        self.table = table
        self.folder = folder
        self.rows_left = rows_left
        self.quiet = quiet
        self.started_s = started_s
        self.load_s = load_s
        self.weights_on_host = False
        self.energy: EnergyMeter  # set once there is a model
        self.machine: MachineProfile
        self.stolen = StolenTime()
        self.stats = RunStats()

    def to_end(self, loaded: LoadedModel, signals: StopSignals) -> Manifest:
        """Plan, generate, and write the manifest, also when interrupted."""
        from vasuki.hf.device.energy import EnergyMeter

        self.energy = EnergyMeter(loaded.device)
        stream = RequestStream(
            self.table,
            self.config,
            loaded.tokenizer,
            max_context_tokens=loaded.max_context,
            vocab_size=loaded.vocab_size,
            selection=self.folder.selection,
        )
        with stream as requests:
            first = list(first_rows(requests, PLANNED_REQUESTS))
            shape = shape_in_use(loaded, self.config)
            self.machine = machine = profile_for_run(self.config, loaded, shape, rough_tokens(first, self.rows_left))
            plan = self._plan(loaded, shape, machine, first)
            self.weights_on_host = plan.layout.host_layers > 0
            cost_model = CostModel(shape, machine.profile, plan.layout)
            self.folder.begin()
            writer = self.folder.writer(answer_schema(self.config, self.table))
            with signals.questions():
                return self._generate(loaded, plan, cost_model, itertools.chain(first, requests), writer, signals.asked)

    # --- plan --------------------------------------------------------------------------------------------------------

    def _plan(self, loaded: LoadedModel, shape: ModelShape, machine: MachineProfile, first: list[Request]) -> Plan:
        """Plan from the first rows, and take the others to go on like them."""
        from vasuki.hf.loading.kv_budget import kv_budget_bytes

        config = self.config
        on_cpu = loaded.device.type == "cpu"
        kv = self._kv(loaded)
        kv_bytes = kv_budget_bytes(loaded, config.kv.device_memory) if loaded.is_on_device else None

        def planned(lengths: Lengths) -> Plan:
            return make_plan(
                lengths,
                shape,
                machine.profile,
                plan=config.plan,
                engine=config.engine,
                kv=kv,
                cost=config.cost,
                kv_bytes=kv_bytes,
                # On a CPU both tiers are the same memory: moving gains nothing, unless somebody asks for it.
                offload_modes=("none",) if on_cpu and config.kv.offload == "auto" else OFFLOAD_MODES,
            )

        lengths = lengths_of(first, self.rows_left)
        try:
            plan = planned(lengths if len(lengths) else NOTHING_TO_RUN)
        except InputError:  # none of them fits: they become error rows, as beside others that do
            plan = planned(NOTHING_TO_RUN)
        plan = replace(plan, source=machine.source, spread=machine.spread)
        log.info(
            "planned: %d requests in %s (%s), at most %s of it could be saved; steps of %d tokens, offload %s%s",
            plan.requests,
            expected(plan),
            plan.source,
            percent_text(plan.could_save),
            plan.chunk_tokens,
            plan.offload.mode,
            f", weights of {plan.layout.host_layers} layers on the host" if plan.layout.host_layers else "",
        )
        return plan

    def _kv(self, loaded: LoadedModel) -> KVConfig:
        """Blocks as large as torch's CUDA kernel wants them for walking block tables, where it does and unless the job
        says otherwise, and no more host memory than there is."""
        import torch

        from vasuki.hf.device.memory import available_bytes
        from vasuki.hf.kernels.varlen import preferred_block_tokens

        kv, layout = self.config.kv, loaded.kv_layout
        if loaded.device.type != "cpu" or kv.offload not in ("auto", "none"):
            kv = within_host_memory(kv, available_bytes(torch.device("cpu")))
        preferred = preferred_block_tokens(layout.dtype, loaded.device, min(layout.head_dims))
        if kv.block_tokens != "auto" or preferred is None:
            return kv
        return kv.model_copy(update={"block_tokens": preferred})

    # --- generate ----------------------------------------------------------------------------------------------------

    def _generate(
        self,
        loaded: LoadedModel,
        plan: Plan,
        cost_model: CostModel,
        requests: Iterable[Request],
        writer: PartWriter,
        should_stop: Callable[[], bool],
    ) -> Manifest:
        from vasuki.hf.loading.weights import place_weights
        from vasuki.hf.ragged_executor import build_executor

        prediction = RunningPrediction(plan, cost_model)
        loaded = place_weights(loaded, plan.layout.host_layers)
        generate_started_s = time.perf_counter()
        predicted_s = generate_started_s - self.started_s + plan.makespan_s
        interrupted: Interrupted | None = None
        scheduler = Scheduler.build(plan.settings)
        executor = build_executor(loaded, plan.settings, self.config.output.logprobs)
        order = order_requests(
            requests,
            plan.settings,
            solver=plan.solver,
            output_length=self.config.plan.output_length,
            window_rows=self.config.plan.window_rows,
            order=plan.order,
        )
        try:
            with TraceWriter(self.folder.trace) as trace:
                sink = RowSink(writer, loaded.tokenizer.decode, on_commit=trace.flush)
                progress = Progress(self.rows_left, lambda: sink.written.rows, prediction, self.quiet)
                tracer = StepTracer(trace, plan.settings, cost_model, prediction)
                observers: list[Observer] = [order, prediction, tracer, progress]
                gc.freeze()  # the collector need not walk through what was loaded, half a second in the midst of a job
                try:
                    drain(order, scheduler, executor, sink, observers, should_stop, self.stats)
                finally:
                    gc.unfreeze()
                    progress.close()
                    sink.close()
        except Interrupted as error:
            interrupted = error
        generate_s = time.perf_counter() - generate_started_s
        look_back(self.machine, prediction.pace, self.stolen.share)
        written = writer.committed
        tokens = written.prompt_tokens + written.output_tokens
        manifest = self._manifest(loaded, plan, scheduler.counters, tokens, predicted_s, generate_s)
        manifest = self.folder.finish(manifest)
        if interrupted is not None:
            left = self.rows_left - written.rows
            raise Interrupted(f"{interrupted}; {left} rows are left, run the same command again to go on")
        return manifest

    def _manifest(
        self,
        loaded: LoadedModel,
        plan: Plan,
        counters: Counters,
        tokens: int,
        predicted_s: float,
        generate_s: float,
    ) -> Manifest:
        makespan_s = time.perf_counter() - self.started_s
        stats = self.stats
        kv = loaded.kv_layout
        device_bytes, host_bytes = footprint(
            plan.settings,
            plan.settings.block_tokens * kv.bytes_per_token,
            kv.num_layers,
            stats.peak_device_blocks,
            stats.peak_host_blocks,
        )
        return Manifest(
            job=self.config.model_dump(mode="json"),
            config_hash=self.config.config_hash,
            input_fingerprint=self.table.fingerprint,
            tokens=TokenCounts(recomputed=counters.recomputed_tokens, shared=counters.shared_tokens),
            timings=Timings(
                load_s=self.load_s,
                plan_s=plan.plan_s,
                compile_s=loaded.compile_s,
                generate_s=generate_s,
                makespan_s=makespan_s,
            ),
            # What comes before the first step is in the makespan, and no schedule ends without it.
            predicted=Prediction(
                predicted_s,
                plan.lower_bound_s,
                plan.schedule_bound_s + predicted_s - plan.makespan_s,
                plan.source,
                plan.output_tokens_estimate,
            ),
            steps=stats.steps,
            batch=BatchStats(stats.mean_seqs, stats.max_seqs),
            kv=KVStats(
                peak_device_bytes=device_bytes + stats.max_seqs * plan.state_bytes,
                peak_host_bytes=host_bytes,
                offloaded_bytes=stats.copied_bytes,
                exposed_copy_s=stats.exposed_copy_s,
                hidden_copy_s=stats.hidden_copy_s,
                prefilled_ahead=counters.prefilled_ahead,
            ),
            preemptions=PreemptionCounts(counters.preemptions_swap, counters.preemptions_recompute),
            device=_device(loaded, plan, self.energy.energy_j, self.stolen.share),
            cost=self._cost(plan, makespan_s, tokens),
            versions=_versions(),
            finished_at=now_utc(),
        )

    def _cost(self, plan: Plan, makespan_s: float, tokens: int) -> Cost:
        """At the plan's price by the hour, for the time that was really taken."""
        price = None if plan.cost.amount is None else plan.cost.amount / plan.cost.gpu_hours
        estimate = CostEstimate.of(makespan_s, 1, price, plan.cost.currency, tokens)
        return Cost(estimate.gpu_hours, estimate.amount, estimate.currency, estimate.per_million_tokens)


def _device(loaded: LoadedModel, plan: Plan, energy_j: float | None, stolen_share: float) -> dict[str, Any]:
    import torch

    device: dict[str, Any] = {
        "type": loaded.device.type,
        "name": loaded.device_name,
        "profile": plan.gpu,
        "policy": plan.policy,
        "stolen_share": stolen_share,
    }
    if loaded.device.type == "cpu":
        device["threads"] = torch.get_num_threads()
    if energy_j is not None:
        device["energy_j"] = energy_j
    return device


def _versions() -> dict[str, str]:
    packages = ("vasuki", "torch", "transformers", "pyarrow")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
