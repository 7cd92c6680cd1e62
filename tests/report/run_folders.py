"""Run folders to report on: some whose figures are chosen, some from a small simulation of a card.

Both are written by the same writers that real runs use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vasuki.io.location import Location
from vasuki.io.output.manifest import (
    BatchStats,
    Bounds,
    KVStats,
    Manifest,
    Predicted,
    PreemptionCounts,
    RowCounts,
    Timings,
    TokenCounts,
)
from vasuki.io.output.trace import StepRecord, TraceWriter
from vasuki.machines.price import Cost

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 128 * 1024  # Llama-3-8B in bfloat16


def write_run(
    folder: Path,
    *,
    gpu: str = "a10",
    name: str = "translate",
    makespan_s: float = 3600.0,
    rows: int = 1000,
    failed: int = 0,
    left: int = 0,
    prompt_tokens: int = 1_500_000,
    output_tokens: int = 500_000,
    predicted_s: float | None = None,
    lower_bound_s: float | None = None,
    schedule_bound_s: float | None = None,
    uncertainty: float | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
    policy: str = "vasuki",
    simulated: bool = False,
    device: dict[str, Any] | None = None,
    steps: Sequence[StepRecord] | None = None,
    **changes: Any,
) -> Path:
    """A run folder with exactly these figures. `steps` of None leaves the trace out."""
    hours = makespan_s / 3600
    manifest = Manifest(
        job={
            "name": name,
            "model": {"shape": "llama-3-8b", "path": ""},
            "engine": {"policy": policy},
            "cost": {"price_per_hour": price_per_hour, "currency": currency},
        },
        config_hash="0123456789abcdef",
        input_fingerprint=f"input of {name}",
        rows=RowCounts(rows + left, rows - failed, failed),
        tokens=TokenCounts(prompt_tokens, output_tokens),
        timings=Timings(generate_s=makespan_s, makespan_s=makespan_s),
        predicted=Predicted(predicted_s),
        bounds=Bounds(schedule_bound_s, 1.0, lower_bound_s, uncertainty),
        steps=len(steps) if steps is not None else 0,
        device={"type": "cuda", "profile": gpu} if device is None else device,
        cost=Cost(hours, None if price_per_hour is None else hours * price_per_hour, currency),
        simulated=simulated,
    )
    folder.mkdir(parents=True, exist_ok=True)
    replace(manifest, **changes).write(Location.parse(str(folder / "manifest.json")))
    if steps is not None:
        write_trace(folder, steps)
    return folder


def write_trace(folder: Path, steps: Iterable[StepRecord]) -> None:
    """Append one run to the folder's trace."""
    with TraceWriter(Location.parse(str(folder / "trace.jsonl"))) as trace:
        for step in steps:
            trace.record(step)


@dataclass(frozen=True)
class Card:
    """What the small simulation needs to know of one."""

    flops: float
    bytes_per_s: float
    kv_tokens: int
    price: float


CARDS = {"a10": Card(75e12, 510e9, 34_000, 0.75), "a40": Card(112e12, 557e9, 190_000, 0.45)}


