"""Rows that are computed alone are counted with what their caches really take, and rectangles with what is gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import ALONE, UNCACHED, load_padded, prompts, random_config, random_model, requests_of, run
from transformers import DynamicCache

from vasuki.hf.padded import block_cache
from vasuki.hf.padded.held_memory import held_bytes, memory_of
from vasuki.machines.memory_budget import rectangle_bytes
from vasuki.models.shape import TOKEN_ID_BYTES

JOB = {"model": {"path": "x"}, "input": {"path": "x", "prompt": "{x}"}, "output": {"path": "x"}}


def test_tensors_count_once_and_views_in_full() -> None:
    whole = torch.zeros(10, 4)
    assert memory_of({"a": [whole, (whole[:2], whole)], "b": None}) == 160
    assert memory_of([whole[:1], torch.zeros(3, dtype=torch.float16)]) == 166
    assert memory_of(None) == 0


def test_keys_and_values_are_per_token_and_states_per_row() -> None:
    def cache_of(tokens: int) -> object:
        cache = DynamicCache()
        cache.update(torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8), 0)
        return [cache, torch.zeros(100)]

    assert held_bytes(cache_of) == (2 * 2 * 8 * 4, 400)


def test_a_state_alone_counts_the_ids_of_tokens() -> None:
    config, loaded = random_config("mamba"), load_padded("mamba")
    each = config.intermediate_size * (config.conv_kernel + config.state_size)
    assert loaded.held == (TOKEN_ID_BYTES, config.num_hidden_layers * each * 4)


def test_what_generate_keeps_is_what_is_counted() -> None:
    """After a hundred tokens a row's cache takes what was foreseen from shorter ones."""
    for name in ("minimax", "zamba2", "zaya"):
        model, held = random_model(name), load_padded(name).held
        with torch.inference_mode():
            cache = model(input_ids=torch.full((1, 100), 5), use_cache=True).past_key_values
        assert memory_of(cache) == pytest.approx(held.row + 100 * held.token, rel=0.01)


@pytest.mark.parametrize("name", [*ALONE, *UNCACHED])
def test_plans_count_what_the_loaded_model_keeps(name: str) -> None:
    loaded = load_padded(name)
    shape = loaded.shape_in_use(JOB["model"]["path"], "auto")
    assert (shape.backend, shape.state_bytes) == (loaded.backend, loaded.held.row)
    assert shape.kv_bytes_per_token == -(-loaded.held.token // shape.num_layers) * shape.num_layers
    assert not shape.in_blocks
    assert replace(shape, kept_bytes=0).without_states.state_bytes == 0


@pytest.mark.parametrize("name", ["stablelm", "nemotron", "phimoe"])
def test_rectangles_are_counted_as_large_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_padded(name)
    shape = replace(loaded.shape_in_use(JOB["model"]["path"], "auto"), num_heads=0)  # scores are the model's own
    seen: list[int] = []
    update = block_cache._Layer.update

    def measured(layer: Any, keys: torch.Tensor, values: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = update(layer, keys, values, *more)
        rows, new = layer._rectangle.input_ids.shape
        width = layer._rectangle.past + new
        seen.append(rows)
        mask = rows * new * width * 4
        assert sum(each.numel() * 4 for each in gathered) + mask <= rectangle_bytes(shape, rows, new, width)
        return gathered

    monkeypatch.setattr(block_cache._Layer, "update", measured)
    run(loaded, requests_of(prompts()))
    assert max(seen) > 4
