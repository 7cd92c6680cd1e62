"""`vasuki watch`: every file that comes is answered, once, as `vasuki run` would."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from tiny_job import WORDS, job_tree

from vasuki.base.errors import InputError
from vasuki.base.job_file import load_job
from vasuki.commands.cli import main
from vasuki.io.location import Location, find_files
from vasuki.runs.options import RunOptions
from vasuki.runs.run import Runner, run_job
from vasuki.runs.watch import Watched, watch_job

EVERY_S = 0.05

Job = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    """Writes a job that watches `in` and returns its path."""

    def write(**changes: Any) -> Path:
        tree = job_tree(tiny_model, tmp_path / "in", tmp_path / "out")
        for section, keys in changes.items():
            tree[section] = {**tree.get(section, {}), **keys}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def drop(tmp_path: Path, name: str, rows: int = 6, first: int = 0) -> Path:
    """A file as a careful program writes it: complete when it gets its name."""
    file = tmp_path / "in" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(WORDS[: 1 + (first + i) % 13]) for i in range(rows)]
    pq.write_table(pa.table({"id": list(range(first, first + rows)), "text": texts}), tmp_path / "new")
    os.replace(tmp_path / "new", file)
    return file


def watch(path: Path, until_idle_s: float = 0) -> Watched:
    watched = Watched()
    watch_job(load_job(str(path)), watched, EVERY_S, until_idle_s, options=RunOptions(quiet=True))
    return watched


def answers(folder: Path) -> list[dict[str, Any]]:
    rows = [row for part in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.parametrize("weights_on_host", ["auto", 1])
def test_each_file_is_answered_as_by_a_run_of_it_alone(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, weights_on_host: str | int
) -> None:
    path = job(engine={"weights_on_host": weights_on_host})
    files = [
        drop(tmp_path, name, 5 + 3 * i, 100 * i) for i, name in enumerate(["b.parquet", "a.parquet", "x/c.parquet"])
    ]
    with caplog.at_level(logging.INFO, "vasuki"):
        watched = watch(path)
    loads = sum(record.getMessage().startswith("loaded") for record in caplog.records)
    assert loads == (1 if weights_on_host == "auto" else 3), "weights that were moved are read again"
    assert [(file.input, file.rows, file.exit_code) for file in watched.files] == [
        (str(file), 5 + 3 * i, 0) for i, file in enumerate(files)
    ], "in the order in which they came"
    for file in files:
        folder = tmp_path / "out" / file.relative_to(tmp_path / "in").with_suffix("")
        assert (folder / "_SUCCESS").exists()
        alone = {"input.path": file, "output.path": tmp_path / "alone" / file.name}
        run_job(load_job(str(path), [f"{key}={value}" for key, value in alone.items()]), RunOptions(quiet=True))
        assert answers(folder) == answers(tmp_path / "alone" / file.name) != []
    manifests = [Path(file.output, "manifest.json") for file in watched.files]
    written = [manifest.stat().st_mtime for manifest in manifests]
    assert [file.exit_code for file in watch(path).files] == [0, 0, 0]
    assert [manifest.stat().st_mtime for manifest in manifests] == written


def test_a_file_is_left_alone_while_it_grows(job: Job, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    whole = "".join(json.dumps({"id": i, "text": "the cat"}) + "\n" for i in range(40))
    code = (
        "import sys, time\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    for line in sys.stdin:\n"
        f"        file.write(line); file.flush(); time.sleep({EVERY_S / 4})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "in" / "slow.jsonl")], stdin=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        writer.stdin.write(whole)
        writer.stdin.close()
        watched = watch(job(), until_idle_s=30 * EVERY_S)
    assert [(file.rows, file.exit_code) for file in watched.files] == [(40, 0)]


def test_a_file_that_ends_in_half_a_line_waits_for_its_rest(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "a.parquet")
    half = tmp_path / "in" / "b.jsonl"
    half.write_text('{"id": 0, "text": "the cat"}\n{"id": 1, "te')
    first, second = watch(job()).files
    assert (Path(first.input).name, first.exit_code) == ("a.parquet", 0)
    assert second.exit_code == 4
    assert second.error == f'{half} ends in half a line, and waits for its rest: {{"id": 1, "te'
    with open(half, "a") as file:
        file.write('xt": "the dog"}')
    assert [(file.rows, file.exit_code) for file in watch(job()).files] == [(6, 0), (2, 0)]
    assert len(answers(tmp_path / "out" / "b")) == 2


def test_a_bad_file_holds_up_no_other_and_may_be_mended(job: Job, tmp_path: Path) -> None:
    bad = drop(tmp_path, "a.parquet")
    bad.write_bytes(b"nonsense")
    drop(tmp_path, "b.parquet")
    drop(tmp_path, "c.parquet", rows=1)
    pq.write_table(pa.table({"id": [1, 2], "text": ["the cat", ""]}), tmp_path / "in" / "c.parquet")
    watched = watch(job())
    codes = {Path(file.input).name: file.exit_code for file in watched.files}
    assert codes == {"a.parquet": 4, "b.parquet": 0, "c.parquet": 3}
    assert watched.exit_code == 4
    assert len(answers(tmp_path / "out" / "c")) == 2

    drop(tmp_path, "a.parquet")
    assert {Path(file.input).name: file.exit_code for file in watch(job()).files} == codes | {"a.parquet": 0}


def test_a_file_that_came_slowly_and_is_whole_in_the_end(job: Job, tmp_path: Path) -> None:
    """It was tried in vain once, and counts as one file that is right. What is called .part is not taken."""
    whole = drop(tmp_path, "a.parquet").read_bytes()
    (tmp_path / "in/a.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "in/b.parquet.part").write_bytes(whole)
    watched, failed = Watched(), []

    def mend() -> None:
        for _ in range(1000):
            if watched.files:
                break
            time.sleep(EVERY_S)
        failed.extend(watched.files)
        (tmp_path / "in/a.parquet").write_bytes(whole)
        (tmp_path / "in/b.parquet.part").rename(tmp_path / "in/b.parquet")

    mending = threading.Thread(target=mend)
    mending.start()
    watch_job(load_job(str(job())), watched, EVERY_S, 40 * EVERY_S, options=RunOptions(quiet=True))
    mending.join()
    assert [(Path(file.input).name, file.exit_code) for file in failed] == [("a.parquet", 4)]
    assert {(Path(file.input).name, file.exit_code) for file in watched.files} == {("a.parquet", 0), ("b.parquet", 0)}
    assert len(watched.files) == 2
    assert watched.exit_code == 0


def test_a_file_that_was_replaced_is_refused_and_its_answers_stay(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "a.parquet")
    watch(job())
    before = answers(tmp_path / "out" / "a")
    drop(tmp_path, "a.parquet", rows=9)
    (refused,) = watch(job()).files
    assert refused.exit_code == 5
    assert "changed since" in refused.error
    assert answers(tmp_path / "out" / "a") == before


def test_what_cannot_be_watched_is_refused(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "a.parquet")

    def refusal(**changes: Any) -> str:
        result = CliRunner().invoke(main, ["watch", str(job(**changes)), "--until-idle", "0"])
        assert result.exit_code in (2, 4)
        return result.stderr.strip().splitlines()[-1]

    assert "is a single file" in refusal(input={"path": str(tmp_path / "in" / "a.parquet")})
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for answers in ("in", "in/answers", ".", "link/answers"):
        assert "lie in one another" in refusal(output={"path": str(tmp_path / answers)})
    glob = {"path": str(tmp_path / "in" / "*.parquet")}
    assert "lie in one another" in refusal(input=glob, output={"path": str(tmp_path / "in" / "answers")})
    assert "cannot write to output.path" in refusal(output={"path": str(tmp_path / "in" / "a.parquet" / "answers")})
    assert "cannot write to output.path" in refusal(output={"path": "bogus://bucket/answers"})
    for seconds in ("nan", "inf", "-1"):
        assert CliRunner().invoke(main, ["watch", str(job()), "--every", seconds]).exit_code == 2
    assert "in `watch --stdin`, and in `watch` on one JSONL file" in refusal(engine={"policy": "prefill-packing"})
    assert "no-such-model" in refusal(model={"path": str(tmp_path / "no-such-model")}), "before a file comes"


def test_nothing_that_comes_during_a_run_is_missed(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file that arrives, nor one that changes or goes while another is run."""
    drop(tmp_path, "a.parquet")
    grows, goes = drop(tmp_path, "b.parquet", rows=2), drop(tmp_path, "c.parquet")

    def run_and_disturb(runner: Runner, *arguments: Any) -> Any:
        monkeypatch.undo()
        goes.unlink()
        drop(tmp_path, "b.parquet", rows=9)
        drop(tmp_path, "d.parquet", rows=3)
        return Runner.run(runner, *arguments)

    monkeypatch.setattr(Runner, "run", run_and_disturb)
    watched = watch(job())
    assert [(Path(file.input).name, file.rows, file.exit_code) for file in watched.files] == [
        ("a.parquet", 6, 0), ("b.parquet", 9, 0), ("d.parquet", 3, 0)
    ]  # fmt: skip
    assert len(answers(tmp_path / "out" / grows.stem)) == 9


