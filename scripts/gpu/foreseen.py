"""What a first run on a card should show: steps and jobs of `gpu_check.py`, as the cost model foresees them.

    foreseen.py [--gpu a10 --gpu a40 --gpu h100] [--shape llama-3-8b] [--rows 1024]

Steps of a model in bfloat16, and the workloads of `gpu_check.py` planned and simulated with lengths that are known. A
device idles where it waits for launches, and between steps.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))  # where the workloads lie
from gpu_sections.setting import WORKLOADS, Setting

from vasuki.base.config import KVConfig, PlanConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.machines.attention import page_tokens
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.workload import lengths_of

CONTEXT = 512
STEPS = {  # tokens of each chunk
    "1 decode": [1],
    "64 decodes": [1] * 64,
    "256 decodes": [1] * 256,
    "64 decodes and 448 prompt tokens": [1] * 64 + [448],
    "512 prompt tokens": [512],
}


@dataclass(slots=True)
class Idle:
    """An engine observer that adds up what the device waits for, apart from copies."""

    cost: CostModel
    idle_s: float = 0.0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        if batch.chunks:
            step = self.cost.step(self.cost.batch_work(batch))
            self.idle_s += step.launch_s + step.overhead_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", default=[], help="name of a profile; may be given several times")
    parser.add_argument("--shape", default="llama-3-8b", help="a well-known model")
    parser.add_argument("--rows", type=int, default=1024, help="of each workload")
    options = parser.parse_args()
    shape = named_shape(options.shape).with_dtype("bfloat16")
    profiles = [find_profile(name) for name in options.gpu or ("a10", "a40", "h100")]
    _print("step, ms", [f"{profile.name}" for profile in profiles], _steps(shape, profiles))
    heads = [f"{profile.name}: {column}" for profile in profiles for column in ("s", "tokens/s", "of bound", "idle")]
    _print(f"{options.rows} rows", heads, _jobs(shape, profiles, options.rows))


def _steps(shape: ModelShape, profiles: list[HardwareProfile]) -> dict[str, list[str]]:
    """Milliseconds by step and card."""
    launched = replace(shape, compiles=False)
    table = {name: [_ms(shape, profile, tokens) for profile in profiles] for name, tokens in STEPS.items()}
    return table | {"1 decode, engine.compile: off": [_ms(launched, profile, [1]) for profile in profiles]}


def _ms(shape: ModelShape, profile: HardwareProfile, tokens: list[int]) -> str:
    cost = CostModel(shape, profile)
    return f"{1e3 * cost.step_time_s(cost.work(tokens, [CONTEXT] * len(tokens))):.1f}"


def _jobs(shape: ModelShape, profiles: list[HardwareProfile], rows: int) -> dict[str, list[str]]:
    """Makespan, output tokens a second, the schedule bound's share of that time, and the share that the device
    idles."""
    setting = Setting(torch.device("cpu"), False, Path())
    lengths = {name: lengths_of(setting.workload(name, rows)) for name in WORKLOADS}
    return {
        name: [cell for profile in profiles for cell in _job(shape, profile, each)] for name, each in lengths.items()
    }


def _job(shape: ModelShape, profile: HardwareProfile, lengths: Lengths) -> list[str]:
    how = PlanConfig(output_length="max")
    kv = KVConfig(block_tokens=page_tokens(shape, profile.generation, profile.attention) or "auto")
    plan = make_plan(lengths, shape, profile, plan=how, kv=kv)
    idle = Idle(CostModel(shape, profile, plan.layout))
    run = simulate_plan(plan, lengths, shape, profile, plan_config=how, observers=[idle], one_by_one=True).result
    seconds = run.makespan_s
    shares = [f"{100 * share:.0f} %" for share in (plan.schedule_bound_s / seconds, idle.idle_s / seconds)]
    return [f"{seconds:.0f}", f"{run.written.output_tokens / seconds:,.0f}", *shares]


def _print(title: str, heads: list[str], rows: dict[str, list[str]]) -> None:
    print("| " + " | ".join([title, *heads]) + " |\n|" + "---|" * (1 + len(heads)))
    for name, cells in rows.items():
        print("| " + " | ".join([name, *cells]) + " |")
    print()


if __name__ == "__main__":
    main()
