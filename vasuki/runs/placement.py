"""What plan and run know of a job's machine: the type that the model computes in, the profile, and the memory for KV.

`vasuki run` looks at the model that it has loaded. `vasuki plan` comes to the same by the same rules from what can be
known without torch, so that both make the same plan of the same job on the same machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vasuki.base.config import JobConfig, KVConfig
from vasuki.base.errors import InputError, JobFileError, ModelError
from vasuki.engine.policy import find_policy
from vasuki.machines.attention import page_tokens
from vasuki.machines.here import cpu
from vasuki.machines.here.cpu import limits_of
from vasuki.machines.here.device import LocalDevice, local_device
from vasuki.machines.here.measured import (
    DATASHEET,
    MachineProfile,
    Tokens,
    cache_key,
    datasheet,
    measured_before,
    roughly_s,
    why_not_measured,
)
from vasuki.machines.here.split import Share, split
from vasuki.machines.profile import AttentionChoice, HardwareProfile, ProcessorLimits
from vasuki.machines.profile_files import find_profile
from vasuki.models.dtypes import computed_dtype
from vasuki.models.layout import Layout
from vasuki.models.shape import BACKENDS, ModelShape
from vasuki.planner import make_plan, plan_parallel
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.workload import shape_of

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel

log = logging.getLogger(__name__)

ONE_DEVICE = Layout()
NO_TOKENS = Tokens(0.0, 0.0)  # of nothing that anybody waits for, so nothing is measured
NOTHING_TO_RUN = Lengths(np.ones(1, np.int64), np.ones(1, np.int64))  # stands in where none of the first rows can run
_MOST_LOADED_BYTES = 2**31  # of weights that are loaded for a plan alone
_ADA = (8, 9)  # the first generation that multiplies numbers of 8 bits
CLEARLY = 1.2  # times as fast; a CPU's rates, measured one after the other, differ by noise


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's model on a machine: all that a plan is made from, except the lengths of the requests."""

    config: JobConfig
    shape: ModelShape  # in the type that the model computes in there
    machine: MachineProfile
    kv: KVConfig
    beside_weights_bytes: int | None = None  # see `memory_budget`
    replicas: int = 1  # that share the job, each on as much as this,
    on_one_device: int = 1  # and how many of them share a CPU, which is paid for once

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
    except InputError:  # none of them fits: they become error rows, as among others that do
        return planned(NOTHING_TO_RUN)


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
    shape = _computed(config, shape, None if on_cpu else profile.generation, fast)
    kv, memory = _kv(config), profile.memory_bytes
    if on_cpu:
        kv = LocalDevice("", memory, memory).with_host_memory(kv, memory - shape.weight_bytes)
    kv = _in_blocks(kv, shape, None if on_cpu else profile.generation, profile.attention)
    return Placement(config, shape, MachineProfile.of(profile), kv)


def placed_here(config: JobConfig, shape: ModelShape, tokens: Tokens = NO_TOKENS) -> Placement:
    """A model on the machine at hand, before it is loaded.

    A job that names the profile of another kind of machine (`plan.gpu`) is planned for that one. Where the job is long
    enough and nobody has measured the machine, it is measured, see `machines.here.measured`.

    Args:
        config: the job.
        shape: the model's, as it was saved.
        tokens: how many prompt and output tokens there are, about.

    Raises:
        ModelError: the job wants a CUDA device, and there is none.
        ProfileError: there is no such profile, or it is malformed.
        JobFileError: see `machines.here.device.within_host_memory`.
    """
    device = local_device(config.engine.device)
    if profile := _profile_elsewhere(config, device):
        return placed_on(config, shape, profile)
    shape = _computed(config, shape, device.generation, _multiplies_bfloat16(config))
    waits = device.weights_wait(config.engine, config.kv, shape.weight_bytes)
    load = partial(_load_to_measure, config, shape)
    return _placed(config, shape, device, waits, shape.weight_bytes, tokens, load)


def shares_here(config: JobConfig) -> list[Share]:
    """What each replica of a job gets of the machine at hand; nothing if there is only one.

    Raises JobFileError if there are fewer devices than the job asks for.
    """
    engine = config.engine
    shares = split(engine.device, engine.replicas) if engine.replicas != 1 else []
    return shares if len(shares) > 1 else []


