"""The composition root: a JobConfig becomes a run.

    open_table ─ OutputFolder ─ load_model ─ plan ─ RequestStream ─ engine.drain ─ RowSink ─ manifest

Whatever can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vasuki.batch import Batch, StepResult
from vasuki.blocks import BlockPool
from vasuki.config import JobConfig
from vasuki.engine import RunStats, drain
from vasuki.errors import Interrupted, ModelError, TooManyRowErrors
from vasuki.io.answers import answer_schema
from vasuki.io.manifest import (
    BatchStats,
    Cost,
    KVStats,
    Manifest,
    PreemptionCounts,
    Timings,
    TokenCounts,
    read_manifest,
)
from vasuki.io.output_folder import OutputFolder
from vasuki.io.parts import Totals
from vasuki.io.requests import RequestStream
from vasuki.io.selection import Shard
from vasuki.io.sink import RowSink
from vasuki.io.tables import open_table
from vasuki.io.trace import StepRecord, TraceWriter
from vasuki.model_shape import ModelShape, named_shape
from vasuki.profile import find_profile
from vasuki.progress import Progress, duration
from vasuki.scheduler import Limits, Scheduler, find_policy

if TYPE_CHECKING:
    from vasuki.hf.model import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    manifest: Manifest
    max_error_fraction: float

    def raise_for_errors(self) -> None:
        """Raises TooManyRowErrors if more rows failed than the job allows."""
        rows = self.manifest.rows
        if rows.failed > self.max_error_fraction * rows.total:
            raise TooManyRowErrors(
                f"{rows.failed} of {rows.total} rows failed, errors.max_fraction allows {self.max_error_fraction:g}; "
                "the column `error` says why"
            )

    def summary(self) -> str:
        """The lines that end a run."""
        manifest = self.manifest
        rows, tokens, timings = manifest.rows, manifest.tokens, manifest.timings
        lines = [
            f"{rows.succeeded:,} of {rows.total:,} rows done, {rows.failed:,} failed, "
            f"in {duration(timings.makespan_s)} (loading {duration(timings.load_s)})",
            f"{tokens.prompt:,} prompt and {tokens.output:,} output tokens in {manifest.steps:,} steps "
            f"of {manifest.batch.mean_seqs:.1f} sequences",
        ]
        if manifest.cost.amount is not None:
            lines.append(
                f"cost {manifest.cost.amount:.4f} {manifest.cost.currency}"
                + (
                    f", {manifest.cost.per_million_tokens:.4f} a million tokens"
                    * bool(manifest.cost.per_million_tokens)
                )
            )
        return "\n".join(lines)


def run_job(config: JobConfig, shard: str = "0/1", fresh: bool = False, quiet: bool = False) -> Outcome:
    """Run what is left of a job.

    Raises:
        VasukiError: as described in `vasuki.errors`; finished rows are durable whatever is raised.
    """
    own_shard = Shard.parse(shard)
    table = open_table(config)
    with ExitStack() as stack:
        folder = stack.enter_context(
            OutputFolder.open(
                config.output.path,
                num_rows=table.num_rows,
                config_hash=config.config_hash,
                input_fingerprint=table.fingerprint,
                shard=own_shard,
                fresh=fresh,
            )
        )
        if folder.is_finished:
            log.info("nothing to do: %s is complete", config.output.path)
            return Outcome(read_manifest(folder.manifest), config.errors.max_fraction)
        rows_left = own_shard.num_rows(table.num_rows) - folder.done.count_in(own_shard)
        run = _Run(config, folder, table.fingerprint, rows_left, quiet)
        should_stop = stack.enter_context(_stop_signals())
        loaded = run.load()
        requests = stack.enter_context(
            RequestStream(
                table,
                config,
                loaded.tokenizer,
                max_context_tokens=loaded.max_context,
                vocab_size=loaded.vocab_size,
                selection=folder.selection,
            )
        )
        folder.begin()
        writer = folder.writer(answer_schema(config, table))
        manifest = run.generate(loaded, requests, writer, should_stop)
    return Outcome(manifest, config.errors.max_fraction)


def check_job(config: JobConfig) -> dict[str, Any]:
    """Look at everything that a run would need, without torch and without changing anything.

    Raises:
        VasukiError: the same that the run would raise, as far as it can be known without loading weights.
    """
    table = open_table(config)
    shape = shape_of(config)
    if config.plan.gpu != "auto":
        find_profile(config.plan.gpu)
    return {
        "job": config.name,
        "rows": table.num_rows,
        "model": shape.name,
        "parameters": shape.num_parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "output": config.output.path,
    }


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of the job's model: a named one, or read from its folder or from the hub's cache."""
    model = config.model
    if model.shape:
        return named_shape(model.shape)
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"cannot read model {model.path}: no such folder; for a hub id give model.shape beside --gpu")
    return ModelShape.from_config_json(folder)


