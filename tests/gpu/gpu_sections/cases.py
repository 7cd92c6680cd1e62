"""What the golden models are too small for, or never ask for: each a case of its own."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_sections.golden import Tiny, golden_row, tiny_models
from gpu_sections.setting import Finding, Record, Rows, Setting, caught
from vasuki.engine.batch import Batch
from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import find_policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.probe import likelihoods
from vasuki.hf.device.device import total_bytes
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.fused.float8_linear import refuse_untried, round_products
from vasuki.hf.kernels.varlen import PAGE_TOKENS
from vasuki.hf.loading.quantized import nats_apart
from vasuki.hf.loading.triton_kernels import drawing_kernel, small_kernels
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.hf.sampler import sample
from vasuki.machines.memory_budget import DRAWING_BYTES, DRAWN_LOGITS

_LONG_PROMPT = 9000  # tokens: beyond 8k, where models of 2024 begin to need it
_SAMPLED_ROWS, _VOCABULARY = 512, 128_256  # of Llama 3
_DRAWN_APART = 32  # of them, drawn on the CPU too
_SPARE_BYTES = 64 * 2**20  # left to a step that wants twice as much and more
_STEP_TOKENS = 2048


def cases(setting: Setting, share_s: float) -> Finding:
    """Sampling at full size, log probabilities, long contexts, copies beside graphs, 8 bits, memory that runs out."""
    finding = Finding()
    found: dict[str, Callable[[Setting, Finding], Record]] = {
        "top-p of many rows": _top_p,
        "log probabilities": _logprobs,
        "a long context": _long_context,
        "parked and replayed": _parked,
        "streamed and replayed": _streamed,
        "keys and values of 8 bits": _of_8_bits,
        "products of 8 bits": _products_of_8_bits,
        "memory that runs out": _little_memory,
    }
    for name, case in found.items():
        try:
            finding.rows.append({"case": name, "found": _told(case(setting, finding))})
        except Exception as error:
            finding.failures.append(f"{name}: {caught(error)}")
        setting.free()
    return finding


def _told(record: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in record.items())


def _top_p(setting: Setting, finding: Finding) -> Record:
    """The tokens are those that a CPU draws, in as much memory as plans set aside: by operators, and by one kernel."""
    rows, vocabulary = (16, 512) if setting.toy else (_SAMPLED_ROWS, _VOCABULARY)
    torch.manual_seed(setting.seed)
    logits = 3 * torch.randn(rows, vocabulary, device=setting.device).to(setting.dtype)
    how = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9)
    sequences = [Sequence(Request(row, row, 1, 8, torch.zeros(1).int().numpy(), how)) for row in range(rows)]
    before_bytes = _reset_peak(setting)
    tokens = sample(logits, sequences).token_ids
    held_bytes = _peak_bytes(setting) - before_bytes
    seconds = setting.seconds(lambda: sample(logits, sequences))
    found: Record = {"ms": round(1e3 * seconds, 2)}
    if setting.on_gpu:
        if (draw := drawing_kernel(setting.device)) is None:
            finding.failures.append("top-p: no kernel draws")
        else:
            tokens = sample(logits, sequences, draw=draw).token_ids
            seconds = setting.seconds(lambda: sample(logits, sequences, draw=draw))
            found["ms by one kernel"] = round(1e3 * seconds, 2)
    apart = sample(logits[:_DRAWN_APART].cpu(), sequences[:_DRAWN_APART]).token_ids
    same = int((tokens[:_DRAWN_APART].cpu() == apart).sum())
    if same < len(apart) - 1:  # sums in another order may move a draw that lies on the border of two tokens
        finding.failures.append(f"top-p: {same} of {len(apart)} rows draw what a CPU draws")
    allowed_bytes = min(rows * vocabulary, DRAWN_LOGITS) * DRAWING_BYTES
    if held_bytes > 1.1 * allowed_bytes:
        finding.failures.append(f"top-p: {held_bytes / 2**20:.0f} MiB are held, {allowed_bytes / 2**20:.0f} planned")
    return found | {"drawn as on a CPU": f"{same}/{len(apart)}", "MiB": held_bytes >> 20}


def _reset_peak(setting: Setting) -> int:
    if not setting.on_gpu:
        return 0
    setting.free()
    torch.cuda.reset_peak_memory_stats(setting.device)
    return torch.cuda.memory_allocated(setting.device)


def _peak_bytes(setting: Setting) -> int:
    return torch.cuda.max_memory_allocated(setting.device) if setting.on_gpu else 0


def _logprobs(setting: Setting, finding: Finding) -> Record:
    """They equal a float32 forward's over the same tokens."""
    model = Tiny(setting, "llama", tiny_models().random_model("llama"), torch.float32, tiny_models().prompts())
    outcome = model.run(want_logprobs=True)
    worst = 0.0
    for logprob, (logits, tokens) in zip(outcome.logprobs, model.judged(outcome.outputs), strict=True):
        assert logprob is not None
        expected = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).sum()
        worst = max(worst, abs(logprob - float(expected)))
    if not worst < 1e-3:
        finding.failures.append(f"log probabilities are off by {worst:.3g}")
    return {"rows": len(outcome.outputs), "worst": float(f"{worst:.2g}")}


