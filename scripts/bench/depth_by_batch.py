"""One depth for the job against a depth for each batch, for real: layers' KV over a slowed link of a CPU.

    depth_by_batch.py [--layers 12] [--hidden 256] [--link 1.0] [--rounds 3] [--json FILE]

Three jobs (long prompts, long outputs, both) have memory for a few rows at a time. Each is planned with the profile
that is measured here, and a link of `--link` GB/s, and run with nothing offloaded, with layers streamed
(`kv.offload: stream`) and by batch. Modes alternate; the tokens must be equal. A CPU's tiers are one memory, so that
this says nothing about any card but what the order of things costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from vasuki.base.config import KVConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.engine.loop import drain
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf import ragged_executor
from vasuki.hf.kv.kv_mover import ThreadCopyEngine
from vasuki.hf.loading.load_model import load_model
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.here.measured import Tokens
from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.profile import HardwareProfile
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.placement import placed_as_loaded

ROWS, ROOM = 24, 3  # rows, and how many of them the device has room for
JOBS = {"long prompts": (400, 40), "long outputs": (40, 200), "both": (300, 150)}
MODES = ("none", "stream", "by_batch")


class Rows:
    """A sink that keeps outputs by row number."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def write(self, sequence: Sequence) -> None:
        assert not sequence.error, sequence.error
        self.outputs[sequence.request.row] = sequence.output_token_ids

    def commit_if_due(self, now_s: float) -> None: ...


def small_model(folder: Path, layers: int, hidden: int) -> Path:
    """Random weights, with the tokenizer of the model that is shipped."""
    shipped = Path(__file__).resolve().parents[2] / "models" / "dates"
    config = transformers.AutoConfig.from_pretrained(shipped)
    config.update(
        {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "layer_types": None}
    )
    config.update({"max_position_embeddings": 1024, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    return folder


def with_link(profile: HardwareProfile, gb_per_s: float) -> HardwareProfile:
    point = LinkPoint(bytes=2**12, h2d=gb_per_s, d2h=gb_per_s, both=gb_per_s)
    return profile.model_copy(update={"link": Link(kind="slowed down", curve=(point,), source="made up")})


def requests_of(prompt: int, output: int) -> Iterator[Request]:
    rng = np.random.default_rng(0)
    for row in range(ROWS):
        tokens = rng.integers(3, 200, int(prompt * rng.uniform(0.6, 1.4))).astype(np.int32)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        yield Request(row, row, len(tokens), output, tokens, sampling)


def run(loaded: LoadedModel, plan: Plan, prompt: int, output: int) -> tuple[float, dict[int, list[int]], int]:
    executor, scheduler, rows = build_executor(loaded, plan.settings), Scheduler(plan.settings), Rows()
    begun_s = time.perf_counter()
    stats = drain(requests_of(prompt, output), scheduler, executor, rows)
    return time.perf_counter() - begun_s, rows.outputs, stats.copied_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--link", type=float, default=1.0, help="GB/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vars(ragged_executor)["copy_engine"] = lambda _: ThreadCopyEngine(options.link * 1e9)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), options.layers, options.hidden)
        tree = {"model": {"path": str(model)}, "input": {"path": "x", "prompt": "x"}, "output": {"path": "x"}}
        config = parse_job(tree)
        loaded = load_model(config.model, "cpu")
        placement = placed_as_loaded(config, loaded, Tokens(1e6, 1e6))
        profile = with_link(placement.profile, options.link)
        for name, (prompt, output) in JOBS.items():
            lengths = Lengths(
                np.array([request.num_prompt_tokens for request in requests_of(prompt, output)]),
                np.full(ROWS, output),
                known=True,
            )
            room = int(ROOM * (1.4 * prompt + output) * placement.shape.kv_bytes_per_token)
            plans: dict[str, Plan] = {}
            for mode in MODES:
                kv = {"offload": mode, "device_memory": room, "host_memory": 64 * room}
                try:
                    plans[mode] = make_plan(lengths, placement.shape, profile, kv=KVConfig.model_validate(kv))
                except JobFileError as error:
                    print(f"{name}, {mode}: {error}")
            times: dict[str, list[float]] = {mode: [] for mode in plans}
            moved: dict[str, int] = {}
            answers = []
            for _ in range(options.rounds):
                for mode, plan in plans.items():
                    seconds, outputs, moved[mode] = run(loaded, plan, prompt, output)
                    times[mode].append(seconds)
                    answers.append(outputs)
            assert all(each == answers[0] for each in answers)
            for mode, plan in plans.items():
                taken_s = statistics.median(times[mode])
                found[f"{name}, {mode}"] = {
                    "seconds": round(taken_s, 3),
                    "foreseen": round(plan.makespan_s, 3),
                    "moved_gb": round(moved[mode] / 1e9, 3),
                }
                print(
                    f"{name}, {mode}: {taken_s:.2f} s, foreseen {plan.makespan_s:.2f}, {moved[mode] / 1e9:.2f} GB, "
                    f"{plan.settings.limits.chunk_tokens} tokens a step, {plan.offload.reason}"
                )
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
