"""Tiny random models of many architectures, and what `generate` says about them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from vasuki.engine.loop import RunStats, drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES, Policy
from vasuki.engine.rectangles import Price
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.engine.shaping import Similar, shaping_of
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.packed_experts import pack_experts
from vasuki.hf.kernels.levels import Level
from vasuki.hf.kernels.paged_attention import load_kernel
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import KVMover, StreamedLayers, ThreadCopyEngine
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare, prepare_padded
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.hf.recurrent.states import StateCache

VOCAB = 97
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "mistral": ("MistralConfig", dict(sliding_window=9)),
    "gemma2": (
        "Gemma2Config",
        dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    ),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16)),
    "ministral3": (  # which scales queries far behind what it was trained on
        "Ministral3Config",
        dict(
            head_dim=8,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=16.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        ),
    ),
    "phi3": (
        "Phi3Config",
        dict(
            sliding_window=11,
            original_max_position_embeddings=80,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                original_max_position_embeddings=80,
                short_factor=[1.0, 1.1, 1.3, 1.5],
                long_factor=[1.0, 2.0, 4.0, 8.0],
            ),
        ),
    ),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "granite": ("GraniteConfig", dict(attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=1.5)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, **_MOE)),
    "deepseek_v3": (  # values that are narrower than keys, and a first layer without experts
        "DeepseekV3Config",
        dict(
            num_key_value_heads=4,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            **_MOE,
        ),
    ),
    "gemma4": (  # wider and fewer heads of keys in layers that see everything, two of which share other layers' keys
        "Gemma4TextConfig",
        dict(
            num_hidden_layers=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            head_dim=8,
            sliding_window=7,
            attention_k_eq_v=True,
            global_head_dim=24,
            num_global_key_value_heads=1,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        ),
    ),
    "gpt_oss": ("GptOssConfig", dict(head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
}
_DELTA_NET = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6, head_dim=16
)
_MAMBA_2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=8)
# Models with layers that carry a state, instead of attention or in addition to it.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(layer_types=["linear_attention", "full_attention", "linear_attention"], **_DELTA_NET, **_MOE),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        dict(layer_types=["linear_attention", "linear_attention", "full_attention"], **_DELTA_NET),
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        dict(layer_types=["mamba", "attention", "mamba"], num_local_experts=0, shared_intermediate_size=48, **_MAMBA_2),
    ),
    "jamba": ("JambaConfig", dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8)),
    "falcon_h1": ("FalconH1Config", dict(head_dim=8, mamba_d_ssm=64, **_MAMBA_2)),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention", "conv"])),
}
# Those that the ragged backend refuses, and the padded one serves.
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", dict(n_layer=2, n_head=4)),
    "mpt": ("MptConfig", dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=256)),
    "falcon_alibi": ("FalconConfig", dict(alibi=True, new_decoder_architecture=False, multi_query=True)),
    "falcon": ("FalconConfig", dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False)),
    "gpt_neo": (
        "GPTNeoConfig",
        dict(attention_types=[[["global", "local", "local"], 1]], window_size=7),
    ),
    "gptj": ("GPTJConfig", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=256)),
    "codegen": ("CodeGenConfig", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=256)),
    "llama4": (
        "Llama4TextConfig",
        dict(
            head_dim=8, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=48, no_rope_layers=[1, 0, 1]
        ),
    ),
    "phimoe": ("PhimoeConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9)),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "xglm": ("XGLMConfig", dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)),
    "hrm_text": ("HrmTextConfig", dict(head_dim=8)),
    "rembert": ("RemBertConfig", dict(is_decoder=True)),
}
# Those that the padded backend computes row by row.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "doge": ("DogeConfig", dict(keep_window_size=8)),
    "minimax": (
        "MiniMaxConfig",
        dict(head_dim=8, num_local_experts=2, layer_types=["full_attention", "linear_attention", "full_attention"]),
    ),
    "bart": (
        "BartConfig",
        dict(
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            is_encoder_decoder=False,
            is_decoder=True,
            forced_eos_token_id=None,
        ),
    ),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", dict(intermediate_multiple_size=2)),
    "roformer": ("RoFormerConfig", dict(is_decoder=True)),
    "mamba": ("MambaConfig", {}),
    "mamba2": ("Mamba2Config", dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8)),
    "rwkv": ("RwkvConfig", {}),
    "zamba2": (  # attention of one set of weights, in layers that carry a state as well
        "Zamba2Config",
        dict(
            layers_block_type=["linear_attention", "hybrid", "linear_attention"],
            num_key_value_heads=4,
            mamba_d_state=16,
            n_mamba_heads=8,
            chunk_size=8,
        ),
    ),
    "zaya": ("ZayaConfig", dict(head_dim=8, num_experts=2, num_experts_per_tok=1)),
}
# Those that keep nothing of a row that they could be called with again.
UNCACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai_gpt": ("OpenAIGPTConfig", dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "recurrent_gemma": ("RecurrentGemmaConfig", dict(attention_window_size=9, conv1d_width=3)),
}
# Those whose layers a CPU's kernels compute from end to end.
FUSED = ("llama", "mistral", "qwen2", "qwen3")


class NoTokenizer(Tokenizer):
    """Stands where text plays no part."""

    def __init__(self) -> None: ...

    @property
    def eos_token_id(self) -> None:
        return None

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        return False

    def encode_plain(self, text: str) -> list[int]:
        return list(map(int, text.split()))


def random_config(name: str, **changes: Any) -> Any:
    class_name, own = {**ARCHITECTURES, **RECURRENT, **PADDED, **ALONE, **UNCACHED}[name]
    return getattr(transformers, class_name)(**{**COMMON, **own, **changes})


@functools.cache
def random_model(name: str) -> Any:
    """A float32 model with random weights, the same in every process."""
    torch.manual_seed(sum(map(ord, name)))
    return transformers.AutoModelForCausalLM.from_config(random_config(name), attn_implementation="eager").eval()


def with_kernels(name: str, kernels: CPUKernels) -> Any:
    """Such a model of one's own, with kernels in the place of its layers."""
    model = random_model.__wrapped__(name)
    model.set_attn_implementation("vasuki_ragged")
    kernels.install(model)
    return model


