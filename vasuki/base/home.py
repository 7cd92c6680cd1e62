"""A home for users who have none, as in containers under any number, where libraries would make a folder named `~`; and
a name, which torch before 2.12 asks for as it is imported.
"""

from __future__ import annotations

import getpass
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

log = logging.getLogger(__name__)

_NOWHERE = os.devnull  # below which nothing can be made


@contextmanager
def some_home() -> Iterator[None]:
    """While it lasts, `~` is a folder: the user's own, else a temporary one, else none that could be written to.

    A user without a name is called by the number.
    """
    with ExitStack() as stack:
        if not _has_name():
            _set("USER", f"uid-{os.getuid()}", stack)
        if not os.path.isabs(os.path.expanduser("~")):
            try:
                home = stack.enter_context(tempfile.TemporaryDirectory(prefix="vasuki-home-"))
            except OSError:
                home = _NOWHERE
            _set("HOME", home, stack)
            log.warning(
                "this user has no home folder (HOME): what is measured and compiled is not kept for the next run"
            )
        yield


def _has_name() -> bool:
    try:
        return bool(getpass.getuser())
    except (KeyError, OSError):
        return False


def _set(name: str, value: str, stack: ExitStack) -> None:
    """Set a variable of the environment that has no value yet, until the stack is left."""
    os.environ[name] = value
    stack.callback(os.environ.pop, name, None)
