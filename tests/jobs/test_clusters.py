"""Jobs for Kubernetes, SkyPilot and AWS Batch: schemas and vasuki take them, and codes mean the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from vasuki.base.errors import (
    InputError,
    Interrupted,
    JobFileError,
    OutOfMemory,
    OutputInUse,
    TooManyRowErrors,
    VasukiError,
)
from vasuki.commands.cli import main

JOBS = Path(__file__).parents[2] / "jobs"
MANIFESTS = sorted((JOBS / "kubernetes").glob("*.yaml"))
KUBERNETES_JOBS = ["job.yaml", "indexed-job.yaml", "shards.yaml"]
HOPELESS = {error.exit_code for error in (VasukiError, JobFileError, TooManyRowErrors, InputError, OutOfMemory)}
RETRIED = {error.exit_code for error in (OutputInUse, Interrupted)}


def job(name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [each for each in documents(name) if each["kind"] == "Job"]
    return found


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((JOBS / "kubernetes" / name).read_text()))


def rules_of(name: str) -> dict[str, set[int]]:
    rules = job(name)["spec"]["podFailurePolicy"]["rules"]
    return {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_the_manifests(manifest: Path, version: str) -> None:
    for document in yaml.safe_load_all(manifest.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_see_mistakes() -> None:
    wrong = job("job.yaml")
    wrong["spec"]["podFailurePolicy"]["rule"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_codes_that_no_try_mends_fail_the_job_and_the_others_are_tried_again() -> None:
    assert rules_of("job.yaml") == {"FailJob": HOPELESS}
    assert rules_of("indexed-job.yaml") == {"FailJob": HOPELESS - {VasukiError.exit_code}}  # which Ray ends with, too
    shards = rules_of("shards.yaml")
    assert shards["FailIndex"] == {TooManyRowErrors.exit_code}
    assert shards["FailJob"] | shards["FailIndex"] == HOPELESS
    strategy = json.loads((JOBS / "aws-batch" / "job-definition.json").read_text())["retryStrategy"]
    retried = {int(rule["onExitCode"]) for rule in strategy["evaluateOnExit"] if "onExitCode" in rule}
    recovery = yaml.safe_load((JOBS / "skypilot" / "vasuki.yaml").read_text())["resources"]["job_recovery"]
    assert retried == set(recovery["recover_on_exit_codes"]) == RETRIED


@pytest.mark.parametrize("name", KUBERNETES_JOBS)
def test_a_rule_names_the_container_and_volumes_are_mounted(name: str) -> None:
    spec = job(name)["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["containerName"] for rule in codes} == {container["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert {claim["claimName"] for claim in claims} == {each["metadata"]["name"] for each in documents("volumes.yaml")}


def commands() -> dict[str, list[str]]:
    names = ["job.yaml", "shards.yaml"]
    found = {name: job(name)["spec"]["template"]["spec"]["containers"][0]["args"] for name in names}
    definition = json.loads((JOBS / "aws-batch" / "job-definition.json").read_text())
    sky = yaml.safe_load((JOBS / "skypilot" / "vasuki.yaml").read_text())["run"]
    return found | {
        "aws-batch": definition["containerProperties"]["command"],
        "skypilot": shlex.split(sky)[1:],
    }


@pytest.mark.parametrize("kind", ["job.yaml", "shards.yaml", "aws-batch", "skypilot"])
def test_the_command_is_one_that_vasuki_takes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is missing, and that is what it says."""
    monkeypatch.chdir(tmp_path)
    arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", "3") for argument in commands()[kind]]
    (tmp_path / arguments[1]).write_text(
        "model: {path: m}\ninput: {path: in.jsonl, prompt: '{text}'}\noutput: {path: out}\n"
    )
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == InputError.exit_code
    assert "in.jsonl" in ended.stderr


def test_as_many_shards_run_as_there_are() -> None:
    spec = job("shards.yaml")["spec"]
    (shard,) = [argument for argument in commands()["shards.yaml"] if "INDEX" in argument]
    match = re.fullmatch(r"\$\(JOB_COMPLETION_INDEX\)/(\d+)", shard)
    assert match
    assert int(match[1]) == spec["completions"]


def test_pods_that_share_rows_find_the_first_one_and_end_with_it() -> None:
    """What the first one's script does is tested on a cluster: `tests/runs/workers/on_ray/test_ray_jobs.py`."""
    (service,) = [each for each in documents("indexed-job.yaml") if each["kind"] == "Service"]
    found = job("indexed-job.yaml")
    spec, name = found["spec"], found["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (head,) = [each["value"] for each in container["env"] if each["name"] == "HEAD"]
    assert head.partition(":")[0] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed"
    assert spec["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]
    assert spec["parallelism"] == spec["completions"] > 1


def test_a_job_with_replicas_asks_for_their_cards() -> None:
    (container,) = job("job.yaml")["spec"]["template"]["spec"]["containers"]
    assert "--replicas" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] > 1
