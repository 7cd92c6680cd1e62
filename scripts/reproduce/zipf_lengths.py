"""Request lengths of Sarathi's pipeline experiment (section 5.3), as a LENGTHS.csv for `vasuki simulate`.

    python scripts/reproduce/zipf_lengths.py gpt3.csv [--rows 10000]

Lengths lie between 1,024 and 4,096 tokens, the k-th shortest drawn with weight k^-0.4 (Zipf), with ten prompt tokens
for each output token.
"""

from __future__ import annotations

import argparse
import csv

import numpy as np

from vasuki.planner.lengths import OUTPUT_COLUMN, PROMPT_COLUMN, Lengths

REQUESTS = 10_000
SHORTEST, LONGEST = 1024, 4096
THETA, P_D_RATIO = 0.4, 10


def zipf_lengths(rows: int = REQUESTS, seed: int = 0) -> Lengths:
    """`[rows]` lengths as the paper describes them."""
    sizes = np.arange(SHORTEST, LONGEST + 1)
    weights = np.arange(1, len(sizes) + 1) ** -THETA
    tokens = np.random.default_rng(seed).choice(sizes, rows, p=weights / weights.sum())
    outputs = np.maximum(1, np.round(tokens / (P_D_RATIO + 1))).astype(np.int64)
    return Lengths(tokens - outputs, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="FILE.csv")
    parser.add_argument("--rows", type=int, default=REQUESTS)
    arguments = parser.parse_args()
    lengths = zipf_lengths(arguments.rows)
    with open(arguments.path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([PROMPT_COLUMN, OUTPUT_COLUMN])
        writer.writerows(zip(lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), strict=True))


if __name__ == "__main__":
    main()
