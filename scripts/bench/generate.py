"""Seconds that transformers' own `generate` takes for a workload, in padded batches ordered by prompt length.

    python scripts/bench/generate.py --model DIR --workload FILE.parquet [--batch 16] [--rows N]

A peer for bench.py. A batch runs until its longest row ends, and prompts are padded on the left.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

_PADDING = 0


def generate_batch(model: Any, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[list[int]]:
    """Tokens of each prompt, as many as it asks for."""
    widest, most = max(map(len, prompts)), max(max_tokens)
    ids = torch.full((len(prompts), widest), _PADDING)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, widest - len(prompt) :] = torch.tensor(prompt)
        mask[row, widest - len(prompt) :] = 1
    lengths = {"max_new_tokens": most, "min_new_tokens": most}
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, pad_token_id=_PADDING, eos_token_id=None, **lengths
    )
    return [row[widest : widest + count].tolist() for row, count in zip(output, max_tokens, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, help="how many of the first rows")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    rows = pq.read_table(options.workload).to_pylist()[: options.rows]
    rows.sort(key=lambda row: len(row["prompt_token_ids"]))
    started_s = time.perf_counter()
    for first in range(0, len(rows), options.batch):
        batch = rows[first : first + options.batch]
        generate_batch(model, [row["prompt_token_ids"] for row in batch], [row["max_tokens"] for row in batch])
    print(f"generate {options.workload.stem} {time.perf_counter() - started_s:.2f} s")


if __name__ == "__main__":
    main()
