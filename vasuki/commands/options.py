"""Options that several commands share; those that belong together come as one value.

on_market    prices, spot machines, interruptions, boot: a `Market`
measured     metrics: what opens the place that a run counts into
speaking     --quiet and --log-format: logs are set up, and the command is told whether to be quiet
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vasuki.base.logs import set_up_logs
from vasuki.base.units import seconds_of

if TYPE_CHECKING:
    from vasuki.runs.observers.metrics import Metrics

_LONGEST_S = 1e6

F = TypeVar("F", bound=Callable[..., Any])


def takes(*options: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator for a command with these options, in this order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def seconds(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """A callback: seconds that a command may wait."""
    if value is not None and not 0 <= value <= _LONGEST_S:  # nor what is no number
        raise click.BadParameter(f"must be from 0 to {_LONGEST_S:g}")
    return value


def time_of(context: click.Context, option: click.Parameter, value: str | None) -> float:
    """A callback: a time such as 5h45m, in seconds; infinite where none is given."""
    try:
        return math.inf if value is None else seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def deadline_of(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """A callback: a time after now, in seconds."""
    seconds = time_of(context, option, value)
    if not seconds:
        raise click.BadParameter("give a time after now, such as 6h")
    return None if value is None else seconds


SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Set a key of the job file. Repeatable."
)
_QUIET = click.option("--quiet", is_flag=True, help="Show no progress, only warnings and errors.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
GPUS = click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NAME_OR_PATH[:COUNT]",
    help="Card or profile, such as a10, a10:4 or a10:4+a40:2. Repeatable. Default: this machine.",
)
GPU = click.option("--gpu", default=None, metavar="NAME_OR_PATH", help="Plan with this hardware profile.")
PRICES = click.option(
    "--price", "prices", multiple=True, metavar="CARD=AMOUNT", help="What an hour of a card costs. Repeatable."
)
TENSOR = click.option(
    "--tensor-parallel-size", "--tp", "tensor", default=1, metavar="N", help="GPUs that share each layer."
)
SPOT = click.option("--spot", "on_spot", is_flag=True, help="Count on spot machines, which may be taken away.")
SPOT_PRICES = click.option(
    "--spot-price", "spot_prices", multiple=True, metavar="CARD=AMOUNT", help="What an hour costs on spot. Repeatable."
)
INTERRUPTIONS = click.option(
    "--interruptions",
    multiple=True,
    metavar="CARD=RATE",
    help="How many times an hour a machine is taken away. Repeatable.",
)
BOOT = click.option(
    "--boot",
    "boot_s",
    default=None,
    callback=lambda context, option, value: None if value is None else time_of(context, option, value),
    metavar="TIME",
    help="How long a machine takes to start, also after an interruption. Default: as its profile says.",
)
DEADLINE = click.option(
    "--deadline",
    "deadline_s",
    default=None,
    callback=lambda context, option, value: deadline_of(context, option, value),
    metavar="TIME",
    help="When the job has to be done, such as 6h from now. A run warns if it will be late.",
)
_LOG_FORMAT = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of log lines on stderr.",
)
SHARD = click.option("--shard", default="0/1", metavar="I/N", help="Run part I of N equal parts, counted from 0.")


TRUST = click.option(
    "--trust-remote-code",
    "trusts_code",
    is_flag=True,
    envvar="VASUKI_TRUST_REMOTE_CODE",
    help="Let model.trust_remote_code run the model's own code.",
)


_METRICS = click.option(
    "--metrics", "metrics_file", default="", metavar="FILE", help="Write metrics to this file, as OpenMetrics."
)
_METRICS_PORT = click.option(
    "--metrics-port",
    "metrics_address",
    default="",
    metavar="[HOST:]PORT",
    help="Serve metrics over HTTP; without HOST, to this machine only.",
)


def _metrics(path: str, address: str) -> AbstractContextManager[Metrics | None]:
    if not (path or address):
        return nullcontext()
    from vasuki.runs.observers.metrics import Metrics

    return Metrics(path, address)


def on_market(*taken: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that reads these options into `market`. Raises JobFileError for what is no figure."""

    def apply(function: F) -> F:
        @functools.wraps(function)
        def command(
            *arguments: Any,
            prices: tuple[str, ...] = (),
            on_spot: bool = False,
            spot_prices: tuple[str, ...] = (),
            interruptions: tuple[str, ...] = (),
            boot_s: float | None = None,
            **others: Any,
        ) -> None:
            from vasuki.runs.renting import market_of

            market = market_of(prices, on_spot, spot_prices, interruptions, boot_s)
            function(*arguments, market=market, **others)

        read: Any = command
        return takes(*taken)(read)

    return apply


def measured(function: F) -> F:
    """A decorator that passes on `metrics`, which opens what the options name."""

    @functools.wraps(function)
    def command(*arguments: Any, metrics_file: str, metrics_address: str, **others: Any) -> None:
        function(*arguments, metrics=functools.partial(_metrics, metrics_file, metrics_address), **others)

    read: Any = command
    return takes(_METRICS, _METRICS_PORT)(read)  # type: ignore[no-any-return]


def speaking(function: F) -> F:
    """A decorator that sets up logs before the command begins, and passes on `quiet`."""

    @functools.wraps(function)
    def command(*arguments: Any, quiet: bool, log_format: str, **others: Any) -> None:
        set_up_logs(quiet, log_format)
        function(*arguments, quiet=quiet, **others)

    read: Any = command
    return takes(_QUIET, _LOG_FORMAT)(read)  # type: ignore[no-any-return]


def with_gpu(overrides: tuple[str, ...], gpu: str | None) -> tuple[str, ...]:
    """Overrides of a job, and the profile to plan with."""
    return overrides if gpu is None else (*overrides, f"plan.gpu={gpu}")