def job_of_replica(config: JobConfig, share: Share, here: int) -> JobConfig:
    """The job as one of `here` replicas on a machine runs it: with its share of the host's memory, and on a CPU of the
    device's memory and price, too."""
    kv, cost = config.kv, config.cost
    changes: dict[str, float] = {"host_memory": max(1, kv.host_memory // here)}
    if not share.gpu:
        if isinstance(kv.device_memory, float):
            changes["device_memory"] = kv.device_memory / here
        if cost.price_per_hour is not None:
            cost = cost.model_copy(update={"price_per_hour": cost.price_per_hour / here})
    shared = kv.model_copy(update=changes)
    shared.model_fields_set.intersection_update(kv.model_fields_set)  # what nobody set stays so
    return config.model_copy(update={"kv": shared, "cost": cost})


def placed_on_shares(config: JobConfig, shape: ModelShape, tokens: Tokens = NO_TOKENS) -> Placement:
    """A model on each of the replicas that the job wants on the machine at hand. Raises as `placed_here`, and
    JobFileError if there are fewer devices."""
    if _profile_elsewhere(config, local_device(config.engine.device)):
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
    from vasuki.hf.device.device import device_of

    shape = _packed(config, loaded.shape_in_use(Path(config.model.path).name, config.kv.dtype))
    return _placed(config, shape, device_of(loaded.device), not loaded.is_on_device, 0, tokens, lambda: loaded)


def _placed(
    config: JobConfig,
    shape: ModelShape,
    device: LocalDevice,
    waits: bool,
    unloaded_bytes: int,
    tokens: Tokens,
    load: Callable[[], LoadedModel | None],
) -> Placement:
    """A model on a device of this machine, with the profile that the job names, else the one that is found, and the
    memory that there is. Bounds go by the processor that really runs.

    Args:
        config: the job.
        shape: of the model as it runs there.
        device: where.
        waits: the weights wait in host memory for a plan, for what is free; else they are on the device, or will be.
        unloaded_bytes: of weights that are not in memory yet.
        tokens: how many prompt and output tokens there are, about.
        load: the model to measure with; None if it is too large for a plan to load.
    """
    left = None if waits else device.beside_weights_bytes(_kv(config), device.available_bytes - unloaded_bytes)
    on_host = unloaded_bytes if device.on_cpu or waits else 0
    kv = device.with_host_memory(_kv(config), cpu.available_bytes() - on_host)
    changes: dict[str, int | ProcessorLimits] = {"limits": limits_of(cpu.processor())} if device.on_cpu else {}
    if config.plan.gpu == "auto":
        machine = _found(config, shape, device, waits, tokens, load)
        changes["memory_mib"] = (device.available_bytes if waits else device.total_bytes) // 2**20
    else:
        machine = MachineProfile.of(find_profile(config.plan.gpu))
    machine = replace(machine, profile=machine.profile.model_copy(update=changes))
    kv = _in_blocks(kv, shape, device.paging, machine.profile.attention)
    return Placement(config, shape, machine, kv, left)


def _kv(config: JobConfig) -> KVConfig:
    """What the job says of KV, by itself or by its policy."""
    if config.kv.offload == "auto" and find_policy(config.engine.policy).goes_deep:
        return config.kv.model_copy(update={"offload": "by_batch"})
    return config.kv


def _profile_elsewhere(config: JobConfig, device: LocalDevice) -> HardwareProfile | None:
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


def _computed(
    config: JobConfig, shape: ModelShape, generation: tuple[int, int] | None, multiplies_bfloat16: bool
) -> ModelShape:
    """The shape as the job asks for it, on a GPU of that generation or a CPU."""
    dtype = computed_dtype(config.model.dtype, shape.dtype, generation is None, multiplies_bfloat16)
    refuse_backend(config, shape)
    refuse_8_bits(config, shape, generation)
    shape = replace(shape.served_by(config.engine.attention), compiles=config.engine.compile != "off")
    return _packed(config, shape.with_dtype(dtype, config.kv.dtype, config.model.quantization))


def _packed(config: JobConfig, shape: ModelShape) -> ModelShape:
    """The shape with prompts packed as the job asks. Raises JobFileError where it asks in vain."""
    packing = config.engine.packing
    if packing != "auto" and shape.backend != "padded":
        way_out = "set engine.attention to padded" if shape.backend == "ragged" else "leave it out"
        raise JobFileError(f"engine.packing: {packing} is for padded rows, and {shape.name} has none here; {way_out}")
    if packing == "always" and not shape.longest_packed_tokens:
        raise JobFileError(f"engine.packing: no prompts of {shape.name} can share a row; leave it out")
    return shape.packed_as(packing)


def refuse_backend(config: JobConfig, shape: ModelShape) -> None:
    """Refuse a model that the backend which the job asks for cannot serve, as its type tells. Raises ModelError."""
    if config.engine.attention == "ragged" != shape.backend:
        raise ModelError(
            f"{shape.name}: the ragged backend cannot serve it; where engine.attention is auto, its backend is "
            f"{BACKENDS[shape.backend]}"
        )


def refuse_8_bits(config: JobConfig, shape: ModelShape, generation: tuple[int, int] | None) -> None:
    """Refuse keys and values, and products, of 8 bits where nothing computes with them. Raises JobFileError.

    Args:
        config: the job.
        shape: of its model, as it was saved.
        generation: compute capability of the GPU; None for a CPU.
    """
    if config.kv.dtype == "float8":
        _refuse_8_bits("kv.dtype: float8", config, shape, generation)
    if config.model.quantization != "float8":
        return
    key = "model.quantization: float8"
    _refuse_8_bits(key, config, shape, generation)
    if generation is not None and generation < _ADA:
        capability = ".".join(map(str, generation))
        raise JobFileError(f"{key} needs a GPU from Ada on, of compute capability 8.9; this one has {capability}")
    if (dtype := computed_dtype(config.model.dtype, shape.dtype, False, True)) != "bfloat16":
        raise JobFileError(f"{key} goes with model.dtype: bfloat16, and {shape.name} computes in {dtype}")
    others = {
        "experts": shape.num_expert_layers,
        "latent attention": shape.latent,
        "gated attention": shape.gated_attention,
        "layers that carry a state": shape.recurrent,
    }
    if had := " and ".join(what for what, number in others.items() if number):
        raise JobFileError(f"{key} is for layers of plain attention and dense MLPs, and {shape.name} has {had}")
    if config.engine.compile == "off":
        raise JobFileError(f"{key} is for joined layers, which engine.compile: off does without")
    if config.task in ("embed", "classify"):
        raise JobFileError(f"{key} is for tasks generate and score, not {config.task}")


def _refuse_8_bits(key: str, config: JobConfig, shape: ModelShape, generation: tuple[int, int] | None) -> None:
    if generation is None:
        raise JobFileError(f"{key} is for GPUs; on a CPU bfloat16 is the least")
    if (backend := shape.served_by(config.engine.attention).backend) != "ragged":
        raise JobFileError(f"{key} is for packed attention, and that of {shape.name} is {BACKENDS[backend]}")


def _found(
    config: JobConfig,
    shape: ModelShape,
    device: LocalDevice,
    waits: bool,
    tokens: Tokens,
    load: Callable[[], LoadedModel | None],
) -> MachineProfile:
    """The profile of a device of this machine: measured before, measured now, or its datasheet."""
    base = datasheet(device)
    if not config.model.path:
        return MachineProfile(base, f"{DATASHEET}; there is no model to measure with")
    saved = shape_of(config).served_by(config.engine.attention)
    measured_as = replace(saved, product_dtype=shape.product_dtype)
    key = cache_key(measured_as, device.gpu, config.engine.compile != "off")
    if kept := measured_before(device.names, key):
        return kept
    rough_s = roughly_s(shape, base, tokens)
    if why_not := why_not_measured(rough_s, waits):
        return MachineProfile(base, f"{DATASHEET}; {why_not}")
    if (loaded := load()) is None:
        return MachineProfile(base, f"{DATASHEET}; the first run measures this machine, or `vasuki profile`")
    from vasuki.hf.profiler.first_measure import measured_now

    shape = loaded.shape_in_use(Path(config.model.path).name, config.kv.dtype)
    return measured_now(loaded, shape, base, rough_s, key, config.kv.block_tokens)


def _load_to_measure(config: JobConfig, shape: ModelShape) -> LoadedModel | None:
    """The model, for a plan of a job on a machine that nobody has measured. Raises ModelError as `load_model`."""
    if shape.weight_bytes > _MOST_LOADED_BYTES:
        return None
    from vasuki.hf.loading.load_model import load_model

    log.info("loading the model to measure this machine with it, once")
    engine = config.engine
    compiles = engine.compile != "off"
    return load_model(
        config.model,
        engine.device,
        compiles=compiles,
        kv_dtype=config.kv.dtype,
        backend=engine.attention,
        task=config.task,
    )


def _in_blocks(
    kv: KVConfig, shape: ModelShape, generation: tuple[int, int] | None, attention: AttentionChoice
) -> KVConfig:
    """Set `kv.block_tokens` to the page size of the GPU's attention kernel, unless the job sets it. Without such a GPU,
    or where any size will do, the planner chooses."""
    size = generation and page_tokens(shape, generation, attention)
    return kv.model_copy(update={"block_tokens": size}) if size and kv.block_tokens == "auto" else kv
