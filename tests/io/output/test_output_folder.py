from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from rooms import MakeJob, WriteParquet, output, run

from vasuki.base.config import JobConfig
from vasuki.base.errors import Interrupted, JobFileError, OutputInUse, UnreadableError
from vasuki.engine.sequence import Request, Sequence
from vasuki.io.input.tables import open_table
from vasuki.io.location import Location
from vasuki.io.output.answers import Answer, answer_schema
from vasuki.io.output.manifest import Manifest, Timings, read_manifest
from vasuki.io.output.output_folder import OutputFolder, simulated_folder
from vasuki.io.output.ownership import labelled_parts
from vasuki.io.output.parts import PartLabel, read_label, to_parquet
from vasuki.io.output.trace import StepRecord, TraceWriter
from vasuki.io.selection import WHOLE, Shard
from vasuki.machines.price import Cost


def open_folder(path: Path | str, **options: Any) -> OutputFolder:
    options = {"num_rows": 10, "config_hash": "c", "input_fingerprint": "f", **options}
    return OutputFolder.open(str(path), **options)


def rows_in(config: JobConfig) -> list[Any]:
    return sorted(output(config)["id"].to_pylist())


def out(config: JobConfig) -> Path:
    return Path(config.output.path)


# --- running, stopping, running again --------------------------------------------------------------------------------


def test_an_output_knows_when_it_was_begun(job: MakeJob, parquet: WriteParquet) -> None:
    """From its parts, and from rows in flight."""
    config = job(parquet(text=["a", "b"]))
    table = open_table(config)
    request = Request(0, 0, 5, 9)
    for of_part in (False, True):
        with open_folder(out(config), num_rows=2, fresh=True, now="2026-11-25T07:30:00") as folder:
            assert folder.began == "2026-11-25T07:30:00"
            if of_part:
                writer = folder.writer(answer_schema(config, table))
                writer.append([Answer(0, 0, "a", "stop")])
                writer.close()
            else:
                folder.journal().write([Sequence(request, [7])])
        with open_folder(out(config), num_rows=2, now="2027-01-01T00:00:00") as folder:
            assert folder.began == "2026-11-25T07:30:00"
    with open_folder(out(config), num_rows=2, fresh=True, now="2027-01-01T00:00:00") as folder:
        assert folder.began == "2027-01-01T00:00:00"


def test_a_run_leaves_the_contract(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20 + [None]))
    assert run(config) == 21, "one second each, a commit every five"
    assert sorted(path.name for path in out(config).iterdir() if not path.name.startswith(".")) == [
        "_SUCCESS", "manifest.json", *(f"part-{i:05d}.parquet" for i in range(4))
    ]  # fmt: skip
    assert rows_in(config) == list(range(21))
    manifest = read_manifest(Location.parse(config.output.path))
    assert (manifest.rows.total, manifest.rows.succeeded, manifest.rows.failed) == (21, 20, 1)
    assert (manifest.tokens.prompt, manifest.tokens.output) == (20, 60)


