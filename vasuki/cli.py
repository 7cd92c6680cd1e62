"""The command line.

Commands import what they need when they run, so that `--help` is instant and planning needs no torch.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from vasuki.errors import VasukiError

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Ends a command with one line and the error's exit code, never with a traceback, unless the error is ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VasukiError as error:
            _fail(str(error), error.exit_code)


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"vasuki: {message}", err=True)
    sys.exit(exit_code)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        return json.dumps(entry)


def _set_up_logs(quiet: bool, log_format: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(_JsonLines() if log_format == "json" else text)
    logger = logging.getLogger("vasuki")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False


_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a key of the job file. Repeatable."
)
_QUIET = click.option("--quiet", is_flag=True, help="No progress; warnings and errors only.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
_LOG_FORMAT = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Log lines on stderr."
)
_SHARD = click.option("--shard", default="0/1", metavar="I/N", help="Work on the I-th of N equal shares of the rows.")


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vasuki")
def main() -> None:
    """Finish an offline LLM batch first and cheapest, and know beforehand when and for how much.

    \b
    vasuki plan jobs/quickstart.yaml --gpu a10 --gpu a40     what will it take, on which card?
    vasuki run jobs/quickstart.yaml                          prompts in, answers out
    vasuki report out/dates                                  what did it take?
    """


@main.command()
@click.argument("job_file", metavar="JOB")
@_options(_SET, _SHARD, _QUIET, _JSON, _LOG_FORMAT)
@click.option("--fresh", is_flag=True, help="Delete what earlier runs of this job wrote, and start over.")
def run(
    job_file: str,
    overrides: tuple[str, ...],
    shard: str,
    fresh: bool,
    quiet: bool,
    as_json: bool,
    log_format: str,
) -> None:
    """Run a job, or go on with it where the last run ended.

    \b
    Example:  vasuki run jobs/quickstart.yaml --set sampling.max_tokens=64
    """
    _set_up_logs(quiet, log_format)
    from vasuki.config import load_job
    from vasuki.job import run_job

    outcome = run_job(load_job(job_file, overrides), shard=shard, fresh=fresh, quiet=quiet)
    if as_json:
        click.echo(json.dumps(outcome.manifest.to_dict()))
    elif not quiet:
        click.echo(outcome.summary(), err=True)
    outcome.raise_for_errors()


@main.command()
@click.argument("job_file", metavar="JOB")
@_options(_SET, _JSON)
def check(job_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a job file, its input, model and output folder, without running anything.

    \b
    Example:  vasuki check jobs/quickstart.yaml
    """
    from vasuki.config import load_job
    from vasuki.job import check_job

    findings = check_job(load_job(job_file, overrides))
    if as_json:
        click.echo(json.dumps(findings))
    else:
        for key, value in findings.items():
            click.echo(f"{key.replace('_', ' '):>14}  {value:,}" if isinstance(value, int) else f"{key:>14}  {value}")


@main.command()
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Write a commented job file and a few prompts into DIR, to start from.

    \b
    Example:  vasuki init my-job
    """
    from vasuki.starter import write_starter

    for path in write_starter(folder):
        click.echo(path)
    click.echo(f"set model.path in {folder}/job.yaml, then: vasuki run {folder}/job.yaml")
