"""The command line.

Commands import what they need when they run, so that `--help` is instant and planning needs no torch.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vasuki.base.errors import Interrupted, JobFileError, VasukiError, one_line
from vasuki.base.home import some_home
from vasuki.base.logs import asks_for_json, is_json, last_words, log, set_up_logs, tell
from vasuki.base.streams import is_read, take_streams
from vasuki.base.units import bytes_text, plural
from vasuki.base.urls import without_keys
from vasuki.base.version import VERSION
from vasuki.commands.options import (
    BOOT,
    DEADLINE,
    GPU,
    GPUS,
    INTERRUPTIONS,
    JSON,
    PRICES,
    SET,
    SHARD,
    SPOT,
    SPOT_PRICES,
    TENSOR,
    TRUST,
    measured,
    on_market,
    seconds,
    speaking,
    takes,
    time_of,
    with_gpu,
)
from vasuki.runs.signals import StopSignals

if TYPE_CHECKING:
    from vasuki.runs.observers.metrics import Metrics
    from vasuki.runs.renting import Market


class _Commands(click.Group):
    """Ends a command with one line and the error's exit code, never with a traceback, unless the error is ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        take_streams()
        if asks_for_json(args):  # what is wrong with the arguments is told as JSON too
            set_up_logs(quiet=False, log_format="json")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if sys.flags.optimize > 1:
            _fail("without docstrings transformers loads no model: unset PYTHONOPTIMIZE, or python -OO", 2)
        try:
            with StopSignals(), some_home():
                result = super().invoke(ctx)
            is_read()  # a reader that has gone is content
            return result
        except VasukiError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("stopped by a signal; run the same command again to go on", Interrupted.exit_code)
        except click.ClickException as error:
            if not is_json():
                raise
            _fail(error.format_message(), error.exit_code)
        except Exception as error:
            if what := _lacking(error):
                _fail(what, JobFileError.exit_code)
            if not is_json():
                raise
            log.exception("a bug of vasuki", extra={"more": {"exit_code": VasukiError.exit_code}})
            sys.exit(VasukiError.exit_code)


def _lacking(error: Exception) -> str:
    """What this process has too little of; empty for a bug of ours."""
    most_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    most = "" if most_bytes == resource.RLIM_INFINITY else f"; it may use {bytes_text(most_bytes)} (ulimit -v)"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return "there is no folder for temporary files: set TMPDIR to one that can be written to"
    if isinstance(error, MemoryError):
        return f"memory ran out{most}"
    if isinstance(error, ImportError) and not (error.name or "").startswith("vasuki"):
        return f"a package cannot be loaded: {one_line(error)}{most}"
    return ""


def _fail(message: str, exit_code: int) -> NoReturn:
    last_words(message, exit_code)
    sys.exit(exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION)
def main() -> None:
    """Run an offline LLM batch as fast and as cheaply as the hardware allows, and predict time and cost beforehand.

    \b
    vasuki init demo --example dates              a job, its prompts and a small model to try
    vasuki plan demo/job.yaml                     how long will it take, and what will it cost?
    vasuki run demo/job.yaml                      prompts in, answers out
    vasuki report demo/out                        how long did it take, and what did it cost?
    """


