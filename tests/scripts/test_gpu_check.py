"""The accelerator's check at toy size on the CPU: every path runs, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("check")
    command = [sys.executable, "scripts/gpu/gpu_check.py", "--toy", "--device", "cpu", "--out", str(out)]
    command += ["--checkpoint", str(tiny_model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'solvers'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    found: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    assert last["failures"] == []
    assert (out / "this-machine.yaml").exists()
    return found | {"markdown": (out / "gpu_check.md").read_text()}


def test_every_section_ran(report: dict[str, Any]) -> None:
    assert list(report["sections"]) == [
        *("preflight", "golden", "checkpoint", "offload", "attention", "ceilings"),
        *("profile", "overlap", "steps", "kernels", "contest toy"),
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
    assert list(ways) == ["vasuki", "generate, padded and sorted", "generate_batch"]
    assert len({row["rows"] for row in ways.values()}) == 1
    (alone,) = (row for row in rows if "job" in row)
    assert alone["predicted_s"] >= alone["lower_bound_s"] > 0


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2), (1, 3)], 3), ([(5, 6), (0, 1)], 2), ([(0, 10), (2, 3)], 10), ([(0, 1), (1, 2)], 2)],
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], length: float) -> None:
    from gpu_sections.steps import union_length

    assert union_length(spans) == length


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
