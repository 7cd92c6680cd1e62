"""Tokens that the host sees a step late, as on a GPU: the next step is computed from where they were sampled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiny_models import ARCHITECTURES, NoTokenizer, hopeful, load, prompts, reference, requests_of, run

from vasuki.engine.policy import POLICIES, Admission
from vasuki.engine.sequence import FinishReason, Sequence
from vasuki.hf import ragged_executor
from vasuki.hf.attention.inputs import lay_out

CAREFUL = dataclasses.replace(POLICIES["vasuki"], admission=Admission.PEAK)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate(name: str, chunk_tokens: int) -> None:
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens, steps_ahead=1)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("policy", ["sarathi", "orca", "vllm", "vllm-v0", "static"])
def test_under_every_policy(policy: str) -> None:
    rows, _, _ = run(load("llama"), requests_of(prompts()), policy=POLICIES[policy], steps_ahead=1)
    assert rows.outputs == reference("llama")


TIGHT: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "parked": dict(host_blocks=60),
    "prefilled ahead": dict(host_blocks=60, policy=CAREFUL, prefills_ahead=True),
    "streamed": dict(num_streamed=2),
    "parked and streamed over a slow link": dict(host_blocks=60, num_streamed=1, bytes_per_s=5e6),
}


@pytest.mark.parametrize("options", TIGHT.values(), ids=list(TIGHT))
def test_in_memory_that_is_too_small(options: dict[str, Any]) -> None:
    rows, scheduler, _ = run(load("llama"), hopeful(requests_of(prompts())), 16, 24, steps_ahead=1, **options)
    counters = scheduler.queues.counters
    assert counters.preemptions_recompute + counters.preemptions_swap + counters.prefilled_ahead > 0
    assert rows.outputs == reference("llama")


@pytest.mark.parametrize("options", TIGHT.values(), ids=list(TIGHT))
def test_rows_that_stop_say_the_same(options: dict[str, Any]) -> None:
    """By a token and by what follows what, alone and drawn: the step that was launched meanwhile leaves no trace."""
    loaded = dataclasses.replace(load("llama"), tokenizer=PairsStop(), eos_token_ids=frozenset({5, 17, 40, 60, 83}))
    requests = hopeful([*requests_of(prompts()), *requests_of(prompts(seed=1), temperature=1.0, seed=7)])
    requests = [dataclasses.replace(request, row=row) for row, request in enumerate(requests)]
    requests += [dataclasses.replace(r, row=len(requests) + r.row, sample_index=1) for r in requests]
    at_once, late = [
        run(loaded, requests, 16, 24, want_logprobs=True, steps_ahead=steps_ahead, **options)[0].sequences
        for steps_ahead in (0, 1)
    ]
    assert at_once.keys() == late.keys() == set(range(len(requests)))
    for row, sequence in at_once.items():
        assert late[row].output_token_ids == sequence.output_token_ids
        assert late[row].finish_reason is sequence.finish_reason
        assert late[row].logprob == pytest.approx(sequence.logprob, abs=1e-4)
    reasons = [sequence.finish_reason for sequence in late.values()]
    assert reasons.count(FinishReason.STOP) > 5
    assert reasons.count(FinishReason.LENGTH) > 5


def test_the_next_step_is_launched_before_tokens_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one of them, and a sequence without a pending token is never computed from one."""
    known: list[int] = []

    def watch(batch: Any, *args: Any) -> Any:
        known.extend(chunk.sequence.num_pending_tokens for chunk in batch.chunks if chunk.samples)
        return lay_out(batch, *args)

    monkeypatch.setattr(ragged_executor, "lay_out", watch)
    run(load("llama"), requests_of(prompts()))
    assert set(known) == {0}
    known.clear()
    run(load("llama"), requests_of(prompts()), steps_ahead=1)
    assert sum(known) > 0.8 * len(known)
    assert max(known) == 1


class PairsStop(NoTokenizer):
    """A stop string, as far as the engine can tell: two tokens whose sum is a multiple of nine."""

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        return bool(sequence.output_token_ids) and (sequence.output_token_ids[-1] + token_id) % 9 == 0
