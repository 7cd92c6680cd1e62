"""Recurrences against transformers' functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import RECURRENT, NoTokenizer, prompts, random_config, reference, requests_of, run, with_kernels
from torch.nn.functional import normalize as unit
from transformers import AutoModelForCausalLM
from transformers.models.bamba.modeling_bamba import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)
from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from vasuki.base.errors import ModelError
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.packed_linear import PackedLinear
from vasuki.hf.loading.prepare import prepare

pytestmark = pytest.mark.usefixtures("compiler")


@given(
    rows=st.integers(1, 5),
    tokens=st.integers(1, 40),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    keys=st.integers(1, 40),
    values=st.integers(1, 80),
    normalizes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_delta_rule(
    each_kernels: CPUKernels,
    rows: int,
    tokens: int,
    key_heads: int,
    shared: int,
    keys: int,
    values: int,
    normalizes: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = key_heads * shared
    query, key = (unit(torch.randn(rows, tokens, key_heads, keys, generator=random)) for _ in range(2))
    value = torch.randn(rows, tokens, heads, values, generator=random)
    g = -torch.rand(rows, tokens, heads, generator=random) * 3
    beta = torch.rand(rows, tokens, heads, generator=random)
    state = torch.randn(rows, heads, keys, values, generator=random)
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=normalizes)
    repeated = [tensor.repeat_interleave(shared, dim=2) for tensor in (query, key)]
    expected = [
        plain(*repeated, value, g=g, beta=beta, initial_state=state.clone(), **options)
        for plain in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule)
    ]
    output, left = each_kernels.recurrences.delta_rule(
        _refuse, query, key, value, g, beta, initial_state=state, **options
    )
    assert left is state
    for each in expected:
        torch.testing.assert_close((output, left), each, rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 5),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 4),
    keys=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_delta_rule_with_a_decay_for_each_key(
    each_kernels: CPUKernels, rows: int, tokens: int, heads: int, keys: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(rows, tokens, heads, keys, generator=random) for _ in range(3))
    g = -torch.rand(rows, tokens, heads, keys, generator=random) * 3
    beta = torch.rand(rows, tokens, heads, generator=random)
    options: dict[str, Any] = dict(initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = recurrent_kimi_delta_attention(query, key, value, g, beta, **options)
    got = each_kernels.recurrences.delta_rule(_refuse, query, key, value, g, beta, **options)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    channels=st.integers(1, 20),
    numbers=st.integers(1, 40),
    skips=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_token_of_mamba_2(
    each_kernels: CPUKernels, rows: int, groups: int, shared: int, channels: int, numbers: int, skips: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = groups * shared
    x = torch.randn(rows, heads, channels, generator=random)
    dt = torch.randn(rows, heads, 1, generator=random).expand(-1, -1, channels)
    decay = (-torch.rand(heads, 1, 1, generator=random)).expand(-1, channels, numbers)
    b, c = (torch.randn(rows, groups, numbers, generator=random) for _ in range(2))
    skip = torch.randn(heads, 1, generator=random).expand(-1, channels) if skips else None
    gate = torch.randn(rows, heads, channels, generator=random) if skips else None
    bias = torch.randn(heads, 1, generator=random).expand(-1, channels)
    state = torch.randn(rows, heads, channels, numbers, generator=random)
    theirs = state.clone()
    expected = mamba2_selective_state_update(theirs, x, dt, decay, b, c, skip, bias, dt_softplus=True, z=gate)
    output = each_kernels.recurrences.mamba_2(_refuse, state, x, dt, decay, b, c, skip, bias, dt_softplus=True, z=gate)
    torch.testing.assert_close((output, state), (expected, theirs), rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 40),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    channels=st.integers(1, 20),
    numbers=st.integers(1, 40),
    skips=st.booleans(),
    begins=st.booleans(),
    seed=st.integers(0, 99),
)
def test_prompts_of_mamba_2(
    each_kernels: CPUKernels,
    rows: int,
    tokens: int,
    groups: int,
    shared: int,
    channels: int,
    numbers: int,
    skips: bool,
    begins: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = groups * shared
    x = torch.randn(rows, tokens, heads, channels, generator=random)
    dt = torch.randn(rows, tokens, heads, generator=random)
    decay, skip, bias = -torch.rand(heads, generator=random), *torch.randn(2, heads, generator=random)
    b, c = (torch.randn(rows, tokens, groups, numbers, generator=random) for _ in range(2))
    state = None if begins else torch.randn(rows, heads, channels, numbers, generator=random)
    options = dict(
        chunk_size=16,
        D=skip if skips else None,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=(0.1, 2.0),
        return_final_states=True,
    )
    expected = mamba2_chunk_scan(x, dt, decay, b, c, initial_states=None if state is None else state.clone(), **options)
    got = each_kernels.recurrences.mamba_2_prompts(_refuse, x, dt, decay, b, c, initial_states=state, **options)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 20),
    channels=st.integers(1, 20),
    numbers=st.integers(1, 40),
    has_all=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mamba(
    each_kernels: CPUKernels, rows: int, tokens: int, channels: int, numbers: int, has_all: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x, dt, z = torch.randn(3, rows, channels, tokens, generator=random)
    decay = -torch.rand(channels, numbers, generator=random) * 5
    b, c = torch.randn(2, rows, numbers, tokens, generator=random)
    skip, bias = torch.randn(2, channels, generator=random) if has_all else (None, None)
    gate = z if has_all else None
    one_by_one, ours = torch.randn(rows, channels, numbers, generator=random).repeat(2, 1, 1, 1)
    whole = each_kernels.recurrences.mamba_prompts(
        _refuse, x, dt, decay, b, c, initial_state=ours, D=skip, z=gate, delta_bias=bias, delta_softplus=True,
        return_last_state=True,
    )  # fmt: skip
    theirs = one_by_one.clone()
    moments = [
        (x[..., t], dt[..., t], decay, b[..., t], c[..., t], skip, bias, True, z[..., t] if has_all else None)
        for t in range(tokens)
    ]
    for update, state in (
        (functools.partial(each_kernels.recurrences.mamba, _refuse), one_by_one),
        (mamba_selective_state_update, theirs),
    ):
        each = [update(state, *moment) for moment in moments]
        torch.testing.assert_close(whole, (torch.stack(each, dim=-1), state), rtol=1e-4, atol=1e-4)
    fresh: dict[str, Any] = dict(D=skip, z=gate, delta_bias=bias, delta_softplus=True, return_last_state=True)
    got = each_kernels.recurrences.mamba_prompts(_refuse, x, dt, decay, b, c, **fresh)
    torch.testing.assert_close(got, mamba_selective_scan(x, dt, decay, b, c, **fresh), rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 20),
    channels=st.integers(1, 40),
    width=st.integers(1, 6),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    by_token=st.booleans(),
    seed=st.integers(0, 99),
)
def test_convolution(
    each_kernels: CPUKernels,
    rows: int,
    tokens: int,
    channels: int,
    width: int,
    has_bias: bool,
    activation: str | None,
    by_token: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, channels, generator=random).transpose(1, 2)
    x = x if by_token else x.contiguous()
    weight = torch.randn(channels, width, generator=random)
    bias = torch.randn(channels, generator=random) if has_bias else None
    got = each_kernels.recurrences.convolution(_refuse, x, weight, bias, activation)
    torch.testing.assert_close(got, causal_conv1d_fn(x, weight, bias, activation), rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 4),
    channels=st.integers(1, 40),
    width=st.integers(1, 6),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    seed=st.integers(0, 99),
)
def test_a_step_of_a_convolution(
    each_kernels: CPUKernels, rows: int, channels: int, width: int, has_bias: bool, activation: str | None, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, 1, generator=random)
    weight = torch.randn(channels, width, generator=random)
    bias = torch.randn(channels, generator=random) if has_bias else None
    state = torch.randn(rows, channels, width, generator=random)
    theirs = state.clone()
    expected = causal_conv1d_update(x, theirs, weight, bias, activation)
    got = each_kernels.recurrences.convolution_step(_refuse, x, state, weight, bias, activation)
    torch.testing.assert_close((got, state), (expected, theirs), rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_do_is_left_to_their_twins(kernels: CPUKernels) -> None:
    tokens = torch.ones(1, 2, 1, 4)
    stateless = kernels.recurrences.delta_rule(_answer, tokens, tokens, tokens, tokens[..., 0], tokens[..., 0])
    x, a, b = torch.ones(1, 1, 4), torch.ones(1, 4, 4), torch.ones(1, 1, 4)
    of_another_type = kernels.recurrences.mamba_2(_answer, torch.ones(1, 1, 4, 4).double(), x, x, a, b, b)
    of_another_shape = kernels.recurrences.mamba_2(
        _answer, torch.ones(1, 2, 4, 4), x[..., :1].expand(x.shape), x, a, b, b
    )
    activated = kernels.recurrences.convolution(_answer, tokens, tokens[0, 0], activation="relu")
    assert stateless == of_another_type == of_another_shape == activated == "plain"


@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_equals_generate(name: str, kernels: CPUKernels) -> None:
    expected = reference(name)
    model = with_kernels(name, kernels)
    loaded = prepare(model, NoTokenizer(), model.generation_config, name)
    assert loaded.recurrent is not None
    assert all(layer.continues for layer in loaded.recurrent.layers)
    rows, _, _ = run(loaded, requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == expected
    assert modeling_qwen3_5.torch_recurrent_gated_delta_rule is torch_recurrent_gated_delta_rule


@pytest.mark.parametrize("which", ["kernels", "rounding_kernels"])
def test_small_matrices_beside_products_do_not_keep_kernels_away(which: str, request: pytest.FixtureRequest) -> None:
    """Mamba's decays are one; experts are packed themselves."""
    kernels: CPUKernels = request.getfixturevalue(which)
    sizes = dict(hidden_size=256, intermediate_size=512, mamba_d_state=16)
    for experts in (1, 4):
        config = random_config("jamba", num_experts=experts, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        kernels.install(model)
        assert any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_scan_for_each_head_is_not_told_of_the_states_of_all(kernels: CPUKernels) -> None:
    """Zamba: it is refused for its shared layers, in a line."""
    config = transformers.ZambaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2,
        num_attention_heads=4, num_key_value_heads=4, intermediate_size=48, n_mamba_heads=2, mamba_d_state=8,
        mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    kernels.install(model)
    with pytest.raises(ModelError, match="cannot serve ZambaForCausalLM"):
        prepare(model, NoTokenizer(), model.generation_config, "zamba")


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("the kernel leaves this to its twin")


def _answer(*_: object, **__: object) -> str:
    return "plain"
