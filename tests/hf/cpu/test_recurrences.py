"""Recurrences against transformers' functions."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize as unit
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from models import RECURRENT, NoTokenizer, prompts, reference, requests_of, run, with_kernels
from vasuki.hf.cpu.kernels import CPUKernels
from vasuki.hf.model import prepare

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


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
    kernels: CPUKernels,
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
    output, left = kernels.recurrences.delta_rule(_refuse, query, key, value, g, beta, initial_state=state, **options)
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
    kernels: CPUKernels, rows: int, tokens: int, heads: int, keys: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(rows, tokens, heads, keys, generator=random) for _ in range(3))
    g = -torch.rand(rows, tokens, heads, keys, generator=random) * 3
    beta = torch.rand(rows, tokens, heads, generator=random)
    options = dict(initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = recurrent_kimi_delta_attention(query, key, value, g, beta, **options)
    got = kernels.recurrences.delta_rule(_refuse, query, key, value, g, beta, **options)
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
    kernels: CPUKernels, rows: int, groups: int, shared: int, channels: int, numbers: int, skips: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    heads = groups * shared
    x = torch.randn(rows, heads, channels, generator=random)
    dt = torch.randn(rows, heads, 1, generator=random).expand(-1, -1, channels)
    decay = (-torch.rand(heads, 1, 1, generator=random)).expand(-1, channels, numbers)
    b, c = (torch.randn(rows, groups, numbers, generator=random) for _ in range(2))
    skip = torch.randn(heads, 1, generator=random).expand(-1, channels) if skips else None
    bias = torch.randn(heads, 1, generator=random).expand(-1, channels)
    state = torch.randn(rows, heads, channels, numbers, generator=random)
    theirs = state.clone()
    expected = mamba2_selective_state_update(theirs, x, dt, decay, b, c, skip, bias, dt_softplus=True)
    output = kernels.recurrences.mamba_2(_refuse, state, x, dt, decay, b, c, skip, bias, dt_softplus=True)
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
    kernels: CPUKernels,
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
    expected = mamba2_chunk_scan(x, dt, decay, b, c, initial_states=None if begins else state.clone(), **options)
    got = kernels.recurrences.mamba_2_prompts(_refuse, x, dt, decay, b, c, initial_states=state, **options)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_what_the_kernels_do_not_do_is_left_to_their_twins(kernels: CPUKernels) -> None:
    tokens = torch.ones(1, 2, 1, 4)
    stateless = kernels.recurrences.delta_rule(_answer, tokens, tokens, tokens, tokens[..., 0], tokens[..., 0])
    with_gate = kernels.recurrences.mamba_2(
        _answer, torch.ones(1, 1, 4, 4), *[tokens[:, 0]] * 2, torch.ones(1, 4, 4), *[tokens[:, 0]] * 2, z=tokens
    )
    assert stateless == with_gate == "plain"


@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_equals_generate(name: str, kernels: CPUKernels) -> None:
    expected = reference(name)
    model = with_kernels(name, kernels)
    loaded = prepare(model, NoTokenizer(), model.generation_config, name)  # type: ignore[arg-type]
    rows, _, _ = run(loaded, requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == expected
    assert modeling_qwen3_5.torch_recurrent_gated_delta_rule is torch_recurrent_gated_delta_rule


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("the kernel leaves this to its twin")


def _answer(*_: object, **__: object) -> str:
    return "plain"
