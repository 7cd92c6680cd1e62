"""What all sections share: the device, models with random weights, workloads, and a planned run of one."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from vasuki.base.config import KVConfig, PlanConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import Observer, RunStats, drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf.attention import ragged_attention
from vasuki.hf.device.device import available_bytes, describe, total_bytes
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.fused.float8_linear import round_products
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import small_kernels
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.attention import page_tokens
from vasuki.machines.cost_model import CostModel
from vasuki.machines.gpus import profile_of_gpu
from vasuki.machines.here.gpu import torch_pages
from vasuki.machines.memory_budget import activation_bytes, room_bytes
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile, load_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import NAMED_CONFIGS
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.ordering.planned_order import order_requests
from vasuki.planner.plan import Plan
from vasuki.runs.workload import lengths_of

Record = dict[str, Any]
IN_8_BITS = " in 8 bits"  # behind the name of a model whose products, keys and values are to have them
MEASURED = "this-machine.yaml"

_TOY_CONFIG = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,  # of fewer none is streamed: buffers would take as much
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=4096,
)
_TOY_KV_BYTES = 2**24
FEWEST_ROWS = 16  # of a job that is cut to fit its time
_DEVICE_MEMORY = 0.9  # share of the device, as jobs have it by default
_TOY_SHRINKS = 16  # lengths of toy workloads are divided by it


@dataclass(slots=True)
class Finding:
    """What a section has to say."""

    rows: list[Record] = field(default_factory=list)  # a table; every row has the keys that it needs
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # checks that did not hold
    figures: list[Record] = field(default_factory=list)  # what a card is to reach, and what it reached

    def at_least(self, figure: str, measured: float, target: float) -> None:
        """A figure that is good where it is large."""
        self._figure(figure, measured, f"at least {target:g}", measured >= target)

    def at_most(self, figure: str, measured: float, target: float) -> None:
        """A figure that is good where it is small."""
        self._figure(figure, measured, f"at most {target:g}", measured <= target)

    def _figure(self, figure: str, measured: float, target: str, is_reached: bool) -> None:
        reached = "yes" if is_reached else "no"
        self.figures.append({"figure": figure, "measured": digits(measured), "target": target, "reached": reached})


class NoText:
    """A tokenizer's place where text plays no part."""

    eos_token_id = None

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        return False


