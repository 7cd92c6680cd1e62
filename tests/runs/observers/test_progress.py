"""What a terminal shows while a job runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def test_a_log_says_again_and_again_how_far_a_long_phase_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_SLOW_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    with caplog.at_level(logging.INFO), progress.busy_if_slow("counting tokens") as far:
        wait_for(lambda: "counting tokens, 0 s" in caplog.text)
        far.share, far.words = 0.25, "240 rows"
        wait_for(lambda: "25 % of the work done; counting tokens, 240 rows, 0 s" in caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO), progress.busy_with("loading"):
        wait_for(lambda: len(caplog.records) > 1)
    assert caplog.messages[0] == "loading"


def test_a_terminal_shows_how_far_a_long_phase_is(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_SLOW_S", 0.01)
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return " 50% █████      counting tokens, 240 rows, 0 s" in shown

    with caplog.at_level(logging.INFO), progress.busy_if_slow("counting tokens") as far:
        far.share, far.words = 0.5, "240 rows"
        wait_for(is_shown)
    assert capsys.readouterr().err.endswith("\x1b[2K")


def test_a_short_phase_is_not_named(
    columns: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SLOW_S", 60.0)
    with caplog.at_level(logging.INFO), progress.busy_if_slow("counting tokens"):
        pass
    assert "counting" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "terminal_width", lambda: None)
    with caplog.at_level(logging.INFO), progress.busy_if_slow("counting tokens"):
        pass
    assert not caplog.records


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
