"""What share of a job's steps goes into constraints of answers, and how many of its tokens had no alternative.

    python scripts/bench/mask_share.py --model DIR --rows rows.jsonl [--limit 64]

All rows run at once. Time is taken around the calls within the steps of one run, so nothing else of it can differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from typed_content import ASKED, FIELDS, TOLD

from vasuki.base.job_file import parse_job
from vasuki.hf.constraints import Constraints
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job


class Clock:
    """Seconds spent in some functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, see: Callable[[Any], None] = lambda answer: None) -> None:
        function, self.seconds[name] = getattr(owner, name), 0.0

        def timed(*arguments: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            answer = function(*arguments, **options)
            self.seconds[name] += time.perf_counter() - started_s
            see(answer)
            return answer

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=64)
    options = parser.parse_args()
    texts = [json.loads(line)["text"][:200] for line in options.rows.read_text().splitlines()][: options.limit]
    clock, allowed = Clock(), []

    def count(logits: torch.Tensor) -> None:
        allowed.extend(torch.isfinite(logits).sum(-1).tolist())

    clock.around(Constraints, "ends")
    clock.around(RaggedExecutor, "execute")
    clock.around(RaggedExecutor, "launch")
    clock.around(Constraints, "mask", count)
    with tempfile.TemporaryDirectory() as scratch:
        pq.write_table(pa.table({"text": texts}), Path(scratch) / "in.parquet")
        job = parse_job(
            {
                "model": {"path": options.model},
                "input": {"path": f"{scratch}/in.parquet", "prompt": ASKED + TOLD},
                "output": {"path": f"{scratch}/out"},
                "sampling": {"max_tokens": 100},
                "engine": {"max_num_seqs": options.limit},
                "answer": FIELDS,
            }
        )
        run_job(job, RunOptions(quiet=True))
    masks_s = clock.seconds["mask"] + clock.seconds["ends"]
    alone = np.array(allowed) == 1
    print(
        f"{len(allowed)} tokens, {alone.mean():.1%} without an alternative, {np.median(allowed):,.0f} allowed (median)"
    )
    print(f"masks {masks_s:.2f} s of {clock.seconds['launch']:.2f} s in steps: {masks_s / clock.seconds['launch']:.1%}")


if __name__ == "__main__":
    main()
