"""What any step takes at least, as terms that each depend on one of its sums.

A step of T tokens, S of them sampled, whose attention sees D tokens of context in decodes, and Q pairs and E tokens of
context in longer chunks, takes in a part of the model no less than

    tokens(T) + r samples(S) + r layers [decode(D) + roofline(Q pair_s, E read_s)]

on the device, where r is the least `in_step` of the steps in question; no less than `floor_s` in any case; and
`overhead_s` in addition. This is `PartTimes` taken apart: the same but for `in_step` of what is not in `tokens`, and
for the shortest attention kernel, which is counted once for each layer and step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.machines.cost_model.copies import HostTraffic
from vasuki.machines.cost_model.curves import HUGE, TABLE, OperatorCurves, OperatorRates
from vasuki.machines.cost_model.layers import LayerModel
from vasuki.machines.cost_model.measured import RatioCurve
from vasuki.machines.cost_model.network import Network
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.recurrent import RecurrentModel
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.stages import Part, recorded_steps
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki_solvers.convex import lower_hull

NEGLIGIBLE = 1e-6  # more than a step of `HUGE` tokens takes beyond its rates, as a share


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Attention of layers that see the same, before `in_step`.

    Args:
        layers: how many.
        decode: points (D, seconds) by rising D, and a slope: decodes of a layer take no less than the lines between the
            points say, in addition to the shortest kernel.
        pair_s: compute side of longer chunks, for a (query, key) pair.
        read_s: memory side of longer chunks, for a token of context.
    """

    layers: float
    decode: tuple[list[tuple[float, float]], float]
    pair_s: float
    read_s: float


@dataclass(frozen=True, slots=True, eq=False)
class StepTerms:
    """The terms of a part of the model.

    Args:
        tokens_s: `[TABLE]` of steps of 1, 2, ... tokens.
        token_s: of each token of a larger step.
        samples_s: `[TABLE + 1]` of 0, 1, ... samples, before `in_step`.
        sample_s: of each sample of a larger step.
        in_step: `[TABLE + 1]` the least of steps of at most 1, 2, ... tokens, and last of any.
        full: layers that see the whole context.
        windowed: layers that see a window of it.
        floor_s: launches of a GPU that records no step, or weights on the link.
        weights_s: seconds of the link that weights take in each step.
        overhead_s: once a step.
    """

    tokens_s: Floats
    token_s: float
    samples_s: Floats
    sample_s: float
    in_step: Floats
    full: AttentionTerms
    windowed: AttentionTerms
    floor_s: float
    weights_s: float
    overhead_s: float


def step_terms(
    part: Part,
    shape: ModelShape,
    profile: HardwareProfile,
    layout: Layout,
    network: Network,
    traffic: HostTraffic,
) -> StepTerms:
    """The terms of a part. Arguments as for `PartTimes`."""
    dtypes = shape.dtype, shape.kv_dtype, shape.product_dtype
    exact = _PartCurves(part, shape, profile, layout, OperatorCurves(profile, *dtypes))
    rates = _PartCurves(part, shape, profile, layout, OperatorRates(profile, *dtypes))
    measured = profile.measured.in_step if profile.measured else None
    ratio = RatioCurve(measured.tokens, measured.ratio) if measured else None
    sizes, huge = np.arange(1.0, TABLE + 1), np.array([HUGE])
    in_step, in_step_beyond = (ratio.at(sizes), ratio.least_from(TABLE)) if ratio else (np.ones(TABLE), 1.0)
    recurrent_s, recurrent_token_s = _recurrent_s(exact, rates, sizes) if shape.recurrent else (np.zeros(TABLE), 0.0)

    def network_s(tokens: Any) -> Any:
        return network.part_s(tokens, part)

    on_cpu, launches_s = profile.kind == "cpu", part.launches_s(shape, profile)
    always_launched = not on_cpu and not recorded_steps(shape, profile, layout).rows
    tokens_s = in_step * (exact.of_tokens(sizes) + recurrent_s) + network_s(sizes)
    token_s = in_step_beyond * (rates.of_tokens(huge) / HUGE + recurrent_token_s) + network_s(huge) / HUGE
    weights_s = sum(traffic.alone_s(each) for each in traffic.weights)
    operators, attending = exact.operators, part.layers / shape.num_layers
    return StepTerms(
        tokens_s=tokens_s + (launches_s if on_cpu else 0.0),
        token_s=float(token_s[0]) * (1 - NEGLIGIBLE),
        samples_s=exact.of_samples(np.arange(TABLE + 1.0)),
        sample_s=float(rates.of_samples(huge)[0]) / HUGE * (1 - NEGLIGIBLE),
        in_step=np.minimum.accumulate([*in_step, in_step_beyond]),
        full=_attention(operators, shape.num_full_layers * attending, exact.layers.full_heads),
        windowed=_attention(operators, shape.num_windowed_layers * attending, exact.layers.windowed_heads),
        floor_s=max(weights_s, launches_s) if always_launched else weights_s,
        weights_s=weights_s,
        overhead_s=part.overhead_s(profile.overheads),
    )


