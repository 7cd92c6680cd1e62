"""Every key of job.yaml, with every word that it may be, under every policy and in both backends: plan, simulation, run
and manifest show what was asked for, or the job is refused by the key's name. Keys are read from the schema, so that
none is forgotten."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from vasuki.arrivals import Gathering
from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.engine.policy import POLICIES
from vasuki.io.location import Location
from vasuki.io.output.manifest import Ran, read_manifest
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.ignored import refuse_ignored
from vasuki.runs.manifests import ran
from vasuki.runs.placement import Placement, replicas_elsewhere
from vasuki.runs.planning import placements_of, plans_of
from vasuki.runs.renting import parse_fleets
from vasuki.runs.run import run_job
from vasuki.runs.workload import job_workload

TESTS = Path(__file__).resolve().parents[1]
ROWS, MAX_TOKENS = 8, 12
BACKENDS = ("ragged", "padded")


@dataclass(frozen=True)
class Made:
    """A plan, and what it was made from."""

    plan: Plan
    placement: Placement


def kv_bytes(made: Made) -> float:
    return made.plan.settings.kv_tokens * made.placement.shape.kv_bytes_per_token


# How a plan shows a setting. `auto` asks for nothing.
SHOWN: dict[str, Callable[[Made, Any], bool]] = {
    "model.dtype": lambda made, value: made.placement.shape.dtype == value,
    "model.quantization": lambda made, value: (made.placement.shape.product_dtype or "none") == value,
    "sampling.max_tokens": lambda made, value: made.plan.output_tokens_estimate == value * made.plan.requests,
    "sampling.n": lambda made, value: made.plan.requests == value * ROWS,
    "plan.solver": lambda made, value: made.plan.solver == value,
    "plan.gpu": lambda made, value: made.plan.gpu == value,
    "plan.max_loss": lambda made, value: made.plan.at_risk_s <= value or "plan.max_loss" in made.plan.risks_too_much,
    "engine.policy": lambda made, value: made.plan.policy == made.plan.settings.policy.name == value,
    "engine.chunk_tokens": lambda made, value: made.plan.chunk_tokens == value,
    "engine.max_num_seqs": lambda made, value: made.plan.settings.limits.max_num_seqs == value,
    "engine.attention": lambda made, value: made.plan.backend == value,
    "engine.packing": lambda made, value: (
        made.placement.shape.always_packed == (value == "always")
        and bool(made.placement.shape.longest_packed_tokens) == (value != "never")
    ),
    "engine.compile": lambda made, value: made.placement.shape.compiles == (value != "off"),
    "engine.replicas": lambda made, value: made.plan.layout.data_parallel == value,
    "engine.weights_on_host": lambda made, value: made.plan.layout.host_layers == value,
    "kv.block_tokens": lambda made, value: made.plan.settings.block_tokens == value,
    "kv.device_memory": lambda made, value: (
        made.placement.config.kv.device_memory == value and (value <= 1 or kv_bytes(made) <= value)
    ),
    "kv.dtype": lambda made, value: (made.placement.shape.kv_dtype or made.placement.shape.dtype) == value,
    "kv.host_memory": lambda made, value: made.plan.host_bytes <= value,
    "kv.offload": lambda made, value: made.plan.offload.mode == value,
    "cost.price_per_hour": lambda made, value: made.plan.cost.price_per_hour == value,
    "cost.currency": lambda made, value: made.plan.cost.currency == value,
}
# How a manifest shows what ran.
RAN: dict[str, Callable[[Ran, Any], bool]] = {
    "model.dtype": lambda ran, value: ran.dtype == value,
    "plan.solver": lambda ran, value: ran.solver == value,
    "engine.policy": lambda ran, value: ran.policy == value,
    "engine.chunk_tokens": lambda ran, value: ran.chunk_tokens == value,
    "engine.max_num_seqs": lambda ran, value: ran.max_num_seqs == value,
    "engine.attention": lambda ran, value: ran.backend == value,
    "engine.packing": lambda ran, value: ran.packing == value,
    "engine.weights_on_host": lambda ran, value: ran.weights_on_host == value,
    "kv.block_tokens": lambda ran, value: ran.block_tokens == value,
    "kv.dtype": lambda ran, value: ran.kv_dtype == value,
    "kv.offload": lambda ran, value: ran.offload == value and (value != "stream" or ran.layers > 0),
}
VALUES: dict[str, tuple[Any, ...]] = {
    "sampling.max_tokens": (8, 20),
    "sampling.n": (1, 3),
    "plan.gpu": ("a10", "a40"),
    "plan.max_loss": (0.01, 500.0),
    "engine.chunk_tokens": (64, 300),
    "engine.max_num_seqs": (3, 9),
    "engine.replicas": (1, 2),
    "engine.weights_on_host": (0, 2),
    "kv.block_tokens": (8, 48),
    "kv.device_memory": (0.5, 2**26),
    "kv.host_memory": (2**22, 2**30),
    "cost.price_per_hour": (0.5, 2.0),
    "cost.currency": ("EUR", "CHF"),
}

# Settings that no plan shows: tests that name them, of which a whole section may be one.
ELSEWHERE = {
    "name": "runs/test_run.py",
    "model.path": "runs/test_run.py",
    "model.shape": "commands/test_cli.py",
    "model.revision": "models",
    "model.allow_pickle": "commands/test_check.py",
    "model.trust_remote_code": "commands/test_check.py",
    "engine.device": "runs/test_placement.py",
    "kv.conditions": "planner/offload/test_by_batch.py",
    "plan.solver_time": "planner/test_few_rows.py",
    "plan.output_length": "planner/ordering",
    "plan.window_rows": "planner/ordering",
    "arrivals": "arrivals",  # under a policy that gathers; others refuse it below
    "errors": "runs/test_run.py",
    "input.priority": "runs/rows/test_arriving.py",
    "input.deadline": "runs/rows/test_arriving.py",
    "input": "io",
    "output.special_tokens": "hf/loading",
    "output": "io",
    "sampling.ignore_eos": "runs/test_run.py",
    "output.flatten": "runs/test_typed_answers.py",
    "output.dates": "runs/test_typed_answers.py",
    "task": "runs/test_scores.py",
    "score": "runs/test_scores.py",
    "embed": "runs/test_vectors.py",
    "output.scores": "runs/test_vectors.py",
    "input.truncate": "runs/test_vectors.py",
    "input.duplicates": "runs/test_equal_rows.py",
    "input.unchanged": "runs/test_equal_rows.py",
    "input.pair": "runs/test_vectors.py",
    "input.continuation": "runs/test_scores.py",
    "output.choice_probabilities": "runs/test_scores.py",
    "output.reasoning": "runs/test_thinking.py",
    "output.check": "io/output/test_conditions.py",
    "output.logprobs": "runs/test_logprobs.py",
    "errors.retries": "runs/test_typed_answers.py",
    "sampling.schema": "base/test_constraint.py",
    "sampling.regex": "runs/test_typed_answers.py",
    "sampling.choices": "runs/test_typed_answers.py",
    "answer": "runs/test_typed_answers.py",
    "sampling": "hf",
}


def keys(kind: Any = JobConfig, before: str = "") -> Iterator[tuple[str, Any]]:
    """(`section.key`, its annotation)"""
    for name, field in kind.model_fields.items():
        if not before and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{name}.")
        else:
            yield before + name, field.annotation


def words(kind: Any) -> Iterator[Any]:
    """What a setting may be, where that can be listed."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from (True, False)
    else:
        for part in get_args(kind):
            yield from words(part)


