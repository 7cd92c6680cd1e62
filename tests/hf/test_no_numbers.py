"""A row whose logits are no numbers ends with an error, and the others answer as if it were not there: in its step, and
behind it in the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import NoTokenizer, hopeful, prompts, random_model, requests_of, run

from vasuki.engine.sequence import FinishReason, Request, SamplingParams, Sequence
from vasuki.hf.kernels.native import find_compiler
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare, prepare_padded
from vasuki.hf.sampler import NO_TOKEN, sample

BAD = 3  # a token whose embedding is broken
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"chunk_tokens": 7},
    "parked": {"chunk_tokens": 16, "num_blocks": 24, "host_blocks": 60},
    "launched ahead": {"steps_ahead": 1},
    "compiled": {"native": True},
}


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=["nan", "inf"])
def broken(request: pytest.FixtureRequest) -> LoadedModel:
    """A model that answers rows with that token by what is no number."""
    model = random_model.__wrapped__("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = request.param
    model.set_attn_implementation("vasuki_ragged")
    return prepare(model, NoTokenizer(), model.generation_config, "llama")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_without_numbers_ends_alone(broken: LoadedModel, mode: str, sampling: dict[str, Any]) -> None:
    if mode == "compiled" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    good = [[token for token in prompt if token != BAD] or [5] for prompt in prompts()]
    bad = [5, 6, BAD, 7]
    alone, _, _ = run(broken, requests_of(good, **sampling), want_logprobs=True)
    answers = [alone.sequences[row] for row in range(len(good))]
    rows, scheduler, _ = run(broken, hopeful(requests_of([*good, bad], **sampling)), want_logprobs=True, **MODES[mode])
    failed = rows.sequences[len(good)]
    assert (failed.finish_reason, failed.output_token_ids, failed.logprob) == (FinishReason.ERROR, [], 0.0)
    assert "no numbers" in failed.error
    for row, answer in enumerate(answers):
        assert rows.sequences[row].output_token_ids == answer.output_token_ids
        assert rows.sequences[row].logprob == pytest.approx(answer.logprob, abs=1e-3)
        assert rows.sequences[row].error == answer.error  # of one that writes the broken token itself
    assert any(not answer.error for answer in answers)
    scheduler.queues.check_integrity()


SHORT_OF_MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"chunk_tokens": 7},
    "parked": {"chunk_tokens": 16, "host_blocks": 60},
    "streamed": {"num_streamed": 1},
    "launched ahead": {"steps_ahead": 1},
    "compiled": {"native": True},
    "padded": {},
    "packed": {"price": lambda rows, new, columns: rows},
}


@pytest.mark.parametrize("block_tokens", [4, 16])
@pytest.mark.parametrize("mode", SHORT_OF_MEMORY)
def test_rows_in_blocks_of_one_without_numbers_answer_as_generate_does(mode: str, block_tokens: int) -> None:
    if mode == "compiled" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    model, is_padded = random_model.__wrapped__("llama"), mode in ("padded", "packed")
    good = [[token for token in prompt if token != BAD] or [5] for prompt in prompts()]
    expected = [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=14, do_sample=False
        )
        for prompt in good
    ]
    model.set_attn_implementation("sdpa" if is_padded else "vasuki_ragged")
    described = model, NoTokenizer(), model.generation_config, "llama"
    loaded = prepare_padded(*described) if is_padded else prepare(*described)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    rows = [row for prompt in good for row in ([BAD, *prompt], prompt)]  # each behind one of about its length
    most = max(map(len, rows)) + 14
    blocks: dict[str, Any] = {"num_blocks": -(-most // block_tokens), "block_tokens": block_tokens}
    answered, scheduler, _ = run(loaded, hopeful(requests_of(rows)), **blocks, **SHORT_OF_MEMORY[mode])
    assert scheduler.queues.pool.peak_held == blocks["num_blocks"]
    for row, (prompt, output) in enumerate(zip(good, expected, strict=True)):
        assert "no numbers" in answered.sequences[2 * row].error
        tokens = output[0, len(prompt) :].tolist()
        known = tokens.index(BAD) + 1 if BAD in tokens else len(tokens)  # behind which the row is broken itself
        assert answered.sequences[2 * row + 1].output_token_ids == tokens[:known]


def test_masks_are_numbers_and_rows_without_any_are_not() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, -inf, 2.0], [-inf] * 3, [1.0, nan, 2.0], [1.0, inf, 2.0], [0.0, 3.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=1e-9), SamplingParams(temperature=1e-9, top_k=2)):
        sequences = [Sequence(Request(i, i, 1, 4, sampling=params)) for i in range(len(logits))]
        sampled = sample(logits.clone(), sequences, want_logprobs=True)
        assert sampled.token_ids.tolist() == [2, NO_TOKEN, NO_TOKEN, NO_TOKEN, 1]
        assert torch.isfinite(sampled.logprobs[[0, 4]]).all()
