"""`python -m vasuki`."""

import os
import sys

from vasuki.base.errors import Interrupted
from vasuki.commands.cli import main

try:
    main()
except SystemExit as end:
    if end.code == Interrupted.exit_code:
        # After a signal that met it within `exec`, as imports use it, Python would kill itself instead.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Interrupted.exit_code)
    raise
