"""What a form does to the content of answers: the same rows free, told of a form, and held to it, field by field.

    python scripts/bench/typed_content.py --model DIR --rows rows.jsonl [--limit N] [--characters N]

Rows have the columns `name` and `text`, docstrings of Python functions. Whether a docstring has an example, and whether
it speaks of raising, can be read off it, so that two fields have a right answer. A free answer counts as parsed if
anything in it is a JSON object of the schema.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
from ours import answers

from vasuki.base.config import JobConfig
from vasuki.base.constraint import schema_of
from vasuki.base.job_file import parse_job

FIELDS: dict[str, Any] = {
    "summary": "string",
    "arguments": "integer",
    "has_example": "boolean",
    "kind": ["function", "class", "property", "other"],
}
TOLD = (
    "\n\nAnswer as JSON with summary (a string), arguments (how many it takes, an integer), has_example (true or "
    "false), kind (one of function, class, property, other)."
)
ASKED = "Describe this Python docstring.\n\n{text}"


def job(options: argparse.Namespace, folder: Path, name: str, prompt: str, is_held: bool) -> JobConfig:
    return parse_job(
        {
            "name": name,
            "model": {"path": options.model},
            "input": {"path": str(folder / "rows.parquet"), "id": "row", "prompt": prompt},
            "output": {"path": str(folder / name)},
            "sampling": {"max_tokens": 120},
            **({"answer": FIELDS} if is_held else {}),
        }
    )


def parsed(text: str) -> dict[str, Any] | None:
    """The object of the schema that a free answer holds, if it holds one."""
    schema = schema_of(FIELDS)
    for begin in (found.start() for found in re.finditer(r"\{", text)):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[begin:])
            jsonschema.validate(value, schema)
        except (ValueError, jsonschema.ValidationError):
            continue
        return dict(value)
    return None


def table(texts: Sequence[str], runs: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    values = {
        name: [row["answer"] if "answer" in row else parsed(row["output"]) for row in rows]
        for name, rows in runs.items()
    }
    truth = [">>>" in text or "Example" in text for text in texts]
    lines = [
        "| | parsed | cut | has_example right | of those parsed by both, the same: arguments | has_example | kind |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    told = values.get("told", next(iter(values.values())))
    for name, rows in runs.items():
        own = values[name]
        both = [(one, other) for one, other in zip(own, told, strict=True) if one and other]
        right = sum(bool(value and value["has_example"] == wanted) for value, wanted in zip(own, truth, strict=True))
        cut = sum(row["finish_reason"] == "length" for row in rows)
        same = [
            sum(one[field] == other[field] for one, other in both) for field in ("arguments", "has_example", "kind")
        ]
        shares = " | ".join(f"{count} of {len(both)}" for count in same)
        lines.append(f"| {name} | {sum(value is not None for value in own)} | {cut} | {right} | {shares} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--characters", type=int, default=2000, help="of a docstring")
    parser.add_argument("--only", nargs="+", default=["free", "told", "held", "told and held"], help="some of the runs")
    options = parser.parse_args()
    texts = [json.loads(line)["text"][: options.characters] for line in options.rows.read_text().splitlines()][
        : options.limit
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pq.write_table(pa.table({"row": range(len(texts)), "text": texts}), folder / "rows.parquet")
        asked = {
            "free": (ASKED, False),
            "told": (ASKED + TOLD, False),
            "held": (ASKED, True),
            "told and held": (ASKED + TOLD, True),
        }
        runs = {name: answers(job(options, folder, name, *how)) for name, how in asked.items() if name in options.only}
        print("\n".join(table(texts, runs)))
        for name, rows in runs.items():
            statuses = [row.get("answer_status") for row in rows]
            print(name, {status: statuses.count(status) for status in set(statuses)}, repr(rows[0]["output"][:200]))


if __name__ == "__main__":
    main()
