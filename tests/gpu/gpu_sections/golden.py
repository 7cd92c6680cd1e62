"""Greedy tokens against `model.generate`, with and without offload, and copies byte for byte."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_sections.setting import Finding, Record, Rows, Setting, caught, fused_twin
from vasuki.engine.batch import Batch, Swap
from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import Admission, find_policy
from vasuki.engine.queues import Counters
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.kernels.varlen import PAGE_TOKENS
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.kv.kv_mover import KVMover, copy_engine
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.weights import place_weights
from vasuki.hf.ragged_executor import build_executor

_FOLDER = Path(__file__).resolve().parents[2] / "hf"  # the random models of the golden tests
MAX_TOKENS = 14
_SENTENCES = (
    "The capital of France is",
    "def area(width, height):",
    "Once upon a time there was a king who had three daughters, and the youngest of them",
    "1, 2, 4, 8, 16,",
)
_POISON = 1e4  # finite, and ruinous wherever a stale value is read
_SLACK = 2.0  # our worst choice may lie this much further below the best logit than generate's own, in bfloat16


def golden(setting: Setting, share_s: float) -> Finding:
    """Tiny random models of many architectures: float32 must give the same tokens, bfloat16 must choose as well."""
    tiny = tiny_models()
    names = ["llama", "gemma2", "qwen3_moe", "qwen3_5"] if setting.toy else [*tiny.ARCHITECTURES, *tiny.RECURRENT]
    finding = Finding()
    until_s = time.perf_counter() + share_s
    for name in names:
        if time.perf_counter() > until_s:
            finding.notes.append(f"no time for {', '.join(names[names.index(name) :])}")
            break
        _compare(setting, name, tiny.random_model(name), tiny.prompts(), finding)
    _explain(finding)
    return finding


def checkpoint(setting: Setting, share_s: float) -> Finding:
    """The same of a model that was trained, whose numbers lie otherwise than random ones, on a few sentences."""
    finding, path = Finding(), setting.checkpoint
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    _compare(setting, Path(path).name, model, [tokenizer(text).input_ids for text in _SENTENCES], finding)
    _explain(finding)
    return finding


def _compare(setting: Setting, name: str, plain: Any, prompts: list[list[int]], finding: Finding) -> None:
    """One model, in every type and size of blocks."""
    sizes = [(torch.float32, 4), (torch.bfloat16, 4)]
    sizes += [(torch.bfloat16, PAGE_TOKENS)] if setting.on_gpu else []  # blocks that the packed kernel pages
    for dtype, block_tokens in sizes:
        model = Tiny(setting, name, plain, dtype, prompts)
        try:
            expected = model.generate()
        except RuntimeError as error:  # such as kernels that this card lacks
            finding.notes.append(f"{name} in {dtype}: transformers' generate fails: {str(error).splitlines()[0]}")
            continue
        try:
            finding.rows.append(golden_row(model, dtype, block_tokens, expected, finding))
        except Exception as error:
            finding.failures.append(f"{name} in {dtype}: {caught(error)}")


def _explain(finding: Finding) -> None:
    finding.notes.append(
        "regret: how far a chosen token's logit lies below the best one, in standard deviations of the logits, judged "
        "by a float32 forward of the same weights; the worst of all tokens"
    )


def offload(setting: Setting, share_s: float) -> Finding:
    """Parked sequences, streamed layers and streamed weights change no token, and copies no byte."""
    tiny, finding = tiny_models(), Finding()
    for layers, block_tokens in ((3, 5), (8, 32)):
        exact, moved = _round_trip(setting, layers, block_tokens)
        finding.rows.append({"check": f"round trip, {layers} layers, blocks of {block_tokens}", "exact": exact,
                             "copied_bytes": moved})  # fmt: skip
        if not exact:
            finding.failures.append(f"blocks of {block_tokens} came back changed")
    for name in ["llama"] if setting.toy else ["llama", "mistral", "gemma2", "gpt_oss"]:
        model = Tiny(setting, name, tiny.random_model(name), torch.float32, tiny.prompts())
        expected = model.generate()
        for mode, run in _offload_runs(setting, model).items():
            found = run()
            same = sum(ours == theirs for ours, theirs in zip(found.outputs, expected, strict=True))
            counters = found.counters
            happened = {"park": counters.preemptions_swap, "ahead": counters.prefilled_ahead}.get(mode, True)
            finding.rows.append({"check": f"{name}, {mode}", "exact": same == len(expected), "rows": f"{same}/"
                                 f"{len(expected)}", "swaps": found.counters.preemptions_swap})  # fmt: skip
            if same != len(expected) or not happened:
                finding.failures.append(f"{name}, {mode}: {same} of {len(expected)} rows equal generate's")
    return finding


def tiny_models() -> Any:
    sys.path.insert(0, str(_FOLDER))
    try:
        return importlib.import_module("tiny_models")
    finally:
        sys.path.remove(str(_FOLDER))


@dataclass(frozen=True, slots=True)
class Outcome:
    outputs: list[list[int]]
    logprobs: list[float | None]  # of each row's tokens together, where asked for
    counters: Counters
    replayed_steps: int  # by graphs


class Tiny:
    """One small model on the device."""

    def __init__(self, setting: Setting, name: str, model: Any, dtype: torch.dtype, prompts: list[list[int]]) -> None:
        self.setting = setting
        self.name = name
        self.model = copy.deepcopy(model).to(setting.device, dtype)
        self.prompts = prompts

    def generate(self) -> list[list[int]]:
        """transformers' own greedy tokens, row by row."""
        self.model.set_attn_implementation("eager")
        rows = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt], device=self.setting.device)
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
            )
            rows.append(output[0, len(prompt) :].tolist())
        return rows

    def loaded(self, kv_dtype: str = "auto") -> LoadedModel:
        no_text: Any = tiny_models().NoTokenizer()
        return prepare(fused_twin(self.model), no_text, self.model.generation_config, self.name, kv_dtype)

    def run(
        self, loaded: LoadedModel | None = None, estimate: int = 0, want_logprobs: bool = False, **changes: Any
    ) -> Outcome:
        """Through scheduler and executor, in memory full of poison. `changes` are of EngineSettings."""
        limits, loaded = Limits(16, 16), loaded or self.loaded()
        policy = dataclasses.replace(find_policy("vasuki"), shares_prefixes=loaded.recurrent is None)
        settings = EngineSettings(policy, limits, num_blocks=200, block_tokens=4)
        settings = dataclasses.replace(settings, **changes)
        executor = build_executor(loaded, settings, want_logprobs, record_after=1)
        host = executor.offload.host if executor.offload is not None else None
        states = itertools.chain(*executor.states.tensors) if executor.states is not None else ()
        for tensor in [*executor.cache.layers, *(host.layers if host is not None else ()), *states]:
            tensor.fill_(min(_POISON, torch.finfo(tensor.dtype).max))
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        requests = [
            Request(row, row, len(ids), MAX_TOKENS, torch.tensor(ids, dtype=torch.int32).numpy(), sampling,
                    estimated_tokens=estimate)
            for row, ids in enumerate(self.prompts)
        ]  # fmt: skip
        scheduler, rows = Scheduler(settings), Rows()
        drain(requests, scheduler, executor, rows)
        logprobs: list[float | None] = [rows.sequences[row].logprob for row in sorted(rows.sequences)]
        return Outcome(rows.outputs, logprobs, scheduler.queues.counters, executor.replayed_steps)

    def regret(self, outputs: list[list[int]]) -> float:
        """The worst choice among the outputs' tokens, judged in float32."""
        worst = 0.0
        for logits, tokens in self.judged(outputs):
            chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
            worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
        return worst

    def judged(self, outputs: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each row's logits in float32 `[tokens, vocab_size]`, and the tokens that were chosen."""
        judge = copy.deepcopy(self.model).float()
        judge.set_attn_implementation("eager")
        for prompt, output in zip(self.prompts, outputs, strict=True):
            ids = torch.tensor([prompt + output], device=self.setting.device)
            with torch.inference_mode():
                logits = judge(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            yield logits, ids[0, len(prompt) :]


def golden_row(
    model: Tiny, dtype: torch.dtype, block_tokens: int, expected: list[list[int]], finding: Finding, **changes: Any
) -> Record:
    """Compare a run with what `generate` says of the same model; `changes` as for `Tiny.run`."""
    kind = str(dtype).removeprefix("torch.")
    outcome = model.run(block_tokens=block_tokens, **changes)
    found = outcome.outputs
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    ours, theirs = model.regret(found), model.regret(expected)
    holds = same == len(expected) if dtype is torch.float32 else ours <= _SLACK * theirs + 0.05
    if not holds:
        finding.failures.append(f"{model.name} in {kind}: {same} of {len(expected)} rows equal, regret {ours:.3g}")
    return {
        "model": model.name,
        "dtype": kind,
        "block": block_tokens,
        "rows_equal": f"{same}/{len(expected)}",
        "replayed_steps": outcome.replayed_steps,
        "swaps": outcome.counters.preemptions_swap,
        "regret": float(f"{ours:.2g}"),
        "regret_of_generate": float(f"{theirs:.2g}"),
        "holds": holds,
    }


def _offload_runs(setting: Setting, model: Tiny) -> dict[str, Callable[[], Outcome]]:
    """Every way of moving things between the tiers. Rows that hope for one token overflow the memory and are parked."""
    parked = OffloadPlan("park", host_blocks=60)
    both = dataclasses.replace(parked, streamed_layers=2)
    ahead = dataclasses.replace(parked, prefills_ahead=True)
    careful = dataclasses.replace(find_policy("vasuki"), admission=Admission.PEAK)

    def weights() -> Outcome:
        loaded = model.loaded()
        return model.run(place_weights(dataclasses.replace(loaded, model=copy.deepcopy(loaded.model)), host_layers=2))

    return {
        "no offload": model.run,
        "park": lambda: model.run(estimate=1, num_blocks=24, offload=parked),
        "stream": lambda: model.run(offload=OffloadPlan("stream", streamed_layers=2)),
        "park and stream": lambda: model.run(estimate=1, num_blocks=24, offload=both),
        "ahead": lambda: model.run(policy=careful, num_blocks=24, offload=ahead),
        "weights": weights,
    }


def _round_trip(setting: Setting, layers: int, block_tokens: int) -> tuple[bool, int]:
    """Scattered blocks to the host and back to other places, over poison: whether every byte is the same."""
    layout = KVLayout.uniform(layers, num_kv_heads=2, head_dim=8, dtype=setting.dtype)
    device = KVCache(layout, 12, block_tokens, setting.device)
    host = KVCache(layout, 9, block_tokens, torch.device("cpu"), pinned=setting.on_gpu)
    for layer in device.layers:
        layer.normal_()
        layer[3, 0, 0, 0, 0] = float("nan")  # bit patterns survive, whatever they mean
    for layer in host.layers:
        layer.fill_(_POISON)
    before = [layer.clone() for layer in device.layers]
    engine = copy_engine(setting.device)
    mover, sequence = KVMover(device, engine, host), Sequence(Request(0, 0, 1, 1))
    left, stay, came = [1, 2, 3, 7], [5, 0, 1, 2], [0, 4, 10, 11]
    mover.begin_step(Batch([], [], [], [Swap(sequence, True, left, stay)]))
    for index, layer in enumerate(device.layers):
        mover.before_layer(index)
        layer[left] = _POISON
    mover.begin_step(Batch([], [], [], [Swap(sequence, False, came, stay)]))
    mover.begin_step(Batch([], [], [], []))
    exact = True
    for index, layer in enumerate(device.layers):
        mover.before_layer(index)
        now, then = (tensor.contiguous().view(torch.uint8) for tensor in (layer[came], before[index][left]))
        exact &= torch.equal(now, then)
    return exact, mover.copied_bytes