def test_two_files_with_one_name_for_their_answers(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "a.parquet")
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 0, "text": "the cat"}\n')
    for _ in range(2):  # another process says so too
        watched = watch(job())
        assert sorted(file.exit_code for file in watched.files) == [0, 5]


@pytest.mark.parametrize("as_url", [False, True])
def test_names_may_be_what_they_like(job: Job, tmp_path: Path, as_url: bool) -> None:
    names = ["b c.parquet", "b[1].parquet", "p%41.parquet", "v1.2.parquet", "ü.parquet"]
    for i, name in enumerate(names):
        drop(tmp_path, name, 2 + i)
    paths = {"input": {"path": f"file://{tmp_path}/in"}, "output": {"path": f"file://{tmp_path}/out"}}
    watched = watch(job(**(paths if as_url else {})))
    assert sorted((file.rows, file.exit_code) for file in watched.files) == [(2 + i, 0) for i in range(len(names))]
    assert len(answers(tmp_path / "out" / "b[1]")) == 3


def test_a_name_that_is_not_utf_8_concerns_its_file_alone(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "good.parquet")
    os.rename(os.fsencode(drop(tmp_path, "bad.parquet")), os.fsencode(tmp_path / "in") + b"/caf\xe9.parquet")
    bad, good = sorted(watch(job()).files, key=lambda file: file.exit_code, reverse=True)
    assert (bad.exit_code, good.exit_code, good.rows) == (InputError.exit_code, 0, 6)
    assert r"caf\xe9.parquet is not UTF-8; rename the file" in bad.error
    assert bad.input.endswith(r"caf\xe9.parquet")


