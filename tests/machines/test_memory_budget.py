"""What a device has room for, and what is said when a model has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.machines.experts import MOST_ROWS_OF_ALL_EXPERTS
from vasuki.machines.here.device import within_host_memory
from vasuki.machines.memory_budget import activation_bytes, attention_bytes, memory_budget, recorded_bytes
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths

LLAMA = named_shape("llama-3-8b")
GIB = 2**30


def test_memory_budget_adds_up() -> None:
    budget = memory_budget(LLAMA, find_profile("a10"))
    usable = int(0.9 * find_profile("a10").memory_bytes)
    assert budget.weight_bytes + budget.activation_bytes + budget.kv_bytes == usable
    assert budget.kv_tokens == 16 * budget.num_blocks
    assert budget.kv_tokens * LLAMA.kv_bytes_per_token <= budget.kv_bytes
    assert 35_000 < budget.kv_tokens < 45_000


def test_what_recorded_steps_hold_is_set_aside() -> None:
    """On a GPU, for models whose steps are recorded, and as much for more rows than the largest has."""
    card = find_profile("h100")
    few, many, most = (recorded_bytes(LLAMA, card, rows, 1) for rows in (64, 2048, 4096))
    assert 2 * 64 * LLAMA.vocab_size * 2 < few < many == most
    mixture = named_shape("qwen3-30b-a3b")
    few, many = (recorded_bytes(mixture, find_profile("a100"), rows, 1) for rows in (MOST_ROWS_OF_ALL_EXPERTS, 2048))
    assert few == many < recorded_bytes(mixture, card, 2048, 1)
    assert not recorded_bytes(LLAMA, find_profile("cpu"), 64, 1)
    assert not recorded_bytes(LLAMA, card, 64, 1, Layout(host_layers=1))
    for others in ({"backend": "padded"}, {"compiles": False}):
        assert not recorded_bytes(replace(LLAMA, **others), card, 64, 1)
    packed = card.model_copy(update={"attention": "packed"})
    tables = (recorded_bytes(LLAMA, each, 64, 9) - recorded_bytes(LLAMA, each, 64, 1) for each in (card, packed))
    assert next(tables) == 5 * next(tables), "where torch's kernel attends to prompts, none are recorded"
    budgets = [memory_budget(LLAMA, card, max_num_seqs=rows) for rows in (64, 2048)]
    logits = (2048 - 64) * LLAMA.vocab_size
    assert budgets[0].kv_bytes - budgets[1].kv_bytes > logits * (2 * 2 + 4)


def test_tables_of_recorded_steps_are_as_wide_as_the_longest_row() -> None:
    """A context of 128k in blocks of 16 would take 0.9 GB of tables; rows of 4,096 tokens have room in any case."""
    long = replace(LLAMA, max_context_tokens=131072)
    held = {
        row_tokens: memory_budget(long, find_profile("h100"), max_num_seqs=2048, row_tokens=row_tokens).activation_bytes
        for row_tokens in (0, 600, 4096, 8192)
    }
    assert held[600] == held[4096] == held[0] - 4 * (2048 + 256) * (8192 - 256) * 12
    assert held[8192] == held[4096] + 4 * (2048 + 256) * 256 * 12


def test_memory_budget_of_a_given_pool() -> None:
    assert memory_budget(LLAMA, find_profile("a10"), device_memory=2**30).kv_tokens == 8192
    with pytest.raises(ModelError, match=r"10\.0 GiB of KV \(kv\.device_memory\) is too much"):
        memory_budget(LLAMA, find_profile("a10"), device_memory=10 * 2**30)


def test_a_pool_without_a_block_says_what_a_block_takes() -> None:
    with pytest.raises(ModelError, match=r"1\.0 KiB of KV \(kv\.device_memory\) is too little: a block takes 2\.0 MiB"):
        memory_budget(LLAMA, find_profile("a10"), device_memory=1024)


def test_memory_budget_of_layouts() -> None:
    one = memory_budget(LLAMA, find_profile("a100"))
    two = memory_budget(LLAMA, find_profile("a100"), layout=Layout(tensor_parallel=2))
    staged = memory_budget(LLAMA, find_profile("a100"), layout=Layout(pipeline_parallel=2))
    assert two.kv_bytes_per_token == staged.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.kv_tokens > 2 * one.kv_tokens


def test_layers_on_the_host_leave_their_room_less_the_buffers() -> None:
    launched = replace(LLAMA, compiles=False)  # kernel by kernel either way, as steps that wait for weights are
    card, all_here = find_profile("a100"), memory_budget(launched, find_profile("a100"))
    for host_layers, buffers in ((1, 1), (2, 2), (16, 2), (20, 3), (31, 3)):
        some_away = memory_budget(launched, card, layout=Layout(host_layers=host_layers))
        freed = (host_layers - buffers) * LLAMA.layer_weight_bytes
        assert all_here.weight_bytes - some_away.weight_bytes == some_away.kv_bytes - all_here.kv_bytes == freed


def test_too_large_steps_say_what_would_fit() -> None:
    """No number of cards makes activations smaller."""
    card = find_profile("a10")
    with pytest.raises(
        ModelError, match=r"steps of 1,000,000 tokens are too large for it, [\d,]+ would fit"
    ) as refused:
        memory_budget(LLAMA, card, max_step_tokens=1_000_000)
    assert "such GPUs" not in str(refused.value)
    most = int(str(refused.value).partition("too large for it, ")[2].split()[0].replace(",", ""))
    assert memory_budget(LLAMA, card, max_step_tokens=most).num_blocks > 0


def test_rectangles_hold_what_a_layer_gathers_beside_all_kv() -> None:
    """Llama-3-8B: 8 KV heads of 128 numbers, which 32 heads share, in bfloat16."""
    ragged, padded, alone = (replace(LLAMA, backend=backend) for backend in ("ragged", "padded", "alone"))
    limits = dict(max_step_tokens=512, max_num_seqs=100)
    packed = activation_bytes(ragged, **limits)
    assert activation_bytes(ragged, **limits, row_tokens=4000) == packed
    gathered = 100 * 4000 * 2 * (1024 + 4096) * 2
    assert activation_bytes(padded, **limits, row_tokens=4000) == gathered + 100 * 4000 * 2
    chunk = 4000 * 2 * (1024 + 4096) * 2 + 640 * 4000 * 2
    assert attention_bytes(padded, 512, 1, 4000) == chunk, "of prompts, with a quarter of padding"
    assert attention_bytes(alone, 512, 100, 4000) == 4000 * 2 * (1024 + 4096) * 2 + 4000 * 4000 * 2
    assert attention_bytes(replace(padded, eager=True), 512, 1, 4000) == chunk + 640 * 4000 * 32 * (2 + 2 + 4)


def test_plans_of_padded_rows_leave_room_for_them() -> None:
    lengths = Lengths(np.array([3000] * 40), np.array([500] * 40))
    ragged, padded = (
        make_plan(lengths, replace(LLAMA, backend=backend), find_profile("a10")) for backend in ("ragged", "padded")
    )
    assert padded.settings.kv_tokens < 0.97 * ragged.settings.kv_tokens
    asked = EngineConfig(max_num_seqs=1000)
    with pytest.raises(
        ModelError, match=r"its activations are too large for that: lower engine\.max_num_seqs or"
    ) as refused:
        make_plan(lengths, replace(LLAMA, backend="padded"), find_profile("a10"), engine=asked)
    assert "such GPUs" not in str(refused.value)


def test_too_large_a_model_says_what_would_fit() -> None:
    with pytest.raises(
        ModelError,
        match=r"131 GiB for weights.*what would fit: 4 such GPUs, or weights quantised to 7 bits, which vLLM",
    ):
        memory_budget(named_shape("llama-3-70b"), find_profile("a100"))
    assert (
        memory_budget(named_shape("llama-3-70b"), find_profile("a100"), layout=Layout(tensor_parallel=4)).kv_tokens > 0
    )
    with pytest.raises(ModelError, match=r"would fit: 2 such GPUs, or model\.quantization: float8, or a smaller"):
        memory_budget(named_shape("llama-13b").with_dtype("bfloat16"), find_profile("l4"))
    with pytest.raises(ModelError, match="or bfloat16 weights"):
        memory_budget(LLAMA.with_dtype("float32"), find_profile("a10"))


def test_host_memory_is_no_more_than_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """`auto` takes what is free and says so; a job that names mode and amount is refused."""
    asked = KVConfig(host_memory=8 * GIB)
    assert within_host_memory(asked, 9 * GIB) is asked
    assert not caplog.records
    assert within_host_memory(asked, 3 * GIB).host_memory == 3 * GIB
    assert within_host_memory(KVConfig(offload="park"), 3 * GIB).host_memory == 3 * GIB
    assert caplog.messages == ["kv.host_memory: 8.0 GiB are asked for, 3.0 GiB are free; taking those"] * 2
    with pytest.raises(JobFileError, match=r"8\.0 GiB are asked for, 3\.0 GiB are free; lower it"):
        within_host_memory(KVConfig(host_memory=8 * GIB, offload="stream"), 3 * GIB)
