"""The offload figure and table: their parts on small jobs."""

from __future__ import annotations

from pathlib import Path

import draw_offload_map
import offload_map
import pytest
from offload_map import LINK_GB_PER_S, SHAPE, AheadJob, ahead, layers, link_of, long_rows, pressure, translations


@pytest.mark.parametrize("rate", LINK_GB_PER_S)
def test_links_reach_their_rate_with_large_copies_alone(rate: float) -> None:
    link = link_of(rate)
    assert link.bandwidth_bytes_per_s(2**28, "h2d") == pytest.approx(rate * 1e9, rel=0.01)
    assert link.bandwidth_bytes_per_s(2**12, "h2d") < 2e9
    assert link.bandwidth_bytes_per_s(2**28, "both") < rate * 1e9


def test_cards_stand_where_their_profiles_say() -> None:
    link, memory = ({row["card"]: row[name] for row in offload_map.cards()} for name in ("link_gb_per_s", "kv_gib"))
    assert link["gh200"] > link["h200"] > link["a10"]
    assert memory["a40"] - memory["a10"] == pytest.approx(0.9 * 22, rel=0.1)


def test_steps_hide_more_with_prompts_and_with_larger_copies() -> None:
    rows = list(layers(("a10", "gh200")))
    for row in rows:
        assert 0 <= row["layers_by_16"] <= row["layers_by_256"] < SHAPE.num_layers
    for decodes, mixed in zip(rows[::2], rows[1::2], strict=True):
        assert mixed["step_s"] > decodes["step_s"]
        assert all(mixed[name] >= decodes[name] for name in ("layers_by_16", "layers_by_256"))
    assert any(row["layers_by_256"] > row["layers_by_16"] for row in rows)


def test_prefilling_ahead_does_not_pay_for_the_memory_that_it_pins() -> None:
    equal, others = AheadJob("a10", (18, 34), (2000, 400)), AheadJob("a10", (20,), None, known=False)
    changes = list(ahead([equal, others]))
    assert [(row["rows"], row["ahead"] < 0) for row in changes[:2]] == [(18, False), (34, False)]
    assert len(changes) == 3


def test_jobs_are_the_same_every_time() -> None:
    for job in (long_rows, translations):
        assert (job(50).prompt_tokens == job(50).prompt_tokens).all()
        assert job(50).output_tokens.min() >= 1


def test_a_cell_says_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a handful of rows and a link as fast as memory, more rows side by side are worth streaming."""
    monkeypatch.setattr(offload_map, "LINK_GB_PER_S", (3.0, 450.0))
    monkeypatch.setattr(offload_map, "KV_GIB", {"a10": (1,)})
    slow, fast = offload_map.offload_map(("a10",), least_rows=40)
    assert (slow["link_gb_per_s"], fast["link_gb_per_s"]) == (3.0, 450.0)
    assert fast["mode"] == "stream"
    assert fast["change"] < -0.3
    assert fast["change"] < slow["change"] <= 0


def test_memory_pressure_costs_and_parking_saves_work() -> None:
    rows = list(pressure(("a10",), shares=(1.0, 0.2), rows=60))
    by_key = {(row["share"], row["policy"], row["offload"]): row for row in rows}
    assert len(by_key) == 12
    ample, tight = (by_key[share, "vllm-v0", "none"] for share in (1.0, 0.2))
    assert tight["again"] > ample["again"]
    assert tight["makespan_s"] > ample["makespan_s"]
    assert by_key[0.2, "vasuki", "park"]["again"] < by_key[0.2, "vasuki", "none"]["again"] / 10
    assert all(0 <= row["hidden"] <= 1 for row in rows)


def test_auto_is_no_worse_than_any_fixed_mode_where_memory_is_short() -> None:
    rows = [row for row in offload_map.read()["pressure"] if row["policy"] == "vasuki"]
    autos = [row for row in rows if row["offload"] == "auto"]
    assert len(autos) == 16
    for auto in autos:
        here = [row["makespan_s"] for row in rows if (row["card"], row["share"]) == (auto["card"], auto["share"])]
        assert auto["makespan_s"] <= 1.02 * min(here), "docs/offload.md says so"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_is_drawn(tmp_path: Path, suffix: str) -> None:
    figure = tmp_path / f"map.{suffix}"
    draw_offload_map.draw(offload_map.read()["map"], offload_map.read()["cards"], figure)
    assert figure.stat().st_size > 10_000
    if suffix == "svg":
        text = figure.read_text(encoding="utf-8")
        assert all(word in text for word in ("S −", "GH200", "RTX 4090"))
