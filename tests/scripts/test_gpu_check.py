"""The accelerator's check at toy size on the CPU: every path runs, and says what it found."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(
    1800
)  # some twenty processes, each of which imports torch, on a machine that may be busy


# What `gpu_check.py` asks of vLLM, answered as vLLM would.
FAKE_VLLM = """
from pathlib import Path
from types import SimpleNamespace as Answer

SamplingParams = Answer

class LLM:
    def __init__(self, model, max_model_len, load_format, dtype, skip_tokenizer_init):
        assert Path(model, "config.json").is_file() and (load_format, skip_tokenizer_init) == ("dummy", True)
        self.longest = max_model_len

    def generate(self, prompts, how, use_tqdm):
        sizes = [(len(prompt["prompt_token_ids"]), each.max_tokens) for prompt, each in zip(prompts, how, strict=True)]
        assert max(map(sum, sizes)) <= self.longest
        return [Answer(outputs=[Answer(token_ids=[7] * most)]) for _, most in sizes]
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The Python of an environment with all packages of this one but vasuki, and pydantic, which is a wheel instead.
    Returns it, and the folder of the wheel."""
    environment, wheels = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("wheels")
    venv.create(environment, symlinks=True)
    (bare,) = environment.glob("lib/python*/site-packages")
    own = Path(sysconfig.get_path("purelib"))
    for entry in own.iterdir():
        if not re.search("vasuki|^pydantic$|^pydantic-", entry.name) and not (bare / entry.name).exists():
            (bare / entry.name).symlink_to(entry)
    with zipfile.ZipFile(wheels / "pydantic-2-py3-none-any.whl", "w") as wheel:
        for file in [*own.glob("pydantic/**/*.py"), *own.glob("pydantic-*.dist-info/*")]:
            wheel.write(file, file.relative_to(own))
    python = environment / "bin" / "python"
    for lacking in ("vasuki", "pydantic"):
        done = subprocess.run([python, "-c", f"import {lacking}"], cwd=environment, capture_output=True, text=True)
        assert "ModuleNotFoundError" in done.stderr
    return python, wheels


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, bare: tuple[Path, Path]) -> Path:
    """What both scripts leave, the second with the profile of the first, on a machine where nothing is installed. They
    run for minutes: once for all processes that test side by side."""
    every = tmp_path_factory.getbasetemp()
    every = every.parent if "PYTEST_XDIST_WORKER" in os.environ else every
    out, done = every / "gpu_check", every / "gpu_check.done"
    with FileLock(every / "gpu_check.lock"):
        if not done.exists():
            _run_both(tmp_path_factory, *bare, out)
            done.touch()
    return out


def _run_both(tmp_path_factory: pytest.TempPathFactory, python: Path, wheels: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    work, vllm = (tmp_path_factory.mktemp(name) for name in ("work", "vllm"))
    (vllm / "vllm.py").write_text(FAKE_VLLM)
    (vllm / "python").write_text(f'#!/bin/sh\nPYTHONPATH={vllm} exec {python} "$@"\n')
    (vllm / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1", "PYTHON": str(python), "WHEELS": str(wheels), "WORK": str(work), "OUT": str(out),
        "VLLM": str(vllm / "python"), "CHECK": "--toy --device cpu", "SCALE": "10",
    }  # fmt: skip
    for script in (["first_minutes.sh"], ["second_minutes.sh", str(out / "this-machine.yaml")]):
        command = [str(ROOT / "scripts" / "gpu" / script[0]), *script[1:]]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def report(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / "gpu_check.json").read_text())
    return found | {"markdown": (results / "gpu_check.md").read_text()}


def test_what_is_taken_home_is_few_small_files(results: Path) -> None:
    files = {file.name: file.stat().st_size for file in results.iterdir()}
    assert files.keys() == {"gpu_check.json", "gpu_check.md", "this-machine.yaml", "log.txt"}
    assert all(0 < size < 16 * 2**20 for size in files.values())


def test_every_section_ran(report: dict[str, Any]) -> None:
    assert list(report["sections"]) == [
        *("preflight", "checkpoint", "tests", "golden", "cases", "offload", "attention", "far blocks", "job"),
        *("ceilings", "profile", "overlap", "steps", "kernels", "capped", "moved", "contest toy", "sanitizer", "vllm"),
    ]
    for name, section in report["sections"].items():
        assert section["rows"], name
        assert section["failures"] == []
        assert f"## {name}" in report["markdown"]


def test_nothing_goes_on_after_a_preflight_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    import gpu_check
    from gpu_sections import preflight

    def broken(setting: Any) -> str:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(preflight, "_pinned", broken)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--toy", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_check.main()
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert {name: part["failures"] for name, part in sections.items()} == {
        "preflight": ["pinned memory: RuntimeError: no such thing"]
    }


def test_figures_stand_beside_their_targets(report: dict[str, Any]) -> None:
    """But for the idle share, which a CPU has not."""
    figures = [figure for part in report["sections"].values() for figure in part["figures"]]
    targets = {figure["figure"]: figure["target"] for figure in figures}
    assert sorted(targets.values()) == [
        *("at least 0.7", "at least 0.9", "at least 1", "at least 1", "at least 3", "at least 6", "at least 6"),
        *("at most 0.02", *["at most 0.09"] * 6),
    ]
    assert figures[0] == {
        "figure": "KV bytes as planned without the card, share that they are off",
        "measured": 0.0, "target": "at most 0.02", "reached": "yes",
    }  # fmt: skip
    assert report["markdown"].index("## Figures to reach") < report["markdown"].index("## preflight")


def _called(tmp_path: Path, script: str, *arguments: str, fails: str) -> tuple[int, list[list[str]]]:
    """The exit code of a script whose checks fail where that is among their sections, and what it calls."""
    calls = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
        for word in "$@"; do printf '%s|' "$word" >> {calls}; done; echo >> {calls}
        case " $* " in *" {fails} "*) exit 1;; esac""")
    python.chmod(0o755)
    command = [str(ROOT / "scripts" / "gpu" / script), *arguments]
    environment = {**os.environ, "PYTHON": str(python), "WORK": str(tmp_path / "work"), "OUT": str(tmp_path / "out")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [line.strip("|").split("|")[1:] for line in lines]


def test_the_first_time_stops_where_the_preflight_fails(tmp_path: Path) -> None:
    code, calls = _called(tmp_path, "first_minutes.sh", fails="preflight")
    assert code == 1
    assert [call[call.index("--only") :] for call in calls] == [["--only", "preflight"]]


def test_the_first_time_goes_on_from_other_failures_and_ends_within_25_minutes(tmp_path: Path) -> None:
    """With half a minute for each start, and in calls of ten minutes."""
    code, calls = _called(tmp_path, "first_minutes.sh", fails="cases")
    assert code == 1
    assert len(calls) == 5
    seconds = [30 + int(call[call.index("--budget-s") + 1]) for call in calls]
    assert sum(seconds) <= 25 * 60
    preflight, right, job, speed, moved = seconds
    assert max(preflight + right + job, preflight + speed, preflight + moved) <= 600


@pytest.mark.parametrize("script", [["first_minutes.sh"], ["second_minutes.sh", os.devnull]])
def test_stages_that_do_not_exist_are_refused(script: list[str], tmp_path: Path) -> None:
    assert _called(tmp_path, *script, "contest", "spead", fails="nothing") == (2, [])


@pytest.mark.parametrize(
    ("folder", "lacks"), [("nonexistent", "config.json"), ("empty", "config.json"), ("half", "safetensors")]
)
def test_a_checkpoint_is_looked_for_first(
    folder: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    import gpu_check

    for name in ("empty", "half"):
        (tmp_path / name).mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    options = ["--toy", "--device", "cpu", "--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / folder)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert lacks in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_section_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    import gpu_check

    with pytest.raises(TimeoutError, match="not done within 0 s"), gpu_check._ended_after(0.01):
        time.sleep(60)


def test_golden_tokens_were_compared(report: dict[str, Any]) -> None:
    golden = report["sections"]["golden"]["rows"]
    assert {row["dtype"] for row in golden} == {"float32", "bfloat16"}
    assert all(row["rows_equal"] == "9/9" for row in golden if row["dtype"] == "float32")
    offload = {row["check"]: row for row in report["sections"]["offload"]["rows"]}
    assert all(row["exact"] for row in offload.values())
    assert offload["llama, park"]["swaps"] > 0


def test_copies_were_made_and_timed(report: dict[str, Any]) -> None:
    modes = {row["mode"]: row for row in report["sections"]["overlap"]["rows"]}
    assert modes["recompute"]["recomputed"] > 0
    for mode in ("park", "stream"):
        assert modes[mode]["copied_MB"] > 0
        copy_s, exposed_s = modes[mode]["copy_s"], modes[mode]["exposed_s"]
        assert copy_s >= exposed_s
        hidden_s = modes[mode]["hidden_share"] * copy_s  # of figures that are printed in milliseconds
        assert hidden_s == pytest.approx(copy_s - exposed_s, abs=0.002)


def test_all_ways_ran_the_same_rows(report: dict[str, Any]) -> None:
    rows = report["sections"]["contest toy"]["rows"]
    ways = {row["way"]: row for row in rows if "way" in row}
    assert list(ways) == ["vasuki", "generate, padded and sorted", "generate, padded", "generate_batch"]
    assert len({row["rows"] for row in ways.values()}) == 1
    alone = [row for row in rows if "job" in row]
    assert [row["job"] for row in alone] == ["toy, mixed", "toy in 8 bits, mixed"]
    for row in alone:
        assert row["predicted_s"] >= row["schedule_bound_s"] > 0
        assert row["predicted_s"] >= row["lower_bound_s"] > 0
    (row,) = report["sections"]["vllm"]["rows"]
    assert row["ratio"] == pytest.approx(row["vasuki, tokens/s"] / row["vLLM, tokens/s"], rel=1e-3)


def test_jobs_are_run_by_the_command(report: dict[str, Any]) -> None:
    ways = {row["way"]: row for row in report["sections"]["job"]["rows"]}
    assert list(ways) == ["at once", "weights on the host", "stopped and killed"]
    assert all(row["rows"] == "400/400" and row["right"] > 0.95 for row in ways.values())
    assert ways["stopped and killed"]["runs"] > 1
    assert ways["stopped and killed"]["from earlier runs"] > 0


def test_a_job_in_little_memory_moves_what_it_is_told(report: dict[str, Any]) -> None:
    modes = {row["mode"]: row for row in report["sections"]["moved"]["rows"]}
    assert list(modes) == ["none", "park", "stream", "auto", "auto, with weights on the host"]
    assert {mode for mode, row in modes.items() if row["moved_GB"] > 0} == {"park", "stream"}
    assert modes["park"]["swaps"] > 0
    assert modes["none"]["recomputed"] > 0
    assert all(0 <= row["hidden_share"] <= 1 for row in modes.values())


def test_far_blocks_are_far(report: dict[str, Any]) -> None:
    rows = report["sections"]["far blocks"]["rows"]
    assert all(row["elements"] > 2**31 and row["apart"] == 0 for row in rows)


def test_half_the_memory_halves_the_batch(report: dict[str, Any]) -> None:
    rows = {row["run"]: row for row in report["sections"]["capped"]["rows"]}
    assert list(rows) == ["uncapped", "capped, none", "capped, auto"]
    assert rows["capped, none"]["KV_MB"] == pytest.approx(rows["uncapped"]["used_MB"] / 2, rel=0.2)
    assert rows["capped, none"]["mean_seqs"] < rows["uncapped"]["mean_seqs"]


def test_what_golden_models_never_ask_for(report: dict[str, Any]) -> None:
    cases = {row["case"]: row["found"] for row in report["sections"]["cases"]["rows"]}
    assert list(cases) == [
        *("top-p of many rows", "log probabilities", "a long context", "parked and replayed", "streamed and replayed"),
        *("keys and values of 8 bits", "products of 8 bits", "memory that runs out"),
    ]
    assert cases["memory that runs out"] == "step 32, computed at once 16"
    assert not any("swaps 0" in cases[f"{moved} and replayed"] for moved in ("parked", "streamed"))


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2), (1, 3)], 3), ([(5, 6), (0, 1)], 2), ([(0, 10), (2, 3)], 10), ([(0, 1), (1, 2)], 2)],
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], length: float) -> None:
    from gpu_sections.steps import union_length

    assert union_length(spans) == length


