"""Whole steps on a CUDA device without a card: shapes, types and devices are checked, and nothing may wait for it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from fake_cuda import CUDA, Kernels, Recording, fake_cuda, install_guard
from tiny_models import ARCHITECTURES, RECURRENT, NoTokenizer, random_config, random_model
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from versions import PAGES

from vasuki.engine.batch import Batch, ScheduledChunk, StepResult
from vasuki.engine.blocks import BlockTable
from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf import ragged_executor, sampler
from vasuki.hf.attention import chunks, inputs
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.attention.inputs import LastTokens, lay_out
from vasuki.hf.cuda.recordable import can_record
from vasuki.hf.cuda.step_graphs import Answers, GraphSize, Pause, Replay, _Recorded
from vasuki.hf.fused.by_torch import SmallKernels, fuse_modules
from vasuki.hf.fused.float8_linear import round_products
from vasuki.hf.kernels import experts, transfer, varlen
from vasuki.hf.kernels.float8 import FLOAT8, Scales
from vasuki.hf.kernels.varlen import PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.loading.load_model import install_experts
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.profiler import whole_steps
from vasuki.hf.ragged_executor import LaunchedStep, RaggedExecutor, build_executor
from vasuki.hf.recurrent import states
from vasuki.hf.recurrent.states import StateCache
from vasuki.machines.cost_model import CostModel, launches_of
from vasuki.machines.experts import MOST_ROWS_OF_ALL_EXPERTS
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # a sigmoid far out

# Kernels that a step of three layers launches: decodes, and decodes with prompts. They may only go down.
ROUNDED = ["llama", "qwen2", "qwen3", "gemma2"]  # whose products may have 8 bits
MOST_KERNELS = {"decodes": 60, "mixed": 70}
MOST_BESIDE_OURS = {  # with Triton's
    "llama": (45, 55),
    "qwen2": (45, 55),
    "qwen3": (45, 55),
    "mistral": (45, 55),
    "gemma2": (56, 63),
    "gemma3": (52, 62),
    "ministral3": (102, 112),
    "phi3": (50, 60),
    "olmo2": (57, 67),
    "gpt_neox": (81, 91),
    "granite": (53, 63),
    "qwen3_moe": (81, 91),
    "deepseek_v3": (168, 178),
    "gemma4": (237, 253),  # of six layers
    "gpt_oss": (96, 103),
}


@pytest.fixture(autouse=True)
def _card(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_guard(compiler)

    def on_the_card(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        together = np.concatenate(arrays)
        assert {array.dtype for array in arrays} == {together.dtype}
        on_host = torch.empty(len(together), dtype=torch.from_numpy(together[:0]).dtype)
        return list(torch.split(on_host.to(device), [len(array) for array in arrays]))

    def staging(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
        return torch.zeros(num_bytes, dtype=torch.uint8), np.zeros(num_bytes, np.uint8)

    for module in (chunks, inputs, sampler, states, varlen):
        monkeypatch.setattr(module, "to_device", on_the_card)
    monkeypatch.setattr(transfer, "staging", staging)
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.fixture
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> SmallKernels:
    """Triton's kernels, of which a launch is counted, and computes nothing."""
    pytest.importorskip("triton")
    from vasuki.hf.kernels.by_triton import attention, layer, sampling

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors):
            kernel[grid](*arguments, **sizes)  # while modules are compared
            return
        assert {each.device for each in tensors} == {CUDA}
        assert all(size > 0 for size in grid)
        tensors[0].neg()

    for module in (attention, layer, sampling):
        monkeypatch.setattr(module, "launch", launch)
    return SmallKernels(layer.turn_and_store, layer.gated, layer.normed, layer.round_rows)


