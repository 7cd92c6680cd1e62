"""Times of a layer that carries a state: one of the model's own, with random weights that are cold."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.profiler.operator_times import Bench, dtype_name, microseconds
from vasuki.hf.profiler.timing import Call, measure
from vasuki.hf.recurrent.discovery import wrap_alone
from vasuki.hf.recurrent.recurrent_layer import Group, RecurrentLayer
from vasuki.machines.measured_points import RecurrentPoint, RecurrentPoints

_FEW = 4  # tokens that a layer is tried with


def measure_recurrent(bench: Bench, config: Any) -> RecurrentPoints | None:
    """A recurrent layer as the engine runs it, for the effort's decodes and prompts.

    Args:
        bench: where, and the shape that the config describes.
        config: of the language model.
    """
    shape = bench.shape.recurrent
    if shape is None:
        return None
    layers = _copies(bench, config)
    turns = itertools.cycle(layers)
    points, calls = [], []
    for rows, tokens in bench.effort.recurrent:
        call = _call(bench, layers[0], rows, tokens, turns)
        call()
        if bench.clock.seconds(call, 1) <= bench.effort.max_call_s:
            points.append((rows, tokens))
            calls.append(call)
    return RecurrentPoints(
        matrices=tuple((matrix.k, matrix.n) for matrix in shape.matrices),
        row_bytes=sum(state.num_bytes for state in layers[0].states),
        state_size=shape.state_size,
        dtype=dtype_name(bench.dtype),
        points=tuple(
            RecurrentPoint(sequences=rows, tokens=tokens, us=us)
            for (rows, tokens), us in zip(points, microseconds(measure(calls, bench.clock, bench.effort)), strict=True)
        ),
    )


def _copies(bench: Bench, config: Any) -> list[RecurrentLayer]:
    """The first recurrent layer of a model, as often as it takes to find its weights cold."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.saved, attn_implementation=NAME)
    module = next(module for module in model.modules() if hasattr(module, "layer_idx") and _has_convolution(module))
    module = module.eval().to_empty(device=bench.device)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.02)
    for buffer in module.buffers():
        buffer.zero_()
    module = module.to(bench.dtype)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    layers = torch.nn.ModuleList([copy.deepcopy(module) for _ in range(bench.num_copies(num_bytes))])
    if bench.kernels:
        bench.kernels.install(layers)
    few = bench.tensor(1, _FEW, bench.shape.hidden_size)
    return [wrap_alone(layer, config, few) for layer in layers]


def _has_convolution(module: torch.nn.Module) -> bool:
    """All recurrent layers have one, and nothing else in a language model has."""
    return any(isinstance(each, torch.nn.Conv1d) for each in module.children())


def _call(bench: Bench, first: RecurrentLayer, rows: int, tokens: int, turns: Any) -> Call:
    """Call one layer after the other, on decodes of `rows` rows, or on the first `tokens` tokens of rows."""
    states = [torch.zeros(rows, *state.shape, dtype=state.dtype, device=bench.device) for state in first.states]
    places = torch.arange(rows * tokens, device=bench.device)
    groups = [Group(places, slice(0, rows), is_fresh=tokens > 1)]
    hidden = bench.tensor(1, rows * tokens, bench.shape.hidden_size)

    def call() -> None:
        layer = next(turns)
        layer.begin(states, groups)
        layer.forward(hidden)
        layer.end()

    return call
