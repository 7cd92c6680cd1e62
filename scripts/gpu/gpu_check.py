"""Everything that only an accelerator can show, in one command and a few minutes.

    gpu_check.py --out DIR [--budget-s 540] [--only SECTION ...]
    gpu_check.py --out DIR --device cpu --toy          every path at toy size, in less than a minute

Nothing is downloaded: models have random weights, of Llama-3.2-1B's and Llama-3-8B's shape and tiny ones of many
architectures. DIR gets gpu_check.json, gpu_check.md and the measured hardware profile. Later calls with the same DIR
predict with it, and add their sections to the report. It begins with the figures that a card is to reach, and those
that it reached. Nothing goes on after a preflight that fails; of the other sections, one that fails is reported, and
the others go on. The exit code is 1 if a check did not hold; a figure that is not reached is none.

Every section measures as much as its share of the time allows, and is ended where it takes twice that. All of them fit
one call of ten minutes in brief; first_minutes.sh and second_minutes.sh in this folder give each what it needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))  # where the sections lie
from gpu_sections import (
    capped,
    cases,
    contest,
    far_blocks,
    golden,
    job,
    kernel_table,
    kernels,
    moved,
    preflight,
    steps,
    subprocesses,
)
from gpu_sections.setting import Finding, Record, Setting, caught

from vasuki.base.errors import ModelError
from vasuki.hf.device.device import describe
from vasuki.hf.loading.load_model import resolve_device

Section = Callable[[Setting, float], Finding]


def sections(setting: Setting) -> dict[str, tuple[float, Section]]:
    """List sections by name with their share of the time: whether it works at all, whether it is right, how fast it is.
    Those that others predict with come before them."""
    names = dict.fromkeys((setting.large, setting.small))
    return {
        "preflight": (0.03, preflight.preflight),
        **({"checkpoint": (0.03, golden.checkpoint)} if setting.checkpoint else {}),
        "tests": (0.05, subprocesses.tests),
        "golden": (0.10, golden.golden),
        "cases": (0.05, cases.cases),
        "offload": (0.05, golden.offload),
        "attention": (0.03, kernels.attention),
        "far blocks": (0.02, far_blocks.far_blocks),
        "job": (0.10, job.job),
        "sanitizer": (0.06, subprocesses.sanitizer),
        "ceilings": (0.02, kernels.ceilings),
        "profile": (0.09, kernels.profile),
        "overlap": (0.04, steps.overlap),
        "steps": (0.08, steps.steps),
        "kernels": (0.02, kernel_table.kernel_table),
        "capped": (0.08, capped.capped),
        "moved": (0.20, moved.moved),
        **{f"contest {name}": (0.27 / len(names), partial(contest.contest, name=name)) for name in names},
        **({"vllm": (0.30, subprocesses.vllm)} if setting.vllm else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--budget-s", type=float, default=540, help="seconds that all sections together should take")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--checkpoint", default="", help="folder of a small trained model that is checked too")
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="of an environment that has vLLM")
    parser.add_argument("--toy", action="store_true", help="small everything, to see that every path works")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="SECTION",
        help="by the beginnings of their names; they share all of the time",
    )
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
    except ModelError as error:  # such as a driver that is too old for this torch
        parser.error(str(error))
    if device.type == "cpu" and not options.toy:
        parser.error("there is no CUDA device here; --toy runs every path on the CPU")
    if options.checkpoint and (missing := _missing(Path(options.checkpoint))):
        parser.error(f"--checkpoint {options.checkpoint}: {missing}")
    if options.vllm and shutil.which(options.vllm) is None:
        parser.error(f"--vllm {options.vllm}: there is no such program")
    options.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(device, options.toy, options.out, options.checkpoint, options.vllm)
    report = _report(options.out, _machine(device), options.toy)
    started_s = time.perf_counter()
    known = sections(setting)
    chosen = {name: known[name] for name in known if not options.only or name.startswith(tuple(options.only))}
    if not chosen:
        parser.error(f"--only: no section begins like that; there are {', '.join(known)}")
    unit_s = options.budget_s / sum(share for share, _ in chosen.values())
    for name, (share, section) in chosen.items():
        spent_s = time.perf_counter() - started_s
        report["sections"][name] = _run(setting, name, section, share * unit_s, options.budget_s - spent_s)
        _write(options.out, report)  # after each section, so that a run that is cut off leaves what it has
        if name == "preflight" and report["sections"][name]["failures"]:
            break
    found = {name: part for name, part in report["sections"].items() if name in chosen}
    failures = [f"{name}: {each}" for name, part in found.items() for each in part["failures"]]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    missed = [each["figure"] for part in found.values() for each in part["figures"] if each["reached"] == "no"]
    seconds = round(time.perf_counter() - started_s, 1)
    print(json.dumps({"out": str(options.out), "seconds": seconds, "failures": failures, "missed": missed}))
    sys.exit(bool(failures))


def _run(setting: Setting, name: str, section: Section, share_s: float, left_s: float) -> Record:
    """A section's finding as a record; what it raises is a failure of its own."""
    started_s = time.perf_counter()
    if left_s <= 0:
        finding = Finding(notes=["left out: the time was spent; give --budget-s more, or name it with --only"])
    else:
        try:
            with _ended_after(min(2 * share_s, left_s)):
                finding = section(setting, min(share_s, left_s))
        except Exception as error:
            finding = Finding(failures=[caught(error)])
        setting.free()
    seconds = time.perf_counter() - started_s
    print(f"{name}: {seconds:.1f} s" + (f", {len(finding.failures)} failures" if finding.failures else ""), flush=True)
    return {"seconds": round(seconds, 1), **asdict(finding)}


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s; name it with --only, or give --budget-s more")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _missing(folder: Path) -> str:
    """What a folder lacks to be a checkpoint; empty if nothing."""
    if not (folder / "config.json").is_file():
        return "there is no config.json"
    return "" if any(folder.glob("*.safetensors")) else "there are no weights (*.safetensors)"


