"""What rows cost that need not be computed: of a table in which 40 of 100 rows are identical, and of a table that was
answered last night and of which 2 of 100 rows have changed since. Start-up excluded; alternating.

    python scripts/bench/equal_rows.py --model DIR --rows rows.jsonl [--limit N] [--characters N] [--rounds 3]

Rows have the column `text`. Prints the seconds and the ratio of each round, and the median.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ours import answers, options_of, seconds_taken, texts_of

from vasuki.base.config import JobConfig
from vasuki.base.job_file import parse_job

SAME, CHANGED = 0.4, 0.02


def job(model: str, folder: Path, texts: list[str], name: str, **of_input: Any) -> JobConfig:
    pq.write_table(pa.table({"row": range(len(texts)), "text": texts}), folder / "rows.parquet")
    return parse_job(
        {
            "model": {"path": model},
            "input": {"path": str(folder / "rows.parquet"), "id": "row", "prompt": "{text}", **of_input},
            "sampling": {"max_tokens": 24},
            "output": {"path": str(folder / name)},
        }
    )


def taken(config: JobConfig) -> tuple[float, list[dict[str, Any]]]:
    rows = answers(config)
    return seconds_taken(config), rows


def equal_rows(model: str, folder: Path, texts: list[str], round_: int) -> float:
    """Seconds of a table with identical rows, over those of a table of as many that all differ."""
    usual = sorted(texts, key=len)[len(texts) // 2]
    table = [usual if row % 5 < 2 else text for row, text in enumerate(texts)]
    assert table.count(usual) >= int(SAME * len(texts))
    once_s, once = taken(job(model, folder, table, f"once-{round_}"))
    each_s, each = taken(job(model, folder, table, f"each-{round_}", duplicates="each"))
    differ_s, _ = taken(job(model, folder, texts, f"differ-{round_}"))
    assert [row["output"] for row in once] == [row["output"] for row in each]
    print(
        f"identical rows: computed once {once_s:.1f} s, each {each_s:.1f} s, different ones {differ_s:.1f} s, "
        f"{once_s / differ_s:.3f}",
        flush=True,
    )
    return once_s / differ_s


def nightly(model: str, folder: Path, texts: list[str], round_: int) -> float:
    """Seconds of a run over a changed table, over those of the run before."""
    first_s, _ = taken(job(model, folder, texts, f"nightly-{round_}", unchanged="reuse"))
    changed = [f"{text} (new)" if row < CHANGED * len(texts) else text for row, text in enumerate(texts)]
    again_s, _ = taken(job(model, folder, changed, f"nightly-{round_}", unchanged="reuse"))
    print(f"nightly: first {first_s:.1f} s, again {again_s:.2f} s, {again_s / first_s:.3f}", flush=True)
    return again_s / first_s


def main() -> None:
    parser = options_of(__doc__, limit=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = texts_of(options)
    for measured in (equal_rows, nightly):
        ratios = []
        for round_ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                ratios.append(measured(options.model, Path(folder), texts, round_))
        print(f"{measured.__name__}: median {statistics.median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