def _on_card(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


def _model(
    name: str,
    kernels: SmallKernels | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rounds: bool = False,
    **changed: Any,
) -> LoadedModel:
    def ready() -> LoadedModel:
        return prepare(model, NoTokenizer(), transformers.GenerationConfig(eos_token_id=2), name, uses_kernels=False)

    with unset_fake_temporarily():  # modules are compared by what they answer, and fake ones answer nothing
        config = random_config(name, **changed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="vasuki_ragged"
        ).eval()
        fuse_modules(model, kernels)
        if rounds:
            round_products(model, model.config.num_hidden_layers, kernels)
        recurrent = ready() if name in RECURRENT else None  # layers that carry a state are looked at likewise
    model._apply(_on_card)
    for module in model.modules():  # some keep tensors that are neither parameters nor buffers
        vars(module).update({name: _on_card(each) for name, each in vars(module).items() if torch.is_tensor(each)})
    install_experts(model, CUDA)
    loaded = dataclasses.replace(recurrent, device=CUDA) if recurrent else ready()
    if kernels is None:
        return loaded
    from vasuki.hf.kernels.by_triton.attention import TileAttention

    return dataclasses.replace(loaded, kernel=TileAttention(4, dtype))


def _batches(rows: int = 2) -> dict[str, Batch]:
    def sequence(row: int, tokens: int, computed: int) -> Sequence:
        request = Request(row, row, tokens, 8, np.arange(tokens, dtype=np.int32) + 3)
        return Sequence(request, num_computed_tokens=computed, block_table=BlockTable(device=[row]))

    decodes, prompts = [sequence(row, 40, 39) for row in range(rows)], [sequence(rows + row, 20, 0) for row in (0, 1)]
    chunks = [ScheduledChunk(prompts[0], 0, 20, True), ScheduledChunk(prompts[1], 0, 7, False)]
    starts = [39] * rows
    return {"decodes": Batch(decodes, starts, [], []), "mixed": Batch(decodes, starts, chunks, [])}


def _steps(loaded: LoadedModel) -> dict[str, Kernels]:
    cache = KVCache(loaded.kv_layout, 4, 256, CUDA)
    kernels = AttentionKernels(loaded.kernel)
    kept = StateCache(loaded.recurrent, 4, CUDA) if loaded.recurrent else None
    executor, counted = RaggedExecutor(loaded, cache, attention=kernels, states=kept), {}
    for title, batch in _batches().items():
        with Kernels() as counted[title], torch.inference_mode():
            passing = kept.passing(batch) if kept else ()
            logits = executor.forward(lay_out(batch, cache, kernels, passing=passing).on_device())
        assert logits.shape == (len(batch.decodes) + (title == "mixed"), loaded.vocab_size)
        assert (logits.device, logits.dtype) == (CUDA, loaded.dtype)
    return counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_steps_of_every_architecture_stay_on_the_card(name: str, dtype: torch.dtype, fake: None) -> None:
    _steps(_model(name, dtype=dtype))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_steps_by_our_kernels_stay_on_the_card(name: str, ours: SmallKernels, fake: None) -> None:
    _steps(_model(name, ours))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_keys_and_values_of_8_bits_launch_nothing_more(name: str, ours: SmallKernels, fake: None) -> None:
    loaded = _model(name, ours)
    layout = loaded.kv_layout
    of_8_bits = dataclasses.replace(layout, dtype=FLOAT8, scales=(Scales(0.25, 2.0),) * layout.num_layers)
    counted = (_steps(each) for each in (loaded, dataclasses.replace(loaded, kv_layout=of_8_bits)))
    wide, narrow = ({title: kernels.total for title, kernels in each.items()} for each in counted)
    assert all(narrow[title] <= wide[title] for title in wide)


def test_a_layer_that_waits_for_the_card_is_found(fake: None) -> None:
    class Waits(torch.nn.SiLU):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows if rows.sum().item() else -rows)

    loaded = _model("llama")
    loaded.model.model.layers[1].mlp.act_fn = Waits()
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        _steps(loaded)


def test_a_tensor_on_the_host_is_found(fake: None) -> None:
    loaded = _model("llama")
    loaded.model.model.norm.weight = torch.nn.Parameter(torch.empty(32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="device"):
        _steps(loaded)


@PAGES
def test_kernels_of_a_step_only_become_fewer(fake: None) -> None:
    assert {title: kernels.total for title, kernels in _steps(_model("llama")).items()} == MOST_KERNELS


@PAGES
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ours_take_the_place_of_several(name: str, ours: SmallKernels, fake: None) -> None:
    counts = _steps(_model(name, ours))
    assert (counts["decodes"].total, counts["mixed"].total) == MOST_BESIDE_OURS[name]


@PAGES
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cost_model_counts_what_a_step_launches(name: str, ours: SmallKernels, fake: None) -> None:
    """Kernels other than those that sample a token and fetch it."""
    for rounds in (False, *([True] if name in ROUNDED else [])):
        loaded = _model(name, ours, rounds=rounds)
        shape = shape_from_config(loaded.config.to_dict(), name)
        shape = dataclasses.replace(shape, product_dtype="float8" if rounds else "")
        launches = launches_of(shape, "gpu")
        foreseen = launches.layer * shape.num_layers + launches.outside - 2
        assert abs(_steps(loaded)["mixed"].total - foreseen) <= shape.num_layers / 2


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("title", ["decodes", "mixed"])
def test_products_of_8_bits_are_recorded_without_a_copy(title: str, name: str, ours: SmallKernels, fake: None) -> None:
    loaded = _model(name, ours, rounds=True)
    assert can_record(loaded, 256)
    kernels = Kernels()
    _recorded(loaded, title, watch=kernels)
    assert kernels.counts == Counter({"copy_": 1})


def _record(compute: Callable[[Pause], object]) -> Replay:
    """Record without a card: nothing may be copied from or to the host."""
    with Recording():
        compute(lambda between: None)
    return lambda: None


def _recorded(
    loaded: LoadedModel, title: str = "decodes", draws: bool = False, watch: Any = None, late: bool = False
) -> Answers:
    """What a step is answered by a graph that is recorded for it.

    Args:
        watch: entered while it is replayed.
        late: the host has not seen the tokens of rows that decode.
    """
    cache = KVCache(loaded.kv_layout, 5, 256, CUDA)
    kernels = AttentionKernels(loaded.kernel, "auto")
    states = StateCache(loaded.recurrent, 4, CUDA) if loaded.recurrent else None
    executor = RaggedExecutor(loaded, cache, want_logprobs=True, attention=kernels, states=states)
    batch, sampled = _batches()[title], torch.zeros(2, dtype=torch.int64, device=CUDA)
    for sequence in batch.decodes:
        sequence.num_pending_tokens = int(late)
    passing = states.passing(batch) if states else ()
    step = lay_out(batch, cache, kernels, last_tokens=LastTokens(batch.decodes, sampled), passing=passing)
    size = {"decodes": GraphSize(4, 4, True), "mixed": GraphSize(32, 4, False)}[title]
    compute = executor._all_logits if draws else executor._likeliest
    with torch.inference_mode():
        last = torch.zeros(5, dtype=torch.int64, device=CUDA)
        recorded = _Recorded(size, 1, cache, kernels, compute, _record, None, last, bool(states))
        with watch or nullcontext():
            return recorded(step)


@pytest.mark.parametrize("name", RECURRENT)
def test_decodes_that_carry_a_state_are_recorded_without_a_copy(name: str, ours: SmallKernels, fake: None) -> None:
    loaded = _model(name, ours)
    assert can_record(loaded, 256)
    assert {answer.shape for answer in _recorded(loaded)} == {(2,)}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("title", "samples"), [("decodes", 2), ("mixed", 3)])
