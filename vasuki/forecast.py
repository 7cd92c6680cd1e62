"""What a job will take, without running it: the composition root of `vasuki plan` and `vasuki simulate`.

Prompt lengths come from the job's input or from a LENGTHS.csv, the machine from a profile. Nothing here needs torch,
unless a model has no tokenizer.json.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from vasuki.config import JobConfig, load_job, parse_overrides
from vasuki.cost_model import CostModel
from vasuki.engine import Observer
from vasuki.errors import InputError
from vasuki.io.location import writing
from vasuki.io.manifest import (
    MANIFEST,
    BatchStats,
    Cost,
    KVStats,
    Manifest,
    Prediction,
    PreemptionCounts,
    RowCounts,
    Timings,
    TokenCounts,
    now_utc,
)
from vasuki.io.output_folder import OutputFolder, simulated_folder
from vasuki.io.requests import RequestStream, Tokenizer
from vasuki.io.tables import open_table
from vasuki.io.trace import TRACE, TraceWriter
from vasuki.layout import Layout
from vasuki.lengths import Lengths, Prefixes, is_lengths_file, read_lengths
from vasuki.model_config import named_shape, shape_from_config
from vasuki.model_files import description_folder
from vasuki.model_shape import ModelShape
from vasuki.plan import Plan
from vasuki.planner import plan_parallel
from vasuki.profile import HardwareProfile
from vasuki.profile_files import find_profile
from vasuki.sequence import Request
from vasuki.simulator import Simulated, simulate_plan
from vasuki.steps import StepTracer
from vasuki.token_counter import TokenCounter
from vasuki_solvers import shared_prefixes

log = logging.getLogger(__name__)

ONE_DEVICE = Layout()
MIN_SHARED_TOKENS = 8  # shorter common beginnings fill no block
COUNTED_REQUESTS = 20_000  # a larger input is planned from its first so many
CLEARLY = 1.2  # times as fast; a CPU's rates, measured one after the other, differ by noise


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be planned."""

    config: JobConfig
    shape: ModelShape
    lengths: Lengths
    fingerprint: str = ""

    def on(self, profile: HardwareProfile) -> Workload:
        """The same as a machine runs it: on a CPU, `model.dtype: auto` is float32 unless its own is clearly faster."""
        peaks = profile.peak_tflops
        if self.config.model.dtype != "auto" or profile.kind != "cpu":
            return self
        if peaks.get(self.shape.dtype, 0.0) >= CLEARLY * peaks.get("float32", 0.0):
            return self
        return replace(self, shape=self.shape.with_dtype("float32", self.config.kv.dtype))


def workload_of(job_or_lengths: str, overrides: tuple[str, ...] = ()) -> Workload:
    """A workload from a job file, or from a LENGTHS.csv and `--set` alone.

    Raises:
        VasukiError: as the run would, as far as it can be known without weights.
    """
    if not job_or_lengths.endswith(".csv"):
        return job_workload(load_job(job_or_lengths, overrides))
    config = parse_overrides(
        overrides, {"input": {"path": job_or_lengths, "prompt_token_ids": "-"}, "output": {"path": "-"}}
    )
    return Workload(config, shape_of(config), read_lengths(job_or_lengths))


def output_of(overrides: tuple[str, ...]) -> str:
    """The folder that `--set output.path=DIR` names; a job's own output is for its real runs."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("output.path=")]
    return given[-1] if given else ""


def job_workload(config: JobConfig) -> Workload:
    """Count the tokens of a job's prompts.

    Raises:
        InputError, JobFileError, ModelError: as the run would, as far as it can be known without weights.
    """
    shape = shape_of(config)
    if is_lengths_file(config.input.path):
        return Workload(config, shape, read_lengths(config.input.path))
    table = open_table(config)
    stream = RequestStream(
        table,
        config,
        tokenizer_of(config),
        max_context_tokens=shape.max_context_tokens,
        vocab_size=shape.vocab_size,
    )
    with stream as requests:
        lengths = lengths_of(first_rows(requests, COUNTED_REQUESTS), table.num_rows)
    if not len(lengths):
        raise InputError(f"{config.input.path} has no row that can be run")
    return Workload(config, shape, lengths, table.fingerprint)


def tokenizer_of(config: JobConfig) -> Tokenizer:
    """The model's own tokenizer; where there is only a shape, tokens are guessed from characters.

    Raises:
        ModelError: it cannot be read, or the job has messages and the model no chat template.
    """
    if not config.model.path:
        return TokenCounter()
    from vasuki.hf.tokenizer import tokenizer_without_torch  # transformers takes a second to import

    tokenizer = tokenizer_without_torch(config.model)
    if config.input.messages:
        tokenizer.require_chat_template()
    return tokenizer


def first_rows(requests: Iterable[Request], num_requests: int) -> Iterator[Request]:
    """The first so many requests, and the other samples of the last one's row."""
    for count, request in enumerate(requests, 1):
        yield request
        if count >= num_requests and (request.error or request.sample_index == request.sampling.n - 1):
            return


