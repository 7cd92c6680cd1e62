"""Show generated docstrings and the authors', and what can be said of all: show_docstrings.py OUTPUT_FOLDER."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pyarrow.dataset as ds

SHOWN = 3


def main() -> None:
    folder = Path(sys.argv[1])
    rows = ds.dataset([str(part) for part in sorted(folder.glob("part-*.parquet"))]).to_table().to_pylist()
    rows.sort(key=lambda row: str(row["id"]))
    for row in rows[:: max(1, len(rows) // SHOWN)][:SHOWN]:
        print(row["id"])
        for name, text in (("model", row["output"]), ("authors", row["docstring"])):
            print(
                textwrap.fill(
                    textwrap.shorten(f"{name}: {text}", 160, placeholder=" ..."),
                    80,
                    initial_indent="  ",
                    subsequent_indent="    ",
                )
            )
    ended = sum(row["finish_reason"] == "stop" for row in rows)
    empty = sum(not row["output"].strip() for row in rows)
    print(f"\n{len(rows):,} functions: {ended:,} docstrings ended by themselves, {empty:,} are empty")


if __name__ == "__main__":
    main()
