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

from vasuki.base.errors import Interrupted, VasukiError
from vasuki.commands.signals import StopSignals

_LONGEST_S = 1e6

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Ends a command with one line and the error's exit code, never with a traceback, unless the error is ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with StopSignals():
                return super().invoke(ctx)
        except VasukiError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("stopped by a signal; run the same command again to go on", Interrupted.exit_code)


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
_GPUS = click.option(
    "--gpu", "gpus", multiple=True, metavar="NAME_OR_PATH", help="Hardware profile, such as a10 or a40. Repeatable."
)
_GPU = click.option("--gpu", default=None, metavar="NAME_OR_PATH", help="Plan with this hardware profile.")
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


def _seconds(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= _LONGEST_S:  # nor what is no number
        raise click.BadParameter(f"must be from 0 to {_LONGEST_S:g}")
    return value


def _with_gpu(overrides: tuple[str, ...], gpu: str | None) -> tuple[str, ...]:
    return overrides if gpu is None else (*overrides, f"plan.gpu={gpu}")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vasuki")
def main() -> None:
    """Run an offline LLM batch as fast and cheaply as the hardware allows, and predict time and cost beforehand.

    \b
    vasuki plan jobs/quickstart.yaml --gpu a10 --gpu a40     what will it take, on which card?
    vasuki run jobs/quickstart.yaml                          prompts in, answers out
    vasuki report out/dates                                  what did it take?
    """


@main.command()
@click.argument("job_file", metavar="JOB")
@_options(_SET, _GPU, _SHARD, _QUIET, _JSON, _LOG_FORMAT)
@click.option("--fresh", is_flag=True, help="Delete what earlier runs of this job wrote, and start over.")
def run(
    job_file: str,
    overrides: tuple[str, ...],
    shard: str,
    quiet: bool,
    as_json: bool,
    log_format: str,
    gpu: str | None,
    fresh: bool,
) -> None:
    """Run a job, or go on with it where the last run ended.

    \b
    Example:  vasuki run jobs/quickstart.yaml --set sampling.max_tokens=64
    """
    _set_up_logs(quiet, log_format)
    from vasuki.base.config import load_job
    from vasuki.commands.run import run_job
    from vasuki.report import summary_lines

    outcome = run_job(load_job(job_file, _with_gpu(overrides, gpu)), shard=shard, fresh=fresh, quiet=quiet)
    if as_json:
        click.echo(json.dumps(outcome.manifest.to_dict()))
    elif not quiet:
        click.echo("\n".join(summary_lines(outcome.manifest)), err=True)
    outcome.raise_for_errors()


@main.command()
@click.argument("job_file", metavar="JOB")
@_options(_SET, _GPU, _QUIET, _JSON, _LOG_FORMAT)
@click.option(
    "--every",
    "every_s",
    default=10.0,
    callback=_seconds,
    metavar="SECONDS",
    show_default=True,
    help="Between two looks.",
)
@click.option(
    "--until-idle",
    "until_idle_s",
    type=float,
    callback=_seconds,
    metavar="SECONDS",
    help="End when no file comes for so long.",
)
def watch(
    job_file: str,
    overrides: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    log_format: str,
    gpu: str | None,
    every_s: float,
    until_idle_s: float | None,
) -> None:
    """Run a job on each file that arrives in its input folder. The model stays loaded.

    The answers to in/monday.parquet go to output.path/monday, which has a _SUCCESS when they are complete. A signal
    ends it; what was under way goes on when it is started again.

    \b
    Example:  vasuki watch jobs/quickstart.yaml --set input.path=in --set output.path=out
    """
    _set_up_logs(quiet, log_format)
    from vasuki.base.config import load_job
    from vasuki.commands.watch import Watched, watch_job

    watched = Watched()
    try:
        watch_job(load_job(job_file, _with_gpu(overrides, gpu)), watched, every_s, until_idle_s, quiet)
    finally:
        if as_json:
            click.echo(json.dumps(watched.to_dict()))
    if watched.exit_code:
        in_vain = sum(file.exit_code > 0 for file in watched.files)
        _fail(f"{in_vain} of {len(watched.files)} files ended with an error", watched.exit_code)


@main.command()
@click.argument("job_or_lengths", metavar="JOB|LENGTHS.csv")
@_options(_SET, _GPUS, _QUIET, _JSON, _LOG_FORMAT)
def plan(
    job_or_lengths: str,
    overrides: tuple[str, ...],
    gpus: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    log_format: str,
) -> None:
    """Say what a job will take and cost, and how much of that another schedule could save.

    \b
    Example:  vasuki plan jobs/quickstart.yaml --gpu a10 --gpu a40
              vasuki plan lengths.csv --set model.shape=llama-3-8b --gpu l4
    """
    _set_up_logs(quiet, log_format)
    from vasuki.commands.forecast import machines_of, plan_workload, planned
    from vasuki.commands.workload import workload_of
    from vasuki.report import summary_lines
    from vasuki.report.plan_table import plan_table

    workload = workload_of(job_or_lengths, overrides)
    plans = plan_workload(workload, machines_of(gpus, workload))
    if as_json:
        click.echo(json.dumps([made.to_dict() for made in plans]))
    else:
        click.echo(plan_table(plans))
        for made in plans:
            click.echo("\n".join([f"\n{made.gpu}", *summary_lines(planned(workload, made))]))


@main.command()
@click.argument("job_or_lengths", metavar="JOB|LENGTHS.csv")
@_options(_SET, _GPUS, _QUIET, _JSON, _LOG_FORMAT)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Scheduler to simulate. Repeatable.")
@click.option("--tensor-parallel-size", "--tp", "tensor", default=1, metavar="N", help="GPUs that share each layer.")
@click.option("--pipeline-parallel-size", "--pp", "pipeline", default=1, metavar="N", help="Stages of layers.")
@click.option("--data-parallel-size", "--dp", "data", default=1, metavar="N", help="Replicas that share the job.")
@click.option("--explain", is_flag=True, help="Say where a typical step's time goes.")
def simulate(
    job_or_lengths: str,
    overrides: tuple[str, ...],
    gpus: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    log_format: str,
    policies: tuple[str, ...],
    tensor: int,
    pipeline: int,
    data: int,
    explain: bool,
) -> None:
    """Run a job in virtual time on machines you do not have.

    With `--set output.path=DIR` it writes run folders that `vasuki report` reads.

    \b
    Example:  vasuki simulate lengths.csv --set model.shape=llama-3-8b --gpu a10 --gpu a40 --policy vasuki --policy vllm
              vasuki simulate lengths.csv --set model.shape=gpt-3 --gpu a100 --tp 8 --pp 8
    """
    _set_up_logs(quiet, log_format)
    from vasuki.commands.forecast import explain_step, output_of, profiles_of, simulate_workload
    from vasuki.commands.workload import workload_of
    from vasuki.models.layout import Layout
    from vasuki.report.plan_table import bubble_table, plan_table

    workload = workload_of(job_or_lengths, overrides)
    profiles = profiles_of(gpus, workload.config)
    layout = Layout(tensor, pipeline, data)
    results = simulate_workload(workload, profiles, policies, output_of(overrides), layout)
    if as_json:
        click.echo(json.dumps([result.to_dict() for result in results]))
        return
    click.echo(plan_table(result.plan for result in results))
    if bubbles := bubble_table(results):
        click.echo("\n" + bubbles)
    if explain:
        for profile in profiles:
            click.echo("\n" + explain_step(workload, profile, layout))


@main.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1)
@_JSON
@click.option("--html", "html_path", metavar="FILE", help="Write one self-contained page.")
@click.option("--price", "prices", multiple=True, metavar="NAME=PER_HOUR", help="Price of a card's hour. Repeatable.")
@click.option("--history", "history_dir", metavar="DIR", help="The runs of a cron job below DIR, over time.")
def report(
    run_dirs: tuple[str, ...],
    as_json: bool,
    html_path: str | None,
    prices: tuple[str, ...],
    history_dir: str | None,
) -> None:
    """Compare runs, real or simulated: which card was faster, which cheaper, at what price that flips.

    \b
    Example:  vasuki report out/a10 out/a40 --html compare.html
              vasuki report --history out/nightly
    """
    from vasuki import report as reports
    from vasuki.base.errors import JobFileError

    if bool(run_dirs) == bool(history_dir):
        raise JobFileError("give run folders to compare, or --history DIR")
    result: Any
    if history_dir:
        result = reports.history(history_dir, reports.parse_prices(prices))
        text, write = reports.history_table, reports.write_history_html
    else:
        result = reports.compare(reports.load_runs(run_dirs), reports.parse_prices(prices))
        text, write = reports.terminal_table, reports.write_html  # type: ignore[assignment]
    if html_path:
        write(result, html_path)
        click.echo(f"wrote {html_path}", err=True)
    click.echo(json.dumps(result.to_dict()) if as_json else text(result))