class _Run:
    """One run and what is measured of it."""

    def __init__(
        self, config: JobConfig, folder: OutputFolder, input_fingerprint: str, rows_left: int, quiet: bool
    ) -> None:
        self.config = config
        self.folder = folder
        self.input_fingerprint = input_fingerprint
        self.rows_left = rows_left
        self.quiet = quiet
        self.started_s = time.perf_counter()
        self.load_s = 0.0

    def load(self) -> LoadedModel:
        from vasuki.hf.model import load_model  # torch and transformers take seconds to import

        loaded = load_model(self.config.model, self.config.engine.device)
        self.load_s = time.perf_counter() - self.started_s
        log.info("loaded %s on %s in %s", self.config.model.path, loaded.device, duration(self.load_s))
        return loaded

    def generate(self, loaded: LoadedModel, requests: RequestStream, writer: Any, should_stop: Any) -> Manifest:
        from vasuki.hf.executor import RaggedExecutor
        from vasuki.hf.kv_cache import KVCache
        from vasuki.hf.native import load_kernel

        scheduler = self._scheduler(loaded)
        cache = KVCache(loaded.kv_layout, scheduler.pool.num_blocks, scheduler.pool.block_tokens, loaded.device)
        kernel = None
        if loaded.device.type == "cpu":
            kernel = load_kernel(loaded.kv_layout.head_dim, loaded.kv_layout.dtype)
        executor = RaggedExecutor(loaded, cache, self.config.output.logprobs, kernel)
        generate_started_s = time.perf_counter()
        interrupted: Interrupted | None = None
        with TraceWriter(self.folder.trace) as trace:
            sink = RowSink(writer, loaded.tokenizer.decode, on_commit=trace.flush)
            progress = Progress(self.rows_left, lambda: sink.written.rows, quiet=self.quiet)
            stats = RunStats()
            try:
                drain(requests, scheduler, executor, sink, [_Tracer(trace), progress], should_stop, stats)
            except Interrupted as error:
                interrupted = error
            finally:
                progress.close()
                sink.close()
        generate_s = time.perf_counter() - generate_started_s
        manifest = self.folder.finish(
            self._manifest(loaded, scheduler, cache.block_bytes, stats, sink.written, generate_s)
        )
        if interrupted is not None:
            left = self.rows_left - sink.written.rows
            raise Interrupted(f"{interrupted}; {left} rows are left, run the same command again to go on")
        return manifest

    def _scheduler(self, loaded: LoadedModel) -> Scheduler:
        from vasuki.hf.memory import available_bytes, total_bytes

        config = self.config
        block_tokens = 32 if config.kv.block_tokens == "auto" else config.kv.block_tokens
        max_num_seqs = 256 if config.engine.max_num_seqs == "auto" else config.engine.max_num_seqs
        chunk_tokens = 512 if config.engine.chunk_tokens == "auto" else config.engine.chunk_tokens
        device_memory = config.kv.device_memory
        if device_memory <= 1:
            unusable = (1 - device_memory) * total_bytes(loaded.device)
            device_memory = max(0.0, available_bytes(loaded.device) - unusable)
        block_bytes = block_tokens * loaded.kv_layout.bytes_per_token
        most_useful = max_num_seqs * -(-loaded.max_context // block_tokens)
        num_blocks = min(int(device_memory / block_bytes), most_useful)
        pool = BlockPool(max(1, num_blocks), block_tokens)
        return Scheduler(find_policy(config.engine.policy), Limits(chunk_tokens, max_num_seqs), pool)

    def _manifest(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        block_bytes: int,
        stats: RunStats,
        written: Totals,
        generate_s: float,
    ) -> Manifest:
        makespan_s = time.perf_counter() - self.started_s
        counters = scheduler.counters
        return Manifest(
            job=self.config.model_dump(mode="json"),
            config_hash=self.config.config_hash,
            input_fingerprint=self.input_fingerprint,
            tokens=TokenCounts(recomputed=counters.recomputed_tokens),
            timings=Timings(load_s=self.load_s, generate_s=generate_s, makespan_s=makespan_s),
            steps=stats.steps,
            batch=BatchStats(stats.mean_seqs, stats.max_seqs),
            kv=KVStats(
                peak_device_bytes=stats.peak_device_blocks * block_bytes,
                peak_host_bytes=stats.peak_host_blocks * block_bytes,
                offloaded_bytes=stats.swapped_blocks * block_bytes,
                exposed_copy_s=stats.exposed_copy_s,
                hidden_copy_s=stats.hidden_copy_s,
            ),
            preemptions=PreemptionCounts(counters.preemptions_swap, counters.preemptions_recompute),
            device=_device(loaded),
            cost=self._cost(makespan_s, written.prompt_tokens + written.output_tokens),
            versions=_versions(),
        )

    def _cost(self, makespan_s: float, tokens: int) -> Cost:
        hours = makespan_s / 3600
        price, currency = self.config.cost.price_per_hour, self.config.cost.currency
        if price is None:
            return Cost(hours, None, currency)
        amount = hours * price
        return Cost(hours, amount, currency, amount / tokens * 1e6 if tokens else None)


class _Tracer:
    """Writes each step to the trace."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._preempted = 0

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler) -> None:
        counters = scheduler.counters
        preempted = counters.preemptions_recompute + counters.preemptions_swap
        self._trace.record(
            StepRecord(
                t_s=now_s,
                elapsed_s=result.elapsed_s,
                prefill_tokens=batch.num_prefill_tokens,
                decode_tokens=batch.num_decode_tokens,
                seqs=batch.num_seqs,
                waiting=len(scheduler.waiting) + len(scheduler.parked),
                kv_device_blocks=scheduler.pool.num_held,
                kv_host_blocks=scheduler.host_pool.num_held if scheduler.host_pool else 0,
                swapped_blocks=sum(len(swap.device) for swap in batch.swaps),
                preempted=preempted - self._preempted,
                exposed_copy_s=result.exposed_copy_s,
                hidden_copy_s=result.hidden_copy_s,
                finished=sum(chunk.sequence.is_finished for chunk in batch.chunks),
            )
        )
        self._preempted = preempted


@contextmanager
def _stop_signals() -> Iterator[Any]:
    """Turns SIGTERM and SIGINT into a question that is asked between two steps. A second signal ends at once."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _device(loaded: LoadedModel) -> dict[str, Any]:
    import torch

    if loaded.device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(loaded.device)}
    return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    packages = ("vasuki", "torch", "transformers", "pyarrow")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
