"""Measurements put together as a HardwareProfile.

Datasheet figures of a known device stay as they are: peak rates that no product exceeds, bandwidth, price. Efficiencies
are then what was measured as a share of them. An unknown device, and every CPU, gets the best that was measured as its
peak. Either way the measured points are part of the profile, and the cost model meets them exactly.
"""

from __future__ import annotations

import datetime
import logging
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm
from transformers import AutoConfig

from vasuki.base.errors import ProfileError, one_line
from vasuki.base.units import percent_text
from vasuki.hf.attention.chunks import AttentionKernels, TileKernel
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.device.device import Machine, board_of, describe
from vasuki.hf.kernels.paged_attention import load_kernel
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.loading.load_model import resolve_device, resolve_dtype
from vasuki.hf.loading.triton_kernels import tile_attention
from vasuki.hf.profiler import links, operator_times, step_overheads
from vasuki.hf.profiler.in_step import WholeSteps
from vasuki.hf.profiler.operator_times import Bench
from vasuki.hf.profiler.recurrent_times import measure_recurrent
from vasuki.hf.profiler.timing import FULL, QUICK, Effort
from vasuki.machines.cost_model import CostModel
from vasuki.machines.gpus import known_profile
from vasuki.machines.here import cpu
from vasuki.machines.here.cpu import limits_of
from vasuki.machines.here.stolen_time import NOISE, StolenTime
from vasuki.machines.link import Link
from vasuki.machines.measured_points import AttentionPoints, MatmulPoints, Measured, RecurrentPoints
from vasuki.machines.price import Price
from vasuki.machines.profile import (
    AttentionChoice,
    Efficiency,
    HardwareProfile,
    Overheads,
    Power,
)
from vasuki.machines.profile_files import find_profile, profile_for_device
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape

log = logging.getLogger(__name__)

# What layers that cannot be built or run outside of their model raise.
_NOT_ALONE = (
    Unsupported, AttributeError, TypeError, LookupError, ValueError, OSError, RuntimeError, StopIteration,
)  # fmt: skip
_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PEAK_SIZES = {"cpu": (256, 768), "cuda": (2048, 8192)}
_LOAD_SIZE = 8192  # of the matmul that shows the power under load
_SMALL_LLAMA = ModelShape(
    name="a small Llama",
    num_layers=16,
    hidden_size=1024,
    intermediate_size=2816,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32000,
)
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def profile_machine(
    device: str = "auto",
    model: ModelShape | None = None,
    name: str | None = None,
    quick: bool = False,
    progress: bool = False,
    folder: Path | None = None,
) -> HardwareProfile:
    """Measure this machine: a minute or two, or less than 20 seconds if `quick`, which is coarser.

    Args:
        device: `cpu`, `cuda`, or `auto` for CUDA where there is one.
        model: the sizes to measure with; predictions are best for this model. Without one, Llama-3-8B's on a GPU
            and a small Llama's on a CPU.
        name: of the profile and its file; made from the device's name if not given.
        progress: show a bar on stderr.
        folder: of the model, where it has one; its recurrent layers are measured then.

    Raises:
        ModelError: CUDA is wanted and absent.
        ProfileError: the name is none that `find_profile` would find.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ProfileError(f"'{name}' cannot name a profile: use lower case letters, digits, dots and dashes")
    where = resolve_device(device)
    shape = model or _default_shape(where)
    saved = getattr(torch, shape.dtype, torch.bfloat16)
    kernels = load_cpu_kernels() if where.type == "cpu" else None
    dtype = resolve_dtype("auto", saved, where, kernels)
    shape = shape.with_dtype(operator_times.dtype_name(dtype))
    effort = QUICK if quick else FULL
    with torch.inference_mode(), _Stages(progress) as stages:
        return _Profiler(where, shape, Bench.on(where, dtype, shape, effort, saved), stages, folder).profile(name)


def _default_shape(device: torch.device) -> ModelShape:
    return named_shape("llama-3-8b") if device.type == "cuda" else _SMALL_LLAMA


class _Stages:
    """A bar that names what is being measured."""

    def __init__(self, shown: bool) -> None:
        self._bar = tqdm(
            total=0, disable=not shown or not sys.stderr.isatty(), bar_format="{desc}, {elapsed}", file=sys.stderr
        )
        self._shown = shown

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, what: str) -> None:
        self._bar.set_description_str(f"measuring {what}")
        if self._shown and self._bar.disable:
            log.info("measuring %s", what)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Best rates found, and the datasheet's where there is one."""

    peak_tflops: dict[str, float]
    memory_gb_per_s: float

    def raised(self, matmul: Sequence[MatmulPoints]) -> _Rates:
        """No product is faster than the peak: on a CPU the engine's own may be faster than torch's."""
        peaks = dict(self.peak_tflops)
        for series in matmul:
            peaks[series.dtype] = max(peaks[series.dtype], _digits(_matmul_rate(series) / 1e12))
        return replace(self, peak_tflops=peaks)


