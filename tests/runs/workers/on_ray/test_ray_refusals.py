"""What keeps a job from running on Ray is told in one line, also where Ray is not installed."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from replicas_job import job_into

import vasuki.ray
from vasuki.base.errors import JobFileError
from vasuki.commands.cli import main
from vasuki.machines.here.split import Share
from vasuki.runs.workers.ray.nodes import _survey, shares_of_node


@pytest.mark.parametrize(("lacking", "address"), [("ray", "ray"), ("grpc", "ray://127.0.0.1:1")])
def test_without_ray_or_its_client_the_extra_is_named(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, address: str
) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    result = CliRunner().invoke(main, ["run", str(job_into(tmp_path / "job", tiny_model)), "--on", address])
    assert result.exit_code == 2
    assert f"{lacking} is not installed" in result.output
    assert "pip install 'vasuki[ray]'" in result.output
    assert "Traceback" not in result.output


def test_a_pipeline_without_ray_is_told_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobFileError, match=r"map_batches needs Ray, .* pip install 'vasuki\[ray\]'"):
        vasuki.ray.map_batches(None, "job.yaml")


@pytest.mark.parametrize("address", ["", "kubernetes", "ray://", "ray://host", "http://host:1"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, tiny_model: Path, address: str) -> None:
    result = CliRunner().invoke(main, ["run", str(job_into(tmp_path / "job", tiny_model)), "--on", address])
    assert result.exit_code == 2
    assert "write ray, auto or ray://HOST:PORT" in result.output


def test_a_node_without_vasuki_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", version)
    assert _survey()("0.1", 2, "auto") == ("", [])


def test_where_ray_may_use_some_cores_replicas_share_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert shares_of_node(8, 2) == [Share(threads=4)] * 2
    assert shares_of_node(2, 3) == [Share(threads=1)] * 2
    assert shares_of_node(8, "auto") == [Share(threads=8)]