@main.command()
@click.argument("job_file", metavar="JOB")
@takes(SET, TRUST, GPU, SHARD, JSON)
@speaking
@measured
@click.option("--fresh", is_flag=True, help="Delete what earlier runs of this job wrote, and start over.")
@click.option("--retry-errors", "retries_errors", is_flag=True, help="Run rows that failed once more.")
@click.option(
    "--max-time",
    "max_time_s",
    default=None,
    callback=time_of,
    metavar="TIME",
    help="Stop after this long, such as 5h45m, with exit code 75. The same command goes on.",
)
@DEADLINE
@click.option(
    "--replicas",
    default=None,
    metavar="auto|N",
    help="Share the job among N GPUs, or N groups of a CPU's cores; auto: among all GPUs.",
)
@click.option(
    "--on",
    "cluster",
    default=None,
    metavar="ray|ray://HOST:PORT",
    help="Run on a Ray cluster: the current one, or the one at this address.",
)
def run(
    job_file: str,
    overrides: tuple[str, ...],
    trusts_code: bool,
    shard: str,
    quiet: bool,
    as_json: bool,
    metrics: Callable[[], AbstractContextManager[Metrics | None]],
    gpu: str | None,
    fresh: bool,
    retries_errors: bool,
    max_time_s: float,
    deadline_s: float | None,
    replicas: str | None,
    cluster: str | None,
) -> None:
    """Run a job, or continue it where the last run stopped.

    \b
    Example:  vasuki run my-job/job.yaml --set sampling.max_tokens=64
    """
    from vasuki.base.errors import JobFileError
    from vasuki.base.job_file import load_job
    from vasuki.report import summary_lines
    from vasuki.runs.options import RunOptions
    from vasuki.runs.run import run_job

    card, colon, number = (gpu or "").rpartition(":")
    if colon and number.isdecimal():
        raise JobFileError(f"--gpu {gpu}: a run takes cards that are here; write --gpu {card} --replicas {number}")
    if replicas is not None:
        overrides = (*overrides, f"engine.replicas={replicas}")
    job = load_job(job_file, with_gpu(overrides, gpu), trusts_code)
    due_s = math.inf if deadline_s is None else deadline_s
    with metrics() as counted:
        options = RunOptions(
            shard=shard,
            fresh=fresh,
            retries_errors=retries_errors,
            quiet=quiet,
            max_time_s=max_time_s,
            deadline_s=due_s,
            cluster=cluster,
            metrics=counted,
        )
        outcome = run_job(job, options)
    if as_json:
        click.echo(json.dumps(outcome.manifest.to_dict()))
    elif not quiet:
        tell(summary_lines(outcome.manifest))
    outcome.raise_for_errors()


def _emit(to_stdout: bool) -> Callable[[dict[str, Any]], None]:
    def emit(line: dict[str, Any]) -> None:
        if to_stdout:
            from vasuki.io.values import json_text

            try:
                print(json_text(line), flush=True)
            except BrokenPipeError:
                raise Interrupted("nobody reads the answers; run the same command again to go on") from None

    return emit


@main.command()
@click.argument("job_file", metavar="JOB")
@takes(SET, TRUST, GPU, JSON)
@speaking
@measured
@click.option(
    "--every",
    "every_s",
    default=10.0,
    callback=seconds,
    metavar="SECONDS",
    show_default=True,
    help="How often to look for files.",
)
@click.option(
    "--until-idle",
    "until_idle_s",
    type=float,
    callback=seconds,
    metavar="SECONDS",
    help="Stop when no file or row has come for this long.",
)
@click.option("--stdin", "from_stdin", is_flag=True, help="Take rows from stdin and print answers, as lines of JSON.")
def watch(
    job_file: str,
    overrides: tuple[str, ...],
    trusts_code: bool,
    quiet: bool,
    as_json: bool,
    metrics: Callable[[], AbstractContextManager[Metrics | None]],
    gpu: str | None,
    every_s: float,
    until_idle_s: float | None,
    from_stdin: bool,
) -> None:
    """Run a job on each file that arrives in its input folder. The model stays loaded.

    The answers to in/monday.parquet go to output.path/monday, which gets a file _SUCCESS when they are complete.
    Stop it with a signal (Ctrl-C); the next start continues what was under way. An input that is one JSONL file is
    followed as it grows, and with --stdin each line is answered by a line.

    \b
    Example:  vasuki watch my-job/job.yaml --set input.path=in --set output.path=out
              producer | vasuki watch my-job/job.yaml --stdin | consumer
    """
    from vasuki.base.job_file import load_job
    from vasuki.report import summary_lines
    from vasuki.runs.options import RunOptions
    from vasuki.runs.run import answer_rows
    from vasuki.runs.watch import Watched, is_followed, watch_job

    job = load_job(job_file, with_gpu(overrides, gpu), trusts_code)
    if from_stdin or is_followed(job):
        with metrics() as counted:
            pipe = sys.stdin.fileno() if from_stdin else None
            outcome = answer_rows(job, pipe, _emit(from_stdin), until_idle_s, RunOptions(quiet=quiet, metrics=counted))
        if as_json and not from_stdin:
            click.echo(json.dumps(outcome.manifest.to_dict()))
        elif not quiet:
            tell(summary_lines(outcome.manifest))
        outcome.raise_for_errors()
        return
    watched = Watched()
    try:
        with metrics() as counted:
            watch_job(job, watched, every_s, until_idle_s, RunOptions(quiet=quiet, metrics=counted))
    finally:
        if as_json:
            click.echo(json.dumps(watched.to_dict()))
    if watched.exit_code:
        in_vain = sum(file.exit_code > 0 for file in watched.files)
        _fail(f"{in_vain} of {len(watched.files)} files ended with an error", watched.exit_code)


