"""The one predictor of step time.

A step multiplies its tokens with every weight once, attends over the KV of its sequences once, and pays fixed costs:

    total = max(device, launches) + step overhead + exposed copies
    device = layers x (matmuls + attention + elementwise + all-reduces) + embedding + head

Each operator is a roofline: with c seconds of computing at the achievable rate and m seconds of memory traffic at the
achievable bandwidth it takes (c^3 + m^3)^(1/3), which is max(c, m) except near the ridge. The constants below hold for
every card; what differs between cards stands in the hardware profile. docs/cost-model.md derives and checks them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vasuki.errors import ModelError
from vasuki.layout import Layout
from vasuki.model_shape import DTYPE_BYTES, Matrix, ModelShape
from vasuki.profile import AttentionPoints, ElementwiseOperator, HardwareProfile

if TYPE_CHECKING:
    from vasuki.batch import Batch

ROOFLINE_SHARPNESS = 3.0  # exponent of the roofline; infinity is max(compute, memory)
TILE_COLUMNS = (2.0, 1.0, 0.5, 0.25)  # widths of output tiles to choose from, in units of the profile's tile rows
SHORTEST_TILE = 1 / 8  # fewer tokens than a tile are padded to a power of two, down to this share of a tile
# Share of the memory bandwidth that each elementwise operator reaches (unfused kernels; kv_write is assumed like rope).
ELEMENTWISE_SHARE: dict[ElementwiseOperator, float] = {
    "norm": 0.34,
    "rope": 0.45,
    "kv_write": 0.45,
    "activation": 0.50,
    "residual": 0.95,
    "embedding": 0.15,
}
# norm, qkv, rope, KV write, attention, o, residual, norm, up, activation, down, residual
KERNELS_PER_LAYER = 12
KERNELS_PER_STEP = 6  # embedding, final norm, gather, head, sampling, copy of the tokens


def roofline(compute_s: float, memory_s: float) -> float:
    """Time of an operator from the times that computing and memory traffic would take alone."""
    high, low = (compute_s, memory_s) if compute_s > memory_s else (memory_s, compute_s)
    if high == 0.0:
        return 0.0
    return float(high * (1.0 + (low / high) ** ROOFLINE_SHARPNESS) ** (1.0 / ROOFLINE_SHARPNESS))


@dataclass(frozen=True, slots=True)
class Copies:
    """KV that a step moves between device and host, per device."""

    to_device_bytes: float = 0.0
    to_host_bytes: float = 0.0
    copy_bytes: float = 0.0  # size of one contiguous copy; 0 for one copy in each direction
    overlapped: bool = True  # behind the whole step; otherwise each layer's kernels wait for that layer's part


class StepWork(NamedTuple):
    """What a step computes, as sums over its chunks: all that the cost model needs to know.

    A chunk of n tokens that ends at context e counts n to `num_tokens`. If n is 1 it is a decode and counts e to
    `decode_context_tokens`; otherwise it counts e to `chunk_context_tokens` and its n * e - n * (n - 1) / 2 causal
    (query, key) pairs to `chunk_pairs`. The windowed sums are the same for layers with a sliding window.
    """

    num_tokens: int
    num_samples: int
    num_decodes: int = 0
    num_chunks: int = 0  # of more than one token
    decode_context_tokens: int = 0
    chunk_context_tokens: int = 0
    chunk_pairs: float = 0
    windowed_decode_context_tokens: int = 0
    windowed_chunk_context_tokens: int = 0
    windowed_chunk_pairs: float = 0
    copies: tuple[Copies, ...] = ()

    @classmethod
    def of(
        cls,
        tokens: Iterable[int],
        contexts: Iterable[int],
        num_samples: int | None = None,
        window: int = 0,
        copies: tuple[Copies, ...] = (),
    ) -> StepWork:
        """Sum over chunks.

        Args:
            tokens: tokens of each chunk.
            contexts: context length after each chunk.
            num_samples: sampled tokens; one for each chunk if not given.
            window: the model's sliding window in tokens, 0 for none.
            copies: KV that moves meanwhile.
        """
        sizes = list(zip(tokens, contexts, strict=True))
        decodes = [end for count, end in sizes if count == 1]
        chunks = [size for size in sizes if size[0] != 1]
        return cls._sum(decodes, chunks, len(sizes) if num_samples is None else num_samples, window, copies)

    @classmethod
    def from_batch(cls, batch: Batch, window: int = 0, copies: tuple[Copies, ...] = ()) -> StepWork:
        """The work of a scheduled batch."""
        decodes, chunks, num_samples = [start + 1 for start in batch.starts], [], len(batch.starts)
        for _, start, count, samples in batch.prefills:
            num_samples += samples
            if count == 1:
                decodes.append(start + 1)
            else:
                chunks.append((count, start + count))
        return cls._sum(decodes, chunks, num_samples, window, copies)

    @classmethod
    def _sum(
        cls,
        decodes: list[int],
        chunks: list[tuple[int, int]],
        num_samples: int,
        window: int,
        copies: tuple[Copies, ...],
    ) -> StepWork:
        """From the contexts of decodes, and from tokens and contexts of longer chunks."""
        decode_context, chunk_context = sum(decodes), sum([end for _, end in chunks])
        pairs = sum([causal_pairs(count, end) for count, end in chunks])
        windowed = decode_context, chunk_context, pairs
        if window:
            windowed = (
                decode_context - sum([end - window for end in decodes if end > window]),
                sum([min(end, window + count) for count, end in chunks]),
                sum([windowed_causal_pairs(count, end, window) for count, end in chunks]),
            )
        return cls(
            num_tokens=len(decodes) + sum([count for count, _ in chunks]),
            num_samples=num_samples,
            num_decodes=len(decodes),
            num_chunks=len(chunks),
            decode_context_tokens=decode_context,
            chunk_context_tokens=chunk_context,
            chunk_pairs=pairs,
            windowed_decode_context_tokens=windowed[0],
            windowed_chunk_context_tokens=windowed[1],
            windowed_chunk_pairs=windowed[2],
            copies=copies,
        )


def causal_pairs(num_tokens: int, context: int) -> float:
    """(query, key) pairs of the last `num_tokens` of `context` positions under a causal mask."""
    return num_tokens * context - num_tokens * (num_tokens - 1) / 2


def windowed_causal_pairs(num_tokens: int, context: int, window: int) -> float:
    """The same where a position sees itself and at most `window - 1` before it."""
    start = context - num_tokens
    growing = max(0, min(context, window) - start)  # leading queries whose window is not full yet
    return growing * start + growing * (growing + 1) / 2 + (num_tokens - growing) * window


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted time of a step. The parts marked (+) add up to `total_s`; the others look into them."""

    total_s: float
    linear_s: float  # (+) matmuls of all layers
    attention_s: float  # (+)
    elementwise_s: float  # (+) norms, rope, KV write, activation, residuals
    outside_s: float  # (+) outside the layers: embedding, output head, sampling
    network_s: float  # (+) all-reduces and sends between stages
    launch_s: float  # (+) kernel launches that the device waits for
    overhead_s: float  # (+) once a step
    exposed_copy_s: float  # (+) KV copies that the step waits for
    hidden_copy_s: float  # KV copies behind kernels
    weights_read_s: float  # memory side of linear_s
    matmul_compute_s: float  # compute side of linear_s
    kv_read_s: float  # memory side of attention_s
    attention_compute_s: float  # compute side of attention_s
    flops: float  # useful ones, without padding
    memory_bytes: float
    energy_j: float  # of all devices that take part

    @property
    def device_s(self) -> float:
        """Time in kernels and on the network: what overlapped copies can hide behind."""
        return self.linear_s + self.attention_s + self.elementwise_s + self.outside_s + self.network_s

    def explain(self) -> str:
        """A table of the parts, longest first, for `--explain`."""
        parts = {
            f"matmuls ({_side(self.matmul_compute_s, self.weights_read_s, 'weights read')})": self.linear_s,
            f"attention ({_side(self.attention_compute_s, self.kv_read_s, 'KV read')})": self.attention_s,
            "elementwise (memory)": self.elementwise_s,
            "embedding, head, sampling": self.outside_s,
            "network": self.network_s,
            "launches not hidden": self.launch_s,
            "step overhead": self.overhead_s,
            "copies not hidden": self.exposed_copy_s,
        }
        width = max(map(len, parts))
        lines = [f"{'part':<{width}}  {'ms':>9}  {'share':>6}"]
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
            if seconds:
                lines.append(f"{part:<{width}}  {seconds * 1e3:9.3f}  {seconds / self.total_s:6.1%}")
        lines.append(f"{'step':<{width}}  {self.total_s * 1e3:9.3f}  {1:6.1%}")
        lines.append(
            f"{self.flops / self.total_s / 1e12:.1f} TFLOP/s, {self.memory_bytes / self.total_s / 1e9:.0f} GB/s, "
            f"{self.energy_j:.2f} J; copies hidden {self.hidden_copy_s * 1e3:.3f} ms"
        )
        return "\n".join(lines)