def test_what_a_card_should_show_is_foreseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    import foreseen

    monkeypatch.setattr(sys, "argv", ["foreseen.py", "--gpu", "a10", "--gpu", "h100", "--rows", "48"])
    foreseen.main()
    cells = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in capsys.readouterr().out.splitlines()}
    for slower, faster in (cells[f"| {name}"] for name in foreseen.STEPS):
        assert float(slower) > float(faster) > 0
    one, launched = (float(cells[f"| {name}"][1]) for name in ("1 decode", "1 decode, engine.compile: off"))
    assert launched == pytest.approx((32 * 45 + 23) * 10e-3 + 0.3, abs=0.1)
    assert one < launched
    for workload in ("sum", "trans", "mixed"):
        assert all(1 <= int(cells[f"| {workload}"][place].split()[0]) <= 100 for place in (2, 6)), "of the bound"


@pytest.mark.parametrize("steps", [1, 5, 30, 1000])
def test_windows_lie_all_over_a_job(steps: int) -> None:
    from gpu_sections.steps import windows

    found = windows(steps)
    assert all(1 <= first < last <= steps for first, last in found)
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(found))
    assert len(found) == min(12, max(0, steps - 1))
    assert steps < 1000 or (found[0], found[-1]) == ((1, 9), (916, 924))


def test_workloads_are_drawn_as_described(tmp_path: Path) -> None:
    import torch
    from gpu_sections.setting import WORKLOADS, Setting

    setting = Setting(torch.device("cpu"), False, tmp_path)
    medians = {}
    for name in WORKLOADS:
        requests = setting.workload(name, 400)
        assert [request.row for request in requests] == list(range(400))
        assert all(len(request.prompt_token_ids) == request.num_prompt_tokens for request in requests)
        medians[name] = tuple(
            float(np.median([getattr(request, part) for request in requests]))
            for part in ("num_prompt_tokens", "max_tokens")
        )
    assert medians["sum"] == pytest.approx((350, 40), rel=0.15)
    assert medians["trans"] == pytest.approx((110, 140), rel=0.15)
    assert medians["mixed"][0] < 100
    again = setting.workload("mixed", 400)
    assert all(
        np.array_equal(one.prompt_token_ids, other.prompt_token_ids) for one, other in zip(again, requests, strict=True)
    )
