"""What a terminal shows while a job runs."""

from __future__ import annotations

import logging

import pytest
from tqdm import tqdm

from vasuki.base import logs
from vasuki.runs.observers import progress


@pytest.fixture(params=[40, 80])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A terminal so wide."""
    for module in (logs, progress):
        monkeypatch.setattr(module, "terminal_width", lambda: request.param)
    return int(request.param)


def test_lines_break_between_words(columns: int) -> None:
    text = "vasuki: " + "input.path names a folder that holds no Parquet file " * 4
    lines = logs.fitted(text, indent=8).splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == text.strip()


def test_a_file_gets_whole_lines() -> None:
    assert logs.fitted("word " * 100, indent=8) == "word " * 100


def test_the_bar_drops_words_that_have_no_room(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    bar = tqdm(total=1.0, bar_format="{percentage:3.0f}% {bar:10} {desc}", ncols=columns)
    state = ["prompts: 12.3 s left", "1,000/2,000 rows", "12,345 tokens/s", "120 running", "KV 12 %"]
    progress.StatusLine._draw(bar, 0.5, state)
    bar.close()
    last = capsys.readouterr().err.split("\r")[-1].strip()
    assert len(last) <= columns
    assert last.startswith("50%")
    assert last.rpartition(", ")[2] in state or last.endswith(state[0])  # nothing is cut within


def test_a_phase_is_named_before_it_begins(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with progress.busy_with("loading models/dates"):
        pass
    shown = capsys.readouterr().err
    assert "loading models/dates, 0 s" in shown
    assert shown.endswith("\x1b[2K")  # and is gone afterwards
    monkeypatch.setattr(progress, "terminal_width", lambda: None)
    with caplog.at_level(logging.INFO), progress.busy_with("loading models/dates"):
        assert "loading models/dates" in caplog.text
