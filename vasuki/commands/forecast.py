"""What a job will take, without running it: the composition root of `vasuki plan`, `simulate` and `check`."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterable
from dataclasses import replace

from vasuki.base.config import JobConfig
from vasuki.commands.foresight import MachineProfile, Tokens, profile_for_plan
from vasuki.commands.step_tracer import StepTracer
from vasuki.commands.workload import Workload, model_tokenizer, shape_of
from vasuki.engine.loop import Observer
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import InputTable, open_table
from vasuki.io.location import writing
from vasuki.io.output.manifest import (
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
from vasuki.io.output.output_folder import OutputFolder, simulated_folder
from vasuki.io.output.trace import TRACE, TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner import plan_parallel
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, simulate_plan

ONE_DEVICE = Layout()


def output_of(overrides: tuple[str, ...]) -> str:
    """The folder that `--set output.path=DIR` names; a job's own output is for its real runs."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("output.path=")]
    return given[-1] if given else ""


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
    first_prompt = _first_prompt(config, table, shape)
    if config.plan.gpu != "auto":
        find_profile(config.plan.gpu)
    return {
        "job": config.name,
        "rows": table.num_rows,
        "model": shape.name,
        "parameters": shape.num_parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "output": config.output.path,
        "first_prompt": first_prompt,
    }


def _first_prompt(config: JobConfig, table: InputTable, shape: ModelShape) -> str:
    """The first row's prompt as the model will read it, special tokens included, or why there is none."""
    if not config.model.path:
        return "not known: model.shape comes without a tokenizer"
    tokenizer = model_tokenizer(config)
    with RequestStream(
        table, config, tokenizer, max_context_tokens=shape.max_context_tokens, vocab_size=shape.vocab_size
    ) as requests:
        first = next(requests)
    return first.error or tokenizer.text_of(first.prompt_token_ids.tolist())


def profiles_of(names: Iterable[str], config: JobConfig) -> list[HardwareProfile]:
    """The profiles asked for on the command line, else the job's, else the generic CPU's."""
    wanted = list(names) or ([config.plan.gpu] if config.plan.gpu != "auto" else ["cpu"])
    return [find_profile(name) for name in wanted]


def machines_of(names: Iterable[str], workload: Workload) -> list[MachineProfile]:
    """The profiles asked for on the command line, else the job's, else that of the machine at hand."""
    config, lengths = workload.config, workload.lengths
    wanted = list(names) or ([config.plan.gpu] if config.plan.gpu != "auto" else [])
    if wanted:
        return [MachineProfile.named(name) for name in wanted]
    tokens = Tokens(float(lengths.prompt_tokens.sum()), float(lengths.output_tokens.sum()))
    return [profile_for_plan(config, workload.shape, tokens)]


def plan_workload(workload: Workload, machines: Iterable[MachineProfile]) -> list[Plan]:
    """One plan for each machine."""
    return [_planned(workload, machine) for machine in machines]


def _planned(workload: Workload, machine: MachineProfile) -> Plan:
    profile = machine.profile
    plan = plan_parallel(workload.lengths, workload.on(profile).shape, profile, workload.config, ONE_DEVICE)
    return replace(plan, source=machine.source, spread=machine.spread)


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
        predicted=Prediction(
            plan.makespan_s, plan.lower_bound_s, plan.schedule_bound_s, plan.source, plan.output_tokens_estimate
        ),
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
        predicted=Prediction(
            plan.makespan_s, plan.lower_bound_s, plan.schedule_bound_s, plan.source, plan.output_tokens_estimate
        ),
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
