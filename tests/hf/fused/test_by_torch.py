"""Modules in fewer operators against the models' own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, load, prompts, random_config, reference, requests_of, run
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.fused.attention import FusedAttention
from vasuki.hf.fused.by_torch import JoinedMLP, TorchNorm, fuse_modules, rotate

# Layers of other parts, or that do more with them.
OWN_ATTENTION = {"gpt_neox", "ministral3", "deepseek_v3", "gemma4"}
OWN_MLP = {"gpt_neox", "gpt_oss", "qwen3_moe"}


def _count(model: Any, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate(name: str) -> None:
    loaded = load(name)
    model = copy.deepcopy(loaded.model)  # the tests share the original
    fuse_modules(model)
    layers = loaded.kv_layout.num_layers
    assert _count(model, FusedAttention) == (0 if name in OWN_ATTENTION else layers)
    assert bool(_count(model, JoinedMLP)) == (name not in OWN_MLP)
    rows, _, _ = run(dataclasses.replace(loaded, model=model), requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == reference(name)


def test_what_is_not_fused_is_counted() -> None:
    shared = load("llama").model  # which other tests may have changed
    model = type(shared)(shared.config)
    for part in (model.model.layers[0].self_attn, model.model.layers[2].mlp, model.model.layers[0].mlp):
        part.register_module("another", torch.nn.Identity())
    found = fuse_modules(model)
    assert found == (7, 2, 1)
    assert found.lacks(3) == "the attention of 1 and the MLP of 2 of 3 layers"
    assert fuse_modules(type(shared)(shared.config)).lacks(3) == ""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_model_in_16_bits_is_fused_and_answers_alike(name: str) -> None:
    plain = copy.deepcopy(load(name).model).bfloat16()
    fused = copy.deepcopy(plain)
    fuse_modules(fused)
    assert all(_count(fused, kind) for kind in (FusedAttention, JoinedMLP, TorchNorm))
    rows = torch.randn(1, 5, plain.config.hidden_size).bfloat16()
    with torch.inference_mode():
        for own, twin in zip(plain.model.layers, fused.model.layers, strict=True):
            torch.testing.assert_close(twin.mlp(rows), own.mlp(rows), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(twin.input_layernorm(rows), own.input_layernorm(rows), rtol=2e-2, atol=2e-2)


@given(tokens=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 20), rest=st.sampled_from([0, 4]))
def test_rotates_like_transformers(tokens: int, heads: int, half: int, rest: int) -> None:
    joined = torch.randn(tokens, 2 * heads + 1, 2 * half + rest)
    cos, sin = torch.randn(2, tokens, 2 * half)
    query, key = torch.split(joined[:, : 2 * heads, : 2 * half].clone(), heads, dim=1)
    expected = torch.cat(apply_rotary_pos_emb(query, key, cos, sin), dim=1)
    unturned = joined[:, :, 2 * half :].clone()
    turned = rotate(joined, 2 * heads, cos, sin)
    torch.testing.assert_close(turned[..., : 2 * half], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[..., 2 * half :], unturned[:, : 2 * heads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["gates its output", "clips", "norms by something else"])
def test_what_only_looks_like_one_is_left_alone(
    change: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fused = {
        "gates its output": (LlamaAttention, FusedAttention),
        "clips": (LlamaMLP, JoinedMLP),
        "norms by something else": (LlamaRMSNorm, TorchNorm),
    }[change]
    own = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = own(self, hidden_states, *args, **kwargs)
        if change == "clips":
            return answer.clamp(-1, 1)
        return answer * 1.1 if isinstance(answer, torch.Tensor) else (answer[0] * 1.1, answer[1])

    monkeypatch.setattr(kind, "forward", forward)
    model = copy.deepcopy(load("llama").model).to(dtype)
    fuse_modules(model)
    assert not _count(model, fused)


def test_weights_made_in_inference_mode_are_joined() -> None:
    """As a profile makes them, which measures in that mode."""
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(random_config("llama"), attn_implementation=NAME).eval()
        assert fuse_modules(model).lacks(3) == ""