@main.command()
@click.argument("job_or_lengths", metavar="JOB|LENGTHS.csv")
@takes(SET, TRUST, GPUS, TENSOR, DEADLINE, JSON)
@speaking
@on_market(PRICES, SPOT, SPOT_PRICES, INTERRUPTIONS, BOOT)
@click.option("--sort", type=click.Choice(["time", "cost"]), help="List the fastest or the cheapest card first.")
def plan(
    job_or_lengths: str,
    overrides: tuple[str, ...],
    trusts_code: bool,
    gpus: tuple[str, ...],
    tensor: int,
    deadline_s: float | None,
    market: Market,
    quiet: bool,
    as_json: bool,
    sort: str | None,
) -> None:
    """Predict how long a job will take and what it will cost.

    Also says how much time a better schedule could save at most, and compares cards.

    With --deadline it says which cards to rent and how many, of those that --gpu allows; with --spot it counts on
    machines that may be taken away, too.

    \b
    Example:  vasuki plan my-job/job.yaml
              vasuki plan my-job/job.yaml --gpu a10 --gpu h100 --price h100=2.10 --sort cost
              vasuki plan my-job/job.yaml --gpu a10:4 --gpu a40:2 --deadline 6h --spot
    """
    from vasuki.base.errors import JobFileError
    from vasuki.planner.renting import flip_of
    from vasuki.report.plan_table import plan_table, plan_verdict, sorted_plans
    from vasuki.report.renting_table import fleet_page
    from vasuki.runs.observers.progress import busy_if_slow
    from vasuki.runs.placement import replicas_elsewhere
    from vasuki.runs.planning import placements_of, plans_of
    from vasuki.runs.renting import fleet_choices, parse_fleets
    from vasuki.runs.workload import workload_of

    workload = workload_of(job_or_lengths, overrides, trusts_code)
    fleets = parse_fleets(gpus, tensor, replicas_elsewhere(workload.config))
    if market.on_spot or deadline_s is not None or any(len(fleet) > 1 for fleet in fleets):
        if sort:
            raise JobFileError("fleets come with the best first; leave --sort out")
        with busy_if_slow("planning"):
            choices = fleet_choices(workload, fleets, tensor, deadline_s, market)
        flip = flip_of(choices)
        found = [choice.to_dict() for choice in choices]
        found[0]["fleet"]["flips"] = flip and flip.to_dict()
        click.echo(json.dumps(found) if as_json else fleet_page(choices))
        return
    placements = market.placed(placements_of(fleets, workload))
    plans = sorted_plans(plans_of(workload, placements, tensor), sort)
    if as_json:
        click.echo(json.dumps([made.to_dict() for made in plans]))
    else:
        if verdict := plan_verdict(plans):
            click.echo(verdict + "\n")
        click.echo(plan_table(plans))