def test_steps_are_recorded_without_a_copy(title: str, samples: int, name: str, ours: SmallKernels, fake: None) -> None:
    """Greedy ones leave numbers of their rows alone, with log probabilities; where tokens are drawn, all logits."""
    loaded = _model(name, ours)
    assert can_record(loaded, 256)
    assert {answer.shape for answer in _recorded(loaded, title)} == {(samples,)}
    assert [answer.shape for answer in _recorded(loaded, title, draws=True)] == [(samples, loaded.vocab_size)]


@pytest.mark.parametrize("title", ["decodes", "mixed"])
def test_a_recorded_step_is_brought_by_one_copy(title: str, ours: SmallKernels, fake: None) -> None:
    """And what the step before sampled by one kernel more."""
    loaded = _model("llama", ours)
    for late in (False, True):
        kernels = Kernels()
        _recorded(loaded, title, watch=kernels, late=late)
        assert kernels.counts == Counter({"copy_": 1, "clamp.out": int(late)}) + Counter()


@PAGES
def test_without_ours_soft_caps_are_not_recorded(fake: None) -> None:
    """Attention by torch's operators depends on the lengths of contexts."""
    assert not can_record(_model("gemma2"), 256)
    assert can_record(_model("llama"), 256)


def test_a_layer_that_brings_something_from_the_host_is_not_recorded(fake: None) -> None:
    class Brings(torch.nn.SiLU):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * torch.ones(rows.shape[-1]).to(rows)

    loaded = _model("llama")
    _recorded(loaded)
    loaded.model.model.layers[1].mlp.act_fn = Brings()
    with pytest.raises(RuntimeError, match="capturing"):
        _recorded(loaded)


