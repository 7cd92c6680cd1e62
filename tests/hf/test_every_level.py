"""Models of all architectures, and a whole job, at every level of instructions that this processor executes."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result
from every_level import EMULATES, HERE, at_level
from tiny_job import WORDS, job_tree
from tiny_models import (
    ARCHITECTURES,
    RECURRENT,
    NoTokenizer,
    answers_in_bfloat16,
    prompts,
    reference,
    requests_of,
    with_kernels,
)
from tiny_models import run as run_requests

from vasuki.commands.cli import main
from vasuki.hf.kernels.levels import AVX512_BF16, NONE, VARIABLE, Level
from vasuki.hf.loading.prepare import prepare

MODELS = [*ARCHITECTURES, *RECURRENT]
# The lowest one of x86-64 that rounds for products, emulated if it must be.
ROUNDING = [AVX512_BF16] if EMULATES and AVX512_BF16 not in HERE else []


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("level", HERE[1:], ids=lambda level: level.name)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_generate_in_float32(name: str, level: Level) -> None:
    """By all kernels. Without any, models are in test_golden and test_recurrent."""
    model = with_kernels(name, at_level(level).cpu_kernels())
    loaded = prepare(model, NoTokenizer(), model.generation_config, name)
    rows, _, _ = run_requests(loaded, requests_of(prompts()), chunk_tokens=20, native=True, level=level)
    assert rows.outputs == reference(name)


@pytest.mark.sweep
@pytest.mark.parametrize("level", [*HERE, *ROUNDING], ids=lambda level: level.name)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_bfloat16_rounds_for_products_alone(
    name: str, level: Level, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, activations, residuals and positions stay in float32."""
    monkeypatch.setenv(VARIABLE, level.name if level in HERE else "")
    kernels = None
    if level is not NONE:
        request.getfixturevalue("compiler")
        kernels = at_level(level).cpu_kernels()
    ours, twin = answers_in_bfloat16(name, kernels)
    assert ours == twin


class Jobs:
    """The same job, run again and again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self._source = folder / "in.csv"
        rows = [f"r{i},{' '.join(WORDS[: 1 + i * 7 % 17])}" for i in range(12)]
        self._source.write_text("\n".join(["id,text", *rows]))
        self._model = model

    def run(self, dtype: str) -> Result:
        tree = job_tree(self._model, self._source, self._folder / "out")
        tree["model"]["dtype"] = dtype
        job = self._folder / "job.yaml"
        job.write_text(yaml.safe_dump(tree))
        return CliRunner().invoke(main, ["run", str(job), "--quiet", "--fresh", "--set", "engine.device=cpu"])

    def answers(self) -> dict[str, list[int]]:
        parts = sorted((self._folder / "out").glob("part-*.parquet"))
        return {row["id"]: row["output_token_ids"] for part in parts for row in pq.read_table(part).to_pylist()}


@pytest.fixture
def jobs(tiny_model: Path, tmp_path: Path) -> Jobs:
    return Jobs(tiny_model, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_job(dtype: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {}
    for level in HERE:
        monkeypatch.setenv(VARIABLE, level.name)
        done = jobs.run(dtype)
        assert done.exit_code == 0, done.stderr
        answers[level.name] = jobs.answers()
        assert len(answers[level.name]) == 12
    if dtype == "float32":
        assert all(each == answers["none"] for each in answers.values())


def test_a_run_that_cannot_have_what_the_environment_asks_for(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    done = jobs.run("float32")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("vasuki: VASUKI_CPU_LEVEL is 'fast', but this processor has none, ")
