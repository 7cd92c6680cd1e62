"""Step times against the roofline, the device's idle share, and copies during compute."""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from gpu_sections.setting import FEWEST_ROWS, Finding, Record, Rows, Setting, StepLog, fitting, run_planned
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.kv.kv_mover import CopyEngine
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.cost_model import CostModel, StepWork
from vasuki.models.shape import ModelShape

_WINDOWS, _WINDOW_STEPS = 12, 8  # of a job, in which its kernels are watched
_ROWS = 256
_RUNS = 6  # of the job or of a part of it, the watched one counted twice


def steps(setting: Setting, share_s: float) -> Finding:
    """A job of mixed rows, run twice: undisturbed for step times, and with some of its steps watched for kernels."""
    finding = Finding()
    names = dict.fromkeys((setting.small, setting.large))
    for name in names:
        setting.loaded_alone(name)
        share = share_s / len(names) / _RUNS
        requests = fitting(setting, name, "mixed", FEWEST_ROWS if setting.toy else _ROWS, share)
        run_planned(setting, name, requests[: len(requests) // 8])  # loads kernels
        run = run_planned(setting, name, requests)
        watcher = _KernelWatcher(setting, windows(len(run.log.batches)))
        # One step after another, so that a window holds the kernels of its own steps, and of no other.
        run_planned(setting, name, requests, [watcher], steps_ahead=0)
        wall_s = sum(sum(run.log.elapsed_s[first:last]) for first, last in watcher.windows)
        if name == setting.small:  # whose kernels are the shortest
            launched = run_planned(setting, name, requests, compiles=False)
            finding.notes.append(f"{name}: {launched.seconds:.3g} s with every kernel launched by itself")
            in_turn = run_planned(setting, name, requests, steps_ahead=0)
            finding.notes.append(f"{name}: {in_turn.seconds:.3g} s where each step waits for the one before")
        setting.free()
        finding.rows += _step_rows(setting, name, run.log)
        finding.notes.append(f"{name}: {run.replayed_steps} of {len(run.log.batches)} steps were replayed by graphs")
        step_ms, waited_ms = (seconds / len(run.log.batches) * 1e3 for seconds in (run.seconds, run.waited_s))
        finding.notes.append(
            f"{name}: {len(run.log.batches)} steps in {run.seconds:.3g} s; of {step_ms:.3g} ms a step the host works "
            f"{step_ms - waited_ms:.3g} ms and waits for the device for the rest"
        )
        if watcher.busy_s is None:
            finding.notes.append(f"{name}: no idle share, the device is the host" if not setting.on_gpu else
                                 f"{name}: no idle share, the profiler saw no kernel")  # fmt: skip
        else:
            idle, watched = max(0.0, 1 - watcher.busy_s / wall_s), sum(last - first for first, last in watcher.windows)
            finding.notes.append(
                f"{name}: kernels take {watcher.busy_s / watched * 1e3:.3g} ms of a step of "
                f"{wall_s / watched * 1e3:.3g} ms in {watched} steps from all over the job: "
                f"the device idles {idle:.1%}, waiting for the host"
            )
            if name == setting.large:
                finding.at_most(
                    f"{name}, {len(requests)} mixed rows: share of the job that the device idles", idle, 0.05
                )
            places = "; ".join(f"{count} times at {place}" for place, count in watcher.waits.most_common(5))
            finding.notes.append(f"{name}: meanwhile the host waited for it {places or 'for nothing but tokens'}")
    return finding


def _step_rows(setting: Setting, name: str, log: StepLog) -> list[Record]:
    """Steps with prompts and steps without: measured, predicted, and at the ceilings."""
    shape = setting.shape(name)
    cost = CostModel(shape, setting.profile)
    rows = []
    for title, prefills in (("decodes", False), ("with prompts", True)):
        chosen = [i for i, batch in enumerate(log.batches) if batch.chunks and bool(batch.prefills) == prefills]
        if not chosen:
            continue
        works = [cost.batch_work(log.batches[i]) for i in chosen]
        measured_s = statistics.median(log.elapsed_s[i] for i in chosen)
        row: Record = {
            "model": name,
            "steps": f"{len(chosen)} {title}",
            "tokens": round(statistics.mean(work.num_tokens for work in works)),
            "measured_ms": _ms(measured_s),
            "predicted_ms": _ms(statistics.median(cost.step_time_s(work) for work in works)),
        }
        if setting.ceilings is not None:
            floors = [_floor_s(setting, shape, work) for work in works]
            total_s = sum(log.elapsed_s[i] for i in chosen)
            row |= {"floor_ms": _ms(statistics.median(floors)), "share_of_floor": round(sum(floors) / total_s, 3)}
        rows.append(row)
    return rows


def _floor_s(setting: Setting, shape: ModelShape, work: StepWork) -> float:
    """The longer of the arithmetic at the best matmul's rate and the traffic at the best copy's."""
    assert setting.ceilings is not None
    flops: float = work.num_tokens * shape.linear_flops_per_token + work.num_samples * shape.head_flops_per_sample
    flops += shape.attention_flops(work.decode_context_tokens + work.chunk_pairs)
    weights = (shape.active_layer_parameters + shape.hidden_size * shape.vocab_size) * shape.dtype_bytes
    context = work.decode_context_tokens + work.chunk_context_tokens
    traffic = weights + context * shape.kv_bytes_per_token
    return max(flops / setting.ceilings.flops_per_s, traffic / setting.ceilings.bytes_per_s)


def windows(num_steps: int) -> list[tuple[int, int]]:
    """Steps `[first, last)` from all over a job, but for the first, which loads what others find."""
    starts = {1 + (num_steps - 1) * window // _WINDOWS for window in range(_WINDOWS)}
    ends = [*sorted(starts)[1:], num_steps]
    found = [(first, min(first + _WINDOW_STEPS, end)) for first, end in zip(sorted(starts), ends, strict=True)]
    return [(first, last) for first, last in found if last > first]


class _KernelWatcher:
    """An engine observer that has torch's profiler running in some windows, and notes what makes the host wait."""

    def __init__(self, setting: Setting, windows: list[tuple[int, int]]) -> None:
        self.windows = windows
        self.busy_s: float | None = None  # the device was at work in them; None where nothing was seen
        self.waits: Counter[str] = Counter()  # for the device, by line of code; fetched tokens are not among them
        self._setting = setting
        self._firsts, self._lasts = ({window[end] for window in windows} for end in (0, 1))
        self._step = 0
        self._profiler: Any = None
        self._catcher: Any = None
        self._caught: list[warnings.WarningMessage] = []

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self._step += 1
        if not self._setting.on_gpu:
            return
        if self._step in self._lasts:
            self._close()
        if self._step in self._firsts:
            self._open()

    def _open(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def _close(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        said = [warning for warning in self._caught if "synchroniz" in str(warning.message)]
        self.waits.update(f"{Path(warning.filename).name}:{warning.lineno}" for warning in said)
        self._setting.synchronize()
        self._profiler.stop()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == DeviceType.CUDA
        ]
        if spans:
            self.busy_s = (self.busy_s or 0.0) + union_length(spans) * 1e-6


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length that the spans cover together."""
    total, covered_to = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


# --- copies during compute -------------------------------------------------------------------------------------------


def overlap(setting: Setting, share_s: float) -> Finding:
    """The same job in memory that is too small, without and with each kind of offload."""
    name = setting.small
    loaded, layers = setting.loaded_alone(name), setting.shape(name).num_layers
    requests = setting.workload("trans", 24 if setting.toy else 64)
    hopeful = [dataclasses.replace(request, estimated_tokens=1) for request in requests]
    longest = max(request.num_prompt_tokens + request.max_tokens for request in requests)
    block_tokens = 4 if setting.toy else 32
    num_blocks = (1 if setting.toy else 8) * -(-longest // block_tokens)
    tight = EngineSettings(find_policy("vasuki"), Limits(32 if setting.toy else 512, 256), num_blocks, block_tokens)
    parking = OffloadPlan("park", host_blocks=4 * num_blocks)
    streaming = OffloadPlan("stream", streamed_layers=max(1, layers // 4))
    runs: dict[str, tuple[EngineSettings, list[Request]]] = {
        "recompute": (tight, hopeful),
        "park": (dataclasses.replace(tight, offload=parking), hopeful),
        "resident": (tight, requests),
        "stream": (
            dataclasses.replace(tight, offload=streaming),
            requests,
        ),
    }
    finding = Finding()
    for mode, (settings, rows) in runs.items():
        for some in (rows[:8], rows):  # a few rows load kernels and pin memory; all of them count
            executor = build_executor(loaded, settings)
            scheduler, sink = Scheduler(settings), Rows()
            seconds = setting.seconds(lambda: drain(some, scheduler, executor, sink))  # noqa: B023
        row: Record = {"mode": mode, "seconds": round(seconds, 3), "swaps": scheduler.queues.counters.preemptions_swap,
                       "recomputed": scheduler.queues.counters.recomputed_tokens}  # fmt: skip
        if executor.offload is not None:
            row |= _copies(executor.offload.engine, executor.offload.copied_bytes)
            if not executor.offload.copied_bytes:
                finding.failures.append(f"{mode}: nothing was moved")
        finding.rows.append(row)
        if len(sink.sequences) != len(rows):
            finding.failures.append(f"{mode}: {len(sink.sequences)} of {len(rows)} rows came out")
    finding.notes.append(
        f"{name}, {len(requests)} rows of trans, KV memory of {num_blocks * block_tokens} tokens; exposed: compute "
        "waited between the events around each wait, also where the host had nothing else to give it: an upper bound; "
        "recompute and park run rows whose lengths are unknown, resident and stream the same rows with known lengths"
    )
    return finding


def _copies(engine: CopyEngine, copied_bytes: int) -> Record:
    engine.settle()
    exposed_s, busy_s = engine.exposed_s, engine.busy_s
    return {
        "copied_MB": round(copied_bytes / 1e6, 1),
        "copy_s": round(busy_s, 4),
        "exposed_s": round(min(exposed_s, busy_s), 4),
        "hidden_share": round(1 - min(1.0, exposed_s / busy_s), 3) if busy_s else 1.0,
        "GB_per_s": round(copied_bytes / busy_s / 1e9, 2) if busy_s else 0.0,
    }


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")
