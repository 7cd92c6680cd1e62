"""What plan and run know of a job's machine: the type that the model computes in, the profile, and the memory for KV.

`vasuki run` looks at the model that it has loaded. `vasuki plan` comes to the same by the same rules from what can be
known without torch, so that both make the same plan of the same job on the same machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vasuki.base.config import JobConfig, KVConfig
from vasuki.base.errors import InputError, JobFileError, ModelError
from vasuki.machines.here import cpu, gpu
from vasuki.machines.here.cpu import limits_of
from vasuki.machines.here.split import Share, split
from vasuki.machines.memory_budget import room_bytes
from vasuki.machines.paging import page_tokens
from vasuki.machines.profile import AttentionChoice, HardwareProfile, Limits
from vasuki.machines.profile_files import find_profile
from vasuki.models.dtypes import computed_dtype
from vasuki.models.layout import Layout
from vasuki.models.shape import BACKENDS, ModelShape
from vasuki.planner import make_plan, plan_parallel
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.foresight import MachineProfile, Tokens, profile_for_plan, profile_for_run, shape_in_use

if TYPE_CHECKING:
    import torch

    from vasuki.hf.loading.load_model import LoadedModel

log = logging.getLogger(__name__)

ONE_DEVICE = Layout()
NO_TOKENS = Tokens(0.0, 0.0)  # of nothing that anybody waits for, so nothing is measured
NOTHING_TO_RUN = Lengths(np.ones(1, np.int64), np.ones(1, np.int64))  # stands in where none of the first rows can run
CLEARLY = 1.2  # times as fast; a CPU's rates, measured one after the other, differ by noise


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's model on a machine: all that a plan is made from, beside the lengths of the requests."""

    config: JobConfig
    shape: ModelShape  # in the type that the model computes in there
    machine: MachineProfile
    kv: KVConfig
    beside_weights_bytes: int | None = None  # see `memory_budget`
    replicas: int = 1  # that share the job, each on as much as this,
    on_one_device: int = 1  # and so many of them on a CPU, which is paid for once

    @property
    def profile(self) -> HardwareProfile:
        """The machine's rates."""
        return self.machine.profile

    def with_engine(self, **changes: str | int) -> Placement:
        """The same with other settings of `engine`."""
        engine = self.config.engine.model_copy(update=changes)
        return replace(self, config=self.config.model_copy(update={"engine": engine}))

    def plan(self, lengths: Lengths, layout: Layout = ONE_DEVICE) -> Plan:
        """Plan the job, or some of its requests. Raises as `make_plan` and `plan_parallel` do."""
        return replace(self._plan(lengths, layout), source=self.machine.source, spread=self.machine.spread)

    def _plan(self, lengths: Lengths, layout: Layout) -> Plan:
        config = self.config.model_copy(update={"kv": self.kv})
        if layout != ONE_DEVICE:
            return plan_parallel(lengths, self.shape, self.profile, config, layout)
        return make_plan(
            lengths,
            self.shape,
            self.profile,
            plan=config.plan,
            engine=config.engine,
            kv=config.kv,
            cost=config.cost,
            beside_weights_bytes=self.beside_weights_bytes,
            may_be_urgent=config.input.may_be_urgent,
        )


def plan_for(lengths: Lengths, planned: Callable[[Lengths], Plan]) -> Plan:
    """The plan that `planned` makes for such lengths, or for none at all."""
    try:
        return planned(lengths if len(lengths) else NOTHING_TO_RUN)
    except InputError:  # none of them fits: they become error rows, as beside others that do
        return planned(NOTHING_TO_RUN)


@dataclass(frozen=True, slots=True)
class _Device:
    """What the job computes on, and what it has to itself there."""

    gpu: str  # as its driver reports it; empty for the CPU
    total_bytes: int
    available_bytes: int
    generation: tuple[int, int] | None = None  # of a GPU whose torch walks block tables

    @property
    def on_cpu(self) -> bool:
        """Whether that is the CPU."""
        return not self.gpu


def placed_on(config: JobConfig, shape: ModelShape, profile: HardwareProfile) -> Placement:
    """A model on a machine that is not at hand.

    Args:
        config: the job.
        shape: the model's, as it was saved.
        profile: the machine's.
    """
    peaks = profile.peak_tflops
    fast = peaks.get("bfloat16", 0.0) >= CLEARLY * peaks.get("float32", 0.0)
    on_cpu = profile.kind == "cpu"
    shape = _computed(config, shape, on_cpu, fast)
    kv, memory = config.kv, profile.memory_bytes
    if on_cpu:
        kv = _kv(config, _Device("", memory, memory), memory - shape.weight_bytes)
    kv = _in_blocks(kv, shape, None if on_cpu else profile.generation, profile.attention)
    return Placement(config, shape, MachineProfile.of(profile), kv)


