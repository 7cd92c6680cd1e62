"""Writes summarise.csv and translate.csv: lengths of made-up requests, in tokens, with stated parameters.

    python jobs/compare/make_lengths.py

summarise  like arXiv summarisation. Prompts and outputs are lognormal with the median and the 90th percentile of
           Vidur's public trace of that task for requests up to 4,096 tokens (28,257 of them): prompts 2,730 and 3,702,
           outputs 167 and 372. Left out: the trace's short prompts (5 % have fewer than 749 tokens, here none has),
           its few outputs of thousands of tokens, and that longer prompts have shorter outputs there.
translate  like translating chapters of the Bilingual Web Book, whose trace is not public. Prompts are lognormal with
           median 900 and 90th percentile 1,500; outputs are the prompt times a lognormal with median 1.5 and 90th
           percentile 1.8.

Requests of more than 4,096 tokens together are drawn again, as the Vasuki paper keeps to that context (6.1.4). That
brings the medians of the first to 2,582 and 164, of the second to 861 and 1,286.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

MAX_TOKENS = 4096
Z90 = 1.2815515655446004  # 90th percentile of the standard normal distribution
HERE = Path(__file__).resolve().parent

Draw = Callable[[random.Random], tuple[int, int]]


def lognormal(generator: random.Random, median: float, percentile_90: float) -> float:
    """A draw from the lognormal distribution with this median and 90th percentile."""
    return generator.lognormvariate(math.log(median), math.log(percentile_90 / median) / Z90)


def summarise(generator: random.Random) -> tuple[int, int]:
    """(prompt, output) tokens of a paper and its abstract."""
    return round(lognormal(generator, 2730, 3702)), round(lognormal(generator, 167, 372))


def translate(generator: random.Random) -> tuple[int, int]:
    """(prompt, output) tokens of a passage and its translation."""
    prompt = lognormal(generator, 900, 1500)
    return round(prompt), round(prompt * lognormal(generator, 1.5, 1.8))


JOBS: dict[str, tuple[Draw, int]] = {"summarise": (summarise, 1000), "translate": (translate, 500)}


def lengths(name: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every request of a job; always the same."""
    draw, num_rows = JOBS[name]
    generator = random.Random(f"vasuki {name}")
    rows: list[tuple[int, int]] = []
    while len(rows) < num_rows:
        prompt, output = draw(generator)
        if prompt + output <= MAX_TOKENS and min(prompt, output) > 0:
            rows.append((prompt, output))
    return rows


def main() -> None:
    counts = {}
    for name in JOBS:
        rows = lengths(name)
        with open(HERE / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["num_prefill_tokens", "num_decode_tokens"])
            writer.writerows(rows)
        prompts, outputs = (sum(column) for column in zip(*rows, strict=True))
        counts[name] = {"rows": len(rows), "prompt_tokens": prompts, "output_tokens": outputs}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