class _Profiler:
    def __init__(
        self, device: torch.device, shape: ModelShape, bench: Bench, stages: _Stages, folder: Path | None
    ) -> None:
        self.device = device
        self.folder = folder
        self.shape = shape
        self.bench = bench
        self.effort: Effort = bench.effort
        self.stages = stages
        self.machine: Machine = describe(device)
        self.kind: Literal["gpu", "cpu"] = "gpu" if device.type == "cuda" else "cpu"
        name = self.machine.name
        self.known = known_profile(name) if self.kind == "gpu" else profile_for_device(name)
        self.listed = self.known if self.known and name in self.known.device_names else None  # not a similar card
        self.attention: AttentionChoice = self.known.attention if self.known else "auto"
        self.stolen = StolenTime()
        versions = f"torch {torch.__version__.partition('+')[0]}, {self.machine.driver}"
        self.whole_steps = WholeSteps(bench) if self.kind == "cpu" else None
        self.source = f"measured by `vasuki profile`, {datetime.date.today().isoformat()}, {versions}"

    def profile(self, name: str | None) -> HardwareProfile:
        """All measurements, in the order in which later ones need earlier ones."""
        idle_w, loaded_w, limit_w = self._power()
        self._begin("whole steps")
        rates = self._rates()
        measured = self._measured()
        rates = rates.raised(measured.matmul)
        overheads = self._floor()
        profile = HardwareProfile(
            name=name or (self.listed.name if self.listed else self.machine.slug),
            title=self.known.title if self.known else self.machine.name,
            kind=self.kind,
            device_names=self.listed.device_names if self.listed else (self.machine.name, *self.machine.other_names),
            memory_mib=self.machine.memory_bytes // 2**20,
            memory_gb_per_s=rates.memory_gb_per_s,
            peak_tflops=rates.peak_tflops,
            processors=self.machine.processors,
            compute_capability=self.machine.compute_capability,
            tile_rows=self._tile_rows(),
            attention=self.attention,
            efficiency=self._efficiency(rates, measured),
            overheads=overheads,
            rates_measured_on=datetime.date.today().isoformat(),
            link=self._link(),
            interconnect=self.known.interconnect if self.known else None,
            power=self._power_section(idle_w, limit_w),
            price=self._price(),
            dollars_per_fp32_gflop_per_watt=self.known.dollars_per_fp32_gflop_per_watt if self.known else None,
            sources=self._sources(loaded_w),
            measured=measured,
            limits=limits_of(cpu.processor()) if self.kind == "cpu" else None,
        )
        profile = profile.model_copy(update={"overheads": self._overheads(profile)})
        measured = measured.model_copy(update={"rates": profile.rates})
        return profile.model_copy(update={"measured": self._in_steps(profile, measured)})

    def _begin(self, what: str) -> None:
        """Name what is measured next. On a CPU whole steps are sampled before each of them."""
        self.stages.begin(what)
        if self.whole_steps is not None:
            self.whole_steps.sample()

    # --- rates -------------------------------------------------------------------------------------------------------

    def _rates(self) -> _Rates:
        self._begin("peak rates and memory bandwidth")
        sizes = _PEAK_SIZES[self.device.type]
        best = {
            operator_times.dtype_name(dtype): _digits(operator_times.peak_rate(self._in(dtype), sizes) / 1e12)
            for dtype in _FLOAT_TYPES
        }
        bandwidth = _digits(links.memory_bytes_per_s(self.device, self.effort) / 1e9)
        self.best_bandwidth = bandwidth
        if self.known and self.kind == "gpu":
            known = self.known.peak_tflops
            peaks = {dtype: max(best.get(dtype, 0.0), known.get(dtype, 0.0)) for dtype in {**best, **known}}
            return _Rates(peaks, max(bandwidth, self.known.memory_gb_per_s))
        return _Rates(best, bandwidth)

    def _in(self, dtype: torch.dtype) -> Bench:
        shape = self.shape.with_dtype(operator_times.dtype_name(dtype))
        saved = self.bench.saved if dtype is self.bench.dtype else dtype
        return Bench.on(self.device, dtype, shape, self.effort, saved)

    def _tile_rows(self) -> int:
        if self.kind == "cpu":
            return 1  # matmuls on a CPU take single rows
        self._begin("matmul tiles")
        default = self.known.tile_rows if self.known else 128
        return operator_times.measure_tile_rows(self.bench, self.machine.processors, default)

    def _efficiency(self, rates: _Rates, measured: Measured) -> Efficiency:
        """Shares of the peak rates, from the largest sizes measured."""
        dtype = self.shape.dtype
        flops, bandwidth = rates.peak_tflops[dtype] * 1e12, rates.memory_gb_per_s * 1e9
        own = [series for series in measured.matmul if series.dtype == dtype]
        attention = measured.attention[0]
        return Efficiency(
            matmul=_share([_matmul_rate(series) / flops for series in own]),
            bandwidth=_share([_weight_rate(series, self.shape.dtype_bytes) / bandwidth for series in own]),
            attention=_share([_attention_rate(attention) / flops]),
            kv_read=_share([_kv_rate(attention, self.shape.dtype_bytes) / bandwidth]),
            source=f"{self.source}: matmuls of the most tokens, weights read for one token, largest attention calls",
        )

    # --- operators ---------------------------------------------------------------------------------------------------

    def _measured(self) -> Measured:
        dtypes = [self.bench.dtype]
        if torch.float32 not in dtypes and self.effort is FULL:
            dtypes.append(torch.float32)
        matmul: list[MatmulPoints] = []
        for dtype in dtypes:
            for (k, n), widths in operator_times.products(self.shape, self._in(dtype).kernels is not None).items():
                self._begin(f"matmul {k} x {n} in {operator_times.dtype_name(dtype)}")
                matmul.append(operator_times.measure_matmul(self._in(dtype), k, n, widths, n == self.shape.vocab_size))
        self._begin("norm, rope, KV write, activation, residual, embedding")
        elementwise = operator_times.measure_elementwise(self.bench, self._kernel())
        attention = []
        for kv_dtype in dict.fromkeys((self.bench.dtype, self.bench.saved)):
            self._begin(f"attention over {operator_times.dtype_name(kv_dtype)}")
            attention.append(operator_times.measure_attention(self.bench, self._attention_kernels(kv_dtype), kv_dtype))
        return Measured(
            source=f"{self.source}, sizes of {self.shape.name}",
            matmul=tuple(matmul),
            elementwise=tuple(elementwise),
            attention=tuple(attention),
            recurrent=self._recurrent(),
        )

    def _recurrent(self) -> RecurrentPoints | None:
        if self.folder is None or self.shape.recurrent is None:
            return None
        self._begin("a recurrent layer")
        try:
            config = AutoConfig.from_pretrained(self.folder).get_text_config()
            return measure_recurrent(self.bench, config)
        except _NOT_ALONE as error:
            log.warning("recurrent layers are not measured, since none runs by itself: %s", one_line(error))
            return None

    def _kernel(self, kv_dtype: torch.dtype | None = None) -> TileKernel | None:
        """Attention of ours, as a model of this shape is given it here."""
        bench, shape = self.bench, self.shape
        kv_dtype = kv_dtype or bench.dtype
        if self.kind == "cpu":
            return load_kernel((shape.head_dim,), bench.between, kv_dtype, bench.dtype is torch.bfloat16)
        return tile_attention(
            self._layout(kv_dtype), -(-shape.num_heads // shape.num_kv_heads), bench.dtype, self.device
        )

    def _attention_kernels(self, kv_dtype: torch.dtype) -> AttentionKernels:
        return AttentionKernels(self._kernel(kv_dtype), self.attention)

    def _layout(self, kv_dtype: torch.dtype) -> KVLayout:
        return KVLayout.uniform(1, self.shape.num_kv_heads, self.shape.head_dim, kv_dtype)

    def _floor(self) -> Overheads:
        """Overheads without the parts that come from whole steps."""
        kernel_s = operator_times.shortest_kernel_s(self.bench)
        return Overheads(step_us=0, launch_us=0, kernel_us=_us(kernel_s), source=self.source)

    def _overheads(self, profile: HardwareProfile) -> Overheads:
        self._begin("steps of a small model")

        def cost_model_of(shape: ModelShape) -> CostModel:
            return CostModel(shape, profile)

        dispatch_s = operator_times.dispatch_s(self.bench)
        found = step_overheads.measure_overheads(self.bench, cost_model_of, dispatch_s)
        how = step_overheads.describe(self.bench, dispatch_s)
        return Overheads(
            step_us=_us(found.step_s),
            launch_us=_us(found.launch_s),
            kernel_us=profile.overheads.kernel_us,
            first_touch_us_per_mib=_us(operator_times.first_touch_s_per_mib(self.bench)) if self.kind == "cpu" else 0,
            pinning_s_per_gib=_digits(links.pinning_s_per_gib()) if self.kind == "gpu" else 0,
            source=f"{self.source}: {how}",
        )

    def _in_steps(self, profile: HardwareProfile, measured: Measured) -> Measured:
        """The measured operators, and how much longer they take in a step. On a GPU they are taken to be as fast."""
        if self.whole_steps is None:
            return measured
        self._begin("whole steps")
        found = self.whole_steps.in_step(CostModel(self.whole_steps.shape, profile))
        return measured.model_copy(update={"in_step": found})

    # --- link, power, price ------------------------------------------------------------------------------------------

    def _link(self) -> Link:
        self._begin("copies between host and device")
        kind = "memory to memory" if self.kind == "cpu" else self.known.link.kind if self.known else "host link"
        return links.measure_link(self.device, self.effort, kind, self.source)

    def _power(self) -> tuple[float | None, float | None, float | None]:
        """Watts at idle and under full load, and the limit; None where they cannot be read."""
        board = board_of(self.device)
        if board is None:
            return None, None, None
        self._begin("power")
        left, right = (self.bench.tensor(_LOAD_SIZE, _LOAD_SIZE) for _ in range(2))
        idle_w = board.idle_w(self.effort.load_s)
        # The clock waits for the twenty products that it times.
        load = partial(self.bench.clock.seconds, partial(torch.matmul, left, right), 20)
        loaded_w = board.loaded_w(load, self.effort.load_s)
        return idle_w, loaded_w, board.limit_w

    def _power_section(self, idle_w: float | None, limit_w: float | None) -> Power:
        if self.known:
            assumed = self.known.power
        elif self.kind == "cpu":
            generic = find_profile("cpu")
            share = self.machine.processors / generic.processors
            assumed = Power(idle_w=generic.power.idle_w * share, peak_w=generic.power.peak_w * share)
        else:
            assumed = Power(idle_w=0, peak_w=300)
        return Power(idle_w=_digits(idle_w or assumed.idle_w), peak_w=_digits(limit_w or assumed.peak_w))

    def _price(self) -> Price:
        if self.known:
            return self.known.price
        month = datetime.date.today().strftime("%Y-%m")
        if self.kind == "cpu":
            generic = find_profile("cpu")
            per_hour = generic.price.per_hour * self.machine.processors / generic.processors
            return generic.price.model_copy(update={"per_hour": per_hour})
        return Price(per_hour=0, date=month, source="unknown; set cost.price_per_hour to yours")

    def _sources(self, loaded_w: float | None) -> dict[str, str]:
        """Return the sources of figures that have none of their own."""
        allocation = f"{operator_times.allocation_s(self.bench) * 1e6:.3g} us for a MiB from torch's allocator"
        sources = dict(self.known.sources) if self.known and self.kind == "gpu" else {}
        if not sources:
            sources["peak_tflops"] = f"{self.source}: large square matmuls, or the fastest of the shape's"
            sources["memory_gb_per_s"] = f"{self.source}: the better of a long read and a long copy"
        else:
            sources["memory_gb_per_s"] = f"datasheet; a long read or copy reached {self.best_bandwidth:g} GB/s"
        sources["allocation"] = allocation
        if (share := self.stolen.share) > NOISE:
            sources["disturbance"] = (
                f"the host gave {percent_text(share)} of the processors to others while this was measured"
            )
            log.warning("%s; plans will expect as much, so measure again when it is quieter", sources["disturbance"])
        sources["memory_mib"] = "as the driver or the operating system reports it"
        if loaded_w is not None:
            sources["power"] = f"idle_w and peak_w (the limit in force) by NVML; a large matmul drew {loaded_w:.0f} W"
        elif self.kind == "cpu" or not self.known:
            sources["power"] = "assumed"
        return sources


def _matmul_rate(series: MatmulPoints) -> float:
    return max(2 * tokens * series.k * series.n / us for tokens, us in zip(series.tokens, series.us, strict=True)) * 1e6


def _weight_rate(series: MatmulPoints, item_bytes: int) -> float:
    return series.k * series.n * item_bytes / series.us[0] * 1e6


def _attention_rate(series: AttentionPoints) -> float:
    rates = [
        4 * series.heads * series.head_dim * (point.tokens * point.context - point.tokens * (point.tokens - 1) / 2)
        * point.sequences / point.us
        for point in series.points
        if point.tokens > 1
    ]  # fmt: skip
    return max(rates, default=0.0) * 1e6


def _kv_rate(series: AttentionPoints, item_bytes: int) -> float:
    rates = [
        2 * series.kv_heads * series.head_dim * item_bytes * point.sequences * point.context / point.us
        for point in series.points
        if point.tokens == 1
    ]
    return max(rates, default=0.0) * 1e6


def _share(ratios: list[float]) -> float:
    """The median of some values as a share: above 0 and at most 1, three digits."""
    return float(f"{min(1.0, max(1e-3, statistics.median(ratios))):.3g}")


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.3g}")
