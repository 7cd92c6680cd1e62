"""`vasuki verify`: finished rows computed again, alone, and what it finds where somebody has changed them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from resumed_job import NUM_ROWS, job_into
from run_nursery import Nursery, Order
from tiny_job import write_tiny_model

from vasuki.base.errors import InputError, JobFileError
from vasuki.base.job_file import load_job
from vasuki.commands.cli import main
from vasuki.io.location import Location
from vasuki.io.output.parts import read_label, to_parquet
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job
from vasuki.runs.verify import Verified, verify

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="rows vary where kernels are not compiled")
BFLOAT16 = {"model": {"dtype": "bfloat16"}, "output": {"logprobs": True}}


def verified(job: Path, rows: float = 6) -> Verified:
    return verify(str(job.parent / "out"), rows, quiet=True)


def rewrite(part: Path, name: str, row: int, value: Any) -> None:
    """Another value in a part, whose label is as good as before."""
    label = read_label(Location.parse(str(part)))
    assert label is not None
    table = pq.read_table(part).replace_schema_metadata()
    values = table[name].to_pylist()
    values[row] = value
    column = table.column_names.index(name)
    table = table.set_column(column, table.schema.field(column), pa.array(values, table.schema.field(column).type))
    part.write_bytes(to_parquet([table], label))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (BFLOAT16, {}),
        ({"sampling": {"temperature": 0.9, "n": 2, "max_tokens": 9}, **BFLOAT16}, {}),
        ({"engine": {"replicas": 2}, "output": {"logprobs": 2}}, {}),
        ({"task": "score", "output": {"token_ids": False}, "input": {"continuation": " {id}"}}, {}),
        ({"output": {"token_ids": False, "columns": ["text"]}}, {"shard": "0/2"}),
    ],
    ids=["bfloat16", "drawn", "replicas", "scores", "a shard"],
)
def test_every_row_is_equal_to_the_bit(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any], option: dict[str, Any]
) -> None:
    sections = {name: keys for name, keys in changes.items() if isinstance(keys, dict)}
    file = job_into(tmp_path / "job", tiny_model, 12, sections)
    overrides = [f"{name}={keys}" for name, keys in changes.items() if not isinstance(keys, dict)]
    if overrides:
        overrides += ["sampling={}"]
    run_job(load_job(file, overrides), RunOptions(quiet=True, **option))
    some, every = verified(file), verified(file, float("inf"))
    assert (some.rows, some.equal, some.lines()[1:]) == (6, 6, [])
    assert every.rows == every.equal == every.finished == (NUM_ROWS // 2 if option else NUM_ROWS)
    assert every.computed_on == every.verified_on
    assert every.is_right


def test_a_run_that_was_killed_is_equal_too(tmp_path: Path, tiny_model: Path, nursery: Nursery) -> None:
    file = job_into(tmp_path / "job", tiny_model, changes=BFLOAT16)
    for moment in (0.05, 0.1):
        nursery.run(Order(str(file), "kill", "vasuki.engine.loop:drain", 1, moment))
    assert nursery.run(Order(str(file))) == 0
    assert verified(file, float("inf")).equal == NUM_ROWS


@pytest.fixture
def finished(tmp_path: Path, tiny_model: Path) -> Path:
    file = job_into(tmp_path / "job", tiny_model, changes=BFLOAT16)
    run_job(load_job(file), RunOptions(quiet=True))
    return file


def test_a_row_that_another_model_wrote_is_found(finished: Path) -> None:
    [part] = (finished.parent / "out").glob("part-*.parquet")
    row = pq.read_table(part)["output_token_ids"][7].as_py()
    rewrite(part, "output_token_ids", 7, [*row[:5], row[5] + 1, *row[6:]])
    rewrite(part, "output", 7, "words of another model")
    found = verified(finished, float("inf"))
    assert (found.rows - found.equal, found.differences[0].id, found.differences[0].token) == (1, "r7", 5)
    assert "row 'r7': output, token 5: stored 'words of another model', computed again" in found.lines()[1]
    assert not found.is_right


def test_a_bit_of_a_log_probability_is_found(finished: Path) -> None:
    [part] = (finished.parent / "out").glob("part-*.parquet")
    logprob = pq.read_table(part)["logprob"][3].as_py()
    rewrite(part, "logprob", 3, logprob * (1 + 2**-50))
    assert [each.column for each in verified(finished, float("inf")).differences] == ["logprob"]


def test_a_flipped_byte_is_found_and_the_command_says_so(finished: Path) -> None:
    runner, out = CliRunner(), str(finished.parent / "out")
    right = runner.invoke(main, ["verify", out, "--rows", "3", "--json", "--quiet"])
    assert (right.exit_code, json.loads(right.stdout)["equal"]) == (0, 3)
    [part] = (finished.parent / "out").glob("part-*.parquet")
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    wrong = runner.invoke(main, ["verify", out, "--quiet"])
    assert wrong.exit_code == 3
    assert "part-00000.parquet is damaged" in wrong.stdout


def test_what_cannot_be_verified_is_refused_by_name(finished: Path, tmp_path: Path, tiny_model: Path) -> None:
    out = finished.parent / "out"
    with pytest.raises(InputError, match="no run has ended there"):
        verify(str(tmp_path))
    manifest = json.loads((out / "manifest.json").read_text())
    own = shutil.copytree(tiny_model, tmp_path / "model")

    def told(**changes: Any) -> None:
        (out / "manifest.json").write_text(json.dumps(manifest | changes))

    told(schema_version=99)
    with pytest.raises(InputError, match="schema_version 99"):
        verified(finished)
    told(simulated=True)
    with pytest.raises(InputError, match="it has no answers"):
        verified(finished)
    told(job={**manifest["job"], "later": 1})
    with pytest.raises(JobFileError, match="the job in its manifest: unknown key 'later'"):
        verified(finished)
    write_tiny_model(own, max_context=100)
    told(job={**manifest["job"], "model": {**manifest["job"]["model"], "path": str(own)}})
    with pytest.raises(JobFileError, match="is not the model that wrote"):
        verified(finished)
    told()
    source = finished.parent / "in.parquet"
    pq.write_table(pq.read_table(source).slice(1), source)
    with pytest.raises(InputError, match="has changed since"):
        verified(finished)


def test_rows_of_another_machine_are_told(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a processor with fewer instructions."""
    file = job_into(tmp_path / "job", tiny_model, changes=BFLOAT16)
    config = load_job(file)
    run_job(config, RunOptions(quiet=True, shard="0/2"))
    assert "16-bit" not in caplog.text
    monkeypatch.setenv("VASUKI_CPU_LEVEL", "generic")
    run_job(config, RunOptions(quiet=True, shard="1/2"))
    assert "where 16-bit answers may differ" in caplog.text
    found = verified(file, float("inf"))
    assert len(found.computed_on.split("; ")) == 2
    assert "16-bit answers may differ" in "\n".join(found.lines())
    assert NUM_ROWS // 2 <= found.equal <= NUM_ROWS