@main.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--model", default="", metavar="FOLDER_OR_SHAPE", help="Measure with this model's matrices.")
@click.option("--name", default=None, help="Name of the profile. Default: made from the device's.")
@click.option("--output", default=None, metavar="FILE", help="Default: where --gpu NAME finds it.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes, and coarser.")
@_JSON
def profile(device: str, model: str, name: str | None, output: str | None, quick: bool, as_json: bool) -> None:
    """Measure this machine and write its hardware profile.

    \b
    Example:  vasuki profile --model models/dates --name this-machine
    """
    from pathlib import Path

    from vasuki.hf.profiler import profile_machine
    from vasuki.machines.profile_files import user_profile_path
    from vasuki.machines.profile_writing import prepare_folder, write_profile
    from vasuki.models.config_json import shape_from_config
    from vasuki.models.named import named_shape
    from vasuki.report.profile_table import profile_table

    folder = Path(model) if model and Path(model).is_dir() else None
    shape = shape_from_config(folder) if folder else named_shape(model) if model else None
    if output:
        name = name or Path(output).stem

    def path_of(name: str) -> Path:
        return Path(output) if output else user_profile_path(name)

    prepare_folder(path_of(name or "profile"), name or "profile")
    measured = profile_machine(device, shape, name, quick, progress=True, folder=folder)
    path = path_of(measured.name)
    write_profile(measured, path)
    if as_json:
        click.echo(measured.model_dump_json())
    else:
        click.echo(profile_table(measured))
        click.echo(f"wrote {path}; use it with --gpu {measured.name if not output else path}", err=True)


@main.command()
@click.argument("job_file", metavar="JOB")
@_options(_SET, _JSON)
def check(job_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a job file, its input, model and output folder, without running anything.

    \b
    Example:  vasuki check jobs/quickstart.yaml
    """
    from vasuki.base.config import load_job
    from vasuki.commands.forecast import check_job

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
    from vasuki.commands.starter import write_starter

    for path in write_starter(folder):
        click.echo(path)
    click.echo(f"set model.path in {folder}/job.yaml, then: vasuki run {folder}/job.yaml")