def _side(compute_s: float, memory_s: float, memory_name: str) -> str:
    return "compute" if compute_s > memory_s else memory_name


class StepTime(NamedTuple):
    """What `CostModel.repeated` says of one step, and `CostModel.stage_times` of one stage of it."""

    total_s: float
    exposed_copy_s: float = 0.0
    hidden_copy_s: float = 0.0


class _Part(NamedTuple):
    """What runs in one go: all of the model, or one pipeline stage of it."""

    layers: int
    embedding: bool
    head: bool
    sends: int  # of hidden states to a next stage
    stages: int = 1


@dataclass(slots=True)
class _Operator:
    """Accumulated times of one class of operators."""

    total_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: _Operator) -> _Operator:
        return _Operator(
            self.total_s + other.total_s,
            self.compute_s + other.compute_s,
            self.memory_s + other.memory_s,
            self.memory_bytes + other.memory_bytes,
        )

    def scaled(self, factor: float) -> _Operator:
        """So many of them."""
        return _Operator(
            factor * self.total_s, factor * self.compute_s, factor * self.memory_s, factor * self.memory_bytes
        )

    def slowed(self, factor: float) -> _Operator:
        """The same in another time."""
        return _Operator(factor * self.total_s, factor * self.compute_s, factor * self.memory_s, self.memory_bytes)


