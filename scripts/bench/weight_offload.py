"""A model whose weights live on the host: layers that we stream against accelerate's CPU offload, on the same run.

    weight_offload.py [--device cpu] [--layers 8] [--host-layers 6] [--hidden 512] [--rows 16] [--rounds 5] [--link 2]

Both serve the same rows through the same executor, with the same decoder layers on the host; the tokens must be equal.
accelerate's hooks bring a layer's tensors one by one when its turn has come, ours brings a layer as one copy while the
layers before it run. On a GPU the copies are real. On a CPU both tiers are the same memory: copies are slowed down to
`--link` GB/s for both, which keeps the order of things but says nothing about any card.

Needs accelerate (`pip install --no-deps accelerate`). Rounds alternate; prints one JSON line last.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
import transformers
from accelerate.hooks import attach_align_device_hook

from vasuki.engine.loop import drain
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.attention import ragged_attention
from vasuki.hf.kv.kv_mover import StreamedLayers, ThreadCopyEngine
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.weights import decoder_layers, place_weights
from vasuki.hf.ragged_executor import build_executor

VOCAB = 2000
BLOCK_TOKENS = 32


class NoText:
    """Stands where text plays no part."""

    eos_token_id = None

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        return False


class Rows:
    """A sink that keeps outputs by row number."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def write(self, sequence: Sequence) -> None:
        self.outputs[sequence.request.row] = sequence.output_token_ids

    def commit_if_due(self, now_s: float) -> None: ...


class SlowWeights(Mapping[str, torch.Tensor]):
    """A state dict behind a link: what is taken out has been copied, at the link's rate."""

    def __init__(self, tensors: dict[str, torch.Tensor], bytes_per_s: float) -> None:
        self._tensors, self._bytes_per_s = tensors, bytes_per_s

    def __getitem__(self, name: str) -> torch.Tensor:
        started_s = time.perf_counter()
        value = self._tensors[name].clone()
        needed_s = value.numel() * value.element_size() / self._bytes_per_s
        time.sleep(max(0.0, needed_s - (time.perf_counter() - started_s)))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--host-layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=float, default=2.0, help="GB/s, on a CPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = random_model(options.layers, options.hidden, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ways = {
        "resident": prepared(copy.deepcopy(model), device),
        "vasuki": streamed(copy.deepcopy(model), device, options.host_layers, options.link * 1e9),
        "accelerate": accelerated(copy.deepcopy(model), device, options.host_layers, options.link * 1e9),
    }
    requests = random_rows(options.rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs = {name: run(loaded, requests)[1] for name, loaded in ways.items()}  # warms up, too
    for _ in range(options.rounds):
        for name, loaded in ways.items():
            seconds[name].append(run(loaded, requests)[0])
    ratios = [theirs / ours for theirs, ours in zip(seconds["accelerate"], seconds["vasuki"], strict=True)]
    print(f"{'weights':<12} {'median s':>9}")
    for name, times in seconds.items():
        print(f"{name:<12} {statistics.median(times):9.3f}")
    print(f"accelerate takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    result = {
        "device": str(device),
        "layers": options.layers,
        "host_layers": options.host_layers,
        "link_gb_per_s": options.link if device.type == "cpu" else None,
        "median_s": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "accelerate_over_vasuki": [round(ratio, 3) for ratio in sorted(ratios)],
        "same_tokens": outputs["vasuki"] == outputs["accelerate"] == outputs["resident"],
    }
    print(json.dumps(result))


def random_model(layers: int, hidden: int, dtype: torch.dtype) -> Any:
    """A Llama with random weights, in host memory."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=1024,
    )  # fmt: skip
    return (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ragged_attention.NAME)
        .eval()
        .to(dtype)
    )


def prepared(model: Any, device: torch.device) -> LoadedModel:
    """All weights on the device."""
    generation = transformers.GenerationConfig(eos_token_id=VOCAB)  # never sampled
    return prepare(model.to(device), cast(Tokenizer, NoText()), generation, "random llama")


def streamed(model: Any, device: torch.device, host_layers: int, bytes_per_s: float) -> LoadedModel:
    """Some layers on the host, as a run places them."""
    return place_weights(
        prepared(model, device), host_layers, ThreadCopyEngine(bytes_per_s) if device.type == "cpu" else None
    )


def accelerated(model: Any, device: torch.device, host_layers: int, bytes_per_s: float) -> LoadedModel:
    """Keep the same layers on the host by accelerate's hooks, as its `dispatch_model` attaches them."""
    loaded = prepared(model, device)
    layers = decoder_layers(loaded.model, loaded.kv_layout.num_layers)
    for index in StreamedLayers.spread(len(layers), host_layers).buffer_of:
        weights: Mapping[str, torch.Tensor] = {name: t.to("cpu") for name, t in layers[index].state_dict().items()}
        if device.type == "cpu":
            weights = SlowWeights(dict(weights), bytes_per_s)
        attach_align_device_hook(layers[index], execution_device=device, offload=True, weights_map=weights)
    return loaded


def random_rows(count: int) -> list[Request]:
    """Prompts of 16 to 128 tokens, with answers of 32."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in rng.integers(16, 129, count)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    return [Request(i, i, len(prompt), 32, prompt, params) for i, prompt in enumerate(prompts)]


def run(loaded: LoadedModel, requests: list[Request]) -> tuple[float, dict[int, list[int]]]:
    """Seconds and tokens of one run."""
    blocks = sum(-(-(request.num_prompt_tokens + request.max_tokens) // BLOCK_TOKENS) for request in requests)
    settings = EngineSettings(find_policy("vasuki"), Limits(256, len(requests)), blocks, BLOCK_TOKENS)
    executor, rows = build_executor(loaded, settings), Rows()
    started_s = time.perf_counter()
    drain(requests, Scheduler(settings), executor, rows)
    return time.perf_counter() - started_s, rows.outputs


if __name__ == "__main__":
    main()
