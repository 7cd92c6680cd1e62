"""Files that nobody meant to be read: a run over them ends with an exit code and one line that says what is wrong.

Each case spoils one file of a good job, in its bytes or in a value somewhere in its tree, or puts a pipe, a link, a
folder or a device in its place.
`make test-hostile` tries 300.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from run_nursery import Nursery, Order
from tiny_job import WORDS, job_tree

CASES = int(os.environ.get("VASUKI_HOSTILE", "20"))
MOST_CPU_S, MOST_BYTES = 5, 10**9
MOST_WALL_S = 60.0  # of which a loaded machine may take its share
NUM_ROWS = 12
PROFILE = "cpu.yaml"
PROFILES = Path(__file__).parents[2] / "profiles"

HOSTILE_VALUES: list[Any] = [
    None, True, 0, -1, 1, 3.7, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), [], {}, [[]], [None],
    ["a"] * 1000, {"a": {"b": 1}}, {"": ""}, "", "\n", "\0", "auto", "x" * 50_000, "{", "{text.__class__}", "{nobody}",
    "../..", "/dev/zero", "/proc/self/mem", "*", "s3://", "99999999TiB", "\u2028\ufffe\U0001f600",
    "{% for i in range(10**9) %}x{% endfor %}",
]  # fmt: skip
HOSTILE_BYTES = [
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r\n", b'"', b"'", b"{", b"[" * 5000, b"{" * 5000, b"}", b",",
    b": ", b"&a *a", b"!!python/object/apply:os.system [ls]", b"PAR1", b"\xff" * 64, b"\0" * 4096, b"1e999", b"-",
    b"NaN", b"9" * 400,
]  # fmt: skip
LEFTOVERS = [
    "manifest.json", "trace.jsonl", "_SUCCESS", "part-00000.parquet", ".vasuki-journal.jsonl", ".vasuki.lock",
    ".vasuki-part-00000.parquet.tmp", "part-00000-0-of-2.parquet", ".vasuki-summary.lock",
]  # fmt: skip


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, repeat, flip or insert somewhere, a few times."""
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([0, 1, 8, 500]))
        what = rng.randrange(5)
        if what == 0:
            data = data[:start]
        elif what == 1:
            data = data[:start] + data[end:]
        elif what == 2:
            data = data[:end] + data[start:end] * 50 + data[end:]
        elif what == 3:
            data = data[:start] + rng.randbytes(end - start) + data[end:]
        else:
            data = data[:start] + rng.choice(HOSTILE_BYTES) + data[end:]
    return data


def spoil_tree(tree: Any, rng: random.Random) -> Any:
    """Put something else in the place of one value, wherever it is."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.15:
        return rng.choice(HOSTILE_VALUES)
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    if isinstance(tree, dict) and rng.random() < 0.1:
        del tree[key]
        return tree
    tree[key] = spoil_tree(tree[key], rng)
    return tree


def spoil_yaml(data: bytes, rng: random.Random) -> bytes:
    return yaml.safe_dump(spoil_tree(yaml.safe_load(data), rng)).encode()


def spoil_json(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(spoil_tree(json.loads(data), rng)).encode()


def replace_by_no_file(file: Path, rng: random.Random) -> None:
    """Put something else in the place of a file."""
    file.unlink()
    target = rng.choice(["a pipe", "a folder", "/dev/zero", "/dev/null", file.name, "nowhere", "job.yaml"])
    if target == "a pipe":
        os.mkfifo(file)
    elif target == "a folder":
        file.mkdir()
    else:
        file.symlink_to(target)


Spoil = Callable[[bytes, random.Random], bytes]
SPOILED: list[tuple[str, list[Spoil]]] = [
    ("job.yaml", [spoil_bytes, spoil_yaml, spoil_yaml]),
    ("input", [spoil_bytes]),
    ("model/config.json", [spoil_bytes, spoil_json, spoil_json]),
    ("model/tokenizer.json", [spoil_bytes, spoil_json]),
    ("model/tokenizer_config.json", [spoil_bytes, spoil_json]),
    ("model/model.safetensors", [spoil_bytes]),
    (PROFILE, [spoil_bytes, spoil_yaml]),
    ("out", [spoil_bytes]),
]


def write_input(folder: Path, rng: random.Random) -> Path:
    table = pa.table({"id": list(range(NUM_ROWS)), "text": [" ".join(WORDS[row:]) for row in range(NUM_ROWS)]})
    file = folder / f"in.{rng.choice(['parquet', 'jsonl', 'csv'])}"
    if file.suffix == ".parquet":
        pq.write_table(table, file, compression=rng.choice(["none", "zstd"]))
    elif file.suffix == ".csv":
        pa_csv.write_csv(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return file


def write_job(folder: Path, model: Path, rng: random.Random) -> Path:
    """A good job. Returns its input."""
    source = write_input(folder, rng)
    tree = job_tree(model, source, folder / "out") | {"sampling": {"max_tokens": 3}}
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return source


def hostile_job(folder: Path, model: Path, done: Path, seed: int) -> tuple[Order, str]:
    """To run or check a job of which one file is spoiled, and what was spoiled."""
    rng = random.Random(seed)
    name, ways = SPOILED[seed % len(SPOILED)]
    shutil.copytree(model, folder / "model")
    shutil.copy(PROFILES / PROFILE, folder)
    source = write_job(folder, folder / "model", random.Random(1) if name == "out" else rng)
    if name == "out":
        shutil.copytree(done, folder / "out")
        left = folder / "out" / rng.choice(LEFTOVERS)
        name = f"out/{left.name}"
        if not left.exists():
            left.write_bytes(next((folder / "out").glob("part-*")).read_bytes())
    file = source if name == "input" else folder / name
    if rng.random() < 0.25:
        replace_by_no_file(file, rng)
    else:
        file.write_bytes(rng.choice(ways)(file.read_bytes(), rng))
    options = ("--set", f"plan.gpu={folder / PROFILE}") if name == PROFILE else ()
    command = rng.choice(["run", "run", "check"])
    return Order(str(folder / "job.yaml"), options=options, command=command, most_wall_s=MOST_WALL_S), name


@pytest.fixture(scope="module")
def done(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was stopped in the midst of its work."""
    folder = tmp_path_factory.mktemp("done")
    write_job(folder, tiny_model, random.Random(1))
    assert nursery.run(Order(str(folder / "job.yaml"), "kill", "commit", 2, 0.0)) in (0, -9)
    return folder / "out"


@pytest.mark.parametrize("first", range(0, CASES, 10))
def test_a_spoiled_file_is_one_line(tmp_path: Path, tiny_model: Path, nursery: Nursery, done: Path, first: int) -> None:
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        order, spoiled = hostile_job(folder, tiny_model, done, seed)
        ending = nursery.watch(order)
        words = (folder / "stderr").read_text()
        case = f"case {seed}, {order.command} with {spoiled} spoiled: {ending}\n{words[-3000:]}"
        assert not ending.hung, case
        assert ending.code in (0, 2, 3, 4, 5, 75), case
        assert not ending.code or (words.count("\n") == 1 and words.startswith("vasuki: ")), case
        assert ending.cpu_s < MOST_CPU_S, case
        assert ending.peak_bytes < MOST_BYTES, case
        shutil.rmtree(folder)


def test_a_run_that_only_waits_is_killed_and_says_where(tmp_path: Path, nursery: Nursery) -> None:
    ending = nursery.watch(Order(str(tmp_path / "job.yaml"), "sleep", amount=60, most_wall_s=2.0))
    assert ending.hung
    assert "in sleep" in (tmp_path / "stderr").read_text()
