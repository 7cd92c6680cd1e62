from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vasuki.base.errors import InputError
from vasuki.io.location import Location
from vasuki.io.output.manifest import (
    BatchStats,
    Bounds,
    KVStats,
    Manifest,
    Predicted,
    PreemptionCounts,
    RowCounts,
    Timings,
    TokenCounts,
    merge,
    read_manifest,
)
from vasuki.machines.price import Cost

FULL = Manifest(
    job={"name": "dates"},
    config_hash="c",
    input_fingerprint="f",
    rows=RowCounts(10, 9, 1),
    tokens=TokenCounts(100, 50, 5),
    timings=Timings(1, 2, 3, 4, 10),
    predicted=Predicted(9.0, 8.0),
    steps=20,
    batch=BatchStats(4.0, 8),
    kv=KVStats(1000, 200, 300, 0.1, 0.2),
    preemptions=PreemptionCounts(1, 2),
    device={"name": "A10"},
    cost=Cost(0.5, 0.375, "USD", 2.5),
    versions={"vasuki": "0.1.0"},
)


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path))
    FULL.write(place / "manifest.json")
    assert read_manifest(place) == FULL
    assert read_manifest(place / "manifest.json") == FULL


def test_the_fields_of_the_contract() -> None:
    tree = FULL.to_dict()
    assert tree["schema_version"] == 2
    assert tree["simulated"] is False
    expected = {
        "rows": "total succeeded failed",
        "tokens": "prompt output recomputed shared",
        "timings": "load_s plan_s compile_s generate_s makespan_s tail_s",
        "predicted": "makespan_s lower_bound_s schedule_bound_s source output_tokens_estimate",
        "bounds": "schedule_s pace datasheet_s uncertainty",
        "batch": "mean_seqs max_seqs",
        "kv": "peak_device_bytes peak_host_bytes offloaded_bytes exposed_copy_s hidden_copy_s prefilled_ahead",
        "preemptions": "swap recompute",
        "cost": "gpu_hours amount currency per_million_tokens",
    }
    assert {name: " ".join(tree[name]) for name in expected} == expected
    assert {"job", "config_hash", "input_fingerprint", "steps", "device", "versions"} <= set(tree)


def test_a_newer_field_is_ignored_and_a_newer_version_is_not(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(FULL.to_dict() | {"later": 1}))
    assert read_manifest(Location.parse(str(tmp_path))) == FULL
    file.write_text(json.dumps(FULL.to_dict() | {"schema_version": 3}))
    with pytest.raises(InputError, match="schema_version 3; this version reads up to 2"):
        read_manifest(Location.parse(str(tmp_path)))


def test_manifests_that_cannot_be_read(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path))
    with pytest.raises(InputError, match=r"has no manifest\.json: no run has ended there"):
        read_manifest(place)
    for text, message in [
        ("{", "is not a manifest: Invalid JSON"),
        ('{"job": {}}', "is not a manifest: config_hash: "),
    ]:
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=message):
            read_manifest(place)


def test_shards_add_up() -> None:
    other = replace(
        FULL,
        timings=Timings(2, 1, 1, 1, 20),
        steps=60,
        batch=BatchStats(8.0, 9),
        kv=replace(FULL.kv, peak_device_bytes=500),
        cost=Cost(1.0, 0.75, "USD", 5.0),
        shard="1/2",
    )
    both = merge([FULL, other])
    assert both.rows == RowCounts(20, 18, 2)
    assert both.tokens == TokenCounts(200, 100, 10)
    assert both.timings == Timings(2, 2, 3, 4, 20)
    assert both.steps == 80
    assert both.batch == BatchStats(7.0, 9)
    assert both.kv == KVStats(1000, 200, 600, 0.2, 0.4)
    assert both.cost == Cost(1.5, 1.125, "USD", 1.125 / 0.3)
    assert both.shard == ""
    assert both.device == {"name": "A10"}
    measured = [replace(shard, device={"name": "A10", "energy_j": joules}) for shard, joules in ((FULL, 3), (other, 4))]
    assert merge(measured).device == {"name": "A10", "energy_j": 7}
    assert merge([measured[0], other]).device == {"name": "A10"}
    shared = [replace(shard, device={"stolen_share": share}) for shard, share in ((FULL, 0.1), (other, 0.3))]
    assert merge(shared).device == {"stolen_share": 0.3}
    bounded = [replace(FULL, bounds=each) for each in (Bounds(3.0, 0.9, 2.0, 0.1), Bounds(4.0, 1.1, 1.0))]
    assert merge(bounded).bounds == Bounds(4.0, 1.1, 2.0, None), "of the slowest; what is not known of one is not known"
    assert merge([FULL, replace(other, cost=Cost(1.0), predicted=Predicted())]).cost == Cost(1.5, None, "USD", None)
