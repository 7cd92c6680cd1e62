"""Fused attention layers against the models' own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, load, prompts, reference, requests_of, run
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.fused_attention import fuse_packed_attention
from vasuki.hf.cpu.packed_linear import pack_linear_layers
from vasuki.hf.fused.attention import FusedAttention

pytestmark = pytest.mark.usefixtures("compiler")

OWN = {"gpt_neox", "ministral3", "deepseek_v3", "gemma4"}  # other layers


@given(
    tokens=st.integers(1, 300),
    heads=st.integers(1, 5),
    values=st.integers(0, 3),
    half=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_rotates_like_transformers(
    each_kernels: CPUKernels, tokens: int, heads: int, values: int, half: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(tokens, 2 * heads + values, 2 * half, generator=generator)
    cos, sin = torch.randn(2, tokens, 2 * half, generator=generator)
    query, key, value = torch.split(joined.clone(), [heads, heads, values], dim=1)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    each_kernels.rotate(joined, 2 * heads, cos, sin)
    torch.testing.assert_close(joined[:, : 2 * heads], torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
    assert torch.equal(joined[:, 2 * heads :], value)


def test_rotates_a_part_of_each_head(each_kernels: CPUKernels) -> None:
    heads, angles = torch.randn(3, 2, 12), torch.randn(3, 8)
    expected, _ = apply_rotary_pos_emb(heads[..., :8], heads[..., :8], angles.cos(), angles.sin())
    rest = heads[..., 8:].clone()
    each_kernels.rotate(heads, 2, angles.cos(), angles.sin())
    torch.testing.assert_close(heads[..., :8], expected)
    assert torch.equal(heads[..., 8:], rest)


def test_a_layer_that_clips_what_is_large_is_left_alone(kernels: CPUKernels) -> None:
    def fused(clip: float | None) -> bool:
        config = transformers.OlmoConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            clip_qkv=clip,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="vasuki_ragged").eval()
        kernels.install(model)
        return any(isinstance(module, FusedAttention) for module in model.modules())

    assert fused(None)
    assert not fused(100.0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate(name: str, kernels: CPUKernels) -> None:
    loaded = load(name)
    model = copy.deepcopy(loaded.model)  # the tests share the original
    kernels.install(model)
    fused = [module for module in model.modules() if isinstance(module, FusedAttention)]
    assert len(fused) == (0 if name in OWN else loaded.kv_layout.num_layers)
    rows, _, _ = run(dataclasses.replace(loaded, model=model), requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("change", ["gates its output", "turns keys the other way", "scales its values"])
def test_what_only_looks_like_one_is_left_alone(
    change: str, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(load("llama").model)
    pack_linear_layers(model, kernels.linear)
    own = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        if change == "turns keys the other way":
            sin = -sin
        output, weights = own(self, hidden_states=hidden_states, position_embeddings=(cos, sin), **kwargs)
        return output * 1.01 if change == "gates its output" else output, weights

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    if change == "scales its values":
        for layer in model.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: 2 * output)
    fuse_packed_attention(model, kernels.linear, kernels.rotate)
    assert not any(isinstance(module, FusedAttention) for module in model.modules())
