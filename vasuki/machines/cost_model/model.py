"""The cost model: operators, network and copies put together into steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vasuki.engine.rectangles import rectangles
from vasuki.engine.shaping import Shaped
from vasuki.machines.cost_model.copies import Copies, HostTraffic
from vasuki.machines.cost_model.layers import LayerModel
from vasuki.machines.cost_model.network import Network
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.stages import Part, recorded_steps
from vasuki.machines.cost_model.step_cost import StepCost, energy_j
from vasuki.machines.cost_model.terms import StepTerms, step_terms
from vasuki.machines.cost_model.times import PartTimes, StepTime
from vasuki.machines.cost_model.unpacked import Piece, padded_work, rectangle_work, work_alone
from vasuki.machines.cost_model.work import StepWork
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape

if TYPE_CHECKING:
    from vasuki.engine.batch import Batch
    from vasuki.engine.settings import EngineSettings


class CostModel:
    """Predicts the time of a step of one replica of a model on one kind of device.

    Args:
        shape: the model; its dtype decides the rates.
        profile: the device.
        layout: how the model is spread over devices.

    Raises:
        ModelError: the layout does not divide the model.
        ProfileError: the profile has no rate for the dtype.
    """

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout | None = None) -> None:
        if shape.backend != "ragged":  # windows are masks then, see `unpacked`
            shape = replace(shape, sliding_window=0, num_windowed_layers=0)
        self.shape = shape
        self.profile = profile
        self.layout = layout or Layout()
        self.layout.check(shape)
        self.operators = OperatorModel(profile, shape.dtype, shape.kv_dtype, shape.product_dtype)
        self.network = Network(shape, profile, self.layout)
        self._layers = LayerModel(shape, profile, self.layout, self.operators)
        self._traffic = HostTraffic(shape, profile, self.layout)
        self._flops_per_token = shape.linear_flops_per_token
        stages = self.layout.pipeline_parallel
        self._whole = Part.whole(shape.num_layers, stages)
        self._stages = [Part.stage(shape.num_layers, stages, stage) for stage in range(stages)]
        self._whole_times = self._times(self._whole)
        self._stage_times = {part: self._times(part) for part in self._stages}  # most of them are equal

    def work(self, tokens: Iterable[int], contexts: Iterable[int], num_samples: int | None = None) -> StepWork:
        """The work of chunks, given by their tokens and the contexts they end at, with this model's sliding window."""
        if self.shape.backend != "ragged":
            sizes = sorted(zip(tokens, contexts, strict=True), key=lambda size: size[0] != 1)
            pieces = [Piece(end - count, count, num_samples != 0) for count, end in sizes]
            return self._unpacked(pieces, sum(piece.num_tokens == 1 for piece in pieces), ())
        return StepWork.of(tokens, contexts, num_samples, self.shape.sliding_window)

    def batch_work(
        self, batch: Batch, copies: tuple[Copies, ...] = (), shaped: Iterable[Shaped] | None = None
    ) -> StepWork:
        """The work of a scheduled batch, with this model's sliding window, in calls that its policy has shaped or as
        the backend has them."""
        if self.shape.backend == "ragged" and shaped is None:
            return StepWork.from_batch(batch, self.shape.sliding_window, copies)
        pieces = [Piece(start, 1, True) for start in batch.starts]
        pieces += [Piece(start, count, samples) for _, start, count, samples in batch.prefills]
        return self._unpacked(pieces, len(batch.starts), copies, shaped)

    def _unpacked(
        self,
        pieces: Sequence[Piece],
        num_decodes: int,
        copies: tuple[Copies, ...],
        shaped: Iterable[Shaped] | None = None,
    ) -> StepWork:
        backend = self.shape.backend
        if backend in ("alone", "uncached"):
            return work_alone(pieces, copies, cached=backend == "alone")
        if shaped is None:
            chunks = [(piece.start, piece.num_tokens) for piece in pieces]
            packed = self.shape.longest_packed_tokens, self.rectangle_s, self.shape.always_packed
            shaped = map(Shaped, rectangles(chunks, num_decodes, *packed))
        return padded_work(pieces, shaped, copies, self.shape.sliding_window if backend == "ragged" else None)

    def rectangle_s(self, rows: int, new: int, width: int) -> float:
        """Seconds of a call, see `engine.rectangles.Price`."""
        return self._whole_times.once(rectangle_work(rows, new, width)).total_s

    # --- part by part ------------------------------------------------------------------------------------------------

    def step(self, work: StepWork) -> StepCost:
        """Cost of one step: through all pipeline stages, one after the other."""
        return self._cost(work, self._whole)

    def step_time_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return self.step(work).total_s

    def stage(self, work: StepWork, stage: int) -> StepCost:
        """Cost of one micro-batch on one pipeline stage, with the send to the next."""
        if not 0 <= stage < len(self._stages):
            raise ValueError(f"stage {stage} of {len(self._stages)}")
        return self._cost(work, self._stages[stage])

    def layer_time_s(self, work: StepWork) -> float:
        """Mean device time of one layer: `exec_time` of the paper's Algorithms 1 and 2."""
        linear, elementwise = self._layers.linear(work.num_tokens)
        layers = self.shape.num_layers
        others = (*self._layers.recurrent(work), self._layers.attention(work, layers))
        per_layer_s = linear.total_s + elementwise.total_s + sum(cost.total_s for cost in others) / layers
        return per_layer_s + 2 * self.network.all_reduce_s(work.num_tokens)

    def first_touch_s(self, kv_tokens: int) -> float:
        """Extra seconds for writing memory for the first time, for the KV of `kv_tokens`."""
        return kv_tokens * self.shape.kv_bytes_per_token / 2**20 * self.profile.overheads.first_touch_us_per_mib * 1e-6

    def launches_s(self, work: StepWork) -> float:
        """Host time of launching a step's kernels one by one; 0 where it is replayed."""
        return self._whole_times.issued(work).host_s

    @property
    def records_decodes(self) -> bool:
        """Whether steps of decodes are replayed."""
        return recorded_steps(self.shape, self.profile, self.layout).rows > 0

    @property
    def most_recorded_tokens(self) -> int:
        """Tokens of the largest step with prompts that is replayed."""
        return recorded_steps(self.shape, self.profile, self.layout).tokens

    def pinning_s(self, settings: EngineSettings) -> float:
        """What host memory costs before the first step: that of parked rows, and of the layers that are streamed."""
        offload = settings.offload
        blocks = offload.host_blocks + settings.num_blocks * offload.streamed_layers / self.shape.num_layers
        if offload.depth is not None:
            homes = len(offload.depth.deepest.streamed) / self.shape.num_layers
            blocks += homes * offload.depth.most_blocks(settings.num_blocks)
        num_bytes = blocks * settings.block_tokens * self.shape.kv_bytes_per_token
        return num_bytes / 2**30 * self.profile.overheads.pinning_s_per_gib

    def _cost(self, work: StepWork, part: Part) -> StepCost:
        times = self._whole_times if part is self._whole else self._stage_times[part]
        linear, elementwise, outside, network_s = times.beside_attention(work)
        attention = self._layers.attention(work, part.layers)
        device_s = linear.total_s + elementwise.total_s + outside.total_s + network_s + attention.total_s
        issued = times.issued(work)
        total_s, exposed_s, hidden_s = times.added_up(device_s, self._traffic.moves(work.copies), issued)

        flops = self._flops(work, part)
        devices = self.layout.tensor_parallel
        operators = linear + elementwise + attention + outside
        memory_bytes = devices * operators.memory_bytes
        each_j = energy_j(self.profile, self.shape.dtype, flops / devices, memory_bytes / devices, total_s)
        return StepCost(
            total_s=total_s,
            linear_s=linear.total_s,
            attention_s=attention.total_s,
            elementwise_s=elementwise.total_s,
            outside_s=outside.total_s,
            network_s=network_s,
            launch_s=times.busy_s(device_s, issued) - device_s,
            overhead_s=part.overhead_s(self.profile.overheads),
            exposed_copy_s=exposed_s,
            hidden_copy_s=hidden_s,
            weights_read_s=linear.memory_s,
            matmul_compute_s=linear.compute_s,
            kv_read_s=attention.memory_s,
            attention_compute_s=attention.compute_s,
            flops=flops,
            memory_bytes=memory_bytes,
            energy_j=each_j * devices,
        )

    def _flops(self, work: StepWork, part: Part) -> float:
        """Useful FLOPs of all devices."""
        attention = self.shape.attention_flops(
            work.decode_context_tokens + work.chunk_pairs,
            work.windowed_decode_context_tokens + work.windowed_chunk_pairs,
        )
        flops = (work.num_tokens * self._flops_per_token + attention) * part.layers / self.shape.num_layers
        skipped = (work.num_tokens - work.num_samples) * self.shape.last_mlp_flops_per_token
        return flops + part.head * (work.num_samples * self.shape.head_flops_per_sample - skipped)

    # --- without the parts -------------------------------------------------------------------------------------------

    def repeated(
        self,
        work: StepWork,
        num_steps: int,
        streamed_layers: int = 0,
        copy_bytes: float = 0.0,
        window_rooms: Sequence[int] = (),
        may_be_recorded: bool = True,
    ) -> Iterator[StepTime]:
        """Times of `num_steps` steps that follow one another, of which `work` is the first.

        Each decode's context grows by one token a step, and the longer chunk moves on by its size; more than one such
        chunk is fine for a single step only. The same times as `step` gives one by one.

        Args:
            work: the first step's.
            num_steps: how many.
            streamed_layers: layers whose KV comes back from the host in every step, and whose new KV goes there.
            copy_bytes: size of a contiguous copy of theirs; 0 for one copy in each direction.
            window_rooms: for each decode whose context is still shorter than the sliding window, the tokens it lacks.
            may_be_recorded: not where layers change place from batch to batch.
        """
        moved = streamed_layers, copy_bytes
        return self._whole_times.repeated(work, num_steps, *moved, window_rooms, may_be_recorded)

    def stage_times(self, work: StepWork) -> list[StepTime]:
        """`[stages]` what `stage` gives for each."""
        times = {part: each.once(work) for part, each in self._stage_times.items()}
        return [times[part] for part in self._stages]

    def terms(self) -> StepTerms:
        """What any step takes at least: no `step_time_s` is below it."""
        return self._terms(self._whole)

    def stage_terms(self) -> list[StepTerms]:
        """Terms of each kind of pipeline stage."""
        return [self._terms(part) for part in dict.fromkeys(self._stages)]

    def _terms(self, part: Part) -> StepTerms:
        return step_terms(part, self.shape, self.profile, self.layout, self.network, self._traffic)

    def _times(self, part: Part) -> PartTimes:
        recorded = recorded_steps(self.shape, self.profile, self.layout)
        return PartTimes(part, self.shape, self.profile, self._layers, self.network, self._traffic, recorded)

    # --- copies ------------------------------------------------------------------------------------------------------

    @property
    def weight_copies(self) -> tuple[Copies, ...]:
        """Weights that come from the host in every step, on each device."""
        return self._traffic.weights

    def swap_copies(self, batch: Batch, block_tokens: int) -> tuple[Copies, ...]:
        """What a batch's swaps move on each device, and layers that change place; see `HostTraffic.swapped`."""
        return self._traffic.swapped(batch, block_tokens)