KEYS = dict(keys())
GPUS_ALONE = "float8"  # which only packed attention on some GPUs takes: tried by itself
OPTIONS = {
    key: [value for value in (*words(KEYS[key]), *VALUES.get(key, ())) if value not in ("auto", "", GPUS_ALONE)]
    for key in SHOWN
}
# Keys that some policy or backend may have to refuse are set one by one, the others all at once.
ALONE = (
    "plan.solver",
    "engine.chunk_tokens",
    "engine.packing",
    "engine.replicas",
    "engine.weights_on_host",
    "kv.offload",
)
TOGETHER = [key for key in SHOWN if key not in (*ALONE, "engine.policy", "engine.attention")]
CASES: list[dict[str, Any]] = [{key: value} for key in ALONE for value in OPTIONS[key]]
CASES += [{"kv.dtype": GPUS_ALONE}, {"model.quantization": GPUS_ALONE}]
CASES.append({"model.quantization": GPUS_ALONE, "plan.gpu": "h100"})
CASES += [
    {key: OPTIONS[key][turn % len(OPTIONS[key])] for key in TOGETHER}
    for turn in range(max(len(OPTIONS[key]) for key in TOGETHER))
]


def test_no_key_is_forgotten() -> None:
    for key in KEYS:
        if key in SHOWN:
            assert OPTIONS[key], f"say which values of {key} are tried"
            continue
        place = TESTS / ELSEWHERE.get(key, ELSEWHERE.get(key.partition(".")[0], ""))
        assert place != TESTS, f"{key}: say how a plan shows it, or which tests hold it"
        files = [place] if place.is_file() else [*place.rglob("test_*.py"), TESTS / "simulator" / "test_arrivals.py"]
        name = key.rpartition(".")[2]
        assert any(re.search(rf"\b{name}\b|__{name}\b", file.read_text(encoding="utf-8")) for file in files), key
    assert SHOWN.keys() | VALUES.keys() <= KEYS.keys()


