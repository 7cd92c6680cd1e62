"""A row's tokens and log probabilities are the same to the last bit, whatever it is computed with, and however."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from every_level import HERE, AtLevel, at_level
from tiny_models import ARCHITECTURES, RECURRENT, NoTokenizer, hopeful, prompts, random_model, requests_of
from tiny_models import run as run_requests
from torch.nn import functional
from transformers.activations import ACT2FN

from vasuki.engine.sequence import Request
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.kernels.levels import AMX, NONE
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.varying import why_rows_vary

VARYING = {"jamba"}  # whose mixer torch multiplies
LEVELS = [level for level in HERE if level is not NONE]
Answers = list[tuple[list[int], float]]
MANY = dict(num_blocks=400, block_tokens=4)
FEW = dict(num_blocks=60, block_tokens=4)


def model_of(name: str, at: AtLevel, dtype: torch.dtype = torch.float32) -> LoadedModel:
    kernels = at.cpu_kernels()
    model = random_model.__wrapped__(name).to(dtype)
    model.set_attn_implementation("vasuki_ragged")
    kernels.install(model)
    loaded = prepare(model, NoTokenizer(), model.generation_config, name)
    types = (model.dtype, loaded.kv_layout.dtype, loaded.dtype is torch.bfloat16)
    kernel = at.paged_kernel(loaded.kv_layout.head_dims, *types)
    return dataclasses.replace(loaded, same_anywhere=kernels.same_anywhere, kernel=kernel)


def answers(loaded: LoadedModel, requests: list[Request], **options: Any) -> Answers:
    rows, _, _ = run_requests(loaded, requests, native=True, want_logprobs=True, **options)
    return [(rows.sequences[row].output_token_ids, rows.sequences[row].logprob) for row in range(len(requests))]


def ways(loaded: LoadedModel) -> Iterator[tuple[str, Callable[[list[Request]], list[Request]], dict[str, Any]]]:
    """Ways of computing the same rows."""

    def same(requests: list[Request]) -> list[Request]:
        return requests

    for chunk_tokens in (1, 33):
        yield f"steps of {chunk_tokens}", same, MANY | dict(chunk_tokens=chunk_tokens)
    yield "alone", same, MANY | dict(chunk_tokens=10_000, max_num_seqs=1)
    yield "larger blocks", same, dict(chunk_tokens=50, num_blocks=60, block_tokens=64)
    yield "computed again", hopeful, FEW | dict(chunk_tokens=30)
    if not loaded.recurrent:
        yield "parked", hopeful, FEW | dict(chunk_tokens=30, host_blocks=200)
        yield "streamed", same, MANY | dict(chunk_tokens=50, num_streamed=2)


def assert_same(loaded: LoadedModel) -> None:
    requests = requests_of(prompts(9, 59), max_tokens=12) + [
        dataclasses.replace(request, row=9 + request.row, id=f"drawn-{request.row}")
        for request in requests_of(prompts(4, 40, seed=1), max_tokens=12, temperature=0.9, top_p=0.8)
    ]
    expected = answers(loaded, requests, chunk_tokens=10_000, **MANY)
    for way, change, options in ways(loaded):
        assert answers(loaded, change(requests), **options) == expected, way


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_rows_are_the_same_to_the_bit_or_the_model_says_why_not(name: str) -> None:
    loaded = model_of(name, at_level(HERE[-1]))
    why = why_rows_vary(loaded)
    assert bool(why) == (name in VARYING)
    if why:
        assert "JambaMambaMixer by matmul" in why
    else:
        assert_same(loaded)


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("level", LEVELS[:-1], ids=lambda level: level.name)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5", "granite_hybrid", "qwen3_moe"])
def test_at_lesser_levels_too(name: str, level: Any) -> None:
    assert_same(model_of(name, at_level(level)))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "qwen3_moe", "gpt_oss"])
def test_in_bfloat16_too(name: str) -> None:
    assert_same(model_of(name, at_level(HERE[-1]), torch.bfloat16))


@pytest.mark.usefixtures("compiler")
def test_by_tile_registers_too() -> None:
    assert_same(model_of("llama", at_level(AMX), torch.bfloat16))


@pytest.mark.usefixtures("compiler", "two_threads")
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_two_threads_compute_what_one_does(name: str) -> None:
    loaded, requests = model_of(name, at_level(HERE[-1])), requests_of(prompts(9, 75))
    by_two = answers(loaded, requests, chunk_tokens=50, **MANY)
    torch.set_num_threads(1)
    assert answers(loaded, requests, chunk_tokens=50, **MANY) == by_two


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ACT2FN)
def test_activations_are_the_same_anywhere(name: str, kernels: CPUKernels) -> None:
    """At the beginning, in the midst and at the end of a tensor, of few numbers and of many."""
    torch.manual_seed(0)
    x, function = 3 * torch.randn(70_003), ACT2FN[name]
    with kernels.same_anywhere.mode(), torch.inference_mode():
        whole = function(x.clone())
        for first in (0, 1, 8, 17, 40_000, 69_000):
            for count in (1, 7, 31, 33, 1000):
                part = function(x[first : first + count].clone())
                assert torch.equal(part, whole[first : first + count])
    torch.testing.assert_close(whole, function(x), rtol=3e-6, atol=2e-6)


def test_only_weights_that_stay_are_packed(kernels: CPUKernels) -> None:
    """One that is made for a call would be kept for ever, and its place in memory may be another one's later."""
    same, x = kernels.same_anywhere, torch.randn(5, 24)
    stays = torch.nn.Parameter(torch.randn(9, 24))
    with same.mode(), torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(functional.linear(x, stays), x @ stays.T, rtol=1e-4, atol=1e-5)
            functional.linear(x, stays * 2)
    assert len(same._packed) == 1
