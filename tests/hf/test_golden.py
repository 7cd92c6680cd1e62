"""Greedy tokens equal `model.generate` row by row, in float32, however the engine cuts and packs the work."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    Float8Cache,
    NoTokenizer,
    RoundedCache,
    hopeful,
    load,
    prompts,
    random_model,
    reference,
    requests_of,
    run,
)

from vasuki.base.errors import ModelError
from vasuki.engine.policy import POLICIES, Admission
from vasuki.engine.sequence import FinishReason
from vasuki.hf.kernels.native import find_compiler
from vasuki.hf.loading.prepare import prepare

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 10_000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate(name: str, chunk_tokens: int) -> None:
    expected = reference(name)
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens)
    assert rows.outputs == expected


@needs_compiler
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_attention_equals_its_plain_twin(name: str) -> None:
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens=20, native=True)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_rounded_keys_and_values_give_what_a_rounded_cache_gives(name: str, native: bool) -> None:
    rows, _, stats = run(
        load(name, "bfloat16"),
        hopeful(requests_of(prompts())),
        16,
        num_blocks=24,
        native=native,
        host_blocks=60,
        num_streamed=1,
    )
    assert rows.outputs == reference(name, cache=RoundedCache)
    assert stats.swapped_blocks > 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gpt_neox"])
def test_keys_and_values_of_8_bits_give_what_such_a_cache_gives(name: str) -> None:
    loaded = load(name, "float8")
    scales = loaded.kv_layout.scales
    memory: dict[str, Any] = dict(num_blocks=24, host_blocks=60, num_streamed=1)
    rows, _, stats = run(loaded, hopeful(requests_of(prompts())), 16, **memory)
    assert rows.outputs == reference(name, cache=functools.partial(Float8Cache, scales))
    assert all(0 < scale < 1 for each in scales for scale in each)
    assert stats.swapped_blocks > 0


def test_a_model_that_8_bits_are_too_few_for_is_refused() -> None:
    """As Qwen 2: keys have a part that is the same for all tokens, and larger than what tells them apart."""
    model = copy.deepcopy(random_model("llama"))
    projection = model.model.layers[1].self_attn.k_proj
    offset = torch.zeros(projection.out_features)
    offset[model.config.head_dim - 1 :: model.config.head_dim] = 300.0  # of the pair that turns most slowly
    projection.bias = torch.nn.Parameter(offset)
    with pytest.raises(ModelError, match=r"llama: kv.dtype: float8: .* change what layer 1 attends to by \d+%"):
        prepare(model, NoTokenizer(), model.generation_config, "llama", "float8")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_greedy_equals_generate_under_preemption(name: str) -> None:
    expected = reference(name)
    rows, scheduler, _ = run(load(name), hopeful(requests_of(prompts())), chunk_tokens=16, num_blocks=24)
    assert scheduler.queues.counters.preemptions_recompute > 0
    assert rows.outputs == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parked_sequences_return_unharmed(name: str) -> None:
    rows, scheduler, stats = run(
        load(name), hopeful(requests_of(prompts())), chunk_tokens=16, num_blocks=24, host_blocks=60
    )
    assert scheduler.queues.counters.preemptions_swap > 0
    assert stats.swapped_blocks > 0
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("num_streamed", [0, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_computed_ahead_change_nothing(name: str, num_streamed: int) -> None:
    policy = dataclasses.replace(POLICIES["vasuki"], admission=Admission.PEAK)
    memory: dict[str, Any] = dict(num_blocks=24, host_blocks=60, num_streamed=num_streamed)
    rows, scheduler, _ = run(load(name), requests_of(prompts()), 16, policy=policy, prefills_ahead=True, **memory)
    assert scheduler.queues.counters.prefilled_ahead > 2
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("num_streamed", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streamed_layers_change_nothing(name: str, num_streamed: int) -> None:
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens=16, num_streamed=num_streamed)
    assert rows.outputs == reference(name)


def test_streaming_and_parking_together_over_a_slow_link() -> None:
    rows, scheduler, stats = run(
        load("llama"),
        hopeful(requests_of(prompts())),
        chunk_tokens=16,
        num_blocks=24,
        host_blocks=60,
        num_streamed=2,
        bytes_per_s=5e6,
    )
    assert scheduler.queues.counters.preemptions_swap > 0
    assert stats.exposed_copy_s > 0
    assert rows.outputs == reference("llama")


@pytest.mark.parametrize("policy", ["sarathi", "orca", "vllm", "vllm-v0", "static"])
def test_greedy_equals_generate_under_every_policy(policy: str) -> None:
    rows, _, _ = run(load("llama"), requests_of(prompts()), policy=POLICIES[policy])
    assert rows.outputs == reference("llama")


def test_shared_prefixes_change_nothing() -> None:
    loaded = load("llama")
    base = prompts()[1]
    forked = [base[:cut] + tail for cut in (8, 21, 32) for tail in ([5], [6, 7], [])] + [base, base]
    alone = [run(loaded, requests_of([row]))[0].outputs[0] for row in forked]
    rows, scheduler, _ = run(loaded, requests_of(forked))
    assert scheduler.queues.counters.shared_tokens > 100
    assert rows.outputs == alone


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"chunk_tokens": 7},
    "preempted": {"num_blocks": 24, "chunk_tokens": 16},
    "parked": {"num_blocks": 24, "chunk_tokens": 16, "host_blocks": 60},
    "streamed": {"num_streamed": 2, "chunk_tokens": 16},
    "launched ahead": {"steps_ahead": 1},
    "compiled": {"native": True},
}


@pytest.mark.parametrize("mode", [pytest.param(m, marks=needs_compiler if m == "compiled" else ()) for m in MODES])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_log_probabilities_are_those_of_the_model(name: str, mode: str) -> None:
    """The sum over a row's output tokens of what transformers' logits give them; the tokens end as they are counted."""
    rows, _, _ = run(load(name), hopeful(requests_of(prompts())), want_logprobs=True, **MODES[mode])
    model = random_model(name)
    model.set_attn_implementation("eager")
    for row, (prompt, answer) in enumerate(zip(prompts(), reference(name), strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(answer)[:, None]).sum()
        sequence = rows.sequences[row]
        assert sequence.logprob == pytest.approx(expected.item(), abs=1e-3)
        assert sequence.output_token_ids == answer
        stops = answer[-1] == model.generation_config.eos_token_id
        assert sequence.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