def _machine(device: torch.device) -> Record:
    found = describe(device)
    return {
        "device": found.name,
        "driver": found.driver,
        "memory_GiB": round(found.memory_bytes / 2**30, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _report(folder: Path, machine: Record, toy: bool) -> Record:
    """What earlier calls have found on this machine, to be added to."""
    begun: Record = {"machine": machine, "toy": toy, "sections": {}}
    file = folder / "gpu_check.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    return begun | {"sections": earlier["sections"]} if {**earlier, "sections": {}} == begun else begun


def _write(folder: Path, report: Record) -> None:
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "gpu_check.md").write_text(markdown(report))


def markdown(report: Record) -> str:
    """The report as tables."""
    machine = report["machine"]
    lines = [f"# {machine['device']}", "", ", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    title = "Figures to reach" + " on a card, at toy size of no meaning" * report["toy"]
    figures = [figure for part in report["sections"].values() for figure in part["figures"]]
    lines += [f"## {title}", "", *_table(figures)] if figures else []
    for name, part in report["sections"].items():
        lines += [f"## {name} ({part['seconds']} s)", ""]
        lines += _table(part["rows"])
        lines += [f"- **failed**: {failure}" for failure in part["failures"]]
        lines += [f"- {note}" for note in part["notes"]] + [""]
    return "\n".join(lines)


def _table(rows: list[Record]) -> list[str]:
    """One table for rows with the same first keys, with the keys of the fullest."""
    lines: list[str] = []
    for _, group in itertools.groupby(rows, key=lambda row: next(iter(row.items()))[0]):
        records = list(group)
        heads = max((list(record) for record in records), key=len)
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(_cell(record.get(head, "")) for head in heads) + " |" for record in records]
        lines.append("")
    return lines


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
