"""How fast a model runs on this machine, how far that is from the floor, and where the time goes.

    bench.py --model DIR --workload FILE.parquet ... [--repeats 5] [--peer 'COMMAND {workload}'] [--rows N]

A workload is Parquet with `id`, `prompt_token_ids` and `max_tokens`; every row generates exactly max_tokens. A peer is
any command that prints `... SECONDS s ...` for the same work; it is run in turn with vasuki, A B A B, because machines
drift, and the ratio is taken pair by pair. The floor is what the arithmetic and the memory traffic would take at the
rates that this machine reaches on one large matmul and one long read, measured in the same minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from vasuki.engine.scheduler import Scheduler
from vasuki.hf import ragged_executor
from vasuki.hf.attention import ragged_attention
from vasuki.hf.kernels import paged_attention
from vasuki.hf.kernels.paged_attention import PagedKernel
from vasuki.machines.here.stolen_time import StolenTime

import torch  # isort: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", help="command with {workload}, whose output holds `SECONDS s`")
    parser.add_argument("--set", action="append", default=[], help="as in `vasuki run`")
    parser.add_argument("--against", action="append", default=[], help="the same for a second run, in place of a peer")
    parser.add_argument("--rows", type=int, help="of each workload, the first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workloads = options.workload
        if options.rows:
            workloads = [_first_rows(path, options.rows, Path(folder)) for path in workloads]
        report = {path.stem: _bench(options, path) for path in workloads}
    print(json.dumps(report))


def _first_rows(workload: Path, count: int, folder: Path) -> Path:
    pq.write_table(pq.read_table(workload).slice(0, count), folder / workload.name)
    return folder / workload.name


def _bench(options: argparse.Namespace, workload: Path) -> dict[str, Any]:
    ours, predicted, peers = [], [], []
    manifest: dict[str, Any] = {}
    for _ in range(options.repeats):
        host = StolenTime()
        manifest = _run(options.model, options.set, workload)
        stolen = [host.share]
        timings = manifest["timings"]
        ours.append(timings["generate_s"])
        predicted.append(manifest["predicted"]["makespan_s"])
        if options.peer or options.against:
            host = StolenTime()
            peers.append(_run_peer(options, workload))
            stolen.append(host.share)
        foreseen = f"{workload.stem}: vasuki {ours[-1]:.2f} s, predicted {predicted[-1]:.2f} s"
        shares = " and ".join(f"{share:.0%}" for share in stolen)
        print(foreseen + (f", peer {peers[-1]:.2f} s" if peers else "") + f"; the host took {shares}", flush=True)
    with _Clocks() as clocks:  # in a run of their own, which they make a little longer
        split = clocks.split(_run(options.model, options.set, workload)["timings"]["generate_s"])
    floor_s = _floor_s(options.model, workload, manifest["steps"], manifest["job"]["kv"]["dtype"])
    seconds = statistics.median(ours)
    result = {
        "generate_s": [round(value, 3) for value in ours],
        "predicted_s": [round(value, 3) for value in predicted],
        "floor_s": round(floor_s, 3),
        "share_of_floor": round(floor_s / seconds, 3),
        "steps": manifest["steps"],
        "output_tokens_per_s": round(manifest["tokens"]["output"] / seconds, 1),
        "split": {name: round(value / sum(split.values()), 4) for name, value in split.items()},
    }
    if peers:
        result["peer_s"] = [round(value, 3) for value in peers]
        result["ratio"] = round(statistics.median(a / b for a, b in zip(ours, peers, strict=True)), 3)
    print(json.dumps(result, indent=1), flush=True)
    return result


def _run(model: str, overrides: list[str], workload: Path) -> dict[str, Any]:
    """The manifest of one run in this process."""
    from vasuki.base.job_file import load_job
    from vasuki.runs.options import RunOptions
    from vasuki.runs.run import run_job

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.yaml")
        tree = {
            "model": {"path": model},
            "input": {"path": str(workload), "id": "id", "prompt_token_ids": "prompt_token_ids"},
            "output": {"path": folder + "/out"},
            "sampling": {"max_tokens": {"column": "max_tokens"}, "ignore_eos": True},
        }
        job.write_text(yaml.safe_dump(tree))
        outcome = run_job(load_job(job, overrides), RunOptions(quiet=True))
    manifest: dict[str, Any] = outcome.manifest.to_dict()
    return manifest


class _Clocks:
    """Times functions from outside, so that the engine carries no instruments."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._places: list[tuple[Any, str, Any]] = []
        self._callbacks: list[Any] = []

    def __enter__(self) -> _Clocks:
        self._watch(ragged_attention, "attend", "attention")
        self._watch(ragged_executor.RaggedExecutor, "_logits", "forward")
        self._watch(ragged_executor, "lay_out", "inputs")
        self._watch(ragged_executor, "sample", "sampling")
        self._watch(Scheduler, "schedule", "scheduling")
        self._watch(Scheduler, "advance", "scheduling")
        self._watch(Scheduler, "settle", "scheduling")
        self._replace(paged_attention, "load_kernel", partial(self._load_kernel, paged_attention.load_kernel))
        return self

    def split(self, total_s: float) -> dict[str, float]:
        """Seconds of each part."""
        spent = self.seconds
        split = {"linear and elementwise": spent["forward"] - spent["inputs"] - spent["attention"]}
        split |= {name: spent[name] for name in ("attention", "inputs", "sampling", "scheduling")}
        return split | {"other": max(0.0, total_s - sum(split.values()))}

    def _watch(self, owner: Any, name: str, label: str) -> None:
        self._replace(owner, name, self._timed(getattr(owner, name), label))

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - started_s

        return timed

    def _load_kernel(self, load: Callable[..., PagedKernel | None], *args: Any) -> PagedKernel | None:
        """The kernel with clocks around what other kernels call of it themselves."""
        kernel = load(*args)
        if kernel is not None:
            kinds = [ctypes.CFUNCTYPE(None, *function.argtypes) for function in kernel.functions]
            pairs = zip(kinds, kernel.functions, strict=True)
            self._callbacks = [kind(self._timed(function, "attention")) for kind, function in pairs]
            kernel.addresses = [ctypes.cast(callback, ctypes.c_void_p) for callback in self._callbacks]
        return kernel

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._places.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._places:
            setattr(owner, name, function)