def placed_here(config: JobConfig, shape: ModelShape, tokens: Tokens = NO_TOKENS) -> Placement:
    """A model on the machine at hand, before it is loaded.

    A job that names the profile of another kind of machine (`plan.gpu`) is planned for that one. Where the job is long
    enough and nobody has measured the machine, it is measured, see `profile_for_plan`.

    Args:
        config: the job.
        shape: the model's, as it was saved.
        tokens: about so many of prompts and of outputs.

    Raises:
        ModelError: the job wants a CUDA device, and there is none.
        ProfileError: there is no such profile, or it is malformed.
        JobFileError: see `within_host_memory`.
    """
    device = _device_at_hand(config)
    if profile := _profile_elsewhere(config, device):
        return placed_on(config, shape, profile)
    shape = _computed(config, shape, device.on_cpu, _multiplies_bfloat16(config))
    weight_bytes = shape.weight_bytes
    waits = not device.on_cpu and weights_wait(config, weight_bytes, device.total_bytes, device.available_bytes)
    beside_weights_bytes = None if waits else _beside_weights(config, device, device.available_bytes - weight_bytes)
    free_bytes = cpu.available_bytes() - (weight_bytes if device.on_cpu or waits else 0)
    kv = _kv(config, device, free_bytes)
    machine = _machine(config, device, waits, lambda: profile_for_plan(config, shape, tokens, device.gpu, waits))
    kv = _in_blocks(kv, shape, device.generation, machine.profile.attention)
    return Placement(config, shape, machine, kv, beside_weights_bytes)


def shares_here(config: JobConfig) -> list[Share]:
    """What each replica of a job gets of the machine at hand; nothing if there is only one.

    Raises JobFileError if there are fewer devices than the job asks for.
    """
    engine = config.engine
    shares = split(engine.device, engine.replicas) if engine.replicas != 1 else []
    return shares if len(shares) > 1 else []


