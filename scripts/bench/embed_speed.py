"""Vectors of real texts: this runner against sentence-transformers' sorted batches, alternating, start-up excluded.

    python scripts/bench/embed_speed.py --model DIR --rows rows.jsonl --peer PYTHON [--limit N] [--rounds 5]

The model is one that sentence-transformers has saved; PYTHON is that of an environment which has the package. Rows have
the column `text`. Prints the seconds and the ratio of each round, the median, and how far vectors are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ours import answers, seconds_taken

from vasuki.base.job_file import parse_job

PEER = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
model, rows, vectors = sys.argv[1:]
encoder, texts = SentenceTransformer(model, device="cpu"), json.load(open(rows))
encoder.encode(texts[:8])
started_s = time.perf_counter()
found = encoder.encode(texts, batch_size=32)
print(time.perf_counter() - started_s)
np.save(vectors, found)
"""


def by_peer(options: argparse.Namespace, folder: Path) -> tuple[float, np.ndarray]:
    files = [str(folder / "rows.json"), str(folder / "theirs.npy")]
    told = subprocess.run(
        [options.peer, "-c", PEER, options.model, *files], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return float(told.split()[-1]), np.load(files[1])


def by_us(options: argparse.Namespace, folder: Path, number: int) -> tuple[float, np.ndarray]:
    job = parse_job(
        {
            "task": "embed",
            "model": {"path": options.model},
            "input": {"path": str(folder / "rows.parquet"), "id": "row", "prompt": "{text}", "truncate": True},
            "output": {"path": str(folder / f"out-{number}")},
        }
    )
    rows = answers(job)
    return seconds_taken(job), np.array([row["embedding"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in options.rows.read_text().splitlines()][: options.limit]
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "rows.json").write_text(json.dumps(texts))
        pq.write_table(pa.table({"row": range(len(texts)), "text": texts}), folder / "rows.parquet")
        for number in range(options.rounds):
            (theirs_s, theirs), (ours_s, ours) = by_peer(options, folder), by_us(options, folder, number)
            ratios.append(ours_s / theirs_s)
            apart = np.abs(ours - theirs).max()
            print(
                f"theirs {theirs_s:.1f} s, ours {ours_s:.1f} s: {ratios[-1]:.2f}; vectors {apart:.1e} apart", flush=True
            )
    print(f"median {statistics.median(ratios):.2f} of {len(texts)} texts")


if __name__ == "__main__":
    main()
