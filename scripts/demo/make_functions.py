"""Write functions of Python's standard library, without their docstrings, as rows: make_functions.py FILE [--rows N].

A row has `name`, `source` and `docstring`, which is what its authors wrote. The same Python gives the same rows.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEAST_LINES, MOST_LINES = 4, 40


def functions(folder: Path) -> Iterator[dict[str, str]]:
    """The documented functions of a folder's modules, in the order of their files."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            docstring, node.body = ast.get_docstring(node), node.body[1:]
            if docstring and node.body:
                source = ast.unparse(node)
                if LEAST_LINES <= source.count("\n") + 1 <= MOST_LINES:
                    name = f"{path.stem}.{node.name}:{node.lineno}"
                    yield {"name": name, "source": source, "docstring": docstring}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=300)
    arguments = parser.parse_args()
    found = list(functions(Path(sysconfig.get_path("stdlib"))))
    random.Random(0).shuffle(found)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text("".join(json.dumps(row) + "\n" for row in found[: arguments.rows]), encoding="utf-8")
    print(f"{len(found[: arguments.rows]):,} of {len(found):,} functions in {arguments.file}")


if __name__ == "__main__":
    main()