def _long(setting: Setting, max_context: int, dtype: torch.dtype, prompts: list[list[int]]) -> Tiny:
    """A tiny Llama with room for long rows."""
    torch.manual_seed(setting.seed)
    config = tiny_models().random_config("llama", max_position_embeddings=max_context)
    return Tiny(setting, "llama", AutoModelForCausalLM.from_config(config).eval(), dtype, prompts)


def _prompts(*lengths: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    vocabulary = tiny_models().VOCAB
    return [torch.randint(3, vocabulary, (length,), generator=numbers).tolist() for length in lengths]


def _long_context(setting: Setting, finding: Finding) -> Record:
    """Greedy tokens after a prompt of many chunks equal `generate`'s."""
    longest = 300 if setting.toy else _LONG_PROMPT
    held = {}
    for dtype, block_tokens in _kinds(setting):
        model = _long(setting, 2 * longest, dtype, _prompts(longest, 5, longest // 3))
        limits, blocks = Limits(longest // 4, 16), 3 * -(-longest // block_tokens) + 8
        row = golden_row(model, dtype, block_tokens, model.generate(), finding, num_blocks=blocks, limits=limits)
        held[row["dtype"]] = f"{row['rows_equal']} equal, regret {row['regret']}"
    return {"tokens": longest} | held


def _kinds(setting: Setting) -> list[tuple[torch.dtype, int]]:
    """Types, and the blocks that a run would have with them."""
    return [(torch.float32, 32), (torch.bfloat16, PAGE_TOKENS)] if setting.on_gpu else [(torch.float32, 32)]


def _parked(setting: Setting, finding: Finding) -> Record:
    """Rows that outgrow the memory wait on the host, while others are replayed in pages as a run has them."""
    return _replayed(setting, finding, "parked", OffloadPlan("park", host_blocks=24))


def _streamed(setting: Setting, finding: Finding) -> Record:
    """The same, with layers that stream between the stretches of a replay."""
    return _replayed(setting, finding, "streamed", OffloadPlan("stream", host_blocks=24, streamed_layers=2))


def _replayed(setting: Setting, finding: Finding, name: str, offload: OffloadPlan) -> Record:
    dtype, block_tokens = _kinds(setting)[-1]
    just_below = block_tokens - 4  # so that each row grows into another block
    model = _long(setting, 4 * block_tokens, dtype, _prompts(*[just_below] * 6))
    memory = {"num_blocks": 8, "offload": offload}
    together = Limits(6 * block_tokens, 16)  # all of them begin in one step
    row = golden_row(model, dtype, block_tokens, model.generate(), finding, limits=together, estimate=1, **memory)
    if not row["swaps"] or (setting.on_gpu and not row["replayed_steps"]):
        finding.failures.append(f"{name} and replayed: {row['swaps']} swaps, {row['replayed_steps']} replayed steps")
    return {key: row[key] for key in ("dtype", "block", "rows_equal", "regret", "swaps", "replayed_steps")}


def _of_8_bits(setting: Setting, finding: Finding) -> Record:
    """The kernels give the tokens that torch's operators give."""
    tiny = tiny_models()
    model = Tiny(setting, "llama", tiny.random_model("llama"), torch.float32, tiny.prompts())
    loaded = model.loaded("float8")
    ours, plain = (model.run(each).outputs for each in (loaded, dataclasses.replace(loaded, kernel=None)))
    same = sum(map(operator.eq, ours, plain))
    if same != len(plain) or (setting.on_gpu and loaded.kernel is None):
        finding.failures.append(f"keys and values of 8 bits: {same} of {len(plain)} rows equal, by {loaded.kernel}")
    return {"rows_equal": f"{same}/{len(plain)}"}


def _products_of_8_bits(setting: Setting, finding: Finding) -> Record:
    """The card multiplies them as a CPU does, and what is likely hardly changes."""
    refuse_untried(setting.device)
    model = tiny_models().random_model.__wrapped__("llama").bfloat16()
    model.set_attn_implementation(ragged_attention.NAME)
    layers = model.config.num_hidden_layers
    exact, here = likelihoods(model), copy.deepcopy(model).to(setting.device)
    kernels = small_kernels(setting.device) if setting.on_gpu else None
    for each, own in ((model, None), (here, kernels)):
        fuse_modules(each, own)
        round_products(each, layers, own)
    plain, ours = likelihoods(model), likelihoods(here).cpu()
    nats, apart = (nats_apart(one, ours) for one in (exact, plain))
    if not (apart < 1e-3 and nats < 0.1) or (setting.on_gpu and kernels is None):
        finding.failures.append(f"products of 8 bits: {apart:.2g} nats from a CPU's, {nats:.2g} from exact ones")
    return {"nats": float(f"{nats:.2g}"), "nats from a CPU's": float(f"{apart:.2g}")}


@dataclass(slots=True)
class _Filled:
    """Takes a device's memory away, all but what a step of half the size needs."""

    setting: Setting
    executor: RaggedExecutor

    def __enter__(self) -> None:
        setting = self.setting
        if setting.on_gpu:
            setting.free()
            share = (torch.cuda.memory_reserved(setting.device) + _SPARE_BYTES) / total_bytes(setting.device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
            return
        whole = self.executor._logits

        def logits(batch: Batch) -> torch.Tensor:
            if batch.num_tokens > 16:
                raise MemoryError
            return whole(batch)

        self.executor._logits = logits  # type: ignore[method-assign]

    def __exit__(self, *raised: object) -> None:
        if self.setting.on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _little_memory(setting: Setting, finding: Finding) -> Record:
    """A step for which memory does not suffice is computed in halves, and the run goes on."""
    loaded, step_tokens = setting.loaded_alone(setting.small), 32 if setting.toy else _STEP_TOKENS
    requests = setting.workload("sum", 8 if setting.toy else 24)
    tokens = sum(request.num_prompt_tokens + request.max_tokens for request in requests)
    block_tokens = _kinds(setting)[-1][1]
    blocks = math.ceil(tokens / block_tokens) + len(requests)
    settings = EngineSettings(find_policy("vasuki"), Limits(step_tokens, 64), blocks, block_tokens)
    executor = build_executor(loaded, settings)
    few = [copy.copy(request) for request in requests[:2]]
    drain(few, Scheduler(settings), executor, Rows())  # whatever libraries take when they are first called
    rows: Any = Rows()
    with _Filled(setting, executor):
        drain(requests, Scheduler(settings), executor, rows)
    expected = sum(request.max_tokens for request in requests)
    if rows.output_tokens != expected or executor.most_tokens >= step_tokens:
        finding.failures.append(
            f"memory that runs out: {rows.output_tokens} of {expected} tokens came out, steps of at most "
            f"{executor.most_tokens} tokens were computed at once, of {step_tokens}"
        )
    return {"step": step_tokens, "computed at once": executor.most_tokens}
