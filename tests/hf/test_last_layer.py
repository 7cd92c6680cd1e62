"""The last MLP computes sampled tokens, and only them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, load, prompts, reference, requests_of, run

from vasuki.hf.last_layer import SampledMLP, sampled_mlp


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_for_the_tokens_that_are_wanted(name: str) -> None:
    loaded = load(name)
    last = sampled_mlp(loaded.model, loaded.kv_layout.num_layers)
    assert isinstance(last, SampledMLP)
    assert sampled_mlp(loaded.model, loaded.kv_layout.num_layers) is last, "it is wrapped once"
    x = torch.randn(1, 7, loaded.config.hidden_size)
    with torch.inference_mode():
        whole = last(x)
        for rows in ([1, 6], [0, 1, 2, 3, 4, 5, 6], []):
            with last.only(torch.tensor(rows, dtype=torch.int64)):
                some = last(x)
            assert type(some) is type(whole)
            first, expected = (out[0] if isinstance(out, tuple) else out for out in (some, whole))
            torch.testing.assert_close(first[:, rows], expected[:, rows])
            assert first.shape == expected.shape
            assert not first[:, [row for row in range(1, 7) if row not in rows]].any()
        assert torch.equal(last(x)[0] if isinstance(whole, tuple) else last(x), expected), "and all of them again"


def test_a_run_asks_it_for_no_more() -> None:
    loaded = load("llama")
    last = sampled_mlp(loaded.model, loaded.kv_layout.num_layers)
    assert last is not None
    seen: list[int] = []
    hook = last.mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    rows, _, stats = run(loaded, requests_of(prompts()), chunk_tokens=16)
    hook.remove()
    assert rows.outputs == reference("llama")
    assert sum(map(len, rows.outputs)) <= sum(seen) <= sum(map(len, rows.outputs)) + stats.steps