def simulate_run(
    folder: Path,
    gpu: str,
    *,
    name: str = "summarise",
    num_rows: int = 200,
    prompt_tokens: int = 2600,
    output_tokens: int = 250,
    simulated: bool = True,
    parks: bool = False,
    noise: float = 0.0,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Llama-3-8B on a card: decodes first, then chunks up to 512 tokens, limited by KV memory.

    Args:
        parks: keep a few finished prefills on the host while the device is full.
        noise: sigma of a lognormal factor on measured step times; the trace holds the undisturbed time as predicted.
    """
    card = CARDS[gpu]
    generator = np.random.default_rng(seed)
    prompts = np.clip(generator.lognormal(np.log(prompt_tokens), 0.4, num_rows), 16, 4096).astype(int)
    outputs = np.clip(generator.lognormal(np.log(output_tokens), 0.8, num_rows), 4, 4096).astype(int)
    steps = list(_steps(card, prompts, outputs, parks, noise, generator))
    makespan_s = steps[-1].t_s + 1.0
    predicted_s = 1.0 + sum(step.predicted_s or step.elapsed_s for step in steps)
    exposed_s, hidden_s = sum(s.exposed_copy_s for s in steps), sum(s.hidden_copy_s for s in steps)
    swapped = sum(step.swapped_blocks for step in steps)
    return write_run(
        folder,
        gpu=gpu,
        name=name,
        makespan_s=makespan_s,
        rows=num_rows,
        prompt_tokens=int(prompts.sum()),
        output_tokens=int(outputs.sum()),
        predicted_s=predicted_s,
        lower_bound_s=0.6 * predicted_s,
        schedule_bound_s=0.8 * predicted_s,
        simulated=simulated,
        steps=steps,
        batch=BatchStats(float(np.mean([step.seqs for step in steps])), max(step.seqs for step in steps)),
        kv=KVStats(
            peak_device_bytes=max(step.kv_device_bytes for step in steps),
            peak_host_bytes=max(step.kv_host_bytes for step in steps),
            offloaded_bytes=swapped * BLOCK_BYTES,
            exposed_copy_s=exposed_s,
            hidden_copy_s=hidden_s,
        ),
        preemptions=PreemptionCounts(swap=sum(step.preempted for step in steps)),
        timings=Timings(load_s=0.9, plan_s=0.1, generate_s=makespan_s - 1.0, makespan_s=makespan_s),
        cost=Cost(makespan_s / 3600, makespan_s / 3600 * card.price, "USD"),
        **changes,
    )


def _steps(
    card: Card, prompts: Any, outputs: Any, parks: bool, noise: float, generator: np.random.Generator
) -> Iterable[StepRecord]:
    waiting = list(range(len(prompts)))[::-1]
    done_prompt = np.zeros(len(prompts), int)
    done_output = np.zeros(len(prompts), int)
    running: list[int] = []
    now_s, parked_before = 0.0, 0
    while waiting or running:
        held = sum(int(prompts[i] + outputs[i]) for i in running)
        while waiting and held + prompts[waiting[-1]] + outputs[waiting[-1]] <= card.kv_tokens and len(running) < 128:
            running.append(waiting.pop())
            held += int(prompts[running[-1]] + outputs[running[-1]])
        decodes = [i for i in running if done_prompt[i] == prompts[i]]
        done_output[decodes] += 1
        budget, prefill, chunks = max(0, 512 - len(decodes)), 0, 0
        for i in running:
            chunk = min(int(prompts[i] - done_prompt[i]), budget - prefill)
            if chunk > 0:
                done_prompt[i] += chunk
                prefill += chunk
                chunks += 1
        context = int(done_prompt[running].sum() + done_output[running].sum())
        parked = min(4, len(waiting)) * 160 if parks else 0
        moved = abs(parked - parked_before) + (20 if parked else 0)
        tokens = prefill + len(decodes)
        step_s = max(16e9 * tokens / card.flops, (16e9 + 131072 * context) / card.bytes_per_s) + 5e-4
        copy_s = moved * BLOCK_BYTES / 25e9
        exposed_s = max(0.0, copy_s - step_s)
        elapsed_s = step_s * (float(generator.lognormal(0.02, noise)) if noise else 1.0) + exposed_s
        now_s += elapsed_s
        finished = [i for i in running if done_output[i] == outputs[i]]
        running = [i for i in running if done_output[i] < outputs[i]]
        yield StepRecord(
            t_s=now_s,
            elapsed_s=elapsed_s,
            prefill_tokens=prefill,
            decode_tokens=len(decodes),
            seqs=len(decodes) + chunks,
            waiting=len(waiting),
            kv_device_bytes=context // BLOCK_TOKENS * BLOCK_BYTES,
            kv_host_bytes=parked * BLOCK_BYTES,
            swapped_blocks=moved,
            preempted=int(parked > parked_before),
            exposed_copy_s=exposed_s,
            hidden_copy_s=copy_s - exposed_s,
            predicted_s=step_s if noise else 0.0,
            finished=len(finished),
        )
        parked_before = parked
