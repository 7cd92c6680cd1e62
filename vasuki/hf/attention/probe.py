"""The probe: it sees what a model asks of its attention by running it on a few tokens.

Nothing is attended to meanwhile: each layer's call is noted, and answered with its queries. Only where it is to be seen
how large keys and values are, attention is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.kernels.float8 import LARGEST, UNSCALED, Scales, in_8_bits
from vasuki.hf.kernels.recurrent_functions import by_torch
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.models.config_json import context_of

NOT_ON_INTERFACE = "it does not use transformers' attention interface"
_NAME = "vasuki_probe"
_NUM_TOKENS = 4
_NUM_METERED = 64
_HEADROOM = 4  # times what keys and values of those tokens reach
_MOST_CHANGED = 0.25

Attends = TypeVar("Attends", bound="_Attends")


@dataclass(frozen=True, slots=True)
class Observation:
    """A layer's call of its attention: what it handed over, `[num_tokens, num_(kv_)heads, head_dim]`, and what it
    got for it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    variant: Variant

    @property
    def output(self) -> torch.Tensor:
        """The queries stand for the attention that is not computed."""
        return self.query


class _Observer:
    """Notes every call, and answers with its queries.

    Args:
        longest: positions of the model; a window that holds as many is none.
    """

    def __init__(self, longest: int) -> None:
        self.seen: dict[torch.nn.Module, Observation] = {}
        self._longest = longest

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if module in self.seen:
            raise Unsupported("it attends more than once in a layer")
        if getattr(module, "is_causal", True) is False:
            raise Unsupported("its tokens attend to those behind them")
        if value.shape[-1] > query.shape[-1]:
            raise Unsupported(f"its value heads have {value.shape[-1]} dimensions and its keys {query.shape[-1]}")
        if mask is not None:
            if not hasattr(mask, "window"):
                raise Unsupported("it builds an attention mask of its own")
            if self._reach(mask.window) != self._reach(variant.window):
                raise Unsupported("the window of its attention is in its mask alone")
        self.seen[module] = Observation(query, key, value, variant)
        return self.answer(module, self.seen[module])

    def answer(self, module: torch.nn.Module, call: Observation) -> torch.Tensor:
        return call.output

    def _reach(self, window: int | None) -> int:
        """Tokens that a token sees at most."""
        return min(window or self._longest, self._longest)


class _Attends(_Observer):
    """Attends, too."""

    def answer(self, module: torch.nn.Module, call: Observation) -> torch.Tensor:
        return attend_eagerly(call.query, call.key, call.value, call.variant)