def job_of_replica(config: JobConfig, share: Share, here: int) -> JobConfig:
    """The job as one of so many replicas on a machine runs it: with its share of the host's memory, and on a CPU of the
    device's memory and price, too."""
    kv, cost = config.kv, config.cost
    changes: dict[str, float] = {"host_memory": max(1, kv.host_memory // here)}
    if not share.gpu:
        if isinstance(kv.device_memory, float):
            changes["device_memory"] = kv.device_memory / here
        if cost.price_per_hour is not None:
            cost = cost.model_copy(update={"price_per_hour": cost.price_per_hour / here})
    return config.model_copy(update={"kv": kv.model_copy(update=changes), "cost": cost})


def placed_on_shares(config: JobConfig, shape: ModelShape, tokens: Tokens = NO_TOKENS) -> Placement:
    """A model on each of the replicas that the job wants on the machine at hand. Raises as `placed_here`, and
    JobFileError if there are fewer devices."""
    if _profile_elsewhere(config, _device_at_hand(config)):
        return replace(placed_here(config, shape, tokens), replicas=replicas_elsewhere(config))
    if not (shares := shares_here(config)):
        return placed_here(config, shape, tokens)
    with shares[0].entered():
        placement = placed_here(job_of_replica(config, shares[0], len(shares)), shape, tokens)
    return replace(placement, replicas=len(shares), on_one_device=1 if shares[0].gpu else len(shares))


def replicas_elsewhere(config: JobConfig) -> int:
    """How many replicas a job wants on a machine whose devices nobody counts."""
    replicas = config.engine.replicas
    return 1 if replicas == "auto" else replicas


def placed_as_loaded(config: JobConfig, loaded: LoadedModel, tokens: Tokens) -> Placement:
    """A loaded model on the machine at hand, which is measured with it as in `placed_here`. Raises the same."""
    from vasuki.hf.device.device import available_bytes, describe, total_bytes

    device = _Device(
        gpu="" if loaded.device.type == "cpu" else loaded.device_name,
        total_bytes=total_bytes(loaded.device),
        available_bytes=available_bytes(loaded.device),
        generation=describe(loaded.device).compute_capability if gpu.torch_pages() else None,
    )
    # Weights that wait on the host are planned for what is free; the others are on the device already.
    waits = not loaded.is_on_device
    beside_weights_bytes = None if waits else _beside_weights(config, device, device.available_bytes)
    shape = shape_in_use(loaded, config)
    kv = _kv(config, device, cpu.available_bytes())
    machine = _machine(config, device, waits, lambda: profile_for_run(config, loaded, shape, tokens))
    kv = _in_blocks(kv, shape, device.generation, machine.profile.attention)
    return Placement(config, shape, machine, kv, beside_weights_bytes)


def stays_on_host(config: JobConfig, weight_bytes: int, device: torch.device) -> bool:
    """Whether so many bytes of weights, loaded into host memory, wait there for a plan."""
    from vasuki.hf.device.device import available_bytes, total_bytes

    return weights_wait(config, weight_bytes, total_bytes(device), available_bytes(device))


def weights_wait(config: JobConfig, weight_bytes: int, total_bytes: int, available_bytes: int) -> bool:
    """Whether weights are more than a device with so much memory has room for, or the job keeps some on the host."""
    if config.engine.weights_on_host != "auto":
        return config.engine.weights_on_host > 0
    return weight_bytes >= room_bytes(config.kv.device_memory, total_bytes, available_bytes)


def within_host_memory(kv: KVConfig, free_bytes: int) -> KVConfig:
    """Lower `kv.host_memory` to what is free, with a warning if that is less than allowed.

    Raises JobFileError if the job names both the mode and the amount: then it is to run like that or not at all.
    """
    if kv.host_memory <= free_bytes:
        return kv
    asked, free = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (kv.host_memory, free_bytes))
    short = f"kv.host_memory: {asked} are asked for, {free} are free"
    if kv.asks_for_offload and "host_memory" in kv.model_fields_set:
        raise JobFileError(f"{short}; lower it, or let kv.offload be auto to take what there is")
    log.warning("%s; taking those", short)
    return kv.model_copy(update={"host_memory": max(1, free_bytes)})


def _device_at_hand(config: JobConfig) -> _Device:
    """The device that a run would take."""
    card = None if config.engine.device == "cpu" else gpu.gpu()
    if card is not None:
        generation = card.generation if gpu.torch_pages() else None
        return _Device(card.name, card.total_bytes, card.available_bytes, generation)
    if config.engine.device == "cuda":
        raise ModelError("engine.device is cuda, but there is no CUDA device here; name a card with --gpu")
    return _Device("", cpu.total_bytes(), cpu.available_bytes())


def _profile_elsewhere(config: JobConfig, device: _Device) -> HardwareProfile | None:
    """The profile that the job names, if that is another kind of machine than the one at hand."""
    profile = None if config.plan.gpu == "auto" else find_profile(config.plan.gpu)
    return profile if profile and (profile.kind == "cpu") != device.on_cpu else None


def _multiplies_bfloat16(config: JobConfig) -> bool:
    """Whether the processor multiplies bfloat16 no slower than float32, by the kernels that a run would take."""
    from vasuki.hf.kernels import levels, native

    processor = cpu.processor()
    level = levels.chosen(processor.capabilities) if config.engine.compile != "off" else levels.NONE
    if level is levels.NONE or native.find_compiler() is None:
        return processor.torch_multiplies_bfloat16
    return level in (levels.AVX512_BF16, levels.AMX)


def _computed(config: JobConfig, shape: ModelShape, on_cpu: bool, multiplies_bfloat16: bool) -> ModelShape:
    dtype = computed_dtype(config.model.dtype, shape.dtype, on_cpu, multiplies_bfloat16)
    asked = config.engine.attention
    if asked == "ragged" != shape.way:
        raise ModelError(
            f"{shape.name}: the ragged backend cannot serve it; where engine.attention is auto, its backend is "
            f"{BACKENDS[shape.way]}"
        )
    shape = replace(shape.served_by(asked), compiles=config.engine.compile != "off")
    return shape.with_dtype(dtype, config.kv.dtype)


def _machine(
    config: JobConfig, device: _Device, weights_wait: bool, found: Callable[[], MachineProfile]
) -> MachineProfile:
    """The profile that the job names, else the one that is found, with the memory that there is. Bounds go by the
    processor that really runs."""
    changes: dict[str, int | Limits] = {}
    if config.plan.gpu != "auto":
        machine = MachineProfile.of(find_profile(config.plan.gpu))
    else:
        machine = found()
        changes["memory_mib"] = (device.available_bytes if weights_wait else device.total_bytes) // 2**20
    if device.on_cpu:
        changes["limits"] = limits_of(cpu.processor())
    return replace(machine, profile=machine.profile.model_copy(update=changes))


def _beside_weights(config: JobConfig, device: _Device, available_bytes: int) -> int | None:
    """What `kv.device_memory` leaves to activations and KV where so much is free beside the weights."""
    if config.kv.device_memory > 1:
        return None
    return max(0, room_bytes(config.kv.device_memory, device.total_bytes, available_bytes))


def _kv(config: JobConfig, device: _Device, free_bytes: int) -> KVConfig:
    """No more host memory than there is. On a CPU that is what the device leaves; half of it where nobody says more."""
    kv = config.kv
    if device.on_cpu:
        if not kv.asks_for_offload:
            return kv
        free_bytes = room_bytes(kv.device_memory, device.total_bytes, free_bytes)
        if "host_memory" not in kv.model_fields_set:
            free_bytes //= 2
    return within_host_memory(kv, free_bytes)


def _in_blocks(
    kv: KVConfig, shape: ModelShape, generation: tuple[int, int] | None, attention: AttentionChoice
) -> KVConfig:
    """Blocks of the size that the chosen kernels of a GPU of that generation walk, unless the job says otherwise.
    Without such a GPU, or where any size will do, the planner chooses."""
    size = generation and page_tokens(shape, generation, attention)
    return kv.model_copy(update={"block_tokens": size}) if size and kv.block_tokens == "auto" else kv
