"""Record the pictures of the README: record_demo.py [OUTPUT_FOLDER]. Needs rich and matplotlib.

demo.svg      a terminal session: two cards planned for, then the shipped job
compare-*.svg makespan and cost of a translating job on two cards, simulated
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

SESSION = [
    "vasuki plan jobs/compare/translate.yaml --gpu a10 --gpu a40 | head -5",
    "vasuki run jobs/quickstart.yaml --fresh",
]
COMPARE = "vasuki simulate jobs/compare/translate.yaml --gpu a10 --gpu a40"


def record_session(path: Path) -> None:
    """Run the session and draw what it printed."""
    console = Console(record=True, width=100, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    for command in SESSION:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text(_output(command)))
        console.print()
    console.save_svg(str(path), title="vasuki")


def draw_comparison(folder: Path) -> None:
    """Simulate on two cards and draw the report's first figures."""
    from vasuki.report import compare, load_runs
    from vasuki.report.figures import plots_of

    with tempfile.TemporaryDirectory() as runs:
        _output(f"{COMPARE} --set output.path={runs}")
        (workload,) = compare(load_runs([runs])).workloads
        plots = {plot.name: plot for plot in plots_of(workload)}
        for name in ("makespan", "cost"):
            (folder / f"compare-{name}.svg").write_bytes(plots[name].svg())


def _output(command: str) -> str:
    """What a command line prints, on both streams, with our own program in place of the one on the path."""
    line = f"{shlex.quote(sys.executable)} -m {command}"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout.rstrip()


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img")
    folder.mkdir(parents=True, exist_ok=True)
    record_session(folder / "demo.svg")
    draw_comparison(folder)
    print("\n".join(sorted(str(path) for path in folder.glob("*.svg"))))


if __name__ == "__main__":
    main()
