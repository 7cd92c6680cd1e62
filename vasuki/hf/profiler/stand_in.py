"""A model with random weights, for a machine that is measured without one."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3MoeConfig, Starcoder2Config

from vasuki.base.errors import ModelError
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.device.device import available_bytes
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import small_kernels
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape

_MEMORY_SHARE = 0.6  # of what is free, for weights: the rest is for steps
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


def usual_shape(device: torch.device) -> ModelShape:
    """Llama-3-8B on a GPU, a small Llama on a CPU."""
    return named_shape("llama-3-8b") if device.type == "cuda" else _SMALL_LLAMA


def stand_in(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A model of that shape, with as many of its layers as memory has room for: those of Llama, or of a family with
    experts or without gates.

    Args:
        shape: whose sizes it has, and the type that it was saved in: packed weights stay as narrow as that. Of
            attention it has the plain kind: not windowed, gated or latent.
        dtype: that it computes in.
        device: that computes.

    Raises:
        ModelError: there is no room for a single layer.
    """
    room = _MEMORY_SHARE * available_bytes(device) - shape.embedding_parameters * dtype.itemsize
    layers = min(shape.num_layers, int(room / max(1, shape.layer_parameters // shape.num_layers * dtype.itemsize)))
    if layers < 1:
        raise ModelError(f"{shape.name}: there is no memory for one of its layers; measure with a smaller model")
    saved = getattr(torch, shape.dtype, torch.bfloat16)
    with device:
        model = AutoModelForCausalLM.from_config(_config(shape, layers), dtype=saved, attn_implementation=NAME)
    model = model.eval() if dtype is saved else model.eval().to(dtype)
    if device.type == "cpu" and (kernels := load_cpu_kernels()):
        kernels.install(model)
    if device.type == "cuda":
        fuse_modules(model, small_kernels(device))
    return prepare(model, cast(Tokenizer, _NoText()), GenerationConfig(eos_token_id=0), shape.name, dtype=dtype)


def _config(shape: ModelShape, layers: int) -> Any:
    common: dict[str, Any] = dict(
        hidden_size=shape.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=shape.max_context_tokens,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    if shape.num_expert_layers:
        return Qwen3MoeConfig(
            **common,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.expert_intermediate_size,
            intermediate_size=max(shape.intermediate_size, 1),
            norm_topk_prob=True,
        )
    if shape.gated_mlp:
        return LlamaConfig(**common, intermediate_size=shape.intermediate_size)
    return Starcoder2Config(**common, intermediate_size=shape.intermediate_size, sliding_window=None)


class _NoText:
    """Stands where text plays no part."""

    eos_token_id = None

    def meets_stop_string(self, sequence: object, token_id: int) -> bool:
        return False
