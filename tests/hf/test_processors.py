"""Settings that look back on a row's tokens: as transformers' processors have them, row by row in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import load, prompts, random_model, requests_of, run
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf.processors import Processors
from vasuki.hf.sampler import sample

VOCAB = 12
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
        st.sampled_from([1.0, 0.7, 1.3]),
        st.sampled_from([0, 3, 5]),
    ),
    min_size=1,
    max_size=5,
)


def sequence(row: int, prompt: list[int], output: list[int], **sampling: Any) -> Sequence:
    request = Request(row, f"row-{row}", len(prompt), 99, np.array(prompt, np.int32), SamplingParams(**sampling))
    return Sequence(request, output_token_ids=list(output))


def processors_of(*end_token_ids: int) -> Processors:
    return Processors(frozenset(end_token_ids), lambda text: [int(word) for word in text.split()])


@given(rows, st.integers(0, 2**31))
def test_penalties_and_least_lengths_are_those_of_transformers(
    given_rows: list[tuple[list[int], list[int], float, int]], seed: int
) -> None:
    logits = torch.randn(len(given_rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    sequences, expected = [], []
    for row, (prompt, output, penalty, least) in enumerate(given_rows):
        sequences.append(sequence(row, prompt, output, repetition_penalty=penalty, min_tokens=least))
        processors = LogitsProcessorList()
        if penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if least:
            processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, [2, 3]))
        ids = torch.tensor([prompt + output])
        expected.append(processors(ids, logits[row : row + 1].clone())[0])
    assert torch.equal(processors_of(2, 3).change(logits, sequences), torch.stack(expected))


def test_frequency_and_presence_count_the_output_alone() -> None:
    logits = processors_of().change(
        torch.zeros(2, VOCAB),
        [
            sequence(0, [1, 1, 4], [5, 5, 6], frequency_penalty=0.5, presence_penalty=0.25),
            sequence(1, [1], [5], temperature=1.0),
        ],
    )
    expected = torch.zeros(2, VOCAB)
    expected[0, 5], expected[0, 6] = -1.25, -0.75
    assert torch.equal(logits, expected)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([0.02, 0.2, 0.7, 1.0]), st.sampled_from([1.0, 0.8]))
def test_min_p_keeps_what_transformers_keeps(seed: int, min_p: float, top_p: float) -> None:
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)])
    kept = torch.isfinite(warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone())[0]).nonzero().flatten().tolist()
    drawn = [sequence(row, [1], [], temperature=1.3, top_p=top_p, min_p=min_p) for row in range(200)]
    assert set(sample(logits.expand(200, -1), drawn).token_ids.tolist()) <= set(kept)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.4},
        {"min_tokens": 9},
        {"logit_bias": {5: 3.0, 17: -4.0}, "repetition_penalty": 1.1},
        {"bad_words": ("40", "5 17")},
        {"stop_token_ids": (17, 33)},
        {"repetition_penalty": 0.8, "min_tokens": 4},
    ],
)
def test_greedy_tokens_are_those_of_generate(asked: dict[str, Any]) -> None:
    model, names = random_model("llama"), {"min_tokens": "min_new_tokens"}
    theirs = {names.get(name, name): value for name, value in asked.items()}
    if bias := theirs.pop("logit_bias", {}):
        theirs["sequence_bias"] = {(token,): value for token, value in bias.items()}
    if words := theirs.pop("bad_words", ()):
        theirs["bad_words_ids"] = [list(map(int, word.split())) for word in words]
    if ends := theirs.pop("stop_token_ids", ()):
        theirs["eos_token_id"] = [model.generation_config.eos_token_id, *ends]
    model.set_attn_implementation("eager")
    expected = []
    for prompt in prompts():
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        output = model.generate(
            torch.tensor([prompt]), attention_mask=mask, max_new_tokens=14, do_sample=False, **theirs
        )
        expected.append(output[0, len(prompt) :].tolist())
    found, *_ = run(load("llama"), requests_of(prompts(), **asked), chunk_tokens=16)
    assert found.outputs == expected


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_rows_with_settings_and_others_share_steps(steps_ahead: int) -> None:
    """A step whose tokens the next has to know is waited for, and only such a step."""
    asked: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.4}, {"logit_bias": {5: 3.0}}, {"min_tokens": 9}]
    requests = [
        replace(requests_of([prompt], **asked[row % 4])[0], row=row, id=f"row-{row}")
        for row, prompt in enumerate(prompts())
    ]
    together, *_ = run(load("llama"), requests, chunk_tokens=16, steps_ahead=steps_ahead)
    for row, request in enumerate(requests):
        alone, *_ = run(load("llama"), [replace(request, row=0)])
        assert together.outputs[row] == alone.outputs[0]
