"""Seconds of a step without the parts, for simulations that ask for millions; and the one place that adds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vasuki.machines.cost_model.copies import HostTraffic
from vasuki.machines.cost_model.layers import LayerModel
from vasuki.machines.cost_model.network import Network
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.stages import STREAMED_LAYER_S, Part, Recorded
from vasuki.machines.cost_model.work import StepWork, windowed_causal_pairs
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape


class StepTime(NamedTuple):
    """What a step takes, or one stage of it."""

    total_s: float
    exposed_copy_s: float = 0.0
    hidden_copy_s: float = 0.0


class Issued(NamedTuple):
    """What the host gives to the device for a step."""

    host_s: float  # that takes it
    is_recorded: bool  # its kernels are not launched one by one


class PartTimes:
    """Times of one part of the model.

    Args:
        part: all of the model, or a stage.
        shape: the model.
        profile: the device.
        layers: operators.
        network: between devices.
        traffic: on the host link.
        recorded: the largest steps that are replayed.
    """

    def __init__(
        self,
        part: Part,
        shape: ModelShape,
        profile: HardwareProfile,
        layers: LayerModel,
        network: Network,
        traffic: HostTraffic,
        recorded: Recorded,
    ) -> None:
        self.part = part
        self._shape = shape
        self._link = profile.link
        self._on_cpu = profile.kind == "cpu"
        self._layers = layers
        self._network = network
        self._traffic = traffic
        self._launches_s = part.launches_s(shape, profile)
        self._recorded = recorded
        self._overhead_s = part.overhead_s(profile.overheads)
        self._fixed_cache: dict[tuple[int, ...], float] = {}

    def once(self, work: StepWork) -> StepTime:
        """One step."""
        if not work.num_tokens:
            return self._copies_alone(work)
        shape, part, attention_seconds = self._shape, self.part, self._layers.attention_seconds
        attention_s = attention_seconds(work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens)
        attention_s *= shape.num_full_layers / shape.num_layers
        if shape.num_windowed_layers:  # every stage has its share of them
            windowed_s = self._layers.windowed_attention_seconds(
                work.windowed_decode_context_tokens, work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
            )
            attention_s += windowed_s * shape.num_windowed_layers / shape.num_layers
        attention_s *= part.layers * self._layers.in_step(work.one_call.num_tokens)
        return self.added_up(self._fixed_s(work) + attention_s, self._traffic.moves(work.copies), self.issued(work))

    def repeated(
        self,
        work: StepWork,
        num_steps: int,
        streamed_layers: int = 0,
        copy_bytes: float = 0.0,
        window_rooms: Sequence[int] = (),
        may_be_recorded: bool = True,
    ) -> Iterator[StepTime]:
        """`num_steps` steps that follow one another, of which `work` is the first; see `CostModel.repeated`."""
        tokens = work.num_tokens
        if not tokens:
            yield self._copies_alone(work)
            return
        windowed_layers = self._shape.num_windowed_layers
        layers = self._shape.num_full_layers
        in_step = self._layers.in_step(work.one_call.num_tokens)
        full, windowed = in_step * layers, in_step * windowed_layers
        all_fits = not windowed_layers or (
            self._layers.is_uniform and self._fits_into_window(work, num_steps, window_rooms)
        )
        windowed_sums = self._windowed_sums(work, num_steps, window_rooms)
        attention_s = 0.0
        fixed_s, attention_seconds = self._fixed_s(work), self._layers.attention_seconds
        windowed_seconds = self._layers.windowed_attention_seconds
        decodes, chunk_tokens = work.num_decodes, tokens - work.num_decodes
        decode_context, chunk_context = work.decode_context_tokens, work.chunk_context_tokens
        pairs, more_pairs = work.chunk_pairs, chunk_tokens * chunk_tokens
        added_up, moves = self.added_up, self._traffic.moves(work.copies)
        issued = self.issued(work, streamed_layers, may_be_recorded)
        if streamed_layers:
            token_bytes, _ = self._traffic.streamed_bytes(streamed_layers, 1, 1)
            block_bytes, out_bytes = self._traffic.streamed_bytes(
                streamed_layers, 0, tokens, copy_bytes, decodes + work.num_chunks
            )
            transfer_s = self._link.transfers(out_bytes, copy_bytes)
        for _ in range(num_steps):
            device_s = fixed_s
            if layers or all_fits:
                attention_s = attention_seconds(decode_context, pairs, chunk_context)
                device_s += full * attention_s
            if windowed_layers:
                device_s += windowed * (attention_s if all_fits else windowed_seconds(*next(windowed_sums)))
            if streamed_layers:
                streamed_s = transfer_s((decode_context + chunk_context) * token_bytes + block_bytes)
                yield added_up(device_s, [*moves, (streamed_s, True)], issued)
            else:
                yield added_up(device_s, moves, issued)
            decode_context += decodes
            chunk_context += chunk_tokens
            pairs += more_pairs

    def _copies_alone(self, work: StepWork) -> StepTime:
        """Sequences leave or return, and nothing is computed: no weights are fetched and no kernel is launched."""
        copied_s = sum([self._traffic.alone_s(each) for each in work.copies])
        return StepTime(copied_s, copied_s)

    def _fits_into_window(self, work: StepWork, num_steps: int, rooms: Sequence[int]) -> bool:
        """Whether windowed layers see all of `work` and of the steps after it."""
        seen = work.windowed_decode_context_tokens, work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
        if seen != (work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens):
            return False
        if num_steps == 1:
            return True
        if len(rooms) < work.num_decodes or min(rooms, default=num_steps) < num_steps - 1:
            return False
        chunk_tokens = work.num_tokens - work.num_decodes
        return work.chunk_context_tokens + (num_steps - 1) * chunk_tokens <= self._shape.sliding_window

    def _windowed_sums(self, work: StepWork, num_steps: int, rooms: Sequence[int]) -> Iterator[tuple[int, float, int]]:
        """What a windowed layer sees of `work` and of the steps after it: decode contexts, chunk pairs and contexts.

        A decode's context grows up to the window, and stays.
        """
        window, chunk_tokens = self._shape.sliding_window, work.num_tokens - work.num_decodes
        decode_context, chunk_end = work.windowed_decode_context_tokens, work.chunk_context_tokens
        pairs, chunk_context = work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
        growing = len(rooms)
        filling = sorted([room for room in rooms if room < num_steps], reverse=True)  # the next to fill up is the last
        for step in range(1, num_steps + 1):
            yield decode_context, pairs, chunk_context
            while filling and filling[-1] < step:
                filling.pop()
                growing -= 1
            decode_context += growing
            if chunk_tokens:
                chunk_end += chunk_tokens
                pairs = windowed_causal_pairs(chunk_tokens, chunk_end, window)
                chunk_context = min(chunk_end, window + chunk_tokens)

    def issued(self, work: StepWork, streamed_layers: int = 0, may_be_recorded: bool = True) -> Issued:
        """Launches of a step that is not recorded, call by call of the model, and on a GPU copies of layers that
        stream."""
        decodes = work.num_tokens == work.num_decodes
        most = self._recorded.rows if decodes else self._recorded.tokens
        is_recorded = may_be_recorded and work.num_tokens <= most
        call_s = 0.0 if is_recorded else self._launches_s
        if not self._on_cpu:
            call_s += streamed_layers * STREAMED_LAYER_S
        return Issued(work.calls * call_s, is_recorded)

    def added_up(self, device_s: float, moves: Sequence[tuple[float, bool]], issued: Issued) -> StepTime:
        """THE sum of a step: what the device is busy with, or the host where that takes longer; the step's overhead;
        and what copies do not hide.

        Args:
            device_s: kernels and network.
            moves: of the step's copies, from `HostTraffic.moves`.
            issued: by the host.
        """
        busy_s = self.busy_s(device_s, issued)
        if not moves:
            return StepTime(busy_s + self._overhead_s)
        hidden_s, exposed_s = self._traffic.hidden_and_exposed_s(moves, busy_s, issued.is_recorded)
        return StepTime(busy_s + self._overhead_s + exposed_s, exposed_s, hidden_s)

    def busy_s(self, device_s: float, issued: Issued) -> float:
        """The host runs ahead of a GPU; a CPU launches its own."""
        return device_s + issued.host_s if self._on_cpu else max(device_s, issued.host_s)

    def _fixed_s(self, work: StepWork) -> float:
        """Device time outside attention: it depends only on the numbers of tokens and samples, and of rows where layers
        are recurrent."""
        num_tokens, num_samples = work.num_tokens, work.num_samples
        rows = (work.num_decodes, work.num_chunks) if self._shape.recurrent else (0, 0)
        key = (num_tokens, num_samples, *rows, work.calls)
        fixed_s = self._fixed_cache.get(key)
        if fixed_s is None:
            linear, elementwise, outside, network_s = self.beside_attention(work)
            fixed_s = linear.total_s + elementwise.total_s + outside.total_s + network_s
            self._fixed_cache[key] = fixed_s
        return fixed_s

    def beside_attention(self, work: StepWork) -> tuple[OperatorCost, OperatorCost, OperatorCost, float]:
        """What the device computes outside attention: matmuls and elementwise operators of the layers, what is outside
        them, and seconds on the network."""
        calls, work = work.calls, work.one_call
        costs = (
            *self._layers.in_part(work, self.part),
            self._layers.outside(work.num_tokens, work.num_samples, self.part),
        )
        linear, elementwise, outside = [cost.scaled(calls) for cost in costs] if calls > 1 else costs
        return linear, elementwise, outside, calls * self._network.part_s(work.num_tokens, self.part)
