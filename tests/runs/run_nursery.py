"""Runs `vasuki run` many times, each in a fork of a process that has imported everything, so that a run takes a second.

Each line of stdin is an order: a job, the phase and the moment in it at which a clock goes off, and what happens then.
The answer is how the run ended. What it says goes to the file `stderr` in its job's folder.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hands import HANDS, counting, lay_hands

PHASES = {  # what a run calls there, how often at least, and about how long the phase takes from there on
    "load": ("vasuki.hf.loading.load_model:load_model", 1, 0.3),
    "measure": ("vasuki.runs.workers.device:placed_as_loaded", 1, 0.1),
    "plan": ("vasuki.runs.placement:make_plan", 1, 0.1),
    "prompts": ("vasuki.io.input.tokenised:PromptTokenizer._tokenise", 1, 0.05),
    "decodes": ("vasuki.io.output.trace:TraceWriter.record", 12, 0.02),
    "journal": ("vasuki.io.output.journal:Journal.write", 3, 0.002),
    "commit": ("vasuki.io.output.parts:PartWriter._commit", 3, 0.01),
    "last rows": ("vasuki.io.output.sink:RowSink.close", 1, 0.01),
    "manifest": ("vasuki.io.output.output_folder:OutputFolder.finish", 1, 0.02),
}
MOST_CPU_S = 60  # then a run is killed: it would not end


@dataclass(frozen=True)
class Order:
    """A run, and what happens to it. Without a phase it happens at once."""

    job: str
    event: str = "nothing"
    phase: str = ""
    entries: int = 1  # the clock starts when the phase is entered for this many times
    delay_s: float = 0.0
    amount: int = 0  # of what the event needs
    options: tuple[str, ...] = ()  # of the command line
    command: str = "run"
    most_wall_s: float = 120.0  # then it is killed: it only waits


class Ending(NamedTuple):
    """How a run ended, and what it took."""

    code: int  # a signal's number negated
    cpu_s: float
    peak_bytes: int  # of resident memory, that of all that the fork shares included
    hung: bool = False  # it was killed, as it did not end by itself


def kill(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(order: Order) -> None:
    """Do nothing for a number of seconds."""
    time.sleep(order.amount)


def hang_up(order: Order) -> None:
    """As when the terminal is closed."""
    os.kill(os.getpid(), signal.SIGHUP)


def terminate(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_A_LINE = 400  # bytes


def limit_files(order: Order) -> None:
    """No file can be written beyond a number of bytes, as on a full disk. What the run says is in a file, too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_A_LINE + order.amount, resource.RLIM_INFINITY))


def fill_disk(order: Order) -> None:
    """Leave a number of bytes free where the output is."""
    folder = Path(order.job).parent / "out"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
    (folder / "ballast").write_bytes(b"\0" * max(0, free - order.amount))


def make_read_only(order: Order) -> None:
    set_read_only(Path(order.job).parent / "out", True)


def limit_handles(order: Order) -> None:
    """Allow a number of open files more than now, and one with which Python reads what it is to run."""
    most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1 + order.amount
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def turn_clock_back(order: Order) -> None:
    """To 1970, or from now on each look at the wall clock is a minute before the last one."""
    now_s, looks = 1e6 if order.amount else time.time(), iter(range(1, 1_000_000))
    time.time = lambda: now_s - 60.0 * next(looks)
    time.time_ns = lambda: int(time.time() * 1e9)


EVENTS: dict[str, Callable[[Order], None]] = {
    "nothing": lambda order: None,
    "kill": kill,
    "hang_up": hang_up,
    "terminate": terminate,
    "limit_files": limit_files,
    "sleep": sleep,
    "fill_disk": fill_disk,
    "make_read_only": make_read_only,
    "limit_handles": limit_handles,
    "turn_clock_back": turn_clock_back,
    **dict.fromkeys(HANDS, lambda order: lay_hands(Path(order.job).parent, order.event, order.amount)),
}


def set_read_only(folder: Path, is_so: bool) -> bool:
    """Let nobody write to a folder, or let them again. Root heeds no permissions, so it needs a file system that knows
    immutable folders. Returns whether that could be done."""
    if os.geteuid():
        folder.chmod(0o555 if is_so else 0o755)
        return True
    done = subprocess.run(["chattr", "+i" if is_so else "-i", folder], capture_output=True, check=False)
    return done.returncode == 0


class Nursery:
    """The process that forks runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, order: Order) -> int:
        """Carry out an order. Returns the run's exit code, or the negated number of the signal that ended it."""
        ending = self.watch(order)
        assert not ending.hung, (Path(order.job).parent / "stderr").read_text()
        return ending.code

    def watch(self, order: Order) -> Ending:
        """Carry out an order. Returns how the run ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(order)), file=self._process.stdin, flush=True)
        return Ending(*json.loads(self._process.stdout.readline()))


@contextmanager
def open_nursery() -> Iterator[Nursery]:
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nursery(process)


def serve() -> None:
    """Fork a run for each order on stdin. One that takes longer is killed, and leaves word of where it hung."""
    # The children find all of this imported: it takes a run five times as long as the rest of what it does.
    import transformers

    from vasuki.base import commits

    _ = transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast  # which it imports when they are asked for

    commits.COMMIT_S = 0.02  # so that there are several commits in a second
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the tests' parent may ignore, as nohup does
    for line in sys.stdin:
        order = Order(**json.loads(line))
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(0.8 * order.most_wall_s)
            os._exit(run(order))
        ended = os.pidfd_open(child)
        hung = not select.select([ended], [], [], order.most_wall_s)[0]
        os.close(ended)
        if hung:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        ending = Ending(code, cpu_s, used.ru_maxrss * 1024, hung)
        print(json.dumps(ending), flush=True)


def run(order: Order) -> int:
    """Run a job in this process. Returns the exit code; 70 for a traceback."""
    import traceback

    from vasuki.commands.cli import main

    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, resource.RLIM_INFINITY))
    os.chdir(Path(order.job).parent)  # an order may name any output
    for stream, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(order.job).parent / name, "w") as said:
            os.dup2(said.fileno(), stream)
    on_entry("manifest", counting.set)
    if order.phase:
        start_clock(order)
    else:
        EVENTS[order.event](order)
    try:
        main([order.command, order.job, *(["--quiet"] if order.command == "run" else []), *order.options])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def start_clock(order: Order) -> None:
    """Let the event happen so long after the run has entered the phase."""
    entered = itertools.count(1)

    def enter() -> None:
        if next(entered) == order.entries:
            threading.Timer(order.delay_s, EVENTS[order.event], [order]).start()

    on_entry(order.phase, enter)


def on_entry(phase: str, act: Callable[[], None]) -> None:
    """Let a run do something whenever it enters the phase."""
    place, _, _ = PHASES[phase]
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    wrapped = getattr(owner, name)

    def entering(*arguments: Any, **options: Any) -> Any:
        act()
        return wrapped(*arguments, **options)

    setattr(owner, name, entering)


if __name__ == "__main__":
    serve()