def _attends_by(loaded: LoadedModel, profile: HardwareProfile, batch: Batch, records: bool) -> Counter[str]:
    """How often either kernel attends, in an executor that is built as for a run."""
    settings = EngineSettings(find_policy("sarathi"), Limits(64, 9), 20, 256)
    shape = dataclasses.replace(named_shape("llama-3-8b"), num_layers=3)
    executor = build_executor(loaded, settings, record_after=1, cost_model=CostModel(shape, profile))
    assert executor.graphs is not None
    called: Counter[str] = Counter()

    def watched(kind: type, name: str) -> Any:
        own = kind.__call__

        def call(*arguments: Any) -> Any:
            called[name] += 1
            return own(*arguments)

        return mock.patch.object(kind, "__call__", call)

    step = lay_out(batch, executor.cache, executor.attention)
    with torch.inference_mode():
        if records:
            executor.graphs(step, executor._likeliest)
            size = executor.graphs._size_of(step)
            assert size is not None
            placed = executor.graphs._recorded[executor._likeliest, size]._step
        else:
            placed = step.on_device()
        with watched(PagedVarlen, "packed"), watched(type(loaded.kernel), "paged"):
            executor.forward(placed)
    return called


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records without a card, where nothing can be compared."""
    monkeypatch.setattr(ragged_executor, "record_on_device", lambda: _record)
    monkeypatch.setattr(_Recorded, "apart", lambda *arguments: 0.0)


@PAGES
@pytest.mark.parametrize(
    ("choice", "rows", "kernel"),
    [("auto", 2, "paged"), ("auto", 9, "paged"), ("packed", 2, "packed"), ("paged", 9, "paged")],
)
@pytest.mark.parametrize("records", [False, True])
def test_decodes_are_attended_by_ours_and_prompts_by_the_packed_kernel(
    choice: Any, rows: int, kernel: str, records: bool, ours: SmallKernels, recorder: None, fake: None
) -> None:
    profile = find_profile("a10").model_copy(update={"attention": choice})
    loaded, batch = _model("llama", ours), _batches(rows)["decodes"]
    assert set(_attends_by(loaded, profile, batch, records)) == {kernel}
    both = {"packed", "paged"} if choice == "auto" else {choice}
    assert set(_attends_by(loaded, profile, _batches(rows)["mixed"], False)) == both


@PAGES
@pytest.mark.parametrize(("choice", "kernel"), [("auto", "paged"), ("packed", "packed")])
def test_windows_of_recorded_decodes_read_each_key_once(
    choice: Any, kernel: str, ours: SmallKernels, recorder: None, fake: None
) -> None:
    """A graph expects the longest contexts, which its windows do not cover."""
    profile = find_profile("a10").model_copy(update={"processors": 1, "attention": choice})
    assert set(_attends_by(_model("mistral", ours), profile, _batches()["decodes"], True)) == {kernel}


def test_a_first_measure_replays_what_a_run_replays(
    ours: SmallKernels, recorder: None, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that torch has no kernel for."""
    loaded, built = _model("gemma2", ours), []

    class Timed(RaggedExecutor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            built.append(self)

        def collect(self, step: LaunchedStep) -> StepResult:
            return StepResult([], [], 0.0)

    monkeypatch.setattr(ragged_executor, "RaggedExecutor", Timed)
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    monkeypatch.setattr(whole_steps, "available_bytes", lambda device: 2**30)
    shape = dataclasses.replace(named_shape("llama-3-8b"), vocab_size=loaded.vocab_size, max_context_tokens=64)
    whole_steps.time_steps(loaded, CostModel(shape, find_profile("a10")), lambda slower: 60.0)
    [executor] = built
    assert executor.replayed_steps


@pytest.mark.parametrize("by_ours", [False, True])
@pytest.mark.parametrize("setting", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 90, "top_p": 0.9}])
def test_tokens_are_drawn_on_the_card(
    setting: dict[str, Any], by_ours: bool, ours: SmallKernels, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log probabilities, in slices, and together with rows that take the likeliest token."""
    from vasuki.hf.kernels.by_triton.sampling import draw

    monkeypatch.setattr(sampler, "DRAWN_LOGITS", 3 * 97)
    logits = torch.empty(8, 97, dtype=torch.bfloat16, device=CUDA)
    settings = [SamplingParams(), SamplingParams(**{"temperature": 0.7, **setting})]
    rows = [Sequence(Request(row, row, 1, 9, sampling=settings[row % 2])) for row in range(8)]
    with Kernels() as kernels, torch.inference_mode():
        sampled = sampler.sample(logits, rows, True, draw if by_ours else None)
    assert (sampled.token_ids.shape, sampled.token_ids.dtype, sampled.token_ids.device) == ((8,), torch.int64, CUDA)
    assert (sampled.logprobs.shape, sampled.logprobs.dtype, sampled.logprobs.device) == ((8,), torch.float32, CUDA)
    sorts = setting.get("top_k") == 90 or setting == {"top_p": 0.9}
    assert bool(kernels.counts["sort.stable"]) == (sorts and not by_ours)
    if by_ours:
        assert kernels.total <= 16  # one copy and one launch draw, whatever is asked for; 234 operators else


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.inference_mode()
def test_all_experts_answer_as_those_chosen(name: str) -> None:
    plain = random_model.__wrapped__(name)
    plain.set_attn_implementation("eager")
    ours = copy.deepcopy(plain)
    plain.config._experts_implementation = "eager"
    experts.use_all_experts(ours)
    tokens = torch.arange(3, 43).unsqueeze(0)
    torch.testing.assert_close(ours(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [experts.MOST_ROWS, experts.MOST_ROWS + 1])
def test_few_rows_go_through_all_experts(rows: int) -> None:
    model = random_model.__wrapped__("qwen3_moe")  # of its own: others give theirs our attention
    experts.use_all_experts(model)
    with Kernels() as kernels, torch.inference_mode():
        model(torch.full((1, rows), 5))
    assert bool(kernels.counts["_grouped_mm"]) == (rows > MOST_ROWS_OF_ALL_EXPERTS)
