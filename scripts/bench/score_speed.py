"""Likelihoods of choices behind real texts: this runner against a loop over transformers in batches sorted by length,
alternating, start-up excluded.

    python scripts/bench/score_speed.py --model DIR --rows rows.jsonl [--limit N] [--characters N] [--rounds 5]

Rows have the columns `name` and `text`; the choices of a row are its own name and those of three others. The loop pads
each batch of 16 to its longest, and computes a prompt again for each choice, as evaluation harnesses do. Prints the
seconds and the ratio of each round, the median, and how far sums are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from ours import answers, seconds_taken
from transformers import AutoModelForCausalLM, AutoTokenizer

from vasuki.base.job_file import parse_job

BATCH = 16


@torch.inference_mode()
def by_loop(model: str, prompts: list[str], choices: list[list[str]]) -> tuple[float, np.ndarray]:
    """Seconds, and the sums `[rows, choices]`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    started_s = time.perf_counter()
    pairs = [(row, choice) for row, some in enumerate(choices) for choice in range(len(some))]
    before = tokenizer(prompts).input_ids
    whole = tokenizer([prompts[row] + choices[row][choice] for row, choice in pairs]).input_ids
    sums = np.zeros((len(prompts), len(choices[0])))
    order = sorted(range(len(pairs)), key=lambda at: -len(whole[at]))
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        width = max(len(whole[at]) for at in some)
        ids = torch.zeros(len(some), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, at in enumerate(some):
            ids[place, : len(whole[at])], mask[place, : len(whole[at])] = torch.tensor(whole[at]), 1
        logprobs = network(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
        for place, at in enumerate(some):
            begin, end = len(before[pairs[at][0]]), len(whole[at])
            told = logprobs[place, begin - 1 : end - 1].gather(1, ids[place, begin:end, None])
            sums[pairs[at]] = float(told.sum())
    return time.perf_counter() - started_s, sums


def by_us(model: str, folder: Path, number: int) -> tuple[float, np.ndarray]:
    job = parse_job(
        {
            "task": "score",
            "model": {"path": model, "dtype": "float32"},
            "input": {
                "path": str(folder / "rows.parquet"),
                "id": "row",
                "prompt": "{prompt}",
                "chat": False,
                "continuation": {"column": "choices"},
            },
            "output": {"path": str(folder / f"out-{number}")},
        }
    )
    rows = answers(job)
    return seconds_taken(job), np.array([row["logprob"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--characters", type=int, default=400, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()][: options.limit]
    prompts = [f"{row['text'][: options.characters]}\n\nThis describes the Python function" for row in rows]
    names = [f" {row['name']}" for row in rows]
    choices = [[names[(row + step) % len(names)] for step in range(4)] for row in range(len(names))]
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table = pa.table({"row": range(len(rows)), "prompt": prompts, "choices": choices})
        pq.write_table(table, folder / "rows.parquet")
        for number in range(options.rounds):
            theirs_s, theirs = by_loop(options.model, prompts, choices)
            ours_s, ours = by_us(options.model, folder, number)
            ratios.append(ours_s / theirs_s)
            apart = np.abs(ours - theirs).max()
            print(f"theirs {theirs_s:.1f} s, ours {ours_s:.1f} s: {ratios[-1]:.2f}; sums {apart:.1e} apart", flush=True)
    print(f"median {statistics.median(ratios):.2f} of {len(rows)} rows with 4 choices")


if __name__ == "__main__":
    main()
