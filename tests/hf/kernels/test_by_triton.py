"""Triton's kernels against their plain twins, by Triton's interpreter: the same programs on a CPU, one after another.

It multiplies no bfloat16, so float16 stands for the types of 16 bits.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_varlen import as_it_is
from tiny_models import RoundedProducts, Rows, load, prompts, reference, requests_of, run
from torch.nn.functional import rms_norm

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's kernels are compiled for the card here", allow_module_level=True)

from vasuki.engine.loop import drain
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.cuda.step_graphs import StepGraphs
from vasuki.hf.fused import by_torch
from vasuki.hf.fused.attention import FusedAttention
from vasuki.hf.fused.by_torch import JoinedMLP, SmallKernels, fuse_modules
from vasuki.hf.fused.float8_linear import round_products
from vasuki.hf.kernels.by_triton import attention, float8, layer, sampling
from vasuki.hf.kernels.by_triton.attention import TileAttention, num_splits
from vasuki.hf.kernels.float8 import FLOAT8, UNSCALED, Scales, rounded_rows
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.loading import triton_kernels
from vasuki.hf.loading.quantized import on_its_device
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.hf.sampler import NO_TOKEN, sample, uniform

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # a sigmoid far out
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # by Triton 3.6
]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SMALL = SmallKernels(layer.turn_and_store, layer.gated, layer.normed, layer.round_rows)


def _attended(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_tokens: int,
    chunks: list[tuple[int, int]],
    variant: Variant,
    large: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel and its twin answer chunks of (tokens before, tokens)."""
    num_kv_heads, group, head_dim = heads
    width = max(-(-sum(chunk) // block_tokens) for chunk in chunks)
    cache = torch.randn(len(chunks) * width, 2, block_tokens, num_kv_heads, head_dim).to(dtype)
    tables = torch.randperm(len(cache)).view(len(chunks), width)
    query = torch.randn(sum(tokens for _, tokens in chunks), num_kv_heads * group, head_dim).to(dtype)
    kernel, tiles, first, expected = TileAttention(group, dtype, large), [], 0, []
    for row, (before, tokens) in enumerate(chunks):
        for done in range(0, tokens, kernel.tile_tokens):
            tiles.append([first + done, min(kernel.tile_tokens, tokens - done), before + done, row, 0])
        keys, values = (each.flatten(0, 1)[: before + tokens].float() for each in cache[tables[row]].unbind(1))
        expected.append(attend_eagerly(query[first : first + tokens].float(), keys, values, variant))
        first += tokens
    output, longest = torch.full_like(query, torch.nan), max(tokens for _, tokens, *_ in tiles)
    options = variant.sinks, variant.window, variant.scaling, variant.softcap
    kernel(query, cache, torch.tensor(tiles), longest, tables, *options, output)
    return output.float(), torch.cat(expected)


@DTYPES
@pytest.mark.parametrize(
    ("variant", "splits"), [("plain", 1), ("window", 1), ("soft cap and sinks", 1), ("all", 1), ("all", 4)]
)
def test_attends_like_torch(variant: str, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(attention, "num_splits", lambda programs, context: splits)
    options: dict[str, Any] = {}
    if variant in ("window", "all"):
        options["window"] = 30
    if variant in ("soft cap and sinks", "all"):
        options |= {"softcap": 5.0, "sinks": torch.randn(6)}
    chunks = [(130, 1), (0, 1), (0, 30), (61, 5), (3, 1)]
    answer, expected = _attended(dtype, (2, 3, 20), 16, chunks, Variant(0.3, **options))
    torch.testing.assert_close(answer, expected, rtol=0, atol=TOLERANCE[dtype])


def test_large_tiles_attend_like_torch() -> None:
    torch.manual_seed(2)
    chunks, dtype = [(70, 150), (0, 1), (200, 1), (0, 33)], torch.float16
    answer, expected = _attended(dtype, (2, 2, 24), 16, chunks, Variant(0.3, window=90), large=True)
    torch.testing.assert_close(answer, expected, rtol=0, atol=TOLERANCE[dtype])
    assert TileAttention(2, dtype, large_tiles=True).tile_tokens == 64


@pytest.mark.parametrize(
    ("generation", "head_dim", "dtype", "takes"),
    [
        ((9, 0), 128, torch.bfloat16, True),
        ((9, 0), 96, torch.float16, True),
        ((9, 0), 256, torch.bfloat16, False),
        ((9, 0), 64, torch.float32, False),
        ((8, 6), 128, torch.bfloat16, False),
        ((12, 0), 128, torch.bfloat16, False),
    ],
)
def test_tiles_are_large_where_they_fit(
    generation: tuple[int, int], head_dim: int, dtype: torch.dtype, takes: bool
) -> None:
    assert attention.takes_large_tiles(generation, head_dim, dtype) == takes


def test_heads_that_share_one_make_no_tile_large() -> None:
    """Falcon 7B has 71 for one KV head: as many rows as a large tile, on cards without room for one."""
    assert attention._sizes(128, 64, 2, large_tiles=False).keys() == {"ROWS", "SPAN"}
    assert attention._sizes(128, 64, 2, large_tiles=True)["num_warps"] == 8


@settings(max_examples=10, deadline=None)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([8, 24, 32])),
    block_tokens=st.sampled_from([1, 7, 16, 256]),
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 100),
)
def test_attends_in_any_shape(
    heads: tuple[int, int, int], block_tokens: int, chunks: list[tuple[int, int]], window: int | None
) -> None:
    answer, expected = _attended(torch.float32, heads, block_tokens, chunks, Variant(0.2, window=window))
    torch.testing.assert_close(answer, expected, rtol=0, atol=1e-5)


