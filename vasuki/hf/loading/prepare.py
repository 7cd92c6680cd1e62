"""A model in memory -> LoadedModel: probed by a backend, and described; or a refusal by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from vasuki.base.errors import ModelError
from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.probe import NOT_ON_INTERFACE, probe, scales_of
from vasuki.hf.kernels import paged_attention
from vasuki.hf.kernels.float8 import FLOAT8
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.loading.defaults import end_tokens, first_line, warn_of_penalties
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import tile_attention
from vasuki.hf.padded.probe import probe as probe_padded
from vasuki.hf.recurrent.discovery import wrap_layers
from vasuki.hf.recurrent.recurrent_layer import RecurrentLayers
from vasuki.models.config_json import context_of
from vasuki.models.recurrent_config import MLP_ALONE, RECURRENT

log = logging.getLogger(__name__)

T = TypeVar("T")

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": FLOAT8,
}
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class Refused(ModelError):
    """A model that a backend cannot serve."""


def prepare(
    model: Any,
    tokenizer: Tokenizer,
    generation: Any,
    name: str,
    kv_dtype: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    uses_kernels: bool = True,
    device: torch.device | None = None,
) -> LoadedModel:
    """Check a model in memory and describe it. The model must have been built with our attention.

    Args:
        model: a transformers causal LM.
        tokenizer: its own.
        generation: its defaults.
        name: as errors call it.
        kv_dtype: of keys and values; `auto` is the model's.
        dtype: that it multiplies in, if kernels have taken over and what lies between is in another.
        uses_kernels: whether attention may be ours.
        device: that computes, if the weights wait elsewhere.
    """
    config = model.config.get_text_config()
    refuse_config(name, config)
    refused = f"{name}: the ragged backend cannot serve {type(model).__name__}"
    try:
        stateful = _wrap_recurrent(model, config)
        layout = probe(model, config.num_hidden_layers, _silent_layers(config, stateful))
    except ragged_attention.Unsupported as error:
        raise Refused(f"{refused}: {error}") from None
    except TypeError as error:  # what a step calls a model with, one that is not on the interface need not take
        if getattr(model, "_supports_attention_backend", False):
            raise
        raise Refused(f"{refused}: {NOT_ON_INTERFACE} ({first_line(error)})") from error
    if kv_dtype == "float8":
        try:
            layout = replace(layout, scales=scales_of(model, layout))
        except ragged_attention.Unsupported as error:
            raise ModelError(f"{name}: kv.dtype: float8: {error}; leave it out") from None
    ready = replace(described(model, tokenizer, generation, name, layout, kv_dtype, dtype), recurrent=stateful)
    device = device or model.device
    if uses_kernels and device.type == "cuda":
        fewest = min(num_kv_heads for num_kv_heads, _ in layout.heads if num_kv_heads)
        sharing = -(-config.num_attention_heads // fewest)
        return replace(ready, kernel=tile_attention(ready.kv_layout, sharing, model.dtype, device))
    if not uses_kernels or device.type != "cpu":
        return ready
    types = (model.dtype, ready.kv_layout.dtype, ready.dtype is torch.bfloat16)
    kernel, compile_s = timed(partial(paged_attention.load_kernel, layout.head_dims, *types))
    return replace(ready, kernel=kernel, compile_s=compile_s)


def prepare_padded(model: Any, tokenizer: Tokenizer, generation: Any, name: str, kv_dtype: str = "auto") -> LoadedModel:
    """Check and describe a model that has its own attention, for the padded backend. Raises Refused by name."""
    if kv_dtype == "float8":
        raise Refused(f"{name}: kv.dtype: float8 is for packed attention; leave it out")
    try:
        found = probe_padded(model)
    except ragged_attention.Unsupported as error:
        raise Refused(f"{name}: the padded backend cannot serve {type(model).__name__}: {error}") from None
    return replace(
        described(model, tokenizer, generation, name, found.layout, kv_dtype),
        backend=found.backend,
        longest_packed_tokens=found.longest_packed_tokens,
        held=found.held,
        compiles=False,
    )


def described(
    model: Any,
    tokenizer: Tokenizer,
    generation: Any,
    name: str,
    layout: KVLayout,
    kv_dtype: str,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Describe what is the same for both backends. Arguments as for `prepare`."""
    config, dtype = model.config.get_text_config(), dtype or model.dtype
    layout = replace(layout, dtype=dtype if kv_dtype == "auto" else _DTYPES[kv_dtype])
    _warn_of_context(name, config)
    warn_of_penalties(generation)
    eos_ids = end_tokens(name, config, generation, tokenizer)
    return LoadedModel(model, tokenizer, config, eos_ids, layout, dtype, model.device)


def timed(load: Callable[[], T]) -> tuple[T, float]:
    """Call the loader; return what it loads, and the seconds that took."""
    started_s = time.perf_counter()
    return load(), time.perf_counter() - started_s


def refuse_config(name: str, config: Any) -> None:
    """Refuse what a configuration announces and the backend lacks."""
    layer_types = set(_layer_types(config))
    if odd := sorted(layer_types - _ATTENTION_LAYER_TYPES - RECURRENT - MLP_ALONE):
        raise Refused(f"{name}: the ragged backend cannot serve {config.model_type}: it has {', '.join(odd)} layers")


def _wrap_recurrent(model: Any, config: Any) -> RecurrentLayers | None:
    """Layers that carry a state from token to token, if there are any. Raises Unsupported by name."""
    if not RECURRENT & set(_layer_types(config)):
        return None
    return wrap_layers(model)


def _silent_layers(config: Any, stateful: RecurrentLayers | None) -> set[int]:
    """Layers that need not attend."""
    kinds = _layer_types(config)
    silent = {index for index, kind in enumerate(kinds) if kind in MLP_ALONE}
    return silent | (stateful.indices if stateful else set())


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())


def _warn_of_context(name: str, config: Any) -> None:
    """Say so if rows are kept shorter than the model's positions reach."""
    reach, context = getattr(config, "max_position_embeddings", 0), context_of(config.to_dict())
    rope = getattr(config, "rope_parameters", None) or {}
    if reach and rope.get("rope_type") == "dynamic":
        reach *= rope.get("factor") or 1
    if context and reach and context < reach:
        log.warning(
            "%s has other rotary embeddings for rows of over %d tokens, which would change shorter rows of its step: "
            "rows end there, and longer prompts fail",
            name,
            context,
        )
