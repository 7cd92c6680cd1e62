"""What a job will take, without running it: the composition root of `vasuki plan` and `simulate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from vasuki.arrivals import Gathering
from vasuki.base.errors import JobFileError, did_you_mean
from vasuki.engine.loop import Observer
from vasuki.engine.policy import find_policy
from vasuki.io.location import writing
from vasuki.io.output.manifest import MANIFEST
from vasuki.io.output.output_folder import simulated_folder
from vasuki.io.output.trace import TRACE, TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, simulate_plan
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.manifests import simulated_manifest
from vasuki.runs.observers.progress import busy_if_slow
from vasuki.runs.observers.tracer import StepTracer
from vasuki.runs.placement import ONE_DEVICE, Placement, placed_on, placed_on_shares
from vasuki.runs.uncertainty import cost_of_uncertainty
from vasuki.runs.workload import Workload, tokens_of


def output_of(overrides: tuple[str, ...]) -> str:
    """The folder that `--set output.path=DIR` names; a job's own output is for its real runs."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("output.path=")]
    return given[-1] if given else ""


def placements_of(fleets: Iterable[Mapping[str, int]], workload: Workload) -> list[Placement]:
    """The model on each of the machines that the command line names, with as many replicas, or on the machine at hand
    if it names none."""
    config, shape = workload.config, workload.shape
    placements = [
        replace(placed_on(config, shape, find_profile(name)), replicas=number)
        for fleet in fleets
        for name, number in fleet.items()
    ]
    return placements or [placed_on_shares(config, shape, tokens_of(workload.lengths))]


def priced(placements: Iterable[Placement], prices: Mapping[str, float]) -> list[Placement]:
    """Return the placements with these prices an hour, by card, in place of the job's and the profiles'.

    Raises JobFileError for a card that is not among them.
    """
    placements = list(placements)
    wanted = by_card("--price", placements, prices)
    return [_priced(placement, wanted.get(placement.profile.name)) for placement in placements]


def by_card(option: str, placements: Iterable[Placement], given: Mapping[str, float]) -> dict[str, float]:
    """Figures that an option gives for cards, by their names as in the profiles; case does not matter.

    Raises JobFileError for a card that is not among the placements.
    """
    known = {placement.profile.name.casefold(): placement.profile.name for placement in placements}
    for name in map(str.casefold, given):
        if name not in known:
            raise JobFileError(f"{option} {name}: not one of the cards{did_you_mean(name, known)}: {', '.join(known)}")
    return {known[name.casefold()]: figure for name, figure in given.items()}


def _priced(placement: Placement, per_hour: float | None) -> Placement:
    if per_hour is None:
        return placement
    cost = placement.config.cost
    currency = placement.profile.price.currency if cost.price_per_hour is None else cost.currency
    cost = cost.model_copy(update={"price_per_hour": per_hour / placement.on_one_device, "currency": currency})
    return replace(placement, config=placement.config.model_copy(update={"cost": cost}))


def plans_of(workload: Workload, placements: Iterable[Placement], tensor: int = 1) -> list[Plan]:
    """A plan for each of the machines, with `tensor` GPUs to each replica."""
    refuse_ignored(workload.config)
    plans: list[Plan] = []
    with busy_if_slow("planning") as far:
        for each in (some := list(placements)):
            far.share, far.words = len(plans) / len(some), each.profile.name
            plans.append(each.plan(workload.lengths, Layout(tensor, data_parallel=each.replicas)))
    return plans


def simulate_workload(
    workload: Workload,
    placements: list[Placement],
    policies: Iterable[str],
    output: str = "",
    layout: Layout = ONE_DEVICE,
) -> list[Simulated]:
    """One simulated run for each machine and policy.

    Args:
        workload: lengths are taken as recorded: rows end when they say, whatever the plan expects.
        placements: the model on each of the machines.
        policies: names of policies; the job's own where there are none.
        output: write a run folder below this one for each run, such as `DIR/a10`, which `report` reads.
        layout: how each replica is spread over GPUs of each kind.
    """
    wanted = list(policies) or [workload.config.engine.policy]
    refuse_ignored(workload.config, wanted)
    runs: list[Simulated] = []
    for placement, policy in itertools.product(placements, wanted):
        spread = replace(layout, data_parallel=placement.replicas)
        folder = _folder_of(output, placement, spread, policy, len(wanted))
        runs.append(_simulate(workload, placement, policy, folder, spread))
    return runs


def explain_step(workload: Workload, placement: Placement, layout: Layout = ONE_DEVICE) -> str:
    """Say where the time of a typical full step goes: decodes of half-done rows, and prompts up to the token budget."""
    plan = placement.plan(workload.lengths, layout)
    lengths, settings = workload.lengths, plan.settings
    context = int((lengths.prompt_tokens + lengths.output_tokens / 2).mean())
    decodes = max(1, min(settings.limits.max_num_seqs, settings.kv_tokens // max(1, context), len(lengths)))
    chunk = max(0, settings.limits.chunk_tokens - decodes)
    cost_model = CostModel(placement.shape, placement.profile, plan.layout)
    work = cost_model.work([1] * decodes + [chunk] * bool(chunk), [context] * decodes + [chunk] * bool(chunk))
    where = f"{plan.gpu} {layout.label}".rstrip()
    title = f"{where}: a step of {decodes} decodes at {context} tokens of context and {chunk} prompt tokens"
    return f"{title}\n{cost_model.step(work).explain()}"


def _folder_of(output: str, placement: Placement, layout: Layout, policy: str, num_policies: int) -> str:
    names = filter(None, (placement.profile.name, layout.label, policy if num_policies > 1 else ""))
    return output and f"{output.rstrip('/')}/{'-'.join(names)}"


def _simulate(workload: Workload, placement: Placement, policy: str, folder: str, layout: Layout) -> Simulated:
    placement = placement.with_engine(policy=policy)
    if find_policy(policy).gathers:  # a step holds a packed batch, or a longer prompt alone
        batch_tokens, prompts = Gathering.of(placement.config).batch_tokens, workload.lengths.prompt_tokens
        placement = placement.with_engine(chunk_tokens=max(min(batch_tokens, int(prompts.sum())), int(prompts.max())))
    config, plan = placement.config, placement.plan(workload.lengths, layout)
    shape, profile = placement.shape, placement.profile

    def simulated_with(*observers: Observer) -> Simulated:
        simulated = simulate_plan(
            plan,
            workload.lengths,
            shape,
            profile,
            plan_config=config.plan,
            gathering=Gathering.of(config),
            observers=observers,
            one_by_one=bool(observers),
        )
        makespan_s = simulated.plan.makespan_s
        uncertainty = cost_of_uncertainty(placement, plan, workload.lengths, makespan_s, layout)
        return replace(simulated, plan=replace(simulated.plan, uncertainty=uncertainty))

    if not folder:
        return simulated_with()
    with simulated_folder(folder) as place, writing(place):
        (place / TRACE).delete()
        if layout.num_streams > 1:  # their steps overlap, a trace's follow one another
            simulated = simulated_with()
        else:
            with TraceWriter(place / TRACE) as trace:
                tracer = StepTracer(trace.record, plan.settings, shape.kv_bytes_per_token, shape.num_layers)
                simulated = simulated_with(tracer)
        manifest = simulated_manifest(
            config, workload.config_hash, workload.fingerprint, plan, workload.lengths, simulated, shape, profile
        )
        manifest.write(place / MANIFEST)
    return simulated
