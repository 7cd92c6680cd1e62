"""Show what the demo job answered, and how often it is right: show_demo.py OUTPUT_FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.dataset as ds


def main() -> None:
    folder = Path(sys.argv[1])
    rows = ds.dataset([str(part) for part in sorted(folder.glob("part-*.parquet"))]).to_table().to_pylist()
    print(f"\n{'input':<72} {'answer':<12} {'truth':<12}")
    for row in sorted(rows, key=lambda row: str(row["id"]))[:12]:
        text = row["text"] if len(row["text"]) <= 70 else row["text"][:67] + "..."
        print(f"{text:<72} {row['output']:<12} {row['iso']:<12}{'' if row['output'] == row['iso'] else '  <- wrong'}")
    exact = sum(row["output"] == row["iso"] for row in rows)
    print(f"\nexact matches: {exact:,} of {len(rows):,} = {exact / len(rows):.4f}")


if __name__ == "__main__":
    main()