def caught(error: Exception) -> str:
    """What was raised, in a line; all of it goes to stderr, which the log keeps."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def digits(value: float) -> float:
    """Four of them, however small it is."""
    return float(f"{value:.4g}")


@dataclass(slots=True)
class Ceilings:
    """Best rates found on this device."""

    flops_per_s: float
    bytes_per_s: float


class Setting:
    """Where and with what the sections run.

    Args:
        device: where models run.
        toy: small everything, to see that every path works.
        out: folder for what sections leave behind.
        checkpoint: folder of a small trained model, if there is one.
        vllm: Python of an environment that has vLLM, if there is one.
        seed: of weights and workloads.
    """

    def __init__(
        self, device: torch.device, toy: bool, out: Path, checkpoint: str = "", vllm: str = "", seed: int = 0
    ) -> None:
        self.device = device
        self.toy = toy
        self.out = out
        self.checkpoint = checkpoint
        self.vllm = vllm
        self.seed = seed
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.small, self.large = ("toy", "toy") if toy else ("llama-3.2-1b", "llama-3-8b")
        self.known = profile_of_gpu(torch.cuda.get_device_name(device)) if self.on_gpu else find_profile("cpu")
        self.profile = self._measured_before() or self.known  # until kernels.profile measures the card
        self.ceilings: Ceilings | None = None  # set by kernels.ceilings
        self._plain: tuple[str, Any] | None = None  # a name, and the model as transformers has it,
        self._fused: tuple[str, Any] | None = None  # and as the engine has it

    def _measured_before(self) -> HardwareProfile | None:
        """What an earlier call has left of this device, where one did."""
        file = self.out / MEASURED
        profile = load_profile(file) if file.exists() else None
        return profile if profile and describe(self.device).name in profile.device_names else None

    def tree(self, name: str) -> Record:
        """What a model's `config.json` says."""
        name = name.removesuffix(IN_8_BITS)
        return dict(_TOY_CONFIG if name == "toy" else NAMED_CONFIGS[name])

    def config(self, name: str) -> Any:
        """Of a model: transformers' own class."""
        tree = self.tree(name)
        return AutoConfig.for_model(tree.pop("model_type"), **tree)

    def shape(self, name: str) -> ModelShape:
        """What the planner and the cost model know of a model."""
        shape = shape_from_config(self.tree(name), name).with_dtype(str(self.dtype).removeprefix("torch."))
        if not name.endswith(IN_8_BITS):
            return shape
        return shape.with_dtype(shape.dtype, "float8", "float8" if self.on_gpu else "none")  # no CPU has such rates

    def model(self, name: str) -> Any:
        """A model with random weights, built on the device. Only the last one is kept."""
        name = name.removesuffix(IN_8_BITS)
        if self._plain is None or self._plain[0] != name:
            if self._fused is not None and self._fused[0].removesuffix(IN_8_BITS) != name:
                self._fused = None
            self._plain = None
            self.free()
            torch.manual_seed(self.seed)
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self.config(name), dtype=self.dtype).eval()
            model.set_attn_implementation("sdpa")
            self._plain = (name, model)
        return self._plain[1]

    def loaded(self, name: str) -> LoadedModel:
        """The same, ready for the engine. Matrices that are joined for it are there twice, as long as both are kept."""
        if self._fused is None or self._fused[0] != name:
            self._fused = (name, twin := fused_twin(self.model(name)))
            if name.endswith(IN_8_BITS):
                self._plain = None
                kernels = small_kernels(self.device) if self.on_gpu else None
                round_products(twin, self.shape(name).num_layers, kernels)
        kv_dtype = self.shape(name).kv_dtype or "auto"
        return prepare(self._fused[1], cast(Tokenizer, NoText()), GenerationConfig(eos_token_id=0), name, kv_dtype)

    def loaded_alone(self, name: str) -> LoadedModel:
        """The same with nothing else on the device, as in a run."""
        loaded = self.loaded(name)
        self._plain = None
        self.free()
        return loaded

    def forget(self) -> None:
        """Drop the models, and give their memory back."""
        self._plain = self._fused = None
        self.free()

    def free(self) -> None:
        """Give memory back that nobody refers to."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device, once a measurement is over."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """How long a call takes, with everything that it started on the device."""
        self.synchronize()
        started_s = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started_s

    def workload(self, name: str, rows: int) -> list[Request]:
        """Requests of `sum`, `trans` or `mixed`, which all generate exactly max_tokens."""
        rng = np.random.default_rng([self.seed, len(name)])
        prompts, outputs = _LENGTHS[name](rng, rows)
        shrink = _TOY_SHRINKS if self.toy else 1
        vocab_size = 512 if self.toy else 15_000
        requests = []
        shrunk = [np.maximum(1, lengths // shrink) for lengths in (prompts, outputs)]
        for row, (prompt, output) in enumerate(zip(*shrunk, strict=True)):
            ids = rng.integers(5, vocab_size, int(prompt)).astype(np.int32)
            sampling = SamplingParams(max_tokens=int(output), ignore_eos=True)
            requests.append(Request(row, row, len(ids), int(output), ids, sampling))
        return requests


def fused_twin(model: Any) -> Any:
    """The same as a run has it on a GPU, over the same weights."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation(ragged_attention.NAME)
    fuse_modules(twin, small_kernels(twin.device) if twin.device.type == "cuda" else None)
    return twin


# --- workloads -------------------------------------------------------------------------------------------------------

Ints = Any  # int64 [rows]


def _drawn(rng: np.random.Generator, rows: int, median: float, sigma: float, low: int, high: int) -> Ints:
    return np.clip(rng.lognormal(np.log(median), sigma, rows).astype(np.int64), low, high)


def _summaries(rng: np.random.Generator, rows: int) -> tuple[Ints, Ints]:
    """Long prompts, short answers."""
    return _drawn(rng, rows, 350, 0.7, 32, 1500), _drawn(rng, rows, 40, 0.6, 8, 128)


def _translations(rng: np.random.Generator, rows: int) -> tuple[Ints, Ints]:
    """Answers somewhat longer than prompts."""
    return _drawn(rng, rows, 110, 0.6, 16, 400), _drawn(rng, rows, 140, 0.6, 16, 400)