class RatioCurve:
    """Measured over analytical time, by size: interpolated in log-log between points, constant beyond the ends.

    The roofline times this curve passes through every measured point and keeps the roofline's steps in between.
    """

    def __init__(self, sizes: Sequence[float], ratios: Sequence[float]) -> None:
        self._log_sizes = [math.log(size) for size in sizes]
        self._log_ratios = [math.log(ratio) for ratio in ratios]

    def __call__(self, size: float) -> float:
        sizes, ratios = self._log_sizes, self._log_ratios
        position = math.log(size)
        index = bisect_right(sizes, position)
        if index == 0:
            return math.exp(ratios[0])
        if index == len(sizes):
            return math.exp(ratios[-1])
        low, high = sizes[index - 1], sizes[index]
        share = (position - low) / (high - low)
        return math.exp(ratios[index - 1] + share * (ratios[index] - ratios[index - 1]))

    @classmethod
    def mean(cls, curves: Sequence[RatioCurve]) -> RatioCurve:
        """Geometric mean, at the sizes of all curves."""
        sizes = sorted({size for curve in curves for size in curve._log_sizes})
        means = [sum(math.log(curve(math.exp(size))) for curve in curves) / len(curves) for size in sizes]
        return cls([math.exp(size) for size in sizes], [math.exp(mean) for mean in means])


