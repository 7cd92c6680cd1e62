"""Whole workloads against transformers' own ways, in turn, and the plan's promises against what happened."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from gpu_sections.setting import IN_8_BITS, WORKLOADS, Finding, Record, Setting, caught, digits, fitting, run_planned
from vasuki.engine.sequence import Request
from vasuki.hf.fused.float8_linear import refuse_untried

_PAD = 2
_PROBE_ROWS = 256  # warm up, and tell how many rows and rounds there is time for
_MOST_ROUNDS = 3
_MOST_ROWS = 2048  # of the comparison
_MOST_PLANNED_ROWS = 8192  # of the job that vasuki runs alone
_MOST_PADDED_ROWS = 256
_PADDED_PREFILL_TOKENS = 131_072
_PADDED_MEMORY = 0.4  # share of the free memory that a padded batch's KV may take
_ALONE_SHARE = 0.25  # of the time
_SLOWEST_PROBE = 0.3  # of the time: a way whose first rows take longer is left out
_SILENCE_S = 45  # without a row, after which continuous batching is given up
SKEWED = "mixed"  # the workload of very different lengths


def contest(setting: Setting, share_s: float, name: str) -> Finding:
    """Every workload: the same rows in turn by every way, then a larger job by vasuki alone, as planned."""
    finding = Finding()
    ways: dict[str, Way] = {
        "vasuki": lambda rows: run_planned(setting, name, rows).rows.output_tokens,
        "generate, padded and sorted": lambda rows: _padded(setting, name, sorted(rows, key=_prompt_tokens)),
        "generate, padded": partial(_padded, setting, name),
        "generate_batch": partial(_continuous, setting, name),
    }
    workloads = WORKLOADS[-1:] if setting.toy else WORKLOADS
    for workload in workloads:
        _compare(setting, ways, name, workload, share_s / len(workloads), finding)
    alone_s = _ALONE_SHARE * share_s / (len(workloads) + 1)
    for workload in workloads if "vasuki" in ways else ():
        _alone(setting, name, workload, alone_s, finding)
    try:
        refuse_untried(setting.device)
        _alone(setting, name + IN_8_BITS, workloads[-1], alone_s, finding)
    except Exception as error:
        finding.notes.append(f"not in 8 bits: {caught(error)}")
    finding.notes.append(
        "rows are the same for all ways, as many as time allowed; batches of the padded ways are as large as memory "
        "allows; times include planning and setting up memory; ratio is vasuki's output tokens a second over theirs, "
        "the median of rounds that take turns"
    )
    return finding


Way = Callable[[list[Request]], int]  # runs rows and returns the output tokens


def _compare(
    setting: Setting, ways: dict[str, Way], name: str, workload: str, share_s: float, finding: Finding
) -> None:
    """The same rows by every way in turn. A way that fails, or is too slow for its time, is dropped from `ways`."""
    probe_rows = 8 if setting.toy else _PROBE_ROWS
    rows = setting.workload(workload, probe_rows)
    probed: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    for way in list(ways):
        try:
            probed[way], tokens = _timed(setting, ways[way], rows)
        except Exception as error:
            (finding.failures if way == "vasuki" else finding.notes).append(f"{workload}, {way}: {caught(error)}")
            del ways[way]
            continue
        rates[way] = [tokens / probed[way]]
        if way != "vasuki" and probed[way] > _SLOWEST_PROBE * share_s:
            finding.notes.append(f"{workload}, {way}: too slow for more than its first {probe_rows} rows")
            del ways[way]
    left_s = (1 - _ALONE_SHARE) * share_s - sum(probed.values())
    passes = int(left_s / max(1e-9, sum(probed[way] for way in ways)))
    rounds = 1 if setting.toy else min(_MOST_ROUNDS, passes)
    if rounds > 0:
        num_rows = probe_rows if setting.toy else min(_MOST_ROWS, passes // rounds * probe_rows)
        rows = setting.workload(workload, num_rows)
        rates = {way: [] for way in ways}
    expected = sum(request.max_tokens for request in rows)
    for _ in range(rounds):
        for way, run in ways.items():
            seconds, tokens = _timed(setting, run, rows)
            rates[way].append(tokens / seconds)
            if tokens != expected:
                finding.failures.append(f"{workload}, {way}: {tokens} output tokens instead of {expected}")
    for way, measured in rates.items():
        row: Record = {
            "model": name,
            "workload": workload,
            "rows": len(rows),
            "rounds": f"{rounds}" if rounds > 0 else "first run",
            "way": way,
            "output_tokens_per_s": [round(rate, 1) for rate in measured],
        }
        if "vasuki" in rates:
            pairs = zip(rates["vasuki"], measured, strict=True)  # of the same round
            row["ratio"] = ratio = digits(statistics.median(ours / theirs for ours, theirs in pairs))
            if name == setting.large and way == "generate_batch":
                finding.at_least(f"{workload}, times as fast as continuous batching of transformers", ratio, 3)
            if name == setting.large and workload == SKEWED and way.startswith("generate, "):
                finding.at_least(f"{workload}, times as fast as {way}", ratio, 6)
        finding.rows.append(row)


def _timed(setting: Setting, way: Way, rows: list[Request]) -> tuple[float, int]:
    """Seconds and output tokens, in memory that others have given back."""
    setting.free()
    tokens = 0

    def run() -> None:
        nonlocal tokens
        tokens = way(rows)

    seconds = setting.seconds(run)
    setting.free()
    return seconds, tokens


def _alone(setting: Setting, name: str, workload: str, share_s: float, finding: Finding) -> None:
    """A job as large as its prediction fits the time: thousands of rows on a card."""
    requests = fitting(setting, name, workload, 16 if setting.toy else _MOST_PLANNED_ROWS, share_s)
    run = run_planned(setting, name, requests)
    setting.free()
    plan, error = run.plan, run.plan.makespan_s / run.seconds - 1
    if name == setting.large:
        job = f"{workload}, {len(requests)} rows"
        finding.at_most(f"{job}: predicted makespan, share that it is off", abs(error), 0.09)
        finding.at_least(f"{job}: schedule bound, share of the makespan", plan.schedule_bound_s / run.seconds, 0.7)
    record: Record = {
        "job": f"{name}, {workload}",
        "rows": len(requests),
        "output_tokens_per_s": digits(run.rows.output_tokens / run.seconds),
        "predicted_s": digits(plan.makespan_s),
        "measured_s": digits(run.seconds),
        "prediction_error": round(error, 3),
        "schedule_bound_s": digits(plan.schedule_bound_s),
        "lower_bound_s": digits(plan.lower_bound_s),
        "chunk_tokens": plan.chunk_tokens,
        "mean_seqs": round(run.stats.mean_seqs, 1),
        "offload": plan.offload.mode,
        "kv_blocks": f"{run.stats.peak_device_blocks}/{plan.settings.num_blocks}",
    }
    if run.peak_bytes:
        record |= {
            "peak_GiB": round(run.peak_bytes / 2**30, 2),
            "planned_GiB": round(run.planned_bytes / 2**30, 2),
        }
    finding.rows.append(record)


# --- transformers' own ways ------------------------------------------------------------------------------------------


def _prompt_tokens(request: Request) -> int:
    return request.num_prompt_tokens


@torch.inference_mode()
def _padded(setting: Setting, name: str, rows: list[Request]) -> int:
    """`generate` on left-padded batches; each runs until its longest answer is there."""
    model = setting.model(name)
    tokens = 0
    for batch in _batches(setting, name, rows):
        longest = max(request.num_prompt_tokens for request in batch)
        most = max(request.max_tokens for request in batch)
        ids = torch.full((len(batch), longest), _PAD)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - request.num_prompt_tokens :] = torch.from_numpy(request.prompt_token_ids)
            mask[row, longest - request.num_prompt_tokens :] = 1
        output = model.generate(
            ids.to(setting.device),
            attention_mask=mask.to(setting.device),
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=_PAD,
            eos_token_id=None,
        )
        answers = output[:, longest:].tolist()
        tokens += sum(len(answer[: request.max_tokens]) for answer, request in zip(answers, batch, strict=True))
    return tokens


def _batches(setting: Setting, name: str, rows: list[Request]) -> list[list[Request]]:
    """Padded batches that are as large as memory allows."""
    per_token = setting.shape(name).kv_bytes_per_token
    free_bytes = torch.cuda.mem_get_info(setting.device)[0] if setting.on_gpu else 2**30
    batches: list[list[Request]] = [[]]
    for request in rows:
        batch = [*batches[-1], request]
        longest = max(each.num_prompt_tokens for each in batch)
        most = max(each.max_tokens for each in batch)
        too_large = (
            len(batch) > _MOST_PADDED_ROWS
            or len(batch) * longest > _PADDED_PREFILL_TOKENS
            or len(batch) * (longest + most) * per_token > _PADDED_MEMORY * free_bytes
        )
        if too_large and batches[-1]:
            batches.append([request])
        else:
            batches[-1] = batch
    return batches


def _continuous(setting: Setting, name: str, rows: list[Request]) -> int:
    """transformers' continuous batching, with its defaults for memory and attention."""
    model = setting.model(name)
    most = max(request.max_tokens for request in rows)
    options: Record = {}
    if not setting.on_gpu:  # by default it takes nine tenths of the memory, which on a CPU is everybody's
        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=-1, pad_token_id=_PAD),
        **options,
    )
    manager.start()
    try:
        for request in rows:
            manager.add_request(
                request.prompt_token_ids.tolist(), request_id=str(request.row), max_new_tokens=request.max_tokens
            )
        tokens: dict[str, int] = {}
        last_s = time.perf_counter()
        while len(tokens) < len(rows):
            result = manager.get_result(timeout=1)
            if result is not None and result.error:  # a row that failed counts as finished
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                tokens[result.request_id] = len(result.generated_tokens)
                last_s = time.perf_counter()
            elif not manager.is_running():
                raise RuntimeError(f"it stopped with {len(rows) - len(tokens)} rows left")
            elif time.perf_counter() - last_s > _SILENCE_S:
                raise TimeoutError(f"no row came out for {_SILENCE_S} s")
        return sum(tokens.values())
    finally:
        manager.stop(block=True, timeout=_SILENCE_S)