@main.command()
@click.argument("job_or_lengths", metavar="JOB|LENGTHS.csv")
@takes(SET, TRUST, GPUS, TENSOR, JSON)
@speaking
@on_market(SPOT, INTERRUPTIONS, BOOT)
@click.option("--seed", default=0, metavar="N", help="Seed of the random moments at which machines go.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Scheduling policy to simulate. Repeatable.")
@click.option(
    "--pipeline-parallel-size", "--pp", "pipeline", default=1, metavar="N", help="Stages that share the layers."
)
@click.option(
    "--data-parallel-size",
    "--dp",
    "data",
    type=int,
    metavar="N",
    help="Replicas that share the job. Default: engine.replicas.",
)
@click.option("--explain", is_flag=True, help="Show where the time of a typical step goes.")
def simulate(
    job_or_lengths: str,
    overrides: tuple[str, ...],
    trusts_code: bool,
    gpus: tuple[str, ...],
    market: Market,
    seed: int,
    quiet: bool,
    as_json: bool,
    policies: tuple[str, ...],
    tensor: int,
    pipeline: int,
    data: int | None,
    explain: bool,
) -> None:
    """Run a job in virtual time, also for machines you do not have.

    With `--set output.path=DIR` it writes run folders that `vasuki report` reads. A LENGTHS.csv has the columns
    num_prefill_tokens and num_decode_tokens, and may have arrived_at, in seconds, and those that input.priority and
    input.deadline name.

    \b
    Example:  vasuki simulate my-job/job.yaml --gpu a10 --gpu a40 --set output.path=compare
              vasuki simulate lengths.csv --set model.shape=gpt-3 --gpu a100 --tp 8 --pp 8
              vasuki simulate my-job/job.yaml --gpu a10:4+a40:2 --spot --seed 7
    """
    from vasuki.base.errors import JobFileError
    from vasuki.models.layout import Layout
    from vasuki.report.plan_table import bubble_table, plan_table, waiting_table
    from vasuki.report.renting_table import fleet_runs
    from vasuki.runs.observers.progress import busy_if_slow
    from vasuki.runs.placement import replicas_elsewhere
    from vasuki.runs.planning import explain_step, output_of, placements_of, simulate_workload
    from vasuki.runs.renting import parse_fleets, simulate_fleets
    from vasuki.runs.workload import workload_of

    if data is not None:
        overrides = (*overrides, f"engine.replicas={data}")
    workload = workload_of(job_or_lengths, overrides, trusts_code)
    fleets = parse_fleets(gpus, tensor * pipeline, replicas_elsewhere(workload.config))
    if market.on_spot or any(len(fleet) > 1 for fleet in fleets):
        if policies or pipeline > 1 or data is not None or explain or output_of(overrides):
            raise JobFileError(
                "--spot, or several kinds of cards: leave --policy, --pp, --dp, --explain and output.path out"
            )
        with busy_if_slow("simulating"):
            played = simulate_fleets(workload, fleets, tensor, market, seed)
        click.echo(json.dumps([each.to_dict() for each in played]) if as_json else fleet_runs(played))
        return
    if data is not None and any(number != data for fleet in fleets for number in fleet.values()):
        raise JobFileError("--dp and a number behind the card say the same; leave one of them out")
    placements = placements_of(fleets, workload)
    layouts = [Layout(tensor, pipeline, placement.replicas) for placement in placements]
    results = []
    with busy_if_slow("simulating") as far:
        for index, (placement, layout) in enumerate(zip(placements, layouts, strict=True)):
            far.share, far.words = index / len(placements), placement.profile.name
            results += simulate_workload(workload, [placement], policies, output_of(overrides), layout)
    if as_json:
        click.echo(json.dumps([result.to_dict() for result in results]))
        return
    click.echo(plan_table(result.plan for result in results))
    for more in (bubble_table(results), waiting_table(results)):
        if more:
            click.echo("\n" + more)
    if explain:
        for placement, layout in zip(placements, layouts, strict=True):
            click.echo("\n" + explain_step(workload, placement, layout))