def made(rows: Path, asked: dict[str, Any]) -> Made:
    """The plan that `vasuki plan --gpu a10` makes with these settings."""
    tree: dict[str, Any] = {
        "model": {"shape": "qwen2.5-0.5b"},
        "input": {"path": str(rows), "prompt": "{text}"},
        "output": {"path": str(rows.parent / "out")},
        "sampling": {"max_tokens": MAX_TOKENS},
    }
    for dotted, value in asked.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    config = parse_job(tree)
    workload = job_workload(config)
    card = config.plan.gpu if config.plan.gpu != "auto" else "a10"
    placements = placements_of(parse_fleets([card], unsaid=replicas_elsewhere(config)), workload)
    [plan] = plans_of(workload, placements)
    return Made(plan, placements[0])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *(["word " * (20 + 3 * row)] for row in range(ROWS))])
    return path


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_what_is_asked_for_is_done_or_refused_by_name(
    rows: Path, case: dict[str, Any], policy: str, backend: str
) -> None:
    asked = {"engine.policy": policy, "engine.attention": backend, **case}
    refused, plan = "", None
    try:
        plan = made(rows, asked)
    except JobFileError as error:
        refused = str(error)
    if POLICIES[policy].goes_deep and case.get("kv.offload") != "none":  # layers move, one by one and to the host
        stays = backend == "padded" or case.get("engine.weights_on_host")
        if stays and not refused.startswith(f"{next(iter(case))}: "):
            assert refused.startswith(f"engine.policy: {policy} cannot be done: ")
            return
        if "kv.host_memory" in case and refused:
            assert refused.startswith("kv.host_memory: ")
            return
    if plan is None:
        assert len(case) == 1 or GPUS_ALONE in case.values()
        assert refused.startswith(f"{next(iter(case))}: ")
        return
    simulated = ran_of(plan)
    for key, value in asked.items():
        assert SHOWN[key](plan, value), f"{key}: {value}"
        assert key not in RAN or RAN[key](simulated, value), f"{key}: {value}"


def ran_of(made: Made) -> Ran:
    """What the manifest of a simulation says."""
    plan, shape, config = made.plan, made.placement.shape, made.placement.config
    lengths = job_workload(config).lengths
    gathering = Gathering.of(config) if plan.settings.policy.gathers else None
    run = simulate_plan(plan, lengths, shape, made.placement.profile, plan_config=config.plan, gathering=gathering)
    return ran(run.plan, shape, run.result.stats)


RUN = [{"engine.policy": policy} for policy in POLICIES if not (POLICIES[policy].pads or POLICIES[policy].gathers)]
RUN += [{"engine.policy": policy, "engine.attention": "padded"} for policy in POLICIES if POLICIES[policy].pads]
RUN += [{"engine.attention": "padded", "engine.packing": word} for word in ("always", "never")]
RUN += [{key: value} for key in RAN for value in OPTIONS[key] if key not in ("engine.policy", "engine.packing")]
RUN += [{"engine.policy": "vasuki-paper", "kv.conditions": "printed"}]


@pytest.mark.parametrize("asked", RUN, ids=lambda asked: "-".join(map(str, asked.values())))
def test_a_run_does_it_and_its_manifest_says_so(asked: dict[str, Any], deep_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join(["text", *("a word " * (2 + 2 * row) for row in range(ROWS))]))
    tree: dict[str, Any] = {
        "model": {"path": str(deep_model)},
        "input": {"path": str(rows), "prompt": "{text}", "chat": False},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": 4},
        "kv": {"device_memory": 2**20, "host_memory": 2**24},
    }
    for dotted, value in asked.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    run_job(parse_job(tree))
    manifest = read_manifest(Location.parse(str(tmp_path / "out")))
    for key, value in asked.items():
        assert key not in RAN or RAN[key](manifest.ran, value), f"{key}: {value}: {manifest.ran}"
    assert manifest.rows.succeeded == ROWS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("arrivals.")])
def test_settings_of_arrivals_are_those_of_a_policy_that_gathers(key: str, policy: str) -> None:
    name = key.partition(".")[2]
    usual = getattr(parse_job(TREE).arrivals, name)
    options = [word for word in words(KEYS[key]) if word != usual] or [usual * 1.01 if isinstance(usual, float) else 20]
    config = parse_job({**TREE, "engine": {"policy": policy}, "arrivals": {name: options[0]}})
    if POLICIES[policy].gathers:
        refuse_ignored(config)
        return
    with pytest.raises(JobFileError, match=rf"{key}: {policy} gathers no rows"):
        refuse_ignored(config)


TREE = {"model": {"shape": "x"}, "input": {"path": "x", "prompt": "x"}, "output": {"path": "x"}}
