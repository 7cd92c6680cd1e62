"""Write what commands print into a page: command_outputs.py PAGE [MODEL].

A fenced block below a line `<!-- output of COMMAND -->` becomes what COMMAND prints on a terminal of 80 columns,
without its log. MODEL, a folder or a Hub id, stands in for the models of the jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"(<!-- output of (?P<command>.+?) -->\n\n?```text\n)(?P<output>.*?)(```\n)", re.DOTALL)
_PROGRAMS = {"vasuki": f"{shlex.quote(sys.executable)} -m vasuki", "python": shlex.quote(sys.executable)}
_LOG = re.compile(r"\d\d:\d\d:\d\d ")


def output_of(command: str, model: str = "") -> str:
    """What a command prints, on both streams."""
    program, _, arguments = command.partition(" ")
    line = f"{_PROGRAMS[program]} {arguments}"
    if model and program == "vasuki" and ".yaml" in command:
        line = line.replace(".yaml", f".yaml --set model.path={shlex.quote(model)}", 1)
    done = subprocess.run(
        line,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    lines = [each.rsplit("\r", 1)[-1].rstrip() for each in done.stdout.splitlines()]
    return "\n".join(each for each in lines if not _LOG.match(each)).strip() + "\n"


def main() -> None:
    page, model = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    text = page.read_text(encoding="utf-8")
    text = _BLOCK.sub(lambda found: found[1] + output_of(found["command"], model) + found[4], text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