def _run_peer(options: argparse.Namespace, workload: Path) -> float:
    """Seconds of the peer, or of the second run."""
    if options.against:
        return float(_run(options.model, options.against, workload)["timings"]["generate_s"])
    done = subprocess.run(shlex.split(options.peer.format(workload=workload)), capture_output=True, text=True)
    found = re.findall(r"([0-9.]+) s\b", done.stdout)
    if not found:
        sys.exit(f"the peer printed no seconds: {done.stdout[-300:]} {done.stderr[-300:]}")
    return float(found[-1])


def _floor_s(model: str, workload: Path, steps: int, kv_dtype: str) -> float:
    """Seconds that the workload's arithmetic and memory traffic take at this machine's best rates."""
    from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
    from vasuki.hf.loading.load_model import resolve_dtype
    from vasuki.models.config_json import shape_from_config

    shape = shape_from_config(Path(model))
    dtype = resolve_dtype("auto", getattr(torch, shape.dtype), torch.device("cpu"), load_cpu_kernels())
    shape = shape.with_dtype(str(dtype).removeprefix("torch."), kv_dtype)
    flops = kv_bytes = 0.0
    for row in pq.read_table(workload).to_pylist():
        prompt, output = len(row["prompt_token_ids"]), row["max_tokens"]
        tokens = prompt + output - 1
        flops += tokens * shape.linear_flops_per_token + output * shape.head_flops_per_sample
        flops -= (tokens - output) * shape.last_mlp_flops_per_token
        flops += shape.attention_flops(tokens * (tokens + 1) / 2)
        kv_bytes += shape.kv_bytes_per_token * (output * prompt + output * (output - 1) / 2)
    flops_per_s, bytes_per_s = _rates(dtype)
    return max(flops / flops_per_s, (steps * shape.weight_bytes + kv_bytes) / bytes_per_s)


def _rates(dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of a large matmul, bytes/s of a long read), the best of some seconds."""
    size = 1536
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    long = torch.randn(64 * 2**20)
    return 2 * size**3 / _best_s(lambda: a @ b), long.numel() * 4 / _best_s(lambda: long.sum())


def _best_s(function: Callable[[], Any], patience_s: float = 3.0) -> float:
    """The shortest of its calls: a shared machine may be slow for a second."""
    until_s, best_s = time.perf_counter() + patience_s, math.inf
    while (started_s := time.perf_counter()) < until_s:
        function()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


if __name__ == "__main__":
    main()