@main.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1)
@JSON
@click.option("--html", "html_path", metavar="FILE", help="Write one self-contained page.")
@PRICES
@click.option("--history", "history_dir", metavar="DIR", help="Show all runs below DIR over time, as of a cron job.")
def report(
    run_dirs: tuple[str, ...],
    as_json: bool,
    html_path: str | None,
    prices: tuple[str, ...],
    history_dir: str | None,
) -> None:
    """Say which run was faster, and which cheaper.

    Compares real or simulated runs, and says at what price the cheaper one would change.

    \b
    Example:  vasuki report my-job/out
              vasuki report compare/a10 compare/a40 --html compare.html
              vasuki report --history out/nightly
    """
    from vasuki import report as reports
    from vasuki.base.errors import JobFileError
    from vasuki.machines.price import parse_prices

    if bool(run_dirs) == bool(history_dir):
        raise JobFileError("give run folders to compare, or --history DIR")
    if history_dir:
        if html_path:
            raise JobFileError("--html is for comparisons: a history is a table, or --json")
        past = reports.history(history_dir, parse_prices(prices))
        click.echo(json.dumps(past.to_dict()) if as_json else reports.history_table(past))
        return
    compared = reports.compare(reports.load_runs(run_dirs), parse_prices(prices))
    if html_path:
        reports.write_html(compared, html_path)
        click.echo(f"wrote {html_path}", err=True)
    click.echo(json.dumps(compared.to_dict()) if as_json else reports.terminal_table(compared))


@main.command()
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--to", "target", required=True, metavar="FILE", help="File to write, or a URL.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "jsonl", "csv", "openai"]),
    default="auto",
    show_default=True,
    help="openai: results as hosted batch APIs give them. auto: by the file's extension.",
)
@click.option("--partial", is_flag=True, help="Write what there is of an output that lacks rows.")
@JSON
def export(run_dir: str, target: str, form: str, partial: bool, as_json: bool) -> None:
    """Write the answers of a run into one file.

    They come in the order of the input, all of them, or with --partial those that are there. With --format openai each
    row becomes a chat completion under its custom_id; rows that failed go to a second file, FILE.errors.jsonl.

    \b
    Example:  vasuki export my-job/out --to answers.csv
              vasuki export my-job/out --to results.jsonl --format openai
    """
    from vasuki.base.errors import JobFileError
    from vasuki.io.export.writing import export_answers

    address = target.partition("?")[0] if "://" in target else target
    extension = address.rsplit(".", 1)[-1]
    if form == "auto" and extension not in ("jsonl", "csv"):
        raise JobFileError(f"--to {without_keys(target)}: end it in .jsonl or .csv, or say --format")
    chosen: Any = extension if form == "auto" else form
    written = export_answers(run_dir, target, chosen, partial)
    if as_json:
        click.echo(json.dumps(written))
    else:
        for file, lines in written.items():
            click.echo(f"wrote {plural(lines, 'line')} to {file}")


@main.command()
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--rows", default=20, show_default=True, metavar="N", type=click.IntRange(1), help="How many rows.")
@click.option("--all", "all_rows", is_flag=True, help="Every finished row.")
@takes(TRUST, JSON)
@speaking
def verify(run_dir: str, rows: int, all_rows: bool, trusts_code: bool, quiet: bool, as_json: bool) -> None:
    """Compute finished rows of a run again, each alone, and say whether they are equal to the bit.

    The rows are evenly spread over the input. Exits with 3 if one differs, or a part is damaged.

    \b
    Example:  vasuki verify my-job/out
              vasuki verify my-job/out --all
    """
    from vasuki.base.errors import TooManyRowErrors
    from vasuki.runs.verify import verify

    verified = verify(run_dir, math.inf if all_rows else rows, quiet, trusts_code)
    if as_json:
        click.echo(json.dumps(verified.to_dict()))
    else:
        for line in verified.lines():
            click.echo(line)
    if not verified.is_right:
        sys.exit(TooManyRowErrors.exit_code)


