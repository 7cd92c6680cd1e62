"""Measures what a step takes beyond its operators: Python, dispatch, forming inputs, fetching tokens, scheduling.

Two models with random weights, layers of the shape's kind but narrow, run side by side under the real scheduler and
executor. With next to nothing to compute, a step takes as long as the host needs for it, and no long operator has to be
taken off that a machine runs now faster, now slower. What is left is a line in the number of layers:

    rest(layers) = step_us + (kernels_per_layer x layers + kernels_per_step) x launch_us

On a GPU the launches run ahead of the device, so the time of the host counts alone, and where steps are recorded,
step_us is that of replayed ones; on a CPU what the cost model says of the operators is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3MoeConfig, Starcoder2Config

from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.cpu.fused_decoder import FusedDecoder
from vasuki.hf.cuda.recordable import can_record
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import small_kernels
from vasuki.hf.profiler.operator_times import Bench, dtype_name
from vasuki.hf.profiler.timing import measure_timed
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.cost_model import CostModel, Launches, launches_of
from vasuki.models.launches import LAUNCHES
from vasuki.models.shape import ModelShape

_LAYERS = (2, 6)
_PROMPT_TOKENS = 24
_MOST_STEPS = 400
# Bounds of what is plausible, in eager operators: a layer has some twenty to fifty, which on a CPU count as eleven.
_LAUNCH_DISPATCHES = (1.0, 20.0)
_STEP_DISPATCHES = (50.0, 2000.0)
_NARROW = dict(hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=512)


@dataclass(frozen=True, slots=True)
class StepOverheads:
    """Fixed costs in seconds."""

    step_s: float  # once a step
    launch_s: float  # each of the kernels that the cost model counts


def measure_overheads(
    bench: Bench, cost_model_of: Callable[[ModelShape], CostModel], dispatch_s: float
) -> StepOverheads:
    """Run steps, and fit what their operators do not explain.

    Args:
        bench: the device, and the shape to imitate.
        cost_model_of: the cost model of a shape on this device, with measured operators and without overheads.
        dispatch_s: host time of one eager operator.
    """
    shape = narrow(bench.shape)
    models = {layers: stand_in(shape, layers, bench.dtype, bench.device, bench.saved) for layers in _LAYERS}
    # As a run has them, and with every kernel launched by itself, as in steps too large to record.
    ways = [False, True] if all(can_record(each, bench.block_tokens) for each in models.values()) else [False]
    runs = [
        _Decoding(
            replace(models[layers], compiles=records), rows, cost_model_of(cut(shape, layers)), bench.block_tokens
        )
        for records in ways
        for layers in _LAYERS
        for rows in bench.effort.decode_rows
    ]
    timed = [run.rest_of_step if bench.device.type == "cpu" else run.step for run in runs]
    for function in timed:
        function()
    rests = np.array(measure_timed(timed, replace(bench.effort, group_s=3 * bench.effort.group_s)))
    launched, *replayed = rests.reshape(len(ways), len(_LAYERS), -1).mean(axis=2).tolist()
    in_one_call = all(map(_has_fused_decoder, models.values()))
    found = fit_overheads(_LAYERS, launched, dispatch_s, _launches(bench), in_one_call)
    for rests_s in replayed:  # whose host does nothing but the step itself
        _, intercept = np.polyfit(_LAYERS, rests_s, 1)
        found = replace(found, step_s=_within(float(intercept), _STEP_DISPATCHES, dispatch_s))
    return found


def _has_fused_decoder(loaded: LoadedModel) -> bool:
    return loaded.kernel is not None and any(isinstance(module, FusedDecoder) for module in loaded.model.modules())


def _launches(bench: Bench) -> Launches:
    """Of the models that stand in for the shape."""
    return launches_of(cut(bench.shape, 1), "gpu" if bench.device.type == "cuda" else "cpu")


def fit_overheads(
    layers: tuple[int, ...], rests_s: list[float], dispatch_s: float, launches: Launches, in_one_call: bool = False
) -> StepOverheads:
    """The line through the rests of steps of models with these numbers of layers.

    A rest is a small difference of long times. Where a noisy machine makes it absurd, what one eager operator takes of
    the host sets the bounds. Where all layers are computed `in_one_call`, a layer may cost the host nothing; otherwise
    it costs its launches.
    """
    least, most = _LAUNCH_DISPATCHES
    slope, intercept = np.polyfit(layers, rests_s, 1)
    launch_s = _within(float(slope) / launches.layer, (0.0 if in_one_call else least, most), dispatch_s)
    step_s = _within(float(intercept) - launches.outside * launch_s, _STEP_DISPATCHES, dispatch_s)
    return StepOverheads(step_s, launch_s)


def _within(seconds: float, dispatches: tuple[float, float], dispatch_s: float) -> float:
    low, high = dispatches
    return min(high * dispatch_s, max(low * dispatch_s, seconds))


def narrow(shape: ModelShape) -> ModelShape:
    """Return the shape with narrow layers, but heads as wide, for which attention kernels are made."""
    experts = bool(shape.num_experts)
    return replace(
        shape,
        **_NARROW,  # type: ignore[arg-type]
        intermediate_size=128 if shape.intermediate_size else 0,
        expert_intermediate_size=32 if experts else 0,
        shared_intermediate_size=0,
        sliding_window=0,
        num_windowed_layers=0,
    )


def cut(shape: ModelShape, layers: int) -> ModelShape:
    """Return the shape with `layers` layers of plain attention: not windowed, gated, latent or replaced."""
    expert_layers = layers if shape.num_expert_layers else 0
    return replace(
        shape,
        num_layers=layers,
        num_expert_layers=expert_layers,
        num_windowed_layers=0,
        sliding_window=0,
        full_kv_heads=0,
        full_head_dim=0,
        latent=None,
        recurrent=None,
        attention_layers=None,
        mlp_layers=None,
        gated_attention=False,
        gated_mlp=shape.gated_mlp or expert_layers > 0,
        launched_per_layer=LAUNCHES["qwen3_moe" if expert_layers else "llama" if shape.gated_mlp else "starcoder2"],
    )


def stand_in(
    shape: ModelShape, layers: int, dtype: torch.dtype, device: torch.device, saved: torch.dtype | None = None
) -> LoadedModel:
    """A model of that shape with random weights, as if it had been saved in that type and then loaded: layers of Llama,
    or of a family with experts or without gates."""
    common: dict[str, Any] = dict(
        hidden_size=shape.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=_PROMPT_TOKENS + _MOST_STEPS + 1,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    if shape.num_expert_layers:
        config: Any = Qwen3MoeConfig(
            **common,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.expert_intermediate_size,
            intermediate_size=max(shape.intermediate_size, 1),
            norm_topk_prob=True,
        )
    elif shape.gated_mlp:
        config = LlamaConfig(**common, intermediate_size=shape.intermediate_size)
    else:
        config = Starcoder2Config(**common, intermediate_size=shape.intermediate_size, sliding_window=None)
    model = AutoModelForCausalLM.from_config(config, dtype=saved or dtype, attn_implementation=NAME)
    model = model.eval().to(device, dtype)
    if device.type == "cpu" and (kernels := load_cpu_kernels()):
        kernels.install(model)
    if device.type == "cuda":
        fuse_modules(model, small_kernels(device))
    return prepare(model, cast(Tokenizer, _NoText()), GenerationConfig(eos_token_id=0), shape.name, dtype=dtype)


class _NoText:
    """Stands where text plays no part."""

    eos_token_id = None

    def meets_stop_string(self, sequence: object, token_id: int) -> bool:
        return False


class _Decoding:
    """A model that decodes `rows` rows for ever: each call is one step of the loop."""

    def __init__(self, loaded: LoadedModel, rows: int, cost_model: CostModel, block_tokens: int) -> None:
        blocks_each = -(-(_PROMPT_TOKENS + _MOST_STEPS + 1) // block_tokens)
        limits = Limits(_PROMPT_TOKENS * rows, rows)
        settings = EngineSettings(find_policy("vasuki"), limits, rows * blocks_each, block_tokens)
        self._executor = build_executor(loaded, settings, record_after=1, cost_model=cost_model)
        self._scheduler = Scheduler(settings)
        self._rows = rows
        self._rng = np.random.default_rng(0)
        self._vocab_size = loaded.vocab_size
        self._cost_model = cost_model
        self._predicted_s = 0.0  # the last step's operators, by the cost model

    def step(self) -> float:
        """Seconds of one step in which every row decodes."""
        if self._scheduler.queues.is_empty():
            self._fill()
        started_s = time.perf_counter()
        batch = self._scheduler.schedule()
        assert batch is not None
        self._scheduler.update(batch, self._executor.execute(batch))
        seconds = time.perf_counter() - started_s
        self._predicted_s = self._cost_model.step_time_s(self._cost_model.batch_work(batch))
        return seconds

    def rest_of_step(self) -> float:
        """Return the seconds of a step, less what the cost model says its operators take."""
        return self.step() - self._predicted_s

    def _fill(self) -> None:
        sampling = SamplingParams(max_tokens=_MOST_STEPS, ignore_eos=True)
        for row in range(self._rows):
            prompt = self._rng.integers(1, self._vocab_size, _PROMPT_TOKENS).astype(np.int32)
            self._scheduler.add(Request(row, row, _PROMPT_TOKENS, _MOST_STEPS, prompt, sampling))
        while any(not sequence.is_decoding for sequence in self._scheduler.queues.live()):
            batch = self._scheduler.schedule()
            assert batch is not None
            self._scheduler.update(batch, self._executor.execute(batch))


def describe(bench: Bench, dispatch_s: float) -> str:
    """Describe how the overheads were measured, for the profile."""
    rows = ", ".join(map(str, bench.effort.decode_rows))
    return (
        f"steps of {rows} decodes of {_LAYERS[0]} and {_LAYERS[1]} narrow layers like {bench.shape.name}'s in "
        f"{dtype_name(bench.dtype)}, less their operators; launch_us is the rest of a layer over "
        f"{_launches(bench).layer}; an eager operator alone takes {dispatch_s * 1e6:.3g} us of the host"
    )