class _PartCurves:
    """A part's seconds by tokens and by samples, `[sizes]`, before `in_step`."""

    def __init__(
        self, part: Part, shape: ModelShape, profile: HardwareProfile, layout: Layout, operators: OperatorModel
    ) -> None:
        self.operators = operators
        self.layers = LayerModel(shape, profile, layout, operators)
        self.recurrent = RecurrentModel(shape, profile, layout, operators) if shape.recurrent else None
        self._part = part
        self.share = part.layers / shape.num_layers
        self._kernels_s = self.share * shape.num_attention_layers * operators.attention_kernel_s

    def of_tokens(self, tokens: Any) -> Any:
        """Matmuls, elementwise operators and the shortest attention kernels."""
        part, layers = self._part, self.layers
        total_s = part.layers * _seconds(layers.matmuls(tokens), layers.elementwise(tokens)) + self._kernels_s
        if part.head:
            total_s = total_s - _seconds(*layers.last_mlp(tokens))
        return total_s + _seconds(layers.embedding(tokens)) if part.embedding else total_s

    def of_samples(self, samples: Any) -> Any:
        """The last MLP, which at least one token passes, and the head."""
        if not self._part.head:
            return np.zeros(len(samples))
        some: Any = np.maximum(1.0, samples)
        return _seconds(*self.layers.last_mlp(some)) + np.where(samples > 0, _seconds(self.layers.head(some)), 0.0)

    def of_group(self, tokens: Any) -> Any:
        """Seconds of recurrent layers for a group of tokens: as decodes or as a longer chunk, whichever is faster."""
        assert self.recurrent is not None
        decodes, chunk = self.recurrent.decodes(tokens), self.recurrent.chunk(tokens)
        return self.share * np.minimum(_seconds(*decodes), _seconds(*chunk))


def _seconds(*costs: OperatorCost) -> Any:
    return sum(cost.total_s for cost in costs)


def _recurrent_s(exact: _PartCurves, rates: _PartCurves, sizes: Floats) -> tuple[Floats, float]:
    """`[sizes]` what recurrent layers take of a step at least, and of each token of a larger one, however its tokens
    are divided among groups.

    Where groups of t tokens take a + b t or more, for some a and b that are not negative, groups of T tokens together
    take a + b T or more, since there is at least one of them. For each T the best such line touches the hull of what
    groups take; from where that is cheapest for a token on, it is the line through the origin. (Chunks of a step are
    priced by their mean, so that what t tokens take is counted for up to t + 1.)
    """
    rate = float(rates.of_group(np.array([HUGE]))[0]) / HUGE * (1 - NEGLIGIBLE)
    hull = lower_hull(zip((sizes + 1).tolist(), exact.of_group(sizes).tolist(), strict=True), rate).rising()
    group_s = np.array([hull(size) for size in sizes.tolist()])
    cheapest = int(np.argmin(group_s / sizes))
    rate = min(rate, float(group_s[cheapest] / sizes[cheapest]))
    return np.where(sizes <= sizes[cheapest], group_s, rate * sizes), rate


def _attention(operators: OperatorModel, layers: float, heads: tuple[int, int, int]) -> AttentionTerms:
    points, slope = operators.least_decode_attention(*heads)
    pair_s, read_s = operators.least_chunk_attention(*heads)
    return AttentionTerms(layers, (points, slope), pair_s, read_s)
