"""Layers that change place from batch to batch: every token is that of `generate`, whatever moves, and nothing that a
slot held before is ever read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tiny_models import Checked, NoTokenizer, Rows, prompts, random_config, requests_of

from vasuki.engine.batch import Batch
from vasuki.engine.depth import Depth, depths
from vasuki.engine.loop import RunStats, drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf import ragged_executor
from vasuki.hf.kv.depth_mover import DepthMover
from vasuki.hf.kv.kv_mover import ThreadCopyEngine
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor

LAYERS, MAX_TOKENS = 7, 14


@dataclass
class Forced:
    """A rule that goes through given depths, one a batch."""

    order: Iterator[Depth]
    num_layers: int = LAYERS
    is_lazy: bool = False
    asked: list[Depth] = field(default_factory=list)

    def __call__(self, batch: Batch) -> Depth:
        self.asked.append(next(self.order))
        return self.asked[-1]

    @property
    def deepest(self) -> Depth:
        return Depth(self.num_layers, "ring", 2)

    def most_blocks(self, num_blocks: int) -> int:
        return num_blocks * self.num_layers // 2


def shuffled(seed: int) -> Iterator[Depth]:
    every, numbers = list(depths(LAYERS)), torch.Generator().manual_seed(seed)
    while True:
        yield every[int(torch.randint(len(every), (), generator=numbers))]


ORDERS: dict[str, Callable[[], Iterator[Depth]]] = {
    "every depth in turn": lambda: itertools.cycle(depths(LAYERS)),
    "at random": lambda: shuffled(0),
    "from none to a ring of two and back": lambda: itertools.cycle([Depth(LAYERS), Depth(LAYERS, "ring", 2)]),
    "ways": lambda: itertools.cycle([Depth(LAYERS, "first-last", 3), Depth(LAYERS, "ring", 4)]),
    "two steps each": lambda: (depth for depth in shuffled(1) for _ in range(2)),
    "a ring of three": lambda: itertools.repeat(Depth(LAYERS, "ring", 3)),
    "two at the ends": lambda: itertools.repeat(Depth(LAYERS, "first-last", 2)),
}


@cache
def model_of(name: str) -> Any:
    torch.manual_seed(3)
    config = random_config(name, num_hidden_layers=LAYERS)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@cache
def expected(name: str) -> list[list[int]]:
    model = model_of(name)
    model.set_attn_implementation("eager")
    rows = []
    for prompt in prompts():
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        output = model.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def load(name: str) -> LoadedModel:
    expected(name)
    model = model_of(name)
    model.set_attn_implementation("vasuki_ragged")
    return prepare(model, NoTokenizer(), model.generation_config, name)


class Poisoning(Checked):
    """Fills every slot that no block has with what is no number, before each step."""

    def launch(self, batch: Batch) -> Any:
        step = super().launch(batch)
        mover = self.executor.offload
        for done in mover.under_way:
            mover.engine.wait(done)
        arena = self.executor.cache
        arena.layers[0][mover._free[: mover._num_free].copy()] = math.nan
        assert mover._num_free + mover.depth.places * int(mover._has_slots.sum()) == arena.num_blocks
        return step


def run(
    name: str,
    rule: Forced,
    num_blocks: int = 40,
    kernel: bool = True,
    policy: str = "vasuki-paper",
    steps_ahead: int = 0,
) -> tuple[Rows, Scheduler, RunStats, RaggedExecutor]:
    loaded = load(name) if kernel else replace(load(name), kernel=None)
    no_sharing = replace(POLICIES[policy], shares_prefixes=False)
    settings = EngineSettings(no_sharing, Limits(16, 16), num_blocks, 4, OffloadPlan("by_batch", depth=rule))
    executor, scheduler, rows = build_executor(loaded, settings), Scheduler(settings), Rows()
    executor.most_ahead = steps_ahead
    stats = drain(requests_of(prompts(), MAX_TOKENS), scheduler, Poisoning(executor, scheduler), rows)
    assert scheduler.queues.pool.num_held == 0
    return rows, scheduler, stats, executor


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_token_is_that_of_generate(name: str, order: str, kernel: bool) -> None:
    rule = Forced(ORDERS[order]())
    rows, _, stats, executor = run(name, rule, kernel=kernel)
    assert executor.offload is not None
    assert rows.outputs == expected(name)
    assert stats.copied_bytes == executor.offload.copied_bytes > 0


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt_oss", "qwen3_moe"])
def test_other_models_go_deep_too(name: str) -> None:
    assert run(name, Forced(shuffled(2)))[0].outputs == expected(name)


@pytest.mark.parametrize("policy", ["vasuki-paper", "vasuki"])
def test_rows_that_make_room_are_computed_again(policy: str) -> None:
    deep_then_none = itertools.cycle([Depth(LAYERS, "ring", 2)] * 8 + [Depth(LAYERS)] * 8)
    rows, scheduler, _, _ = run("llama", Forced(deep_then_none), num_blocks=19, policy=policy)
    assert rows.outputs == expected("llama")
    assert scheduler.queues.counters.preemptions_recompute > 0


def test_steps_launched_ahead_change_nothing() -> None:
    assert run("llama", Forced(shuffled(4)), steps_ahead=1)[0].outputs == expected("llama")


def test_more_rows_run_side_by_side_the_deeper_they_go() -> None:
    shallow, deep = (
        run("llama", Forced(itertools.repeat(depth)), num_blocks=24)[2]
        for depth in (Depth(LAYERS), Depth(LAYERS, "ring", 2))
    )
    assert deep.peak_device_blocks > 24 >= shallow.peak_device_blocks
    assert deep.mean_seqs > shallow.mean_seqs


def test_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_executor, "copy_engine", lambda _: ThreadCopyEngine(bytes_per_s=2e6))
    rows, _, stats, _ = run("llama", Forced(ORDERS["every depth in turn"]()))
    assert rows.outputs == expected("llama")
    assert stats.exposed_copy_s > 0


def test_the_device_holds_no_more_than_it_did() -> None:
    *_, executor = run("llama", Forced(shuffled(5)))
    assert isinstance(executor.offload, DepthMover)
    assert len({layer.data_ptr() for layer in executor.cache.layers}) == 1
    assert executor.cache.layers[0].shape[0] == 40 * LAYERS
