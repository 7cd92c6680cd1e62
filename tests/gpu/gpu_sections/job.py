"""The shipped job as a user runs it: at once, with weights on the host, and stopped twice."""

from __future__ import annotations

import shutil
import signal
import time

import pyarrow.parquet as pq
import yaml

from gpu_sections.commands import ROOT, Job
from gpu_sections.setting import Finding, Record, Setting, digits
from vasuki.base.errors import Interrupted

_TOY_ROWS = 400
_FEW_SEQS = 4  # so that a run lasts until it is stopped


def job(setting: Setting, share_s: float) -> Finding:
    """All ways give the same answers to the same rows, and nearly all of them right."""
    finding, folder = Finding(), setting.out / "job"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tree = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
    table = pq.read_table(ROOT / tree["input"]["path"])
    table = table.slice(0, _TOY_ROWS) if setting.toy else table
    pq.write_table(table, folder / "rows.parquet")
    tree["model"]["path"], tree["input"]["path"] = str(ROOT / tree["model"]["path"]), str(folder / "rows.parquet")
    tree["model"]["dtype"] = "float32"
    right = dict(zip(*(table[name].to_pylist() for name in ("id", "iso")), strict=True))

    def run(way: str, engine: Record, stops: list[signal.Signals]) -> dict[object, str]:
        one, started_s = Job(setting, folder / way.replace(" ", "-"), {**tree, "engine": engine}), time.perf_counter()
        for stop in stops:
            code = one.run(stop)
            if code not in (Interrupted.exit_code, -stop):
                finding.failures.append(f"{way}: exit code {code} after {stop.name}: {one.said}")
        manifest = one.finished()
        answers, counts = one.answers(), manifest["rows"]
        taken_over = len(stops) and sum(each["rows"] + each["resumed_rows"] for each in manifest["runs"][:-1])
        finding.rows.append(
            {
                "way": way,
                "rows": f"{counts['succeeded']}/{table.num_rows}",
                "right": digits(sum(answers.get(row) == iso for row, iso in right.items()) / len(right)),
                "command_s": digits(time.perf_counter() - started_s),
                "load_s": digits(manifest["timings"]["load_s"]),
                "predicted_s": digits(manifest["predicted"]["makespan_s"] or 0.0),
                "generate_s": digits(manifest["timings"]["generate_s"]),
                "runs": len(manifest["runs"]),
                "from earlier runs": taken_over,
            }
        )
        return answers

    plain = run("at once", {}, [])
    stops = [signal.SIGTERM, signal.SIGKILL]
    others = {
        "weights on the host": run("weights on the host", {"weights_on_host": 2}, []),
        "stopped and killed": run("stopped and killed", {"max_num_seqs": _FEW_SEQS}, stops),
    }
    for way, answers in others.items():
        same = sum(answers.get(row) == answer for row, answer in plain.items())
        if not plain or same < len(plain):
            finding.failures.append(f"{way}: {same} of {len(plain)} answers equal a run at once")
    return finding
