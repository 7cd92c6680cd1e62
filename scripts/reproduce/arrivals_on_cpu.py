"""Rows that arrive, on this machine: time to first token as simulated and as measured.

    python scripts/reproduce/arrivals_on_cpu.py MODEL LENGTHS.csv [--rows 40] [--load 0.8] [--shrink 8]

A window of a trace is replayed through `vasuki watch --stdin`, in process, as fast as the machine is simulated to take
such rows, times the load. Prompts and outputs are divided by `--shrink`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from vasuki.arrivals import Percentiles
from vasuki.base.config import JobConfig, parse_job
from vasuki.commands.forecast import placements_of
from vasuki.commands.stream import answer_rows
from vasuki.commands.this_machine import Placement
from vasuki.commands.workload import Workload, shape_of
from vasuki.planner.lengths import Lengths, read_lengths
from vasuki.planner.simulated import simulate_plan


def job(model: str, policy: str, output: str) -> JobConfig:
    """A job over rows of token ids, each with its own output length."""
    return parse_job(
        {
            "model": {"path": model},
            "input": {"path": "-", "id": "id", "prompt_token_ids": "tokens"},
            "output": {"path": output},
            "sampling": {"max_tokens": {"column": "most"}, "ignore_eos": True},
            "plan": {"output_length": {"column": "most"}},
            "engine": {"policy": policy, "max_num_seqs": 32},
        }
    )


def simulated(placement: Placement, config: JobConfig, lengths: Lengths) -> Percentiles:
    """Time to first token by the cost model, as measured on this machine."""
    plan = placement.plan(lengths)
    result = simulate_plan(
        plan, lengths, placement.shape, placement.profile, plan_config=config.plan, gathering=config.arrivals
    )
    assert result.ttft is not None
    return result.ttft


def measured(config: JobConfig, lengths: Lengths) -> Percentiles:
    """The same in real time. The first row is sent ahead, so that planning is over when the others come."""
    random, (read, write) = np.random.default_rng(0), os.pipe()
    rows = list(zip(lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), strict=True))
    has_begun = threading.Event()

    def lines() -> Iterator[tuple[float, bytes]]:
        assert lengths.arrived_at_s is not None
        for number, (at_s, (prompt, output)) in enumerate(
            zip([-1.0, *lengths.arrived_at_s], [rows[0], *rows], strict=True)
        ):
            row = {"id": number, "tokens": random.integers(10, 1000, prompt).tolist(), "most": output}
            yield at_s, json.dumps(row).encode() + b"\n"

    def send() -> None:
        start_s = 0.0
        with os.fdopen(write, "wb", buffering=0) as pipe:
            for at_s, line in lines():
                if at_s >= 0 and not start_s:
                    has_begun.wait()
                    start_s = time.monotonic()
                time.sleep(max(0.0, start_s + at_s - time.monotonic()))
                pipe.write(line)

    def begun(answer: dict[str, Any]) -> None:
        has_begun.set()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    manifest = answer_rows(config, read, begun, quiet=True).manifest
    os.close(read)
    assert manifest.ttft is not None
    return manifest.ttft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("lengths")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--shrink", type=int, default=8)
    arguments = parser.parse_args()
    trace = read_lengths(arguments.lengths)
    if trace.arrived_at_s is None:
        parser.error(f"{arguments.lengths} has no arrivals")
    window = slice(0, arguments.rows)
    prompts, outputs = (
        np.maximum(1, tokens[window] // arguments.shrink) for tokens in (trace.prompt_tokens, trace.output_tokens)
    )
    times = trace.arrived_at_s[window] - trace.arrived_at_s[0]
    for policy in ("vasuki", "prefill-packing"):
        with tempfile.TemporaryDirectory() as output:
            config = job(arguments.model, policy, output)
            at_once = Lengths(prompts, outputs, max_tokens=outputs)
            (placement,) = placements_of((), Workload(config, shape_of(config), at_once))
            busy_s = placement.plan(at_once).makespan_s
            scaled = times * busy_s / arguments.load / max(times[-1], 1e-9)
            lengths = Lengths(prompts, outputs, scaled, outputs)
            foreseen, seen = simulated(placement, config, lengths), measured(config, lengths)
            print(
                f"{policy}: {arguments.rows} rows in {scaled[-1]:.0f} s; time to first token, mean and p95: simulated "
                f"{foreseen.mean_s:.2f} and {foreseen.p95_s:.2f} s, measured {seen.mean_s:.2f} and {seen.p95_s:.2f} s; "
                f"measured over simulated {seen.mean_s / foreseen.mean_s:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
