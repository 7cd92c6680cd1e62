"""What a job will take, without running it: the composition root of `vasuki plan` and `simulate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from vasuki.base.config import JobConfig
from vasuki.commands.manifests import simulated_manifest
from vasuki.commands.step_tracer import StepTracer
from vasuki.commands.workload import Workload
from vasuki.engine.loop import Observer
from vasuki.io.location import writing
from vasuki.io.output.manifest import MANIFEST
from vasuki.io.output.output_folder import simulated_folder
from vasuki.io.output.trace import TRACE, TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.planner import plan_parallel
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, simulate_plan

ONE_DEVICE = Layout()


def output_of(overrides: tuple[str, ...]) -> str:
    """The folder that `--set output.path=DIR` names; a job's own output is for its real runs."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("output.path=")]
    return given[-1] if given else ""


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
        manifest = simulated_manifest(workload.config, workload.fingerprint, plan, workload.lengths, simulated, profile)
        manifest.write(place / MANIFEST)
    return simulated
