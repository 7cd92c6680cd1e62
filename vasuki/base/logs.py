"""What goes to stderr: lines for people, or one JSON object a line, keys of object stores left out. That holds for
summaries and last words too."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import sys
import textwrap
import uuid
from datetime import UTC, datetime
from itertools import pairwise

import click

from vasuki.base.urls import without_keys

log = logging.getLogger("vasuki")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry = {"time": time, "run_id": run_id(), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return without_keys(json.dumps(entry | getattr(record, "more", {})))


class _TextLines(logging.Formatter):
    """One line each: names of files and columns may hold any letter."""

    def format(self, record: logging.LogRecord) -> str:
        line = fitted(f"{self.formatTime(record, '%H:%M:%S')} {' '.join(record.getMessage().splitlines())}", indent=9)
        return without_keys(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


def set_up_logs(quiet: bool, log_format: str) -> None:
    """Send what this process logs to stderr, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format == "json" else _TextLines())
    loggers = [log]
    if log_format == "json":
        logging.captureWarnings(True)
        loggers.append(logging.getLogger("py.warnings"))
    for logger in loggers:
        logger.handlers[:] = [handler]
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
        logger.propagate = False


@functools.cache
def run_id() -> str:
    """The name of this process in logs, manifests and metrics: `VASUKI_RUN_ID`, by which a scheduler may know it, or a
    random one."""
    return os.environ.get("VASUKI_RUN_ID") or uuid.uuid4().hex[:12]


def asks_for_json(arguments: list[str]) -> bool:
    """Whether a command line asks for JSON logs, even if it is wrong otherwise."""
    return "--log-format=json" in arguments or ("--log-format", "json") in pairwise(arguments)


def is_json() -> bool:
    """Whether logs are JSON lines."""
    return any(isinstance(handler.formatter, _JsonLines) for handler in log.handlers)


def tell(lines: list[str]) -> None:
    """Show a summary."""
    for line in lines:
        if is_json():
            log.info("%s", line)
        else:
            click.echo(fitted(line, indent=7), err=True)


def last_words(message: str, exit_code: int) -> None:
    """Say why the process ends."""
    message = without_keys(" ".join(message.splitlines()))
    if is_json():
        log.error("%s", message, extra={"more": {"exit_code": exit_code}})
    else:
        click.echo(fitted(f"vasuki: {message}", indent=8), err=True)


def fitted(line: str, indent: int) -> str:
    """The line, broken between words where it is wider than a terminal. Files and pipes get it whole."""
    width = terminal_width()
    if width is None or len(line) <= width:
        return line
    gap = " " * indent
    return textwrap.fill(line, width, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False)


def terminal_width() -> int | None:
    """Columns of the terminal that stderr is; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None