@main.command()
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--chrome", "target", required=True, metavar="FILE", help="File to write, in the Trace Event Format.")
def trace(run_dir: str, target: str) -> None:
    """Write a timeline of a run's steps.

    https://ui.perfetto.dev shows it, with copies and commits.

    \b
    Example:  vasuki trace my-job/out --chrome trace.json
    """
    from vasuki.report.chrome_trace import write_chrome_trace

    click.echo(f"wrote {plural(write_chrome_trace(run_dir, target), 'event')} to {target}")


@main.command()
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="What to measure."
)
@click.option("--model", default="", metavar="FOLDER_OR_SHAPE", help="Measure with steps of this model.")
@click.option("--name", default=None, help="Name of the profile. Default: made from the device's name.")
@click.option("--output", default=None, metavar="FILE", help="File to write. Default: where --gpu NAME finds it.")
@click.option("--quick", is_flag=True, help="Measure for seconds instead of minutes, less exactly.")
@JSON
def profile(device: str, model: str, name: str | None, output: str | None, quick: bool, as_json: bool) -> None:
    """Measure this machine, so that plans are based on it.

    Writes a hardware profile, which --gpu takes by its name.

    \b
    Example:  vasuki profile --quick
              vasuki profile --model llama-3-8b --name this-machine
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
@takes(SET, TRUST, JSON)
def check(job_file: str, overrides: tuple[str, ...], trusts_code: bool, as_json: bool) -> None:
    """Check a job without running it.

    Reads the job file, input, model and output folder, and shows the first prompt.

    \b
    Example:  vasuki check my-job/job.yaml
    """
    from vasuki.base.job_file import load_job
    from vasuki.commands.check import check_job

    findings = check_job(load_job(job_file, overrides, trusts_code))
    if as_json:
        click.echo(json.dumps(findings))
    else:
        for key, value in findings.items():
            click.echo(f"{key.replace('_', ' '):>14}  {value:,}" if isinstance(value, int) else f"{key:>14}  {value}")


@main.command()
@click.argument("folder", metavar="DIR")
@click.option("--model", metavar="PATH_OR_ID", help="A folder, or a Hugging Face id.")
@click.option("--input", "source", metavar="PATH", help="Where the rows are: a file, folder or glob.")
@click.option("--prompt", metavar="TEMPLATE", help="What is asked, with columns in braces. Default: a column of text.")
@click.option("--answer", metavar="FIELDS", help='Fields of every answer, such as "kind: [a, b], amount: number".')
@click.option("--example", type=click.Choice(["dates"]), help="Copy the demo instead: job, prompts and a small model.")
def init(
    folder: str, model: str | None, source: str | None, prompt: str | None, answer: str | None, example: str | None
) -> None:
    """Write a commented job file into DIR, with the JSON schema that editors check it by.

    In a terminal it asks for what no option says. Columns for the id and the prompt are found in the input; without
    one, a few prompts are written too.

    \b
    Example:  vasuki init my-job
              vasuki init letters --model models/small --input letters.parquet --answer "kind: [invoice, other]"
              vasuki init demo --example dates
    """
    from vasuki.commands.starter import Wanted, write_example, write_starter

    if example:
        paths = write_example(folder)
    else:
        questions = {
            "Model (a folder, or a Hugging Face id; empty for later)": model,
            "Input (a file, folder or glob; empty for three sample prompts)": source,
            "Answer (fields such as kind: [a, b], amount: number; empty for text)": answer,
        }
        asks = sys.stdin.isatty() and not any(questions.values())
        model, source, answer = (
            (click.prompt(question, default="", show_default=False) if asks else said) or ""
            for question, said in questions.items()
        )
        paths = write_starter(folder, Wanted(model, source, prompt or "", answer))
    for path in paths:
        click.echo(path)
    job = f"{folder.rstrip('/')}/job.yaml"
    click.echo(f"now: vasuki run {job}" if example or model else f"set model.path in {job}, then: vasuki run {job}")
