"""Every error a user can meet, with the exit code it ends the process with.

    VasukiError                 1   (never raised itself)
    ├── JobFileError            2   job.yaml or the command line is wrong
    ├── TooManyRowErrors        3   the output is complete, but too many rows failed
    ├── UnreadableError         4   something named in the job cannot be read
    │   ├── InputError              the input table
    │   ├── ModelError              the model folder, its tokenizer, or a feature the backend lacks
    │   └── ProfileError            the hardware profile
    ├── OutputInUse             5   the output folder is another's
    │   └── OutputLocked            a run holds it
    ├── Interrupted            75   stopped early, state kept: run the same command again
    │   └── OutOfMemory         2       the job asks for more memory than there is
    └── SchedulerStalled        1   nothing can run although work is left: a bug of ours

A message is one line that says what is wrong and what to do; it is printed as it stands, without a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\[errno -?\d+\] ", re.IGNORECASE)


class VasukiError(Exception):
    """Base of all errors that end a command with a message instead of a traceback."""

    exit_code = 1


class JobFileError(VasukiError):
    """The job file or the arguments are wrong."""

    exit_code = 2


class TooManyRowErrors(VasukiError):
    """More rows failed than `errors.max_fraction` allows. The output holds every row all the same."""

    exit_code = 3


class UnreadableError(VasukiError):
    """Input, model or profile cannot be read."""

    exit_code = 4


class InputError(UnreadableError):
    """The input table is missing, corrupt, lacks a column, or changed while it was read."""


class ModelError(UnreadableError):
    """The model cannot be loaded, or needs a feature that the chosen backend does not have."""


class ProfileError(UnreadableError):
    """The hardware profile is unknown or malformed."""


class OutputInUse(VasukiError):
    """Another run holds this output folder, or it belongs to a different job, or a simulation would replace it."""

    exit_code = 5


class OutputLocked(OutputInUse):
    """Another run holds this output folder now. It may be free later."""


class Interrupted(VasukiError):
    """Stopped by a signal, by time that is over, or by an output that cannot be written; finished rows are kept."""

    exit_code = 75
    goes_on = "run the same command again to go on"


class OutOfMemory(Interrupted):
    """Memory ran out in the smallest step too; finished rows are kept."""

    exit_code = JobFileError.exit_code
    goes_on = "they go on once the job takes less memory"


class SchedulerStalled(VasukiError):
    """Work is left but no step can be formed. Always a bug, never the user's doing."""


def one_line(error: Exception) -> str:
    """The text of another library's error on one line, without the error number that repeats its words."""
    return _NUMBER.sub("", " ".join(str(error).split()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