def _mixture(rng: np.random.Generator, rows: int) -> tuple[Ints, Ints]:
    """One row long in and short out, one short in and long out, two short both ways (the mix of the Baton paper)."""
    quarter = max(1, rows // 4)
    rest = rows - 2 * quarter
    prompts = [_drawn(rng, quarter, 900, 0.3, 400, 1500), _drawn(rng, rows - quarter, 60, 0.5, 16, 200)]
    outputs = [_drawn(rng, quarter, 24, 0.4, 8, 64), _drawn(rng, quarter, 220, 0.4, 100, 400)]
    outputs.append(_drawn(rng, rest, 24, 0.4, 8, 64))
    order = rng.permutation(rows)
    return np.concatenate(prompts)[order], np.concatenate(outputs)[order]


_LENGTHS = {"sum": _summaries, "trans": _translations, "mixed": _mixture}
WORKLOADS = tuple(_LENGTHS)


# --- a planned run ---------------------------------------------------------------------------------------------------


class Rows:
    """A sink that keeps what each row became."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}

    def write(self, sequence: Sequence) -> None:
        self.sequences[sequence.request.row] = sequence

    def commit_if_due(self, now_s: float) -> None: ...

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens of each row, in order of rows."""
        return [self.sequences[row].output_token_ids for row in sorted(self.sequences)]

    @property
    def output_tokens(self) -> int:
        return sum(len(sequence.output_token_ids) for sequence in self.sequences.values())


@dataclass(slots=True)
class StepLog:
    """An engine observer that keeps every step."""

    batches: list[Batch] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        self.batches.append(batch)
        self.elapsed_s.append(result.elapsed_s)


@dataclass(slots=True)
class PlannedRun:
    """A job run as planned."""

    plan: Plan
    seconds: float  # first step to last, without loading and planning
    rows: Rows
    stats: RunStats
    log: StepLog
    kv_bytes: int  # of its blocks
    peak_bytes: int  # of device memory that torch held; 0 on a CPU
    planned_bytes: int  # weights, KV and activations
    replayed_steps: int  # by graphs
    waited_s: float  # in which the host had nothing to do but wait for the device


def plan_for(
    setting: Setting,
    name: str,
    requests: list[Request],
    device_memory: float | int | None = None,
    offload: Literal["auto", "none", "park", "stream"] = "auto",
) -> Plan:
    """The plan of `vasuki run` for these requests on this device; `device_memory` as in the job file."""
    profile = setting.profile.model_copy(update={"memory_mib": total_bytes(setting.device) // 2**20})
    setting.loaded(name)
    setting.free()  # what an ended run has left
    room = room_bytes(_DEVICE_MEMORY, total_bytes(setting.device), available_bytes(setting.device))
    kv = _kv(setting, name, device_memory, offload)
    beside_weights_bytes = room if kv.device_memory <= 1 else None
    return _plan(setting, name, requests, profile, kv, beside_weights_bytes)


def plan_elsewhere(setting: Setting, name: str, requests: list[Request]) -> Plan:
    """The plan of `vasuki plan --gpu NAME` where there is no such card."""
    return _plan(setting, name, requests, setting.known, _kv(setting, name, None, "auto"), None)


def _kv(
    setting: Setting,
    name: str,
    device_memory: float | int | None,
    offload: Literal["auto", "none", "park", "stream"],
) -> KVConfig:
    generation = describe(setting.device).compute_capability if torch_pages() else None
    return KVConfig(
        block_tokens=(generation and page_tokens(setting.shape(name), generation, setting.profile.attention)) or "auto",
        offload=offload if setting.on_gpu else "none",
        device_memory=device_memory or (_TOY_KV_BYTES if setting.toy else _DEVICE_MEMORY),
    )


def _plan(
    setting: Setting,
    name: str,
    requests: list[Request],
    profile: HardwareProfile,
    kv: KVConfig,
    beside_weights_bytes: int | None,
) -> Plan:
    how = PlanConfig(output_length="max")
    lengths, shape = lengths_of(requests), setting.shape(name)
    return make_plan(lengths, shape, profile, plan=how, kv=kv, beside_weights_bytes=beside_weights_bytes)


def run_planned(
    setting: Setting,
    name: str,
    requests: list[Request],
    observers: Iterable[Observer] = (),
    compiles: bool = True,
    steps_ahead: int | None = None,
    plan: Plan | None = None,
) -> PlannedRun:
    """Plan and run, as the command does, without files; `compiles` as in `LoadedModel`, `steps_ahead` as in
    `RaggedExecutor`, and another plan than that of the command where one is given."""
    loaded = replace(setting.loaded(name), compiles=compiles)
    plan = plan or plan_for(setting, name, requests)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    shape = replace(setting.shape(name), compiles=compiles)
    executor = build_executor(loaded, plan.settings, cost_model=CostModel(shape, setting.profile, plan.layout))
    if steps_ahead is not None:
        executor.most_ahead = steps_ahead
    order = order_requests(iter(requests), plan.settings, solver=plan.solver, output_length="max")
    rows, log, scheduler, stats = Rows(), StepLog(), Scheduler(plan.settings), RunStats()
    seconds = setting.seconds(lambda: drain(order, scheduler, executor, rows, [order, log, *observers], stats=stats))
    limits = plan.settings.limits
    activations = activation_bytes(setting.shape(name), limits.chunk_tokens, limits.max_num_seqs)
    kv = plan.settings.kv_tokens * loaded.kv_layout.bytes_per_token
    peak = torch.cuda.max_memory_allocated(setting.device) if setting.on_gpu else 0
    planned = loaded.weight_bytes + kv + activations
    return PlannedRun(plan, seconds, rows, stats, log, kv, peak, planned, executor.replayed_steps, executor.waited_s)


def fitting(
    setting: Setting,
    name: str,
    workload: str,
    most: int,
    share_s: float,
    planned: Callable[[Setting, str, list[Request]], Plan] = plan_for,
) -> list[Request]:
    """As many rows of a workload, up to `most`, as are foreseen to take no longer than that."""
    num_rows = most
    requests = setting.workload(workload, num_rows)
    while num_rows > FEWEST_ROWS and planned(setting, name, requests).makespan_s > share_s:
        num_rows //= 2
        requests = setting.workload(workload, num_rows)
    return requests
