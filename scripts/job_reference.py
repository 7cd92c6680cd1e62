"""Write docs/job.md, the reference of job.yaml, from the descriptions in vasuki.config: job_reference.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vasuki.config import JobConfig

PATH = Path(__file__).resolve().parents[1] / "docs" / "job.md"
HEAD = """\
# job.yaml

Every key, with its default. Unknown keys are refused, with the nearest known one. Any key can be set on the command
line, as in `--set sampling.max_tokens=64`. Sizes are written like `512MiB` or `8GiB`. This page is written by
`scripts/job_reference.py` from the descriptions in `vasuki/config.py`.

"""


def reference() -> str:
    """The page as Markdown."""
    lines = [HEAD.rstrip(), ""]
    plain = []
    for name, field in JobConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += ["", f"## {name}", "", (field.annotation.__doc__ or "").strip(), ""]
            lines += ["| key | default | meaning |", "|---|---|---|"]
            lines += [_row(f"{name}.{key}", entry) for key, entry in field.annotation.model_fields.items()]
        else:
            plain.append(_row(name, field))
    return "\n".join([*lines[:1], "", "| key | default | meaning |", "|---|---|---|", *plain, *lines[1:]]) + "\n"


def _row(name: str, field: Any) -> str:
    default = "required" if field.is_required() else f"`{_yaml(field.default)}`"
    return f"| `{name}` | {default} | {' '.join((field.description or '').split())} |"


def _yaml(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    page = reference()
    if "--check" in sys.argv:
        if PATH.read_text(encoding="utf-8") != page:
            sys.exit(f"{PATH} is stale: run scripts/job_reference.py")
        return
    PATH.write_text(page, encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
