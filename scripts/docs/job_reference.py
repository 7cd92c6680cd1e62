"""Write docs/job.md, the reference of job.yaml, from the descriptions in vasuki.base.config.

job_reference.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from vasuki.base.config import JobConfig
from vasuki.base.config_values import parse_bytes, parse_seconds
from vasuki.commands.job_schema import meanings_of

SIZE, TIME = "size", "time"
_NAMES = {str: "text", int: "integer", float: "number"}
PATH = Path(__file__).resolve().parents[2] / "docs" / "job.md"
HEAD = """\
# job.yaml

Every key of a job file, with what it may be (the default in bold). Unknown keys are refused. The command line can set
any of them: `--set sampling.max_tokens=64`. A size is a number of bytes, or written like `512MiB` or `8GiB`; a time is
in seconds, or written like `30s`, `10min` or `2h`.

`scripts/docs/job_reference.py` writes this page from the descriptions in `vasuki/base/config.py`.

"""


def reference() -> str:
    """The page as Markdown."""
    lines = [HEAD.rstrip()]
    plain = []
    for name, field in JobConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += ["", f"## {name}", "", " ".join((field.annotation.__doc__ or "").split()), ""]
            lines += _entries(name, field.annotation)
        else:
            plain.append(_entry(name, field, meanings_of(JobConfig.__name__).get(name, "")))
    return "\n".join([*lines[:1], "", *plain, *lines[1:]]) + "\n"


def _entries(name: str, section: type[BaseModel]) -> Iterator[str]:
    """An entry for each key of a section, and of the sections in it."""
    meanings = meanings_of(section.__name__)
    for key, entry in section.model_fields.items():
        yield _entry(f"{name}.{key}", entry, meanings.get(key, ""))
        if isinstance(entry.default, BaseModel):
            yield from _entries(f"{name}.{key}", type(entry.default))


def _entry(name: str, field: Any, meaning: str) -> str:
    values = list(dict.fromkeys(_values(field.annotation, field.metadata)))
    default = "**required**" if field.is_required() else _default(field.default, values)
    described = ", ".join(f"**{value}**" if value == default else value for value in values)
    if default and default not in values:
        described += f"; {default if field.is_required() else f'**{default}**'}"
    return f"- `{name}` ({described}): {' '.join(meaning.split())}"


def _values(kind: Any, constraints: Iterable[Any] = ()) -> Iterator[str]:
    """What a key may be, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _values(parts[0], [*constraints, *parts[1:]])
    elif origin is Literal:
        yield from (f"`{value}`" for value in parts)
    elif kind is bool:
        yield from ("`true`", "`false`")
    elif origin in (Union, UnionType):
        for part in sorted(parts, key=_is_mapping):
            yield from _values(part)
    elif _is_mapping(kind):
        yield "`{" + ", ".join(f"{key}: ..." for key in kind.model_fields) + "}`"
    elif origin is dict:
        yield "mapping"
    elif origin is tuple:
        yield f"list of {_NAMES[parts[0]] if parts[0] in _NAMES else next(_values(parts[0]))}"
    elif any(getattr(constraint, "func", None) is parse_bytes for constraint in constraints):
        yield SIZE
    elif any(getattr(constraint, "func", None) is parse_seconds for constraint in constraints):
        yield TIME
    elif kind is not NoneType:
        yield " ".join([_NAMES[kind], " and ".join(_limits(constraints))]).rstrip()


def _is_mapping(kind: Any) -> bool:
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _limits(constraints: Iterable[Any]) -> Iterator[str]:
    for constraint in constraints:
        for limit in getattr(constraint, "metadata", [constraint]):
            for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
                if hasattr(limit, name):
                    yield f"{sign} {getattr(limit, name):g}"


def _default(value: Any, values: Collection[str]) -> str:
    if value is None or value in ("", {}) or isinstance(value, BaseModel):
        return ""
    if SIZE in values and isinstance(value, int):
        return f"`{value // 2**30}GiB`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> None:
    page = reference()
    if "--check" in sys.argv:
        if PATH.read_text(encoding="utf-8") != page:
            sys.exit(f"{PATH} is stale: run scripts/docs/job_reference.py")
        return
    PATH.write_text(page, encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
