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
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
    if os.path.isabs(os.path.expanduser("~")):
        yield
        return
    with ExitStack() as stack:
        try:
            os.environ["HOME"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="vasuki-home-"))
        except OSError:
            os.environ["HOME"] = _NOWHERE
        log.warning("this user has no home folder (HOME): what is measured and compiled is not kept for the next run")
        try:
            yield
        finally:
            del os.environ["HOME"]