def test_a_damaged_answer_concerns_its_file_alone(job: Job, tmp_path: Path) -> None:
    drop(tmp_path, "a.parquet")
    drop(tmp_path, "b.parquet")
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "part-00000.parquet").write_bytes(b"junk")
    (tmp_path / "out" / "a" / ".vasuki-journal.jsonl").touch()
    codes = {Path(file.input).name: file.exit_code for file in watch(job()).files}
    assert codes == {"a.parquet": 4, "b.parquet": 0}


def test_a_folder_that_cannot_be_looked_into(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end says so, and comes, also after a look that found something."""
    drop(tmp_path, "a.parquet")
    looks = []

    def find(path: str) -> list[Location]:
        looks.append(path)
        if len(looks) > 3:
            raise PermissionError(13, "Permission denied", "in/sub")
        return find_files(path)

    monkeypatch.setattr("vasuki.runs.rows.inbox.find_files", find)
    with pytest.raises(InputError, match=r"cannot look into input\.path .* Permission denied"):
        watch(job(), until_idle_s=3 * EVERY_S)


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vasuki", "watch", str(path), "--every", str(EVERY_S), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert all(process.poll() is None for process in processes), "it ended"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_two_processes_share_a_folder_and_one_of_them_dies(job: Job, tmp_path: Path) -> None:
    """One is killed in the midst of a file; the other takes it up; a signal while it waits ends it well."""
    path = job(sampling={"max_tokens": 60, "ignore_eos": True})
    (tmp_path / "in").mkdir()
    first, second = start(path), start(path)
    names = ["a", "b", "c", "d"]
    for i, name in enumerate(names):
        drop(tmp_path, f"{name}.parquet", 150, 1000 * i)
    lock = tmp_path / "out" / "a" / ".vasuki.lock"

    def holder() -> int:
        try:
            return int(json.loads(lock.read_text())["pid"])
        except (FileNotFoundError, ValueError):
            return 0

    wait_for(holder, first, second)
    victim, other = (first, second) if holder() == first.pid else (second, first)
    victim.kill()
    victim.communicate()
    wait_for(lambda: all((tmp_path / "out" / name / "_SUCCESS").exists() for name in names), other)
    for i, name in enumerate(names):
        rows = answers(tmp_path / "out" / name)
        assert [row["id"] for row in rows] == list(range(1000 * i, 1000 * i + 150))
    time.sleep(4 * EVERY_S)
    other.send_signal(signal.SIGTERM)
    stdout, stderr = other.communicate(timeout=60)
    assert other.returncode == 0, stderr
    assert {Path(file["output"]).name for file in json.loads(stdout)["files"]} >= {"a"}
    assert stderr.count("loaded") == 1


def test_a_signal_in_the_midst_of_a_file_keeps_what_is_finished(job: Job, tmp_path: Path) -> None:
    path = job(sampling={"max_tokens": 60, "ignore_eos": True})
    drop(tmp_path, "a.parquet", 800)
    process = start(path)
    wait_for(lambda: (tmp_path / "out" / "a" / "trace.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "run the same command again" in stderr
    assert not (tmp_path / "out" / "a" / "_SUCCESS").exists()
    assert [file.exit_code for file in watch(path).files] == [0]
    assert len(answers(tmp_path / "out" / "a")) == 800