class OperatorModel:
    """Seconds of single operators on one device: analytical rooflines, corrected by the profile's measured points.

    A matrix that was measured follows its own points; any other follows the geometric mean of the measured ones.

    These are times of operators one by one. What they take longer in a step, whose other operators use the same caches
    and the same memory, `CostModel` adds.
    """

    def __init__(self, profile: HardwareProfile, dtype: str) -> None:
        self.profile = profile
        self.dtype_bytes = DTYPE_BYTES[dtype]
        self._peak = profile.peak_flops(dtype)
        self._bandwidth = profile.memory_bytes_per_s
        self._kernel_s = profile.overheads.kernel_us * 1e-6
        self._rate = self._peak * profile.efficiency.matmul
        self._attention_rate = self._peak * profile.efficiency.attention
        self._kv_bandwidth = self._bandwidth * profile.efficiency.kv_read
        self._tile_columns = [max(1, round(profile.tile_rows * share)) for share in TILE_COLUMNS]
        self._load_measured(dtype)

    def matmul(self, tokens: float, k: int, n: int, copies: int = 1) -> _Operator:
        """`copies` products `[tokens / copies, k] x [k, n]` with different weights, as one kernel.

        Rows and columns are padded to tiles, and tiles run in waves of one for each processor, so time rises in steps.
        Of the tile widths the best is taken, as matmul libraries do.
        """
        rows = tokens / copies
        tile_rows = self._tile_rows(rows)
        row_tiles, processors = copies * math.ceil(rows / tile_rows), self.profile.processors
        padded_elements = min(
            math.ceil(row_tiles * math.ceil(n / columns) / processors) * processors * tile_rows * columns
            for columns in self._tile_columns
        )
        compute_s = 2.0 * padded_elements * k / self._rate
        memory_bytes = self.dtype_bytes * (copies * k * n + tokens * (k + n))
        memory_s = memory_bytes / (self._bandwidth * self.profile.efficiency.bandwidth)
        curve = self._matmul_ratio.get((k, n)) or self._any_matmul_ratio
        ratio = curve(rows) if curve else 1.0
        return _Operator(
            ratio * (self._kernel_s + roofline(compute_s, memory_s)), ratio * compute_s, ratio * memory_s, memory_bytes
        )

    def _tile_rows(self, rows: float) -> int:
        """Rows of the tile for so many tokens."""
        tile = self.profile.tile_rows
        power_of_two = 1 << math.ceil(math.log2(rows)) if rows > 1 else 1
        return min(tile, max(1, round(tile * SHORTEST_TILE), power_of_two))

    def elementwise(self, operator: ElementwiseOperator, tokens: float, bytes_per_token: float) -> _Operator:
        """A memory-bound operator."""
        memory_bytes = tokens * bytes_per_token
        memory_s = memory_bytes / (self._bandwidth * ELEMENTWISE_SHARE[operator])
        total_s = max(self._kernel_s, memory_s)
        curve = self._elementwise_ratio.get(operator)
        if curve:
            total_s *= curve(memory_bytes)
        return _Operator(total_s, 0.0, memory_s, memory_bytes)

    def pair_s(self, heads: float, head_dim: int) -> float:
        """Compute side of attention, a (query, key) pair."""
        return 4 * heads * head_dim / self._attention_rate

    def kv_read_s(self, kv_heads: float, head_dim: int) -> float:
        """Memory side of attention, a token of context."""
        return 2 * kv_heads * head_dim * self.dtype_bytes / self._kv_bandwidth

    def attention_seconds(self, heads: float, kv_heads: float, head_dim: int) -> Callable[[float, float, float], float]:
        """A function of decode contexts, chunk pairs and chunk contexts: one layer of both kinds of attention.

        `decode_attention` and `chunk_attention` without the parts, for those who ask a million times.
        """
        pair_s, read_s, kernel_s = self.pair_s(heads, head_dim), self.kv_read_s(kv_heads, head_dim), self._kernel_s
        decode_s = roofline(pair_s, read_s)  # a decode has as many pairs as context, so its roofline is linear
        decode_ratio, chunk_ratio = self._decode_ratio, self._chunk_ratio

        def seconds(decode_context: float, pairs: float, chunk_context: float) -> float:
            total_s = 0.0
            if decode_context:
                ratio = decode_ratio(decode_context * heads) if decode_ratio else 1.0
                total_s = ratio * (kernel_s + decode_context * decode_s)
            if pairs:
                ratio = chunk_ratio(pairs * heads) if chunk_ratio else 1.0
                total_s += ratio * (kernel_s + roofline(pairs * pair_s, chunk_context * read_s))
            return total_s

        return seconds

    def decode_attention(self, context_tokens: float, heads: float, kv_heads: float, head_dim: int) -> _Operator:
        """One layer of attention for single-token chunks, given the sum of their contexts."""
        return self._attention(context_tokens, context_tokens, heads, kv_heads, head_dim, self._decode_ratio)

    def chunk_attention(
        self, pairs: float, context_tokens: float, heads: float, kv_heads: float, head_dim: int
    ) -> _Operator:
        """One layer of attention for longer chunks, given the sums of their (query, key) pairs and contexts."""
        return self._attention(pairs, context_tokens, heads, kv_heads, head_dim, self._chunk_ratio)

    def _attention(
        self,
        pairs: float,
        context_tokens: float,
        heads: float,
        kv_heads: float,
        head_dim: int,
        curve: RatioCurve | None,
    ) -> _Operator:
        if not pairs:
            return _Operator()
        compute_s = pairs * self.pair_s(heads, head_dim)
        memory_s = context_tokens * self.kv_read_s(kv_heads, head_dim)
        memory_bytes = 2 * kv_heads * head_dim * self.dtype_bytes * context_tokens
        ratio = curve(pairs * heads) if curve else 1.0
        return _Operator(
            ratio * (self._kernel_s + roofline(compute_s, memory_s)), ratio * compute_s, ratio * memory_s, memory_bytes
        )

    def _load_measured(self, dtype: str) -> None:
        """Turn measured points into ratios to the rooflines, which are still uncorrected here."""
        self._matmul_ratio: dict[tuple[int, int], RatioCurve] = {}
        self._any_matmul_ratio: RatioCurve | None = None
        self._elementwise_ratio: dict[ElementwiseOperator, RatioCurve] = {}
        self._decode_ratio: RatioCurve | None = None
        self._chunk_ratio: RatioCurve | None = None
        measured = self.profile.measured
        if measured is None:
            return
        matmul_ratios = {
            (series.k, series.n): RatioCurve(
                series.tokens,
                [
                    us * 1e-6 / self.matmul(t, series.k, series.n).total_s
                    for t, us in zip(series.tokens, series.us, strict=True)
                ],
            )
            for series in measured.matmul
            if DTYPE_BYTES.get(series.dtype) == self.dtype_bytes
        }
        elementwise_ratios = {
            series.operator: RatioCurve(
                [t * series.bytes_per_token for t in series.tokens],
                [
                    us * 1e-6 / self.elementwise(series.operator, t, series.bytes_per_token).total_s
                    for t, us in zip(series.tokens, series.us, strict=True)
                ],
            )
            for series in measured.elementwise
        }
        self._decode_ratio, self._chunk_ratio = self._attention_ratios(
            [series for series in measured.attention if DTYPE_BYTES.get(series.dtype) == self.dtype_bytes]
        )
        self._matmul_ratio, self._elementwise_ratio = matmul_ratios, elementwise_ratios
        if matmul_ratios:
            self._any_matmul_ratio = RatioCurve.mean(list(matmul_ratios.values()))

    def _attention_ratios(self, series: Iterable[AttentionPoints]) -> tuple[RatioCurve | None, RatioCurve | None]:
        """Ratios by size (pairs x heads) for decodes and for longer chunks; equal sizes are averaged."""
        ratios: dict[bool, dict[float, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
        for layout in series:
            heads = (layout.heads, layout.kv_heads, layout.head_dim)
            for point in layout.points:
                pairs = point.sequences * causal_pairs(point.tokens, point.context)
                contexts = point.sequences * point.context
                is_decode = point.tokens == 1
                analytical = (
                    self.decode_attention(contexts, *heads)
                    if is_decode
                    else self.chunk_attention(pairs, contexts, *heads)
                )
                ratios[is_decode][pairs * layout.heads].append(point.us * 1e-6 / analytical.total_s)
        curves = [
            RatioCurve(sizes, [math.exp(np.mean(np.log(by_size[size]))) for size in sizes])
            if (sizes := sorted(by_size := ratios[is_decode]))
            else None
            for is_decode in (True, False)
        ]
        return curves[0], curves[1]


class CostModel:
    """Predicts the time of a step of one replica of a model on one kind of device.

    Args:
        shape: the model; its dtype decides the rates.
        profile: the device.
        layout: how the model is spread over devices.
        kernels_per_layer: launches that a layer takes; more in eager execution, where norms are several kernels.

    Raises:
        ModelError: the layout does not divide the model.
        ProfileError: the profile has no rate for the dtype.
    """

    def __init__(
        self,
        shape: ModelShape,
        profile: HardwareProfile,
        layout: Layout | None = None,
        kernels_per_layer: int = KERNELS_PER_LAYER,
    ) -> None:
        self.shape = shape
        self.profile = profile
        self.layout = layout or Layout()
        self.layout.check(shape)
        self.operators = OperatorModel(profile, shape.dtype)
        self.kernels_per_layer = kernels_per_layer
        self._flops_per_token = shape.linear_flops_per_token
        self._linear_cache: dict[int, tuple[_Operator, _Operator]] = {}
        self._outside_cache: dict[tuple[int, int], _Operator] = {}
        self._fixed_cache: dict[tuple[int, int, _Part], float] = {}
        stages = self.layout.pipeline_parallel
        self._whole = _Part(shape.num_layers, embedding=True, head=True, sends=stages - 1, stages=stages)
        self._stages = [self._stage(stage) for stage in range(stages)]
        self.weight_copies = self._weight_copies()  # of every step
        self._attention_seconds = self.operators.attention_seconds(
            self._local_heads(), self._local_kv_heads(), shape.head_dim
        )
        in_step = profile.measured.in_step if profile.measured else None
        self._in_step_ratio = RatioCurve(in_step.tokens, in_step.ratio) if in_step else None

    def work(self, tokens: Iterable[int], contexts: Iterable[int], num_samples: int | None = None) -> StepWork:
        """The work of chunks of so many tokens that end at these contexts, with this model's sliding window."""
        return StepWork.of(tokens, contexts, num_samples, self.shape.sliding_window)

    def batch_work(self, batch: Batch, copies: tuple[Copies, ...] = ()) -> StepWork:
        """The work of a scheduled batch, with this model's sliding window."""
        return StepWork.from_batch(batch, self.shape.sliding_window, copies)

    def step(self, work: StepWork) -> StepCost:
        """Cost of one step: through all pipeline stages, one after the other."""
        return self._cost(work, self._whole)

    def step_time_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return self.step(work).total_s

    def repeated(
        self,
        work: StepWork,
        num_steps: int,
        streamed_layers: int = 0,
        copy_bytes: float = 0.0,
        window_rooms: Iterable[int] = (),
    ) -> Iterator[StepTime]:
        """Times of `num_steps` steps that follow one another, of which `work` is the first.

        Each decode's context grows by one token a step, and the longer chunk moves on by its size; more than one such
        chunk is fine for a single step only. The same times as `step` gives one by one, without the parts: a simulation
        asks for millions.

        Args:
            work: the first step's.
            num_steps: how many.
            streamed_layers: layers whose KV comes back from the host in every step, and whose new KV goes there.
            copy_bytes: size of a contiguous copy of theirs; 0 for one copy in each direction.
            window_rooms: for each decode whose context is still shorter than the sliding window, the tokens it lacks.
        """
        tokens = work.num_tokens
        windowed_layers = self.shape.num_windowed_layers
        layers = self.shape.num_layers - windowed_layers
        windowed = self._windowed_sums(work, window_rooms)
        host_s, overhead_s = self._launches_s(self._whole), self._overhead_s(self._whole)
        on_cpu = self.profile.kind == "cpu"
        fixed_s, attention_s = self._fixed_s(tokens, work.num_samples, self._whole), self._attention_seconds
        in_step = self._in_step(tokens)
        decodes, chunk_tokens = work.num_decodes, tokens - work.num_decodes
        decode_context, chunk_context = work.decode_context_tokens, work.chunk_context_tokens
        pairs, more_pairs = work.chunk_pairs, chunk_tokens * chunk_tokens
        moves, streamed_s = self._moves(work.copies), self.profile.link.transfer_s
        token_bytes = self.stream_copies(streamed_layers, 1, 1).to_device_bytes
        whole = self.stream_copies(streamed_layers, 0, tokens, copy_bytes, decodes + work.num_chunks)
        for _ in range(num_steps):
            device_s = fixed_s
            if layers:
                device_s += in_step * layers * attention_s(decode_context, pairs, chunk_context)
            if windowed_layers:
                device_s += in_step * windowed_layers * attention_s(*next(windowed))
            busy_s = device_s + host_s if on_cpu else max(device_s, host_s)
            if streamed_layers or moves:
                context_bytes = (decode_context + chunk_context) * token_bytes + whole.to_device_bytes
                streamed = streamed_s(context_bytes, whole.to_host_bytes, copy_bytes), True
                hidden_s, exposed_s = self._hidden_and_exposed_s([*moves, streamed], busy_s)
                yield StepTime(busy_s + overhead_s + exposed_s, exposed_s, hidden_s)
            else:
                yield StepTime(busy_s + overhead_s)
            decode_context += decodes
            chunk_context += chunk_tokens
            pairs += more_pairs

    def _windowed_sums(self, work: StepWork, rooms: Iterable[int]) -> Iterator[tuple[int, float, int]]:
        """What a windowed layer sees of `work` and of the steps after it: decode contexts, chunk pairs and contexts.

        A decode's context grows up to the window, and stays.
        """
        window, chunk_tokens = self.shape.sliding_window, work.num_tokens - work.num_decodes
        decode_context, chunk_end = work.windowed_decode_context_tokens, work.chunk_context_tokens
        pairs, chunk_context = work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
        rooms = sorted(rooms)
        full = 0  # of the decodes that lacked something, those whose window has filled up
        for step in itertools.count(1):
            yield decode_context, pairs, chunk_context
            while full < len(rooms) and rooms[full] < step:
                full += 1
            decode_context += len(rooms) - full
            if chunk_tokens:
                chunk_end += chunk_tokens
                pairs = windowed_causal_pairs(chunk_tokens, chunk_end, window)
                chunk_context = min(chunk_end, window + chunk_tokens)

    def stage(self, work: StepWork, stage: int) -> StepCost:
        """Cost of one micro-batch on one pipeline stage, with the send to the next.

        Layers are dealt out evenly, earlier stages taking the remainder; the first stage has the embedding, the last
        the head.
        """
        if not 0 <= stage < len(self._stages):
            raise ValueError(f"stage {stage} of {len(self._stages)}")
        return self._cost(work, self._stages[stage])

    def stage_times(self, work: StepWork) -> list[StepTime]:
        """`[stages]` what `stage` gives for each, without the parts: a simulation asks for millions."""
        times: dict[_Part, StepTime] = {}
        for part in dict.fromkeys(self._stages):  # most of them are alike
            times[part] = self._stage_time(work, part)
        return [times[part] for part in self._stages]

    def _stage_time(self, work: StepWork, part: _Part) -> StepTime:
        attention_s = self._attention_seconds(work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens)
        if windowed_layers := self.shape.num_windowed_layers:  # every stage has its share of them
            share = windowed_layers / self.shape.num_layers
            windowed_s = self._attention_seconds(
                work.windowed_decode_context_tokens, work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
            )
            attention_s += share * (windowed_s - attention_s)
        attention_s *= part.layers * self._in_step(work.num_tokens)
        device_s = self._fixed_s(work.num_tokens, work.num_samples, part) + attention_s
        launches_s = self._launches_s(part)
        busy_s = device_s + launches_s if self.profile.kind == "cpu" else max(device_s, launches_s)
        hidden_s, exposed_s = self._hidden_and_exposed_s(self._moves(work.copies), busy_s)
        return StepTime(busy_s + self._overhead_s(part) + exposed_s, exposed_s, hidden_s)

    def _stage(self, stage: int) -> _Part:
        layers, more = divmod(self.shape.num_layers, self.layout.pipeline_parallel)
        is_last = stage == self.layout.pipeline_parallel - 1
        return _Part(layers + (stage < more), embedding=stage == 0, head=is_last, sends=not is_last)

    def _fixed_s(self, num_tokens: int, num_samples: int, part: _Part) -> float:
        """Device time outside attention: it depends on these two counts alone."""
        key = (num_tokens, num_samples, part)
        fixed_s = self._fixed_cache.get(key)
        if fixed_s is None:
            linear, elementwise = self._linear(num_tokens)
            sizes = StepWork(num_tokens, num_samples)
            fixed_s = part.layers * (linear.total_s + elementwise.total_s)
            fixed_s += self._outside_layers(sizes, part.embedding, part.head).total_s
            fixed_s += self._network_s(num_tokens, part)
            self._fixed_cache[key] = fixed_s
        return fixed_s

    def _network_s(self, num_tokens: int, part: _Part) -> float:
        return part.sends * self.send_s(num_tokens) + 2 * part.layers * self.all_reduce_s(num_tokens)

    def _launches_s(self, part: _Part) -> float:
        """Host time of the kernel launches."""
        return (part.layers * self.kernels_per_layer + KERNELS_PER_STEP) * self.profile.overheads.launch_us * 1e-6

    def _overhead_s(self, part: _Part) -> float:
        return part.stages * self.profile.overheads.step_us * 1e-6

    def first_touch_s(self, kv_tokens: int) -> float:
        """What memory for the KV of so many tokens costs beyond its use when it is written for the first time."""
        return kv_tokens * self.shape.kv_bytes_per_token / 2**20 * self.profile.overheads.first_touch_us_per_mib * 1e-6

    def layer_time_s(self, work: StepWork) -> float:
        """Mean device time of one layer: `exec_time` of the paper's Algorithms 1 and 2."""
        linear, elementwise = self._linear(work.num_tokens)
        layers = self.shape.num_layers
        per_layer_s = linear.total_s + elementwise.total_s + self._attention(work, layers).total_s / layers
        return per_layer_s + 2 * self.all_reduce_s(work.num_tokens)

    def all_reduce_s(self, num_tokens: int) -> float:
        """Ring all-reduce of the hidden states over the tensor-parallel group; a layer needs two."""
        group = self.layout.tensor_parallel
        if group == 1:
            return 0.0
        bandwidth, latency_s = self._interconnect()
        num_bytes = num_tokens * self.shape.hidden_size * self.shape.dtype_bytes
        return 2 * (group - 1) * (num_bytes / group / bandwidth + latency_s)

    def send_s(self, num_tokens: int) -> float:
        """Hidden states from one pipeline stage to the next."""
        if self.layout.pipeline_parallel == 1:
            return 0.0
        bandwidth, latency_s = self._interconnect()
        num_bytes = num_tokens * self.shape.hidden_size * self.shape.dtype_bytes
        return latency_s + num_bytes / self.layout.tensor_parallel / bandwidth

    def stream_copies(
        self, layers: int, context_tokens: int, new_tokens: int, copy_bytes: float = 0, sequences: int = 0
    ) -> Copies:
        """What streaming the KV of `layers` layers moves in a step, on each device.

        Everything comes back in every step; only blocks with new tokens go out, since KV is append-only. A copy is a
        whole block: the last one of a sequence is half full on average, and n tokens in a row lie in as many blocks as
        n - 1 tokens fill, and one more.
        """
        per_token_per_layer = self.shape.kv_bytes_per_token_per_layer
        block_tokens = max(1.0, copy_bytes / per_token_per_layer)
        back, out = context_tokens + sequences * (block_tokens - 1) / 2, new_tokens + sequences * (block_tokens - 1)
        per_token = layers * per_token_per_layer * self._kv_share()
        return Copies(back * per_token, out * per_token, copy_bytes, overlapped=True)

    def swap_copies(self, batch: Batch, block_tokens: int) -> tuple[Copies, ...]:
        """What a batch's swaps move on each device, one copy for a block of a layer.

        Blocks that leave a layer are copied before it writes to their place; those that return have a step's time.
        """
        layer_block_bytes = block_tokens * self.shape.kv_bytes_per_token_per_layer * self._kv_share()
        block_bytes = layer_block_bytes * self.shape.num_layers / self.layout.pipeline_parallel
        out = block_bytes * sum(len(swap.device) for swap in batch.swaps if swap.to_host)
        back = block_bytes * sum(len(swap.device) for swap in batch.swaps if not swap.to_host)
        copies = (Copies(0.0, out, layer_block_bytes, overlapped=False), Copies(back, 0.0, layer_block_bytes))
        return tuple(copy for copy in copies if copy.to_host_bytes or copy.to_device_bytes)

    def _weight_copies(self) -> tuple[Copies, ...]:
        """Weights that come from the host in every step, on each device, one copy for a layer."""
        layer_bytes = self.shape.layer_weight_bytes / self.layout.tensor_parallel
        host_layers = self.layout.host_layers / self.layout.pipeline_parallel
        return (Copies(host_layers * layer_bytes, 0.0, layer_bytes),) if host_layers else ()

    def _cost(self, work: StepWork, part: _Part) -> StepCost:
        layers = part.layers
        linear, elementwise = self._linear(work.num_tokens)
        attention = self._attention(work, layers)
        outside = self._outside_layers(work, part.embedding, part.head)
        linear_s, elementwise_s = layers * linear.total_s, layers * elementwise.total_s
        network_s = self._network_s(work.num_tokens, part)
        device_s = linear_s + elementwise_s + attention.total_s + outside.total_s + network_s

        host_s, overhead_s = self._launches_s(part), self._overhead_s(part)
        launch_s = host_s if self.profile.kind == "cpu" else max(0.0, host_s - device_s)
        hidden_s, exposed_s = self._hidden_and_exposed_s(self._moves(work.copies), device_s + launch_s)
        total_s = device_s + launch_s + overhead_s + exposed_s

        flops = self._flops(work, layers, part.head)
        devices = self.layout.tensor_parallel
        layer_bytes = linear.memory_bytes + elementwise.memory_bytes
        memory_bytes = devices * (layers * layer_bytes + attention.memory_bytes + outside.memory_bytes)
        return StepCost(
            total_s=total_s,
            linear_s=linear_s,
            attention_s=attention.total_s,
            elementwise_s=elementwise_s,
            outside_s=outside.total_s,
            network_s=network_s,
            launch_s=launch_s,
            overhead_s=overhead_s,
            exposed_copy_s=exposed_s,
            hidden_copy_s=hidden_s,
            weights_read_s=layers * linear.memory_s,
            matmul_compute_s=layers * linear.compute_s,
            kv_read_s=attention.memory_s,
            attention_compute_s=attention.compute_s,
            flops=flops,
            memory_bytes=memory_bytes,
            energy_j=self._energy_j(flops / devices, memory_bytes / devices, total_s) * devices,
        )

    def _in_step(self, num_tokens: int) -> float:
        """What the operators of a step of so many tokens take there, over what they take alone."""
        return self._in_step_ratio(max(1, num_tokens)) if self._in_step_ratio else 1.0

    def _linear(self, num_tokens: int) -> tuple[_Operator, _Operator]:
        """Mean matmuls and elementwise operators of one layer, on each device of the tensor-parallel group."""
        cached = self._linear_cache.get(num_tokens)
        if cached is None:
            in_step = self._in_step(num_tokens)
            cached = self._matmuls(num_tokens).slowed(in_step), self._elementwise(num_tokens).slowed(in_step)
            self._linear_cache[num_tokens] = cached
        return cached

    def _matmuls(self, num_tokens: int) -> _Operator:
        shape, total = self.shape, _Operator()
        dense_share = shape.num_dense_layers / shape.num_layers
        for matrices, share in (
            (shape.attention_matrices, 1.0),
            (shape.dense_matrices, dense_share),
            (shape.expert_matrices, 1.0 - dense_share),
        ):
            for matrix in matrices if share else ():
                total += self._matmul(matrix, num_tokens).scaled(share)
        return total

    def _matmul(self, matrix: Matrix, num_tokens: int) -> _Operator:
        """One matrix of a layer. Experts that no token chose are not read: with T tokens that each choose k of E at
        random, E (1 - (1 - k/E)^T) of them are."""
        k, n = self._shard(matrix)
        if matrix.copies == 1:
            return self.operators.matmul(num_tokens, k, n)
        used = matrix.copies * (1.0 - (1.0 - matrix.used / matrix.copies) ** num_tokens)
        return self.operators.matmul(num_tokens * matrix.used, k, n, max(1, round(used)))

    def _shard(self, matrix: Matrix) -> tuple[int, int]:
        """Sizes on one device: the first matrix of a pair is cut by columns, the second by rows."""
        group = self.layout.tensor_parallel
        if group == 1 or matrix.name == "router":
            return matrix.k, matrix.n
        if matrix.name in ("o", "down", "shared_down"):
            return math.ceil(matrix.k / group), matrix.n
        if matrix.name == "qkv":
            return matrix.k, (self._local_heads() + 2 * self._local_kv_heads()) * self.shape.head_dim
        return matrix.k, math.ceil(matrix.n / group)

    def _elementwise(self, num_tokens: int) -> _Operator:
        shape, group = self.shape, self.layout.tensor_parallel
        item, hidden = shape.dtype_bytes, shape.hidden_size
        heads, kv_heads = self._local_heads(), self._local_kv_heads()
        mlp_width = (
            shape.num_dense_layers * shape.intermediate_size
            + shape.num_expert_layers
            * (shape.experts_per_token * shape.expert_intermediate_size + shape.shared_intermediate_size)
        ) / (shape.num_layers * group)
        operators = self.operators
        return (
            operators.elementwise("norm", num_tokens, 2 * hidden * item).scaled(shape.norms_per_layer)
            + operators.elementwise("rope", num_tokens, 2 * (heads + kv_heads) * shape.head_dim * item)
            + operators.elementwise("kv_write", num_tokens, 4 * kv_heads * shape.head_dim * item)
            + operators.elementwise("activation", num_tokens, (3 if shape.gated_mlp else 2) * mlp_width * item)
            + operators.elementwise("residual", num_tokens, 3 * hidden * item).scaled(2)
        )

    def _attention(self, work: StepWork, layers: int) -> _Operator:
        """Attention of `layers` layers, windowed ones in proportion."""
        shape = self.shape
        full = self._layer_attention(work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens)
        full = full.slowed(in_step := self._in_step(work.num_tokens))
        if not shape.num_windowed_layers:
            return full.scaled(layers)
        windowed = self._layer_attention(
            work.windowed_decode_context_tokens, work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
        )
        share = shape.num_windowed_layers / shape.num_layers
        return full.scaled(layers * (1 - share)) + windowed.slowed(in_step).scaled(layers * share)

    def _layer_attention(self, decode_context: float, chunk_pairs: float, chunk_context: float) -> _Operator:
        """Decodes and longer chunks run as two kernels, one bound by memory, the other by compute (Sarathi, 4.3.1)."""
        heads = (self._local_heads(), self._local_kv_heads(), self.shape.head_dim)
        decodes = self.operators.decode_attention(decode_context, *heads)
        if not chunk_pairs:
            return decodes
        if not decode_context:
            return self.operators.chunk_attention(chunk_pairs, chunk_context, *heads)
        return decodes + self.operators.chunk_attention(chunk_pairs, chunk_context, *heads)

    def _outside_layers(self, work: StepWork, embedding: bool, head: bool) -> _Operator:
        """Embedding of every token; output head over sampled tokens, and three passes over float32 logits to sample."""
        key = (work.num_tokens if embedding else 0, work.num_samples if head else 0)
        cached = self._outside_cache.get(key)
        if cached is None:
            num_tokens, num_samples = key
            cached = _Operator()
            if num_tokens:
                row_bytes = 2 * self.shape.hidden_size * self.shape.dtype_bytes
                cached += self.operators.elementwise("embedding", num_tokens, row_bytes)
            if num_samples:
                vocab = math.ceil(self.shape.vocab_size / self.layout.tensor_parallel)
                cached += self.operators.matmul(num_samples, self.shape.hidden_size, vocab)
                cached += self.operators.elementwise("activation", num_samples, 3 * 4 * vocab)
            self._outside_cache[key] = cached
        return cached.slowed(self._in_step(work.num_tokens))

    def _moves(self, step_copies: Iterable[Copies]) -> list[tuple[float, bool]]:
        """Seconds of the link for weights and for a step's own copies, and whether the whole step may hide them."""
        return [
            (self.profile.link.transfer_s(each.to_device_bytes, each.to_host_bytes, each.copy_bytes), each.overlapped)
            for each in (*self.weight_copies, *step_copies)
        ]

    def _hidden_and_exposed_s(self, moves: Iterable[tuple[float, bool]], busy_s: float) -> tuple[float, float]:
        """Hidden and exposed seconds of a step's copies, which share the time that kernels leave them.

        Where layers wait for their own part, that of the first hides behind nothing: of L layers with copies of c and
        kernels of e seconds, a step waits c if c <= e, and else L c - (L - 1) e.
        """
        hidden_s = exposed_s = 0.0
        for copy_s, overlapped in moves:
            behind_s = min(copy_s, busy_s - hidden_s)
            if not overlapped:
                behind_s *= 1 - 1 / self.shape.num_layers
            hidden_s += behind_s
            exposed_s += copy_s - behind_s
        return hidden_s, exposed_s

    def _flops(self, work: StepWork, layers: int, head: bool) -> float:
        shape = self.shape
        attention = shape.attention_flops(
            work.decode_context_tokens + work.chunk_pairs,
            work.windowed_decode_context_tokens + work.windowed_chunk_pairs,
        )
        flops = (work.num_tokens * self._flops_per_token + attention) * layers / shape.num_layers
        return flops + head * work.num_samples * shape.head_flops_per_sample

    def _energy_j(self, flops: float, memory_bytes: float, seconds: float) -> float:
        """Between idle and peak power by the busier of compute and memory, against what is achievable. An estimate."""
        efficiency, power = self.profile.efficiency, self.profile.power
        compute = flops / (self.profile.peak_flops(self.shape.dtype) * efficiency.matmul)
        memory = memory_bytes / (self.profile.memory_bytes_per_s * efficiency.bandwidth)
        utilisation = min(1.0, max(compute, memory) / seconds)
        return seconds * (power.idle_w + (power.peak_w - power.idle_w) * utilisation)

    def _local_heads(self) -> int:
        return self.shape.num_heads // self.layout.tensor_parallel

    def _local_kv_heads(self) -> int:
        """At least one: KV heads are replicated where there are fewer than devices."""
        return max(1, self.shape.num_kv_heads // self.layout.tensor_parallel)

    def _kv_share(self) -> float:
        return self._local_kv_heads() / self.shape.num_kv_heads

    def _interconnect(self) -> tuple[float, float]:
        """Bytes a second in each direction, and seconds of a hop."""
        interconnect = self.profile.interconnect
        if interconnect is None:
            raise ModelError(f"profile {self.profile.name} has no interconnect; several GPUs need one")
        return interconnect.gb_per_s * 1e9, interconnect.latency_us * 1e-6