@given(programs=st.integers(1, 10**5), context=st.integers(1, 10**6))
def test_splits_are_few_and_large(programs: int, context: int) -> None:
    splits = num_splits(programs, context)
    assert splits & (splits - 1) == 0
    assert splits == 1 or (context >= 256 * splits and programs * splits <= 264)


@DTYPES
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (20, 12), (6, 6)])
def test_norms_turns_and_stores_like_torch(
    head_dim: int, rotated: int, repeats: bool, offset: float | None, dtype: torch.dtype
) -> None:
    """Norms that add something to their weights or nothing, or none."""
    torch.manual_seed(2)
    heads = torch.randn(7, 3 + 2 * 2, head_dim).to(dtype)
    angles = torch.randn(7, rotated // 2).repeat(1, 1 if repeats else 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype).t().contiguous().t()  # as models may lay them out
    query_weight, key_weight = (torch.rand(head_dim).to(dtype) for _ in range(2))
    ours, plain = (KVCache(KVLayout.uniform(1, 2, head_dim, dtype), 3, 4, CPU) for _ in range(2))
    rows = plain.rows_of_slots(torch.randperm(12)[:7])
    norms = None if offset is None else (query_weight, key_weight, 1e-5, offset)
    query = layer.turn_and_store(heads.clone(), 3, cos, sin, rows, ours.layers[0], rotated, norms)
    values = heads[:, 5:].clone()
    if offset is not None:
        parts = ((heads[:, :3], query_weight), (heads[:, 3:5], key_weight))
        normed = [rms_norm(part.float(), (head_dim,), weight.float() + offset, 1e-5) for part, weight in parts]
        heads = torch.cat([*normed, heads[:, 5:].float()], dim=1).to(dtype)
    if repeats:
        cos, sin = (torch.cat([each, each], dim=-1) for each in (cos, sin))
    turned = by_torch.rotate(heads, 5, cos, sin)
    plain.write(0, turned[:, 3:], values, rows)
    torch.testing.assert_close(query, turned[:, :3], rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(ours.layers[0], plain.layers[0], rtol=0, atol=TOLERANCE[dtype])


_HALVES = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double().unfold(0, 2, 1).mean(1)  # between neighbours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity, times nothing
@pytest.mark.parametrize("scales", [UNSCALED, Scales(4.0, 2.0**-6)])
def test_keeps_8_bits_as_torch_rounds_them(scales: Scales, dtype: torch.dtype) -> None:
    """Halves between neighbours and what lies next to them, numbers of all sizes, too large ones, and no number."""
    torch.manual_seed(7)
    next_to = [torch.nextafter(_HALVES.float(), torch.tensor(to)) for to in (-1.0, 1e9)]
    sizes = torch.randn(500) * torch.exp(4 * torch.randn(500))
    odd = torch.tensor([0.0, 1e-30, 448.0, 464.0, 1e30, math.inf, math.nan])
    numbers = torch.cat([sizes, odd, _HALVES.float(), *next_to])
    keys = torch.cat([numbers, -numbers])[: len(numbers) // 8 * 16].view(-1, 2, 8).to(dtype)
    layout = dataclasses.replace(KVLayout.uniform(1, 2, 8, FLOAT8), scales=(scales,))
    plain, ours, turned = (KVCache(layout, 1, len(keys), CPU) for _ in range(3))
    rows, values = plain.rows_of_slots(torch.arange(len(keys))), keys.flip(0)
    plain.write(0, keys, values, rows)
    TileAttention(1, dtype).write(keys, values, rows[0], ours.layers[0], scales)
    still = torch.ones(len(keys), 4, dtype=dtype), torch.zeros(len(keys), 4, dtype=dtype)
    layer.turn_and_store(torch.cat([keys, keys, values], dim=1), 2, *still, rows, turned.layers[0], 4, None, scales)
    expected, written, turned_too = (each.layers[0].view(torch.uint8)[0] for each in (plain, ours, turned))
    assert torch.equal(written, expected)
    assert len(set(expected.flatten().tolist())) > 240
    is_number = torch.stack([keys, values]).isfinite().all(-1)  # what is none leaves none when it turns
    assert torch.equal(turned_too[is_number], expected[is_number])


@pytest.mark.parametrize("native", [False, True])
def test_attends_to_8_bits_like_torch(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_has_instructions", lambda device: native)
    layout = KVLayout.uniform(3, 2, 24, FLOAT8)
    assert triton_kernels.tile_attention(layout, 3, torch.float32, CPU) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [48, 2048, 5000])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rounds_rows_as_torch_does(width: int, dtype: torch.dtype) -> None:
    """To the bit, of all sizes; and a row with what is no number gives none."""
    torch.manual_seed(8)
    rows = (torch.randn(8, width) * torch.tensor([1, 1e-3, 30, 0, 1e-8, 1, 1, 1]).unsqueeze(1)).to(dtype)
    rows[5, 3], rows[6, 2], rows[7, 1] = math.inf, math.nan, 6e4
    (ours, scales), (plain, expected) = layer.round_rows(rows), rounded_rows(rows)
    for row in set(range(8)) - {6}:
        assert torch.equal(ours[row].view(torch.uint8), plain[row].view(torch.uint8))
        assert torch.equal(scales[row], expected[row])
    assert (ours[6].float() @ torch.ones(width) * scales[6]).isnan()


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [8, 100])
def test_norms_like_torch(width: int, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(2, 5, width).to(dtype), torch.randn(width).to(dtype)
    expected = rms_norm(x.float(), (width,), weight.float() + offset, 1e-6).to(dtype)
    torch.testing.assert_close(layer.normed(x, weight, 1e-6, offset), expected, rtol=1e-3, atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("activation", by_torch.ACTIVATIONS)
def test_gates_like_torch(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate_up = torch.randn(2, 3, 2 * 1100).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = by_torch.ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(layer.gated(gate_up, activation), expected, rtol=1e-3, atol=TOLERANCE[dtype])


def _model(name: str) -> Any:
    """With our kernels in the place of its layers."""
    loaded = load(name)
    model = copy.deepcopy(loaded.model)  # the tests share the original
    fuse_modules(model, SMALL)
    fused = [module for module in model.modules() if isinstance(module, FusedAttention)]
    assert all(module.stores for module in fused)
    assert len(fused) == loaded.kv_layout.num_layers
    kernel = triton_kernels.tile_attention(loaded.kv_layout, 4, loaded.dtype, CPU)
    assert kernel is not None
    return dataclasses.replace(loaded, model=model, kernel=kernel)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "gpt_oss", "phi3"])
def test_greedy_equals_generate(name: str) -> None:
    """With norms of heads, with soft caps and windows, with sinks and angles by halves, with one projection."""
    rows, _, _ = run(_model(name), requests_of(prompts()[:5], 6), chunk_tokens=20)
    assert rows.outputs == [tokens[:6] for tokens in reference(name)[:5]]


@pytest.mark.sweep
def test_what_torch_has_no_kernel_for_is_recorded() -> None:
    """Soft caps and windows, in blocks of 16 tokens, prompts too: a replay reads contexts that have grown since."""
    loaded, num_blocks = _model("gemma2"), 24
    scheduler = Scheduler(EngineSettings(POLICIES["vasuki"], Limits(24, 3), num_blocks, 16))
    cache = KVCache(loaded.kv_layout, num_blocks + 1, 16, CPU)
    kernels = AttentionKernels(loaded.kernel, "auto")
    executor = RaggedExecutor(loaded, cache, attention=kernels)
    executor.graphs = StepGraphs(cache, kernels, 96, 3, as_it_is, 1, most_tokens=24)
    rows = Rows()
    drain(requests_of(prompts()[2:6], 5), scheduler, executor, rows)
    kinds = {size.single for _, size in executor.graphs._recorded}
    assert rows.outputs == [tokens[:5] for tokens in reference("gemma2")[2:6]]
    assert executor.replayed_steps
    assert kinds == {False, True}


def test_a_kernel_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(attention, "num_splits", lambda programs, context: 0)
    layout = KVLayout.uniform(1, 2, 16, torch.float32)
    assert triton_kernels.tile_attention(layout, 2, torch.float32, CPU) is None
    assert "torch's operators compute attention" in caplog.text


def _rows(asked: list[SamplingParams], seed: int = 0) -> list[Sequence]:
    return [
        Sequence(Request(row, f"{seed}-{row}", 1, 1, sampling=dataclasses.replace(each, seed=seed)))
        for row, each in enumerate(asked)
    ]


@settings(max_examples=40, deadline=None)
@given(
    units=st.lists(st.integers(0, 6), min_size=1, max_size=90),
    top_p=st.integers(1, 16).map(lambda sixteenths: sixteenths / 16),
    top_k=st.integers(0, 40),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    columns=st.sampled_from([16, 128]),
    seed=st.integers(0, 99),
)
def test_draws_from_the_likeliest_tokens(
    units: list[int], top_p: float, top_k: int, min_p: float, columns: int, seed: int
) -> None:
    """Of many equals too, beside rows that ask for other things. Shares are powers of two: sums are exact."""
    logits = torch.tensor([[unit * math.log(2) for unit in units]] * 4)
    asked = [
        SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p),
        SamplingParams(temperature=1.0),
        SamplingParams(),  # is not drawn
        SamplingParams(temperature=1.0, top_k=2),
    ]
    rows = _rows(asked, seed)
    with mock.patch.object(sampling, "_COLUMNS", columns):
        token_ids = sample(logits, rows, draw=sampling.draw).token_ids
    assert token_ids.tolist() == [_drawn(units, row) for row in rows]


def _drawn(units: list[int], row: Sequence) -> int:
    """As it is written down: in order, of equals the first ones first."""
    asked, shares = row.request.sampling, [2.0 ** (unit - max(units)) for unit in units]
    order = sorted(range(len(shares)), key=lambda token: -shares[token])
    if not asked.temperature:
        return order[0]
    kept = order[: asked.top_k or None]
    whole, so_far = sum(shares[token] for token in kept), [0.0]
    for token in kept:
        so_far.append(so_far[-1] + shares[token])
    stay = {token for token, before in zip(kept, so_far, strict=False) if before < asked.top_p * whole}
    stay = {token for token in stay if shares[token] >= asked.min_p}
    number, summed = uniform(row) * sum(shares[token] for token in stay), 0.0
    for token in sorted(stay):
        summed += shares[token]
        if summed > number:
            return token
    raise AssertionError("a number is below 1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_of_a_whole_vocabulary_are_those_of_operators(dtype: torch.dtype) -> None:
    asked = [
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        for temperature in (0.3, 1.0, 1.7)
        for top_p, top_k, min_p in ((1.0, 0, 0.0), (0.3, 0, 0.0), (0.95, 0, 0.05), (1.0, 50, 0.0), (0.9, 1000, 0.0))
        if not top_k or dtype is torch.float32  # torch.topk keeps any of equals, of which there are many
    ]
    logits = torch.randn(len(asked), 20_000, generator=torch.Generator().manual_seed(4)).mul(3).to(dtype)
    rows = _rows(asked)
    expected = sample(logits.clone(), rows).token_ids
    assert torch.equal(sample(logits, rows, draw=sampling.draw).token_ids, expected)


def test_rows_without_numbers_and_with_masks_are_drawn_as_ever() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[1, 3] = torch.nan, torch.inf
    logits[2] = -torch.inf
    logits[2, 41] = -5.0
    rows = _rows([SamplingParams(temperature=1.0, top_p=0.9)] * 4)
    token_ids = sample(logits, rows, draw=sampling.draw).token_ids
    assert token_ids.tolist() == [NO_TOKEN, NO_TOKEN, 41, int(sample(logits.clone(), rows).token_ids[3])]


def test_a_kernel_that_draws_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_kernels.drawing_kernel(CPU) is sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda logits, largest, settings, token_ids, *how: token_ids.zero_())
    assert triton_kernels.drawing_kernel(CPU) is None


def test_layers_are_fused_where_the_kernel_answers_alike_alone() -> None:
    def forgets_values(*arguments: Any) -> torch.Tensor:
        query = layer.turn_and_store(*arguments)
        arguments[5][:, 1].zero_()
        return query

    model = copy.deepcopy(load("llama").model)
    forgets_up = dataclasses.replace(
        SMALL, turn_and_store=forgets_values, gated=lambda gate_up, activation: gate_up.chunk(2, dim=-1)[0]
    )
    fuse_modules(model, forgets_up)
    assert not any(isinstance(module, (FusedAttention, JoinedMLP)) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_products_of_8_bits_equal_generate(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model that was rounded on the host, and got the kernels when it moved to its device."""
    loaded = load(name)
    model = copy.deepcopy(loaded.model)
    fuse_modules(model)
    round_products(model, loaded.kv_layout.num_layers)
    on_its_device(model, name, SMALL)
    assert not caplog.messages
    parts = [each.kernels for each in model.modules() if hasattr(each, "kernels")]
    assert parts
    assert all(each is SMALL for each in parts)
    rows, _, _ = run(dataclasses.replace(loaded, model=model), requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == reference(name, products=RoundedProducts)


def _forgets_values(*arguments: Any) -> torch.Tensor:
    heads, query_heads, *_ = arguments
    zeroed = heads.clone()
    zeroed[:, -((heads.shape[1] - query_heads) // 2) :] = 0
    return layer.turn_and_store(zeroed, *arguments[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"gated": lambda gate_up, activation: 3 * layer.gated(gate_up, activation)},
        {"turn_and_store": _forgets_values},
    ],
    ids=["an MLP", "values"],
)
def test_kernels_that_answer_otherwise_are_left_out(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(load("llama").model)
    fuse_modules(model)
    round_products(model, 3)
    model.lm_head.weight.data *= 20
    on_its_device(model, "llama", dataclasses.replace(SMALL, **wrong))
    assert caplog.messages == ["llama: torch's operators compute its layers, since Triton's kernels answer otherwise"]
    assert {each.kernels for each in model.modules() if hasattr(each, "kernels")} == {None}
    assert not any(each.stores for each in model.modules() if isinstance(each, FusedAttention))


_COMPILE = """
import json, re, subprocess, sys, tempfile
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vasuki.hf.kernels.by_triton import attention, float8, layer, sampling

kernels, card = [], 86

def spills(ptx):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        chip = f"sm_{card}a" if card == 90 else f"sm_{card}"
        command = [knobs.nvidia.ptxas.path, "-v", f"-arch={chip}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\\d+) bytes spill stores", said)[1])

def launch(kernel, grid, *arguments, **sizes):
    names = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.int64": "i64", "torch.float64": "fp64"}
    names |= {"torch.uint8": "u8", "torch.float8_e4m3fn": "fp8e4nv"}
    types = [
        f"*{names[str(each.dtype)]}" if hasattr(each, "dtype") else "fp32" if isinstance(each, float) else "i32"
        for each in arguments
    ]
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages") if name in sizes}
    signature = dict(zip(kernel.arg_names, types)) | dict.fromkeys(sizes, "constexpr")
    constants = {(kernel.arg_names.index(name),): size for name, size in sizes.items()}
    target = GPUTarget("cuda", card, 32)
    built = compile(ASTSource(kernel, signature, constants), target=target, options=options)
    kernels.append((kernel.__name__, card, len(built.asm["cubin"]), built.metadata.shared, spills(built.asm["ptx"])))

attention.launch = layer.launch = sampling.launch = launch
import torch

def attend(dtype, group, head_dim, window=None, softcap=5.0, kept=None):
    float8._has_instructions = lambda device: card >= 89
    large = attention.takes_large_tiles((card // 10, card % 10), head_dim, dtype)
    kernel, heads = attention.TileAttention(group, dtype, large), 2 * group
    query, cache = torch.zeros(4, heads, head_dim, dtype=dtype), torch.zeros(8, 2, 16, 2, head_dim, dtype=kept or dtype)
    tiles, tables = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64)
    kernel.write(query[:, :2], query[:, :2], torch.zeros(2, 4, dtype=torch.int64), cache)
    kernel(query, cache, tiles, kernel.tile_tokens, tables, torch.zeros(heads), window, 0.1, softcap, query)

attend(torch.bfloat16, 4, 128)
attend(torch.bfloat16, 8, 64, None, None)
attend(torch.float32, 1, 128)
attend(torch.bfloat16, 4, 512, 50)
attend(torch.float32, 4, 256, 50)
attend(torch.bfloat16, 4, 128, kept=torch.float8_e4m3fn)
heads, angles = torch.zeros(4, 48, 128, dtype=torch.bfloat16), torch.zeros(4, 128, dtype=torch.bfloat16)
rows, cache = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, 2, 16, 8, 128, dtype=torch.bfloat16)
layer.turn_and_store(heads, 32, angles, angles, rows, cache, 128)
layer.turn_and_store(heads, 32, angles[:, :48], angles[:, :48], rows, cache, 96, (angles[0], angles[1], 1e-6, 1.0))
layer.turn_and_store(heads, 32, angles, angles, rows, torch.zeros(1, 2, 16, 8, 128, dtype=torch.float8_e4m3fn), 128)
layer.normed(heads.flatten(1), heads.flatten(1)[0], 1e-6, 1.0)
layer.round_rows(heads.flatten(1))
for activation in layer.ACTIVATIONS:
    layer.gated(angles, activation)
for filters in ((False, False), (True, True)):
    sampling.draw(heads.flatten(1), heads[:, 0, 0], torch.zeros(6, 4, dtype=torch.float64), rows, *filters)
card = 90
attend(torch.bfloat16, 4, 128)
attend(torch.bfloat16, 1, 64, 50, None)
attend(torch.bfloat16, 4, 128, kept=torch.float8_e4m3fn)
print(json.dumps(kernels))
"""


def test_kernels_are_compiled_for_cards_and_fit() -> None:
    """To machine code, without one: Triton brings the assembler. An A10 has 99 KiB of shared memory for a program, an
    H100 227."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {name for name, *_ in kernels} == {
        "_write",
        "_attend",
        "_merge",
        "_turn_and_store",
        "_gated",
        "_draw",
        "_normed",
        "_round_rows",
    }
    assert all(code for _, _, code, *_ in kernels)
    assert max(shared for _, card, _, shared, _ in kernels if card == 86) <= 99 * 2**10
    assert max(shared for _, card, _, shared, _ in kernels if card == 90) <= 227 * 2**10
    assert not any(spilled for _, card, *_, spilled in kernels if card == 90), kernels
