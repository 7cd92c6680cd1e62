"""Greedy tokens equal `model.generate` row by row, in float32, through rectangles of rows and columns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ALONE, PADDED, UNCACHED, hopeful, load_padded, prompts, reference, requests_of, run

from vasuki.engine.policy import POLICIES
from vasuki.hf.padded.probe import fewest_rows


@pytest.mark.parametrize("chunk_tokens", [7, 10_000])
@pytest.mark.parametrize("name", [*PADDED, *ALONE, *UNCACHED, "llama", "gemma2"])
def test_greedy_equals_generate(name: str, chunk_tokens: int) -> None:
    expected = reference(name)
    loaded = load_padded(name)
    assert loaded.backend == ("alone" if name in ALONE else "uncached" if name in UNCACHED else "padded")
    rows, _, _ = run(loaded, requests_of(prompts()), chunk_tokens)
    assert rows.outputs == expected


@pytest.mark.parametrize("name", ["bloom", "stablelm"])
def test_transformers_fast_attention_takes_the_same_masks(name: str) -> None:
    rows, _, _ = run(load_padded(name, "sdpa"), requests_of(prompts()), 16)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "llama4", "minimax", "mamba", "recurrent_gemma"])
@given(st.data())
@settings(max_examples=5, deadline=None)
def test_rows_may_join_leave_and_come_back_at_any_moment(name: str, data: st.DataObject) -> None:
    """Few slots and blocks: rows start when others end, make room for others, in chunks of any size."""
    order = data.draw(st.permutations(range(len(prompts()))))
    requests = requests_of(prompts())
    rows, _, _ = run(
        load_padded(name),
        hopeful([requests[i] for i in order]),
        chunk_tokens=data.draw(st.integers(1, 40)),
        num_blocks=data.draw(st.integers(20, 60)),
        max_num_seqs=data.draw(st.integers(1, 9)),
    )
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", ["bloom", "minimax", "rwkv"])
def test_preempted_rows_are_computed_again(name: str) -> None:
    rows, scheduler, _ = run(load_padded(name), hopeful(requests_of(prompts())), chunk_tokens=16, num_blocks=24)
    assert scheduler.queues.counters.preemptions_recompute > 0
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", ["mpt", "phimoe"])
def test_parked_rows_keep_keys_and_values(name: str) -> None:
    requests = hopeful(requests_of(prompts()))
    rows, scheduler, stats = run(load_padded(name), requests, chunk_tokens=16, num_blocks=24, host_blocks=60)
    assert scheduler.queues.counters.preemptions_swap > 0
    assert stats.swapped_blocks > 0
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_layers_stream_through_every_call_of_a_step(name: str) -> None:
    """Decodes and prompts of a step are calls of their own, in each of which all layers pass; some rows wait parked."""
    requests = hopeful(requests_of(prompts()))
    rows, scheduler, stats = run(
        load_padded(name), requests, chunk_tokens=16, num_blocks=24, host_blocks=60, num_streamed=1
    )
    assert scheduler.queues.counters.preemptions_swap > 0
    assert stats.copied_bytes > 0
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("num_streamed", [0, 1])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("vasuki", "prefill-packing")])
def test_every_policy_may_run_padded(policy: str, num_streamed: int) -> None:
    rows, _, stats = run(
        load_padded("falcon"), requests_of(prompts()), policy=POLICIES[policy], num_streamed=num_streamed
    )
    assert (stats.copied_bytes > 0) == bool(num_streamed)
    assert rows.outputs == reference("falcon")


def test_rows_that_begin_alike_share_blocks() -> None:
    loaded = load_padded("bloom")
    base = prompts()[1]
    forked = [base[:cut] + tail for cut in (8, 21, 32) for tail in ([5], [6, 7], [])] + [base, base]
    alone = [run(loaded, requests_of([row]))[0].outputs[0] for row in forked]
    rows, scheduler, _ = run(loaded, requests_of(forked))
    assert scheduler.queues.counters.shared_tokens > 100
    assert rows.outputs == alone


@pytest.mark.parametrize("chunk_tokens", [23, 10_000])
@pytest.mark.parametrize("name", [*PADDED, "llama", "gemma2"])
def test_prompts_that_share_rows_give_the_same_tokens(name: str, chunk_tokens: int) -> None:
    loaded = load_padded(name)
    assert (loaded.longest_packed_tokens == 0) == (name in ("bloom", "falcon_alibi"))
    for how in ({"price": fewest_rows}, {"always_packed": True}):
        rows, _, _ = run(loaded, requests_of(prompts()), chunk_tokens, **how)
        assert rows.outputs == reference(name)


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_prompts_may_share_rows_at_any_moment(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["falcon", "gpt_neo", "llama4", "mpt", "llama"]))
    order = data.draw(st.permutations(range(len(prompts()))))
    requests = requests_of(prompts())
    rows, _, _ = run(
        load_padded(name, data.draw(st.sampled_from(["eager", "sdpa"]))),
        hopeful([requests[i] for i in order]),
        chunk_tokens=data.draw(st.integers(1, 90)),
        num_blocks=data.draw(st.integers(20, 90)),
        max_num_seqs=data.draw(st.integers(1, 9)),
        price=fewest_rows,
    )
    assert rows.outputs == reference(name)
