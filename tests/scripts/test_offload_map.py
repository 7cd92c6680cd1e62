"""The offload figure and table: their parts on small jobs, and their verdicts on made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from offload_map import (
    LINK_GB_PER_S,
    PANELS,
    AheadJob,
    Cell,
    Panel,
    Pressure,
    ahead_change,
    ahead_table,
    card_mark,
    draw,
    hidden_layers,
    layers_table,
    link_of,
    long_rows,
    panel_map,
    pressure,
    pressure_table,
    targets,
    translations,
)

from vasuki.engine.offload import OffloadMode
from vasuki.models.named import named_shape

SHAPE = named_shape("llama-3-8b")


@pytest.mark.parametrize("rate", LINK_GB_PER_S)
def test_links_reach_their_rate_with_large_copies_alone(rate: float) -> None:
    link = link_of(rate)
    assert link.bandwidth_bytes_per_s(2**28, "h2d") == pytest.approx(rate * 1e9, rel=0.01)
    assert link.bandwidth_bytes_per_s(2**12, "h2d") < 2e9
    assert link.bandwidth_bytes_per_s(2**28, "both") < rate * 1e9


def test_cards_stand_where_their_profiles_say() -> None:
    marks = {card: card_mark(card, SHAPE) for panel in PANELS for card in panel.marked}
    assert marks["gh200"].link_gb_per_s > marks["h200"].link_gb_per_s > marks["a10"].link_gb_per_s
    assert marks["a40"].kv_gib - marks["a10"].kv_gib == pytest.approx(0.9 * 22, rel=0.1)


def test_steps_hide_more_with_prompts_and_with_larger_copies() -> None:
    rows = [row for card in ("a10", "gh200") for row in hidden_layers(card, SHAPE)]
    for row in rows:
        small, large = row.by_block
        assert 0 <= small <= large < SHAPE.num_layers
    for decodes, mixed in zip(rows[::2], rows[1::2], strict=True):
        assert mixed.step_s > decodes.step_s
        assert mixed.by_block >= decodes.by_block
    assert any(row.by_block[1] > row.by_block[0] for row in rows)
    assert layers_table(rows).count("\n") == 2 + 4


def test_prefilling_ahead_does_not_pay_for_the_memory_that_it_pins() -> None:
    known = AheadJob("equal", "a10", (), (2000, 400))
    changes = [
        *(ahead_change(known, rows, SHAPE) for rows in (18, 34)),
        ahead_change(AheadJob("not known", "a10", (), None, known=False), 20, SHAPE),
    ]
    assert [change.asked < 0 for change in changes[:2]] == [False, False]
    assert ahead_table(changes).count("\n") == 2 + 3


def test_jobs_are_the_same_every_time() -> None:
    for job in (long_rows, translations):
        assert (job(50).prompt_tokens == job(50).prompt_tokens).all()
        assert job(50).output_tokens.min() >= 1


def test_a_cell_says_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a handful of rows and a link as fast as memory, more rows side by side are worth streaming."""
    monkeypatch.setattr("offload_map.LINK_GB_PER_S", (3.0, 450.0))
    slow, fast = panel_map(Panel("a10", (1,), ("a10",)), SHAPE, block_tokens=256, least_rows=40)
    assert (slow.link_gb_per_s, fast.link_gb_per_s) == (3.0, 450.0)
    assert fast.mode == "stream"
    assert fast.change < -0.3
    assert slow.change > fast.change
    assert slow.change <= 0


def test_memory_pressure_costs_and_parking_saves_work() -> None:
    rows = pressure("a10", SHAPE, shares=(1.0, 0.2), rows=60)
    by_key = {(row.share, row.policy): row for row in rows}
    assert len(by_key) == 12
    assert by_key[0.2, "vllm-v0"].recomputed > by_key[1.0, "vllm-v0"].recomputed
    assert by_key[0.2, "vllm-v0"].makespan_s > by_key[1.0, "vllm-v0"].makespan_s
    assert by_key[0.2, "vasuki, park"].recomputed < by_key[0.2, "vasuki, none"].recomputed / 10
    assert all(0 <= row.hidden <= 1 for row in rows)
    table = pressure_table(rows)
    assert table.count("\n") == 4
    assert "a10 | 20%" in table


def row(
    policy: str, makespan_s: float, share: float = 1.0, mode: OffloadMode = "none", hidden: float = 1.0
) -> Pressure:
    return Pressure("a10", share, policy, mode, makespan_s, 0.0, 0, 1.0, hidden)


def test_missed_targets_are_named() -> None:
    fixed = [row(f"vasuki, {mode}", seconds) for mode, seconds in (("none", 10), ("park", 9), ("stream", 12))]
    good = targets([*fixed, row("vasuki, auto", 9.1, mode="park", hidden=0.99)])
    assert good["within_2_percent_of_best_fixed"] == good["cases"] == 1
    assert good["auto_hides_95_percent"] == good["auto_moves"] == 1
    assert good["missed"] == []
    bad = targets([*fixed, row("vasuki, auto", 10, mode="park", hidden=0.5)])
    assert bad["within_2_percent_of_best_fixed"] == bad["auto_hides_95_percent"] == 0
    assert bad["missed"] == ["a10 at 100%: +11.1%", "a10 at 100%: 50% hidden"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_is_drawn(tmp_path: Path, suffix: str) -> None:
    points: list[tuple[float, OffloadMode, float]] = [
        (6.0, "none", 0.0),
        (25.0, "park", -0.02),
        (450.0, "stream", -0.3),
    ]
    maps = [
        [Cell(panel.card, rate, gib, mode, change, 0.0) for gib in panel.kv_gib for rate, mode, change in points]
        for panel in PANELS
    ]
    marks = {card: card_mark(card, SHAPE) for panel in PANELS for card in panel.marked}
    figure = tmp_path / f"map.{suffix}"
    draw(maps, marks, figure)
    assert figure.stat().st_size > 10_000
    if suffix == "svg":
        text = figure.read_text(encoding="utf-8")
        assert all(word in text for word in ("S −30%", "P −2%", "GH200", "RTX 4090"))