def test_a_finished_job_is_left_alone(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    before = {path: path.stat().st_mtime_ns for path in out(config).iterdir()}
    assert run(config) == 0
    after = {path: path.stat().st_mtime_ns for path in out(config).iterdir()}
    del before[out(config) / ".vasuki.lock"], after[out(config) / ".vasuki.lock"]
    assert before == after


@pytest.mark.parametrize("n", [1, 3])
def test_a_stopped_run_goes_on(job: MakeJob, parquet: WriteParquet, n: int) -> None:
    config = job(parquet(text=["a"] * 30), sampling={"n": n})
    assert run(config, stop_after=11 * n + n // 2) == 11
    assert not (out(config) / "_SUCCESS").exists()
    assert rows_in(config) == [row for row in range(11) for _ in range(n)]
    assert run(config) == 19
    assert (out(config) / "_SUCCESS").exists()
    assert rows_in(config) == [row for row in range(30) for _ in range(n)]
    assert read_manifest(Location.parse(config.output.path)).rows.succeeded == 30


def test_a_run_that_died_before_its_manifest_is_finished(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    run(config)
    (out(config) / "_SUCCESS").unlink()
    assert run(config) == 0
    assert (out(config) / "_SUCCESS").exists()


def test_success_is_taken_back_when_there_is_work(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    (out(config) / "part-00001.parquet").unlink()
    assert run(config, stop_after=1) == 1
    assert not (out(config) / "_SUCCESS").exists()
    run(config)
    assert rows_in(config) == list(range(20))


def test_an_empty_input(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=pa.array([], pa.string())))
    assert run(config) == 0
    assert output(config).num_rows == 0
    assert output(config).schema.names[0] == "id"
    assert (out(config) / "_SUCCESS").exists()
    run(config)
    assert len(list(out(config).glob("part-*"))) == 1


# --- whose folder is it ----------------------------------------------------------------------------------------------


def test_another_job_is_refused(job: MakeJob, parquet: WriteParquet) -> None:
    path = parquet(text=["a"] * 5)
    run(job(path))
    with pytest.raises(
        OutputInUse, match=r"a job with another model, input, sampling or output columns .*; run with --fresh"
    ):
        run(job(path, sampling={"temperature": 0.5}))
    assert run(job(path, plan={"solver": "fifo"})) == 0, "speed settings may change"
    assert run(job(path, sampling={"temperature": 0.5}), fresh=True) == 5


def test_a_changed_input_is_refused(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    run(config)
    parquet(text=["a"] * 4 + ["b"])
    with pytest.raises(OutputInUse, match="for an input that has changed since; run with --fresh"):
        run(config)


def test_foreign_parquet_is_refused_and_kept(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    foreign = ["part-00000.parquet", "data.parquet"]
    for name in foreign:
        out(config).mkdir(exist_ok=True)
        pq.write_table(pa.table({"x": [1]}), out(config) / name)
        for fresh in (False, True):
            with pytest.raises(OutputInUse, match="is not ours"):
                run(config, fresh=fresh)
        assert (out(config) / name).exists()
        (out(config) / name).unlink()


FOREIGN = {
    "manifest.json": '{"schema_version": 3, "name": "an app"}',
    "manifest-0-of-2.json": "[1]",
    "_SUCCESS": "",
    "trace.jsonl": '{"traceEvents": []}',
    "part-00000.parquet": "what is left of somebody's table",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_others_wrote_is_refused_by_name_and_kept(
    job: MakeJob, parquet: WriteParquet, name: str, fresh: bool
) -> None:
    config = job(parquet(text=["a"] * 5))
    out(config).mkdir()
    (out(config) / name).write_text(FOREIGN[name])
    with pytest.raises(OutputInUse, match=rf"already holds {re.escape(name)}, which is not ours"):
        run(config, fresh=fresh)
    assert (out(config) / name).read_text() == FOREIGN[name]
    assert [path.name for path in out(config).iterdir() if not path.name.startswith(".")] == [name]


def test_nothing_is_deleted_beside_what_others_wrote(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    run(config)
    (out(config) / "trace-0-of-2.jsonl").write_text("theirs")
    before = sorted(out(config).iterdir())
    with pytest.raises(OutputInUse, match="trace-0-of-2"):
        run(config, fresh=True)
    assert sorted(out(config).iterdir()) == before


OUR_NAMES = [
    "part-00000.parquet", "part-00001-0-of-2.parquet", "answers.parquet", "manifest.json", "manifest-0-of-2.json",
    "trace.jsonl", "trace-0-of-2.jsonl", "_SUCCESS", ".vasuki-journal.jsonl", ".vasuki-rows.jsonl", ".vasuki.lock",
    ".vasuki-0-of-2.lock", ".vasuki-summary.lock", ".vasuki-manifest.json.tmp",
]  # fmt: skip


def put(kind: str, path: Path) -> None:
    """Let something lie there that is no file."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        target = path.parent.parent / "precious"
        target.write_text("")
        path.symlink_to(target)


@pytest.mark.parametrize("kind", ["a link", "a folder", "a pipe"])
@pytest.mark.parametrize("name", OUR_NAMES)
def test_what_is_no_file_is_refused_by_name(job: MakeJob, parquet: WriteParquet, name: str, kind: str) -> None:
    config = job(parquet(text=["a"] * 5))
    out(config).mkdir()
    put(kind, out(config) / name)
    refused = pytest.raises(OutputInUse, match=rf"{re.escape(name)} is {kind}, where a run has a file; remove it")
    for shard, fresh in ((WHOLE, False), (WHOLE, True), (Shard(0, 2), False)):
        with refused:
            run(config, shard, fresh=fresh)
    with refused:
        OutputFolder.check(config.output.path, num_rows=5, config_hash="c", input_fingerprint="f")
    with refused, simulated_folder(config.output.path):
        pass
    assert [path.name for path in out(config).iterdir()] == [name]
    if kind == "a link":
        assert (out(config) / name).read_text() == "", "what it leads to is as it was"


def test_what_becomes_a_link_while_a_run_lasts_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("theirs")
    with open_folder(tmp_path / "out") as folder:
        for name in ("trace.jsonl", ".vasuki-summary.lock"):
            (tmp_path / "out" / name).symlink_to(tmp_path / "precious")
        with pytest.raises(Interrupted, match=r"trace\.jsonl is a link"):
            TraceWriter(folder.traces(1)[0])
        with pytest.raises(Interrupted, match=r"\.vasuki-summary\.lock is a link"):
            folder.finish(Manifest(job={}, config_hash="c", input_fingerprint="f"))
    assert (tmp_path / "precious").read_text() == "theirs"


def test_fresh_deletes_our_files_alone(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    (out(config) / "notes.txt").write_text("keep")
    (out(config) / "trace.jsonl").write_text('{"t_s":1.0}\n')
    assert run(config, fresh=True, stop_after=3) == 3
    assert rows_in(config) == [0, 1, 2]
    assert (out(config) / "notes.txt").exists()
    assert not (out(config) / "trace.jsonl").exists()


def test_a_damaged_part_is_named(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    part = out(config) / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-4])
    for fresh in (False, True):
        with pytest.raises(UnreadableError, match=r"part-00001\.parquet is damaged; delete it"):
            run(config, fresh=fresh)
    part.unlink()
    assert run(config) == 5
    assert rows_in(config) == list(range(20))


def test_a_part_that_cannot_be_read_is_not_called_damaged(
    job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds good work, which nobody should be told to delete."""
    config = job(parquet(text=["a"] * 20))
    run(config)
    opened = Location.open

    def refuse(self: Location) -> Any:
        if self.name == "part-00001.parquet":
            raise OSError(errno.EMFILE, f"Failed to open local file '{self.path}'")
        return opened(self)

    monkeypatch.setattr(Location, "open", refuse)
    with pytest.raises(UnreadableError, match=r"cannot read .*part-00001\.parquet: Too many open files$"):
        run(config)


def test_a_copy_of_a_part_goes_and_the_part_stays(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    names = {path.name for path in out(config).glob("part-*.parquet")}
    shutil.copy(out(config) / "part-00001.parquet", out(config) / "part-00001 (copy).parquet")
    shutil.copy(out(config) / "part-00000.parquet", out(config) / "a backup.parquet")
    run(config)
    assert {path.name for path in out(config).glob("*.parquet")} == names
    assert rows_in(config) == list(range(20))


def test_a_part_with_another_name_counts_and_goes_with_fresh(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    (out(config) / "part-00001.parquet").rename(out(config) / "renamed.parquet")
    assert run(config) == 0
    run(config, fresh=True)
    assert not (out(config) / "renamed.parquet").exists()
    assert rows_in(config) == list(range(20))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("content", ["half", "", "[]", "{}", "null", "other types"])
def test_a_broken_manifest_is_made_again(job: MakeJob, parquet: WriteParquet, content: str, fresh: bool) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    manifest = out(config) / "manifest.json"
    if content == "other types":
        content = json.dumps(json.loads(manifest.read_text()) | {"rows": "many", "runs": 7})
    manifest.write_text(manifest.read_text()[:300] if content == "half" else content)
    run(config, fresh=fresh)
    rows = read_manifest(Location.parse(str(manifest))).rows
    assert (rows.total, rows.succeeded, rows.failed) == (20, 20, 0)
    assert rows_in(config) == list(range(20))


def test_pages_that_were_lost_under_a_whole_footer(job: MakeJob, parquet: WriteParquet) -> None:
    """After a power cut a file may have its length and its end, and zeros before them."""
    config = job(parquet(text=["a"] * 20))
    run(config)
    part = out(config) / "part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[4:200] = bytes(196)
    part.write_bytes(content)
    with pytest.raises(UnreadableError, match=r"part-00001\.parquet is damaged; delete it"):
        run(config)
    part.unlink()
    assert run(config) == 5
    assert rows_in(config) == list(range(20))


def test_parts_that_overlap_are_refused(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config)
    table, label = changed(out(config) / "part-00001.parquet")
    (out(config) / "part-00009.parquet").write_bytes(to_parquet([table], label))
    with pytest.raises(
        UnreadableError, match=r"part-00009\.parquet overlaps with .*00001.parquet: row 6 has two answers"
    ):
        run(config)


def label_of(part: Path) -> PartLabel:
    label = read_label(Location.parse(str(part)))
    assert label is not None
    return label


def changed(path: Path) -> tuple[pa.Table, PartLabel]:
    """A part's table with another answer in its first line, and its label."""
    table = pq.read_table(path)
    outputs = ["other", *table["output"].to_pylist()[1:]]
    index = table.column_names.index("output")
    return table.set_column(index, "output", pa.array(outputs)), label_of(path)


@pytest.mark.parametrize("n", [1, 2])
def test_rows_that_were_answered_twice_are_kept_once(
    job: MakeJob, parquet: WriteParquet, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    """Parts of two runs that knew nothing of one another."""
    config = job(parquet(text=["a"] * 11 + [None] + ["a"] * 8), sampling={"n": n}, output={"logprobs": True})
    folder = out(config)
    run(config)
    theirs = {path.name: path.read_bytes() for path in folder.glob("part-*")}
    run(config, fresh=True, step_s=0.7)
    expected = output(config)
    for name, content in theirs.items():
        (folder / name.replace(".parquet", "-0a1b2c3d.parquet")).write_bytes(content)
    (folder / "_SUCCESS").unlink()
    OutputFolder.check(str(folder), **read_options(folder))
    assert run(config) == 0
    assert (folder / "_SUCCESS").exists()
    assert output(config).sort_by("id").equals(expected.sort_by("id"))
    assert "rows are in other parts too, with equal answers" in caplog.text
    rows = read_manifest(Location.parse(str(folder))).rows
    assert (rows.total, rows.succeeded, rows.failed) == (20, 19, 1)


def read_options(folder: Path) -> dict[str, Any]:
    label = label_of(next(folder.glob("part-*")))
    return {"num_rows": 20, "config_hash": label.config_hash, "input_fingerprint": label.input_fingerprint}


@pytest.mark.parametrize("n", [1, 2])
def test_failed_rows_alone_are_run_once_more(job: MakeJob, parquet: WriteParquet, n: int) -> None:
    config = job(parquet(text=[f"row {i}" for i in range(20)]), sampling={"n": n})
    assert run(config, failing=(3, 4, 19), stop_after=15 * n) == 15
    assert run(config, failing=(3, 4, 19)) == 5
    assert run(config) == 0
    before = output(config)
    folder = Path(config.output.path)
    with pytest.raises(Interrupted):  # parts are rewritten when it is killed
        raise_in_second_rewrite(config)
    assert not (folder / "_SUCCESS").exists()
    assert run(config, retries_errors=True) == 3
    after = output(config)
    assert after.num_rows == before.num_rows == 20 * n
    assert after["error"].null_count == 20 * n
    rows = read_manifest(Location.parse(config.output.path)).rows
    assert (rows.total, rows.succeeded, rows.failed) == (20, 20, 0)
    assert (folder / "_SUCCESS").exists()
    assert run(config, retries_errors=True) == 0


def write_as_version(version: int, part: Path) -> None:
    """As versions before wrote it, where a row without an error had an empty one."""
    table, label = pq.read_table(part).replace_schema_metadata(), label_of(part)
    errors = pc.fill_null(table["error"], "")
    table = table.set_column(table.column_names.index("error"), "error", errors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vasuki.io.output.parts.LABEL_VERSION", version)
        part.write_bytes(to_parquet([table], label))


def test_parts_of_the_first_version_are_named(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    run(config)
    write_as_version(1, out(config) / "part-00000.parquet")
    with pytest.raises(OutputInUse, match="the output of another version of vasuki"):
        run(config)
    assert run(config, fresh=True) == 5


def stopped_after_12_of_30(job: MakeJob, parquet: WriteParquet) -> tuple[JobConfig, Path, dict[str, Any]]:
    """A job whose run was stopped, its manifest, and what that says."""
    config = job(parquet(text=["a"] * 30))
    run(config, stop_after=12)
    manifest = out(config) / "manifest.json"
    return config, manifest, json.loads(manifest.read_text())


def test_an_output_of_a_newer_version_is_refused_before_it_is_worked_on(job: MakeJob, parquet: WriteParquet) -> None:
    config, manifest, tree = stopped_after_12_of_30(job, parquet)
    manifest.write_text(json.dumps(tree | {"schema_version": 3, "rows": "as it says them"}))
    with pytest.raises(OutputInUse, match="the output of a newer version of vasuki; let that version finish it"):
        run(config)
    assert run(config, fresh=True) == 30


def test_a_manifest_that_says_less_is_gone_on_with(job: MakeJob, parquet: WriteParquet) -> None:
    """As the first manifests were."""
    config, manifest, tree = stopped_after_12_of_30(job, parquet)
    keys = ("job", "config_hash", "input_fingerprint", "rows", "tokens", "timings")
    manifest.write_text(json.dumps({"schema_version": 1, **{key: tree[key] for key in keys}}))
    assert run(config) == 18
    assert read_manifest(Location.parse(config.output.path)).rows.succeeded == 30


@pytest.mark.parametrize("content", [b'{"schema_version": 2, "job": {', b"", b"[]"])
@pytest.mark.parametrize("just_before", ["finish", "_earlier"])
def test_a_manifest_that_breaks_while_the_job_runs_is_made_again(
    job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch, just_before: str, content: bytes
) -> None:
    config = job(parquet(text=["a"] * 30))
    run(config, stop_after=12)
    goes_on = getattr(OutputFolder, just_before)

    def break_and_go_on(self: OutputFolder, *arguments: Any) -> Any:
        self.manifest.write_bytes(content)
        return goes_on(self, *arguments)

    monkeypatch.setattr(OutputFolder, just_before, break_and_go_on)
    assert run(config) == 18
    assert read_manifest(Location.parse(config.output.path)).rows.succeeded == 30


def test_a_part_that_goes_while_parts_are_counted(
    job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(parquet(text=["a"] * 30))
    run(config, stop_after=12)
    first, *others = sorted(out(config).glob("part-*.parquet"))

    def read_late(part: Location, with_pages: bool = False) -> PartLabel | None:
        first.unlink(missing_ok=True)  # listed, and gone
        return read_label(part, with_pages)

    monkeypatch.setattr("vasuki.io.output.ownership.read_label", read_late)
    kept = [label for _, label in labelled_parts(Location.parse(config.output.path))]
    assert len(kept) == len(others)


@pytest.mark.parametrize("n", [1, 2])
def test_parts_of_the_version_before_are_gone_on_with(
    job: MakeJob, parquet: WriteParquet, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    texts = [f"row {i}" for i in range(20)]
    config = job(parquet(id=texts, text=texts), id="id", sampling={"n": n})
    folder = out(config)
    run(config, failing=(3, 4, 19), stop_after=15 * n)
    for part in folder.glob("part-*"):
        write_as_version(2, part)
    assert run(config, failing=(3, 4, 19)) == 5
    assert set(output(config)["error"].to_pylist()) == {"", None, "no room"}
    OutputFolder.check(str(folder), **read_options(folder))
    with OutputFolder.open(str(folder), **read_options(folder)) as opened:
        assert {line["error"] for line in opened.stored(set(texts))} == {None, "no room"}
    assert run(config, retries_errors=True) == 3
    assert output(config).num_rows == 20 * n
    assert not set(output(config)["error"].to_pylist()) - {"", None}
    older = (folder / "part-00002.parquet").read_bytes()
    write_as_version(3, folder / "part-00002.parquet")
    (folder / "part-00009.parquet").write_bytes(older)
    (folder / "_SUCCESS").unlink()
    assert run(config) == 0
    assert "rows are in other parts too, with equal answers" in caplog.text


def raise_in_second_rewrite(config: JobConfig) -> None:
    from vasuki.io.output import rewriting

    with pytest.MonkeyPatch.context() as patch:
        whole = rewriting.keep_rows
        calls: list[int] = []

        def keep_rows(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise OSError("no space")
            return whole(*arguments)

        patch.setattr(rewriting, "keep_rows", keep_rows)
        run(config, retries_errors=True)


def test_a_shard_retries_its_own_rows_alone(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=[f"row {i}" for i in range(10)]))
    for index in range(2):
        run(config, Shard(index, 2), failing=(2, 3))
    assert run(config, Shard(0, 2), retries_errors=True) == 1
    answers = {row["id"]: row["error"] for row in output(config).to_pylist()}
    assert [row for row, error in answers.items() if error] == [3]


def test_a_trace_of_which_a_full_disk_took_four_bytes(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(id=["a"], text=["x"]), id="id")
    Path(config.output.path).mkdir()
    (Path(config.output.path) / "trace.jsonl").write_bytes(b'{"t_')
    assert run(config) == 1


def test_half_written_files_are_removed(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 5))
    out(config).mkdir()
    (out(config) / ".part-00001.parquet.tmp").write_bytes(b"somebody's")
    for name in (".vasuki-part-00003.parquet.tmp", ".vasuki-part-00003-0-of-2.parquet.tmp"):
        (out(config) / name).write_bytes(b"half")
    run(config, shard=Shard(1, 2))
    assert len(list(out(config).glob(".vasuki-*.tmp"))) == 2, "another shard may be writing them"
    run(config)
    assert [path.name for path in out(config).glob(".*.tmp")] == [".part-00001.parquet.tmp"]


def test_bad_output_paths(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobFileError, match="is a file; name a folder"):
        open_folder(tmp_path / "file")
    with pytest.raises(JobFileError, match=r"cannot write to output\.path"):
        open_folder(tmp_path / "file" / "below")
    with pytest.raises(JobFileError, match=r"cannot write to output\.path ftp"):
        open_folder("ftp://host/out")


def test_a_check_says_what_a_run_would_and_leaves_no_trace(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    def check(path: Path, config_hash: str = "c") -> None:
        OutputFolder.check(str(path), num_rows=5, config_hash=config_hash, input_fingerprint="f")

    (tmp_path / "file").write_text("")
    check(tmp_path / "not" / "yet")
    for path, words in (("file", "is a file; name a folder"), ("file/below", "cannot write.*Not a directory")):
        with pytest.raises(JobFileError, match=words):
            check(tmp_path / path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    config = job(parquet(text=["a"] * 5))
    run(config)
    (out(config) / ".vasuki.lock").unlink()
    before = sorted(out(config).iterdir())
    with pytest.raises(OutputInUse, match="a job with another model"):
        check(out(config))
    assert sorted(out(config).iterdir()) == before
    for shard in (WHOLE, Shard(0, 2)):
        with open_folder(tmp_path / "held", shard=shard), pytest.raises(OutputInUse, match="is in use by"):
            check(tmp_path / "held")
    check(tmp_path / "held")


@pytest.mark.parametrize("folder", ["/proc", "/sys/kernel", "/dev/full"])
def test_a_check_tries_to_write(folder: str) -> None:
    """Root may write everywhere, by permissions."""
    refusal = rf"cannot write to output\.path {folder}/out: [A-Z][a-z ]*: '{folder}'$|is a file"
    with pytest.raises(JobFileError, match=refusal):
        OutputFolder.check(f"{folder}/out", num_rows=5, config_hash="c", input_fingerprint="f")


def test_each_run_in_a_folder_is_remembered(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    rows = [run(config, stop_after=3), run(config, stop_after=9), run(config)]
    assert [taken.rows for taken in read_manifest(Location.parse(config.output.path)).runs] == rows == [3, 9, 8]
    run(config, fresh=True)
    assert [taken.rows for taken in read_manifest(Location.parse(config.output.path)).runs] == [20]


def test_a_run_that_was_killed_is_known_by_its_trace(tmp_path: Path) -> None:
    manifest = Manifest(
        job={}, config_hash="c", input_fingerprint="f", steps=1, timings=Timings(makespan_s=10.0), cost=Cost(2.0, 4.0)
    )

    def run_for(t_s: float, rows: int, is_killed: bool = False, shard: Shard = WHOLE) -> list[tuple[float, int, bool]]:
        with open_folder(tmp_path, shard=shard) as folder:
            with TraceWriter(folder.traces(1)[0]) as trace:
                trace.record(StepRecord(t_s / 2, t_s / 2, 5, 3, 4, 2))
                trace.record(StepRecord(t_s, t_s / 2, 5, 3, 4, 2))
                trace.flush(rows)
            if is_killed:
                return []
            runs = folder.finish(manifest, traces=[trace]).runs
        assert [(run.gpu_hours, run.amount) for run in runs if run.killed and run.makespan_s == 5.0] in ([], [(1, 2)])
        return [(run.makespan_s, run.rows, run.killed) for run in runs]

    run_for(5.0, 7, is_killed=True)
    run_for(6.0, 0, is_killed=True)
    before = [(5.0, 7, True), (6.0, 0, True), (10.0, 0, False)]
    assert run_for(8.0, 0) == before
    run_for(9.0, 1, is_killed=True)
    before += [(9.0, 1, True), (10.0, 0, False)]
    assert run_for(8.0, 0) == before, "each once"
    older = json.loads((tmp_path / "manifest.json").read_text())
    del older["traced_runs"]
    (tmp_path / "manifest.json").write_text(json.dumps(older))
    assert run_for(8.0, 0) == [*before, (10.0, 0, False)], "of older manifests nobody knows"
    (tmp_path / "trace.jsonl").write_bytes((tmp_path / "trace.jsonl").read_bytes() + b'{"t_s":half a step\n')
    run_for(8.0, 0, is_killed=True)
    assert run_for(8.0, 0) == [*before, *[(10.0, 0, False)] * 2], "a damaged trace costs that alone"
    run_for(5.0, 2, is_killed=True, shard=Shard(1, 2))
    assert run_for(8.0, 0, shard=Shard(1, 2)) == [(5.0, 2, True), (10.0, 0, False)]


def as_user(user: int, path: Path) -> list[str]:
    """What `open` says to a user, and then `check`."""
    said = []
    os.seteuid(user)
    try:
        for ask in (OutputFolder.open, OutputFolder.check):
            try:
                folder = ask(str(path), num_rows=10, config_hash="c", input_fingerprint="f")
                said.append("fine")
            except JobFileError as error:
                said.append(str(error))
            else:
                if folder:
                    folder.close()
    finally:
        os.seteuid(0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_files_of_another_user_in_a_sticky_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:  # since nobody else gets into pytest's own
        os.chmod(folder, 0o755)
        path = Path(folder, "out")
        path.mkdir()
        path.chmod(0o1777)
        assert as_user(30001, path) == ["fine", "fine"]
        Manifest(job={}, config_hash="c", input_fingerprint="f").write(Location.parse(str(path / "manifest.json")))
        os.chown(path / "manifest.json", 30001, 30001)
        assert as_user(30001, path) == ["fine", "fine"]
        (path / ".vasuki.lock").unlink()
        (said,) = set(as_user(30002, path))
        assert said == (
            f"cannot write to output.path {path}: "
            "manifest.json is another user's, in a folder where only owners replace files"
        )


def test_a_file_system_that_cannot_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(JobFileError, match=r"cannot write to output.path .*: Invalid cross-device link"):
        open_folder(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".vasuki.lock"]


def test_a_folder_that_is_gone_interrupts(tmp_path: Path) -> None:
    with open_folder(tmp_path / "out") as folder:
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(Interrupted, match=r"cannot write .*/out: what lay there was removed while the job ran"):
            folder.finish(Manifest(job={}, config_hash="c", input_fingerprint="f"))


# --- locks -----------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from vasuki.io.output.output_folder import OutputFolder
folder = OutputFolder.open(sys.argv[1], num_rows=10, config_hash="c", input_fingerprint="f")
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_of_another_process(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OutputInUse, match=rf"is in use by process {holder.pid} on .*; wait for it"):
            open_folder(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
    open_folder(tmp_path).close()


def test_who_may_run_beside_whom(tmp_path: Path) -> None:
    def refused(shard: Shard) -> bool:
        try:
            open_folder(tmp_path, shard=shard).close()
        except OutputInUse:
            return True
        return False

    with open_folder(tmp_path):
        assert refused(WHOLE)
        assert refused(Shard(0, 2))
    with open_folder(tmp_path, shard=Shard(0, 2)):
        assert refused(WHOLE)
        assert refused(Shard(0, 2))
        assert refused(Shard(2, 4)), "shards of another count would do the same rows"
        assert not refused(Shard(1, 2))
    assert not refused(WHOLE)


def test_a_refused_run_holds_no_lock(job: MakeJob, parquet: WriteParquet) -> None:
    path = parquet(text=["a"] * 5)
    run(job(path))
    with pytest.raises(OutputInUse, match="another model"):
        run(job(path, sampling={"seed": 1}))
    assert run(job(path)) == 0


# --- shards ----------------------------------------------------------------------------------------------------------


def test_shards_share_a_folder(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 21 + [None]))
    for index in (2, 0):
        run(config, shard=Shard(index, 3))
        assert not (out(config) / "_SUCCESS").exists()
    assert run(config, shard=Shard(1, 3)) == 7
    assert (out(config) / "_SUCCESS").exists()
    assert rows_in(config) == list(range(22))
    assert run(config, shard=Shard(1, 3)) == 0
    assert run(config) == 0
    of_a_shard = json.loads((out(config) / "manifest-0-of-3.json").read_text())
    assert (of_a_shard["rows"], of_a_shard["shard"]) == ({"total": 8, "succeeded": 7, "failed": 1}, "0/3")
    summed = json.loads((out(config) / "manifest.json").read_text())
    assert (summed["rows"], summed["shard"]) == ({"total": 22, "succeeded": 21, "failed": 1}, "")


def test_a_whole_run_goes_on_where_shards_stopped(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config, shard=Shard(1, 2))
    run(config, stop_after=3)
    assert run(config, shard=Shard(0, 4)) == 3, "rows 0, 2 and 4 are done; of 0, 4, ..., 16 three are left"
    assert run(config) == 4
    assert rows_in(config) == list(range(20))


def test_a_fresh_shard_leaves_its_siblings(job: MakeJob, parquet: WriteParquet) -> None:
    config = job(parquet(text=["a"] * 20))
    run(config, shard=Shard(0, 2))
    run(config, shard=Shard(1, 2))
    assert run(config, shard=Shard(0, 2), fresh=True) == 10
    assert rows_in(config) == list(range(20))


# --- simulated runs --------------------------------------------------------------------------------------------------


def test_a_simulation_replaces_nothing_but_a_simulation(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    def simulate(path: Path) -> None:
        with simulated_folder(str(path)) as place:
            Manifest(job={}, config_hash="c", input_fingerprint="f", simulated=True).write(place / "manifest.json")

    simulate(tmp_path / "new")
    simulate(tmp_path / "new")
    with open_folder(tmp_path / "new"), pytest.raises(OutputInUse, match="is in use by"):
        simulate(tmp_path / "new")
    config = job(parquet(text=["a"] * 20))
    run(config)
    manifest = (out(config) / "manifest.json").read_bytes()
    with pytest.raises(OutputInUse, match=r"holds the output of a real run; choose another output\.path"):
        simulate(out(config))
    assert (out(config) / "manifest.json").read_bytes() == manifest
    (out(config) / "manifest.json").unlink()
    with pytest.raises(OutputInUse, match="holds the output of a real run"):
        simulate(out(config))


# --- elsewhere -------------------------------------------------------------------------------------------------------


def test_a_file_url(job: MakeJob, parquet: WriteParquet, tmp_path: Path) -> None:
    config = job(parquet(text=["a"] * 5), output={"path": f"file://{tmp_path}/elsewhere"})
    run(config)
    assert len(list((tmp_path / "elsewhere").glob("part-*"))) == 1


def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settle_s: float = 0.05) -> None:
    """Makes st:// an object store in a folder, with leases that are quick."""
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    local = Location.parse
    monkeypatch.setattr(
        Location, "parse", lambda text: Location(store, text[5:], text) if text.startswith("st://") else local(text)
    )
    write = Location.write_bytes

    def put(self: Location, data: Any) -> None:
        """Stores show a new object when it is whole; a file is cut short first, and then written."""
        if not self.url.startswith("st://"):
            return write(self, data)
        whole = tmp_path / f"put-{threading.get_ident()}"
        whole.write_bytes(data)
        whole.rename(tmp_path / self.path)
        return None

    monkeypatch.setattr(Location, "write_bytes", put)
    for name, seconds in (("RENEW_S", 0.1), ("LAPSE_S", 1.0), ("SETTLE_S", settle_s)):
        monkeypatch.setattr(f"vasuki.io.output.lease.{name}", seconds)


def test_an_object_store(job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store without locks and renames: input and output go through the same calls as on s3://."""
    stored(monkeypatch, tmp_path)
    parquet("bucket/in/a.parquet", text=["a"] * 10)
    parquet("bucket/in/b.parquet", text=["b"] * 10)
    config = job("st://bucket/in/*.parquet", output={"path": "st://bucket/out"})
    assert run(config, stop_after=12) == 12
    assert run(config) == 8
    assert run(config) == 0
    folder = tmp_path / "bucket/out"
    assert sorted(re.sub("-[0-9a-f]{8}", "", path.name) for path in folder.iterdir()) == [
        "_SUCCESS", "manifest.json", *(f"part-{i:05d}.parquet" for i in range(5))
    ]  # fmt: skip
    assert sum(pq.read_metadata(part).num_rows for part in folder.glob("part-*")) == 20


def test_a_lease_keeps_a_second_run_out_while_it_is_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored(monkeypatch, tmp_path)
    with open_folder("st://bucket"):
        with pytest.raises(OutputInUse, match=r"st://bucket is in use by process \d+ on .*; wait for it"):
            open_folder("st://bucket")
        with open_folder("st://bucket", shard=Shard(0, 2)):
            pass
    open_folder("st://bucket").close()
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_lease_of_a_killed_run_lapses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored(monkeypatch, tmp_path)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / ".vasuki-lease.json").write_text('{"owner": "o", "beat": 3, "pid": 1, "host": "gone"}')
    open_folder("st://bucket").close()


def test_of_two_that_start_at_once_one_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored(monkeypatch, tmp_path, settle_s=0.3)
    with ThreadPoolExecutor(2) as pool:
        opened = [pool.submit(open_folder, "st://bucket") for _ in range(2)]
        errors = [future.exception() for future in opened]
    assert sorted(error is None for error in errors) == [False, True]
    assert all(error is None or isinstance(error, OutputInUse) for error in errors)
    for future, error in zip(opened, errors, strict=True):
        if error is None:
            future.result().close()


def test_a_run_that_lost_its_lease_writes_no_more(
    job: MakeJob, parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored(monkeypatch, tmp_path)
    with open_folder("st://bucket") as folder:
        (tmp_path / "bucket" / ".vasuki-lease.json").write_text('{"owner": "o", "pid": 7, "host": "other"}')
        lease = folder._lock._lease
        assert lease is not None
        lease._thread.join()
        with pytest.raises(OutputInUse, match=r"was taken over by process 7 on other; this run ends"):
            folder._next_part()
    assert (tmp_path / "bucket" / ".vasuki-lease.json").exists(), "it is the other's"
