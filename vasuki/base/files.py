"""What a path leads to. A pipe waits for its other end, and a device may have none: neither is a file to read whole."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
FILE, FOLDER = _KINDS[stat.S_IFREG], _KINDS[stat.S_IFDIR]


def kind_of(status: os.stat_result) -> str:
    """What lies there, in words."""
    return _KINDS[stat.S_IFMT(status.st_mode)]


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raises OSError for a pipe, a socket or a device, and where nothing is."""
    kind = kind_of(os.stat(path))
    if kind not in (FILE, FOLDER):
        raise OSError(errno.EINVAL, f"it is {kind}", os.fspath(path))


def read_short(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a file, or of what is piped in (`/dev/stdin`, `<(...)`). A named pipe that nobody writes to is empty,
    and not waited for.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than `most_bytes`, or not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has over {most_bytes:,} bytes")
    return content.decode()