def lengths_of(requests: Iterable[Request], num_rows: int = 0) -> Lengths:
    """Lengths of requests that can run: prompts, what is expected of outputs, their limits, and what prompts share.

    If they are the first of `num_rows` rows, the others are taken to go on like them.
    """
    rows: list[tuple[int, int, int]] = []
    rows_read = 0

    def prompts() -> Iterator[ArrayLike]:
        nonlocal rows_read
        for request in requests:
            rows_read += request.sample_index == 0
            if not request.error:
                rows.append((request.num_prompt_tokens, request.expected_tokens, request.max_tokens))
                yield request.prompt_token_ids

    of_row, token_ids = shared_prefixes(prompts(), min_shared=MIN_SHARED_TOKENS)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    lengths = Lengths(table[:, 0], table[:, 1], None, table[:, 2], Prefixes(token_ids, of_row))
    if not rows or rows_read >= num_rows:
        return lengths
    log.info("planning %d rows from the first %d", num_rows, rows_read)
    return lengths.take(np.arange(round(len(rows) * num_rows / rows_read)) % len(rows))


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of the job's model: a named one, or read from its files. `model.dtype` and `kv.dtype` override its own.

    Raises:
        ModelError: there is no such shape or model.
    """
    model = config.model
    if model.shape:
        shape = named_shape(model.shape)
    else:
        shape = shape_from_config(description_folder(model), name=Path(model.path).name)
    return shape.with_dtype(shape.dtype if model.dtype == "auto" else model.dtype, config.kv.dtype)


def check_job(config: JobConfig) -> dict[str, str | int]:
    """Look at everything that a run would need, without changing anything.

    Raises:
        VasukiError: the same that the run would raise, as far as it can be known without loading weights.
    """
    table = open_table(config)
    OutputFolder.check(
        config.output.path,
        num_rows=table.num_rows,
        config_hash=config.config_hash,
        input_fingerprint=table.fingerprint,
    )
    shape = shape_of(config)
    tokenizer_of(config)
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


def profiles_of(names: Iterable[str], config: JobConfig) -> list[HardwareProfile]:
    """The profiles asked for on the command line, else the job's, else the generic CPU's."""
    wanted = list(names) or ([config.plan.gpu] if config.plan.gpu != "auto" else ["cpu"])
    return [find_profile(name) for name in wanted]


def plan_workload(workload: Workload, profiles: Iterable[HardwareProfile]) -> list[Plan]:
    """One plan for each machine."""
    return [
        plan_parallel(workload.lengths, workload.on(profile).shape, profile, workload.config, ONE_DEVICE)
        for profile in profiles
    ]


def simulate_workload(
    workload: Workload,
    profiles: list[HardwareProfile],
    policies: Iterable[str],
    output: str = "",
    layout: Layout = ONE_DEVICE,
) -> list[Simulated]:
    """One simulated run for each machine and policy.

    Args:
        workload: lengths are taken as recorded: rows end when they say, whatever the plan expects.
        profiles: the machines.
        policies: names of policies; the job's own where there are none.
        output: write a run folder below this one for each run, such as `DIR/a10`, which `report` reads.
        layout: how the model is spread over GPUs of each kind.
    """
    wanted = list(policies) or [workload.config.engine.policy]
    runs = list(itertools.product(profiles, wanted))
    return [
        _simulate(workload, profile, policy, _folder_of(output, profile, layout, policy, len(wanted)), layout)
        for profile, policy in runs
    ]


def planned(workload: Workload, plan: Plan) -> Manifest:
    """The manifest of a run that is still to come, for the same summary as after it."""
    rows, tokens = RowCounts(plan.requests), TokenCounts(plan.prompt_tokens, plan.output_tokens_estimate)
    cost = plan.cost
    return Manifest(
        job=workload.config.model_dump(mode="json"),
        config_hash=workload.config.config_hash,
        input_fingerprint=workload.fingerprint,
        rows=rows,
        tokens=tokens,
        predicted=Prediction(plan.makespan_s, plan.lower_bound_s),
        cost=Cost(cost.gpu_hours, cost.amount, cost.currency, cost.per_million_tokens),
    )


def explain_step(workload: Workload, profile: HardwareProfile, layout: Layout = ONE_DEVICE) -> str:
    """Where the time of a typical full step goes: decodes of half-done rows, and prompts up to the token budget."""
    workload = workload.on(profile)
    plan = plan_parallel(workload.lengths, workload.shape, profile, workload.config, layout)
    lengths, settings = workload.lengths, plan.settings
    context = int((lengths.prompt_tokens + lengths.output_tokens / 2).mean())
    decodes = max(1, min(settings.limits.max_num_seqs, settings.kv_tokens // max(1, context), len(lengths)))
    chunk = max(0, settings.limits.chunk_tokens - decodes)
    cost_model = CostModel(workload.shape, profile, plan.layout)
    work = cost_model.work([1] * decodes + [chunk] * bool(chunk), [context] * decodes + [chunk] * bool(chunk))
    where = f"{profile.name} {layout.label}".rstrip()
    title = f"{where}: a step of {decodes} decodes at {context} tokens of context and {chunk} prompt tokens"
    return f"{title}\n{cost_model.step(work).explain()}"


def _folder_of(output: str, profile: HardwareProfile, layout: Layout, policy: str, num_policies: int) -> str:
    names = filter(None, (profile.name, layout.label, policy if num_policies > 1 else ""))
    return output and f"{output.rstrip('/')}/{'-'.join(names)}"


def _simulate(workload: Workload, profile: HardwareProfile, policy: str, folder: str, layout: Layout) -> Simulated:
    engine = workload.config.engine.model_copy(update={"policy": policy})
    workload = replace(workload.on(profile), config=workload.config.model_copy(update={"engine": engine}))
    plan = plan_parallel(workload.lengths, workload.shape, profile, workload.config, layout)

    def simulated_with(*observers: Observer) -> Simulated:
        return simulate_plan(
            plan,
            workload.lengths,
            workload.shape,
            profile,
            plan_config=workload.config.plan,
            observers=observers,
            one_by_one=bool(observers),
        )

    if not folder:
        return simulated_with()
    with simulated_folder(folder) as place, writing(place):
        (place / TRACE).delete()
        if layout.num_streams > 1:  # their steps overlap, a trace's follow one another
            simulated = simulated_with()
        else:
            cost_model = CostModel(workload.shape, profile, plan.layout)
            with TraceWriter(place / TRACE) as trace:
                simulated = simulated_with(StepTracer(trace, plan.settings, cost_model))
        _manifest(workload, plan, simulated, profile).write(place / MANIFEST)
    return simulated


def _manifest(workload: Workload, plan: Plan, simulated: Simulated, profile: HardwareProfile) -> Manifest:
    result = simulated.to_dict()
    rows = len(workload.lengths)
    failed = plan.misfits
    return Manifest(
        job=workload.config.model_dump(mode="json"),
        config_hash=workload.config.config_hash,
        input_fingerprint=workload.fingerprint,
        rows=RowCounts(rows, rows - failed, failed),
        tokens=TokenCounts(
            int(workload.lengths.prompt_tokens.sum()),
            int(workload.lengths.output_tokens.sum()),
            simulated.recomputed_tokens,
            simulated.result.counters.shared_tokens,
        ),
        timings=Timings(plan_s=plan.plan_s, generate_s=result["makespan_s"], makespan_s=result["makespan_s"]),
        predicted=Prediction(plan.makespan_s, plan.lower_bound_s),
        steps=result["steps"],
        batch=BatchStats(**result["batch"]),
        kv=KVStats(**result["kv"]),
        preemptions=PreemptionCounts(**result["preemptions"]),
        device={
            "type": profile.kind,
            "name": profile.title,
            "profile": profile.name,
            "policy": plan.policy,
            "count": plan.layout.num_gpus,
            "layout": plan.layout.to_dict(),
        },
        cost=Cost(**result["cost"]),
        versions={"vasuki": importlib.metadata.version("vasuki")},
        simulated=True,
        finished_at=now_utc(),
    )