class _Meter(_Attends):
    """Attends, and notes of each layer how large keys and values are, and what it matters if they have 8 bits."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self.scales: dict[int, Scales] = {}
        self.changed: dict[int, float] = {}  # share of its answer

    def answer(self, module: torch.nn.Module, call: Observation) -> torch.Tensor:
        scales = Scales(_scale(call.key), _scale(call.value))
        kept = in_8_bits(call.key, scales.key), in_8_bits(call.value, scales.value)
        exact = super().answer(module, call)
        rounded = attend_eagerly(call.query, *kept, call.variant)
        layer = cast(int, module.layer_idx)
        self.scales[layer] = scales
        self.changed[layer] = float((rounded - exact).norm() / exact.norm().clamp_min(1e-30))
        return exact


class _Echo:
    """Answers calls of attention as the probe does, without noting them."""

    def attend(self, module: torch.nn.Module, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query


def _mask(*_: Any, local_size: int | None = None, device: Any = None, **other: Any) -> Any:
    """Stands for the mask of a layer with that window."""
    mask: Any = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.window = local_size
    return mask


AttentionInterface.register(_NAME, ragged_attention.interface)
AttentionMaskInterface.register(_NAME, _mask)


def observe(model: Any, **arguments: Any) -> dict[torch.nn.Module, Observation]:
    """Run the model on a few tokens to see what its layers ask of their attention. Raises Unsupported with the reason.

    Positions are as far apart as the model allows: some treat positions beyond their training context differently.
    The model is called with `arguments` in addition to a step's own.
    """
    longest = context_of(model.config.get_text_config().to_dict()) or _NUM_TOKENS
    observer = _Observer(longest)
    _run(model, torch.arange(_NUM_TOKENS), torch.linspace(0, longest - 1, _NUM_TOKENS).long(), observer, **arguments)
    return observer.seen


def _run(model: Any, tokens: torch.Tensor, positions: torch.Tensor, observer: _Observer, **arguments: Any) -> Any:
    model.set_attn_implementation(_NAME)
    try:
        on_cpu = model.device.type == "cpu"  # weights may wait there, for a device that has other kernels
        with torch.inference_mode(), by_torch(model) if on_cpu else nullcontext():
            # As a step does: some models compute less where logits are wanted of the last token alone.
            kept = torch.arange(len(tokens), device=model.device)
            asked = {"use_cache": False, "logits_to_keep": kept, "step": observer, **arguments}
            ids, places = (each.to(model.device).unsqueeze(0) for each in (tokens, positions))
            return model(input_ids=ids, position_ids=places, **asked)
    finally:
        model.set_attn_implementation(ragged_attention.NAME)


def scales_of(model: Any, layout: KVLayout) -> tuple[Scales, ...]:
    """By what each layer's keys and values are divided where they are kept in 8 bits: so that those of a few tokens
    from all over the vocabulary lie well below the largest number.

    Raises Unsupported where that many bits are too few: Qwen 2's keys have a part that is the same for all tokens and
    larger than all the rest, and what tells them apart is rounded away.
    """
    meter, _ = _run_some(model, _Meter)
    for layer, changed in meter.changed.items():
        if not changed <= _MOST_CHANGED:  # nor no number
            raise Unsupported(f"keys and values of 8 bits change what layer {layer} attends to by {changed:.0%}")
    return tuple(meter.scales.get(layer, UNSCALED) for layer in range(layout.num_layers))


def likelihoods(model: Any) -> torch.Tensor:
    """Logarithms of the probabilities of what follows each of those tokens, float32 `[num_tokens, vocab_size]`."""
    _, output = _run_some(model, _Attends)
    return cast(torch.Tensor, output.logits[0].float().log_softmax(-1))


def _run_some(model: Any, kind: type[Attends]) -> tuple[Attends, Any]:
    """Run the model on a few tokens from all over the vocabulary; return what observed it, and its output."""
    config = model.config.get_text_config()
    longest = context_of(config.to_dict()) or _NUM_METERED
    count, observer = min(_NUM_METERED, longest), kind(longest)
    tokens = torch.linspace(0, config.vocab_size - 1, count).long()
    return observer, _run(model, tokens, torch.arange(count), observer)


def _scale(states: torch.Tensor) -> float:
    """The least power of two that leaves them room below the largest number of 8 bits."""
    largest = float(states.abs().max())
    fits = 0.0 < largest < float("inf")
    return float(2.0 ** math.ceil(math.log2(_HEADROOM * largest / LARGEST))) if fits else 1.0


def observe_calls(
    model: Any, modules: Iterable[torch.nn.Module], see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
) -> dict[torch.nn.Module, Observation]:
    """`observe`, which shows `see` what some modules are called with and answer.

    Nothing is observed where there are no such modules, nor of a model that cannot be served: it is refused with its
    name where it is described.
    """

    def hook(module: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        see(module, args, {**arguments, "step": _Echo()} if "step" in arguments else arguments, output)

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        return observe(model) if handles else {}
    except Unsupported:
        return {}
    finally:
        for handle in handles:
            handle.remove()


def observe_layer(layer: Any, arguments: dict[str, Any]) -> tuple[Observation, Any]:
    """Call an attention layer; return what it hands to its attention, and what it answers."""
    observer = _Observer(longest=1)  # windows were looked at in the model
    output = layer(**{**arguments, "step": observer})
    return observer.seen[layer], output


def probe(model: Any, num_layers: int, others: Collection[int] = ()) -> KVLayout:
    """Return what a model's layers store; layers in `others` that don't attend store nothing. Raises Unsupported with
    the reason."""
    heads: dict[int, tuple[int, int]] = {}  # (num_kv_heads, head_dim) by layer
    for layer, seen in observe(model).items():
        _, num_kv_heads, head_dim = seen.value.shape
        heads[cast(int, layer.layer_idx)] = (num_kv_heads, head_dim)
    if not heads:
        raise Unsupported("none of its layers attend" if others else NOT_ON_INTERFACE)
    layers = set(range(num_layers))
    if not heads.keys() <= layers:
        raise Unsupported("it attends outside of its layers")
    if heads.keys() | set(others) != layers:
        raise Unsupported(f"{len(heads)} of its {num_layers} layers use the attention interface")
    heads |= {layer: (0, 0) for layer in others if layer not in heads}
    return KVLayout(tuple(heads[layer] for layer in range(num_layers)), model.dtype)