@functools.cache
def prompts(count: int = 9, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Random prompts with skewed lengths, from one token up."""
    rng = np.random.default_rng(seed)
    lengths = [1, longest, *np.clip(rng.lognormal(2.3, 0.8, count - 2).astype(int), 1, longest)]
    return [rng.integers(3, VOCAB, int(length)).tolist() for length in lengths]


class RoundedCache(transformers.DynamicCache):  # type: ignore[misc]
    """transformers' own cache, but for keys and values that are rounded to bfloat16 where they enter."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys.bfloat16().float(), values.bfloat16().float(), *args, **kwargs)


class Float8Cache(transformers.DynamicCache):  # type: ignore[misc]
    """The same, divided by a layer's scales and rounded to 8 bits. Those of tiny models are below the largest number.

    Args:
        scales: of each layer's keys and values.
    """

    def __init__(self, scales: tuple[tuple[float, float], ...]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        pairs = zip((keys, values), self.scales[layer], strict=True)
        rounded = ((states / scale).to(torch.float8_e4m3fn).float() * scale for states, scale in pairs)
        return super().update(*rounded, layer, *args, **kwargs)


class RoundedProducts(torch.nn.Linear):
    """A linear layer that rounds its weights, and what they are multiplied with, row by row to 8 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by, columns_by = (each.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448 for each in (x, self.weight))
        rows, weight = (x / by).to(torch.float8_e4m3fn), (self.weight / columns_by).to(torch.float8_e4m3fn)
        return torch.nn.functional.linear(rows.float() * by, weight.float() * columns_by, self.bias)


@functools.cache
def reference(
    name: str,
    max_tokens: int = 14,
    cache: Callable[[], transformers.DynamicCache] | None = None,
    products: type[torch.nn.Linear] | None = None,
) -> list[list[int]]:
    """Greedy output of `model.generate`, row by row, with other linear layers in its decoder if they are given."""
    model = random_model(name)
    if products is not None:
        model = copy.deepcopy(model)
        for where, module in model.model.layers.named_modules():
            if type(module) is torch.nn.Linear and re.search("attn|mlp", where):
                module.__class__ = products
    model.set_attn_implementation("eager")
    rows = []
    for prompt in prompts():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            past_key_values=None if cache is None else cache(),
        )
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def load(name: str, kv_dtype: str = "auto") -> LoadedModel:
    model = random_model(name)
    model.set_attn_implementation("vasuki_ragged")
    return prepare(model, NoTokenizer(), model.generation_config, name, kv_dtype)


def load_padded(name: str, attention: str = "eager") -> LoadedModel:
    """The same for the padded backend, with an attention of transformers."""
    model = random_model(name)
    model.set_attn_implementation(attention)
    return prepare_padded(model, NoTokenizer(), model.generation_config, name)


class Rows:
    """A sink that keeps outputs by row number."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}

    def write(self, sequence: Sequence) -> None:
        assert sequence.request.row not in self.sequences
        self.sequences[sequence.request.row] = sequence

    def commit_if_due(self, now_s: float) -> None: ...

    @property
    def outputs(self) -> list[list[int]]:
        return [self.sequences[row].output_token_ids for row in sorted(self.sequences)]


class Checked:
    """An executor whose scheduler is checked before every step."""

    def __init__(self, executor: Any, scheduler: Scheduler) -> None:
        self.executor, self.scheduler = executor, scheduler

    @property
    def steps_ahead(self) -> int:
        return int(self.executor.steps_ahead)

    def launch(self, batch: Any) -> Any:
        self.scheduler.queues.check_integrity()
        return self.executor.launch(batch)


def run(
    loaded: LoadedModel,
    requests: list[Request],
    chunk_tokens: int = 64,
    num_blocks: int = 200,
    block_tokens: int = 4,
    policy: Policy = POLICIES["vasuki"],
    max_num_seqs: int = 16,
    native: bool = False,
    host_blocks: int = 0,
    num_streamed: int = 0,
    bytes_per_s: float | None = None,
    prefills_ahead: bool = False,
    want_logprobs: bool = False,
    steps_ahead: int = 0,
    level: Level | None = None,
    price: Price | None = None,
    always_packed: bool = False,
) -> tuple[Rows, Scheduler, RunStats]:
    if loaded.recurrent:
        policy = dataclasses.replace(policy, shares_prefixes=False)
    plan = OffloadPlan(host_blocks=host_blocks, prefills_ahead=prefills_ahead)
    scheduler = Scheduler(EngineSettings(policy, Limits(chunk_tokens, max_num_seqs), num_blocks, block_tokens, plan))
    streamed = StreamedLayers.spread(loaded.kv_layout.num_layers, num_streamed)
    cache = KVCache(loaded.kv_layout, num_blocks, block_tokens, loaded.device, buffer_of=streamed.buffer_of)
    for layer in cache.layers:
        layer.fill_(math.nan)  # ruinous wherever a stale value is read
    types = (loaded.model.dtype, loaded.kv_layout.dtype)
    kernel = load_kernel(loaded.kv_layout.head_dims, *types, level=level) if native else None
    assert bool(kernel) == native
    offload = None
    if host_blocks or num_streamed:
        host = KVCache(loaded.kv_layout, host_blocks, block_tokens, loaded.device) if host_blocks else None
        offload = KVMover(cache, ThreadCopyEngine(bytes_per_s), host)
        for layer in host.layers if host else ():
            layer.fill_(math.nan)
    states = StateCache(loaded.recurrent, max_num_seqs, loaded.device) if loaded.recurrent else None
    for tensor in itertools.chain(*states.tensors) if states else ():
        tensor.fill_(math.nan)
    shaping = shaping_of(policy) or Similar(loaded.longest_packed_tokens, price, always_packed)
    executor = RaggedExecutor(loaded, cache, want_logprobs, AttentionKernels(kernel), offload, states, shaping)
    executor.most_ahead = steps_ahead
    rows = Rows()
    stats = drain(requests, scheduler, Checked(executor, scheduler), rows)
    assert scheduler.queues.pool.num_held == 0
    return rows, scheduler, stats


def requests_of(token_lists: list[list[int]], max_tokens: int = 14, **sampling: Any) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return [
        Request(i, f"row-{i}", len(ids), max_tokens, np.array(ids, dtype=np.int32), params)
        for i, ids in enumerate(token_lists)
    ]


def hopeful(requests: list[Request]) -> list[Request]:
    """The same, expected to end with their first token: more of them start than memory can hold to their end."""
    return [dataclasses.replace(request, estimated_tokens=1) for request in requests]


class RoundedLinear(torch.nn.Linear):
    """The plain twin of a layer in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16().float(), self.weight, self.bias)


def answers_in_bfloat16(name: str, kernels: CPUKernels | None) -> list[list[list[int]]]:
    """Outputs of a model in bfloat16 by the kernels, and of its twin in float32, which rounds for products alone where
    they do. A model that they leave as it is has itself for a twin."""
    narrow = random_model.__wrapped__(name).bfloat16()
    narrow.set_attn_implementation("vasuki_ragged")
    twin = copy.deepcopy(narrow).float()
    if kernels is not None:
        kernels.install(narrow)
        pack_experts(twin, torch.nn.Sequential)  # of one layer: as it is
        for module in twin.modules():
            if type(module) is torch.nn.Linear and kernels.linear.multiplies_bfloat16:
                module.__class__ = RoundedLinear
    if any(parameter.dtype is torch.bfloat16 for parameter in narrow.parameters()):
        twin = copy.deepcopy(narrow)
    outputs = []
    for model in (narrow, twin):
        loaded = prepare(model, NoTokenizer(), model.generation_config, name)
        outputs.append(run(loaded, requests_of(prompts()), chunk_tokens=20)[0].outputs)
    return outputs
