"""A file or folder, here or on an object store: path and file system in one value.

Local files are replaced in one motion (write a temporary file, fsync, rename, fsync the folder). Object stores publish
an object when its upload completes, so there a plain put already is all or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from vasuki.base.errors import Interrupted
from vasuki.base.files import FILE, FOLDER, kind_of, refuse_special
from vasuki.base.urls import without_keys
from vasuki.io.fsspec_files import file_system_of

_TEMPORARY = re.compile(r"\.vasuki-(.+)\.tmp")
_WRITTEN = ("part-0.parquet", "manifest.json", "trace.jsonl")
_MAGIC = re.compile(r"[*?\[]")
_PACKINGS = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "lz4": "lz4"}
_OPTIONS = re.compile(r"\?[a-z_]+=[^/*\[]*$")  # of a URL, such as ?region=eu-west-1


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file system. Nothing is touched until a method is called."""

    filesystem: Any  # pyarrow.fs.FileSystem
    path: str
    url: str  # as the user would write it, keys included

    @classmethod
    def parse(cls, text: str) -> Location:
        """A local path, or a URL such as `s3://bucket/key`, `gs://...`, `file:///...`.

        Raises:
            OSError, ValueError: no file system serves the URL, or its bucket cannot be reached.
        """
        if "://" not in text:
            path = os.path.abspath(os.path.expanduser(text))
            return cls(fs.LocalFileSystem(), path, text)
        is_of_others = text.startswith(("hf://", "fsspec+"))
        filesystem, path = file_system_of(text) if is_of_others else fs.FileSystem.from_uri(text)
        return cls(filesystem, path, text)

    def __truediv__(self, name: str) -> Location:
        if "://" not in self.url:
            return Location(self.filesystem, _join(self.path, name), _join(self.url, name))
        address, *options = self.url.split("?", 1)
        return Location(self.filesystem, _join(self.path, name), "?".join([_join(address, quote(name)), *options]))

    def __str__(self) -> str:
        return without_keys(self.url)

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def is_file(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.File)

    def is_folder(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.Directory)

    def exists(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound)

    @property
    def stamp(self) -> tuple[int, int]:
        """Return when a file was written last, in nanoseconds, and its size in bytes; zeros if there is none."""
        info = self.filesystem.get_file_info(self.path)
        return info.mtime_ns or 0, info.size or 0

    @property
    def real_path(self) -> str:
        """The path without links."""
        return os.path.realpath(self.path) if self.is_local else self.path

    def inside(self, folder: Location) -> str:
        """The path from a folder to this place; empty if it does not lie there."""
        top = folder.path.rstrip("/") + "/"
        return self.path.removeprefix(top) if self.path.startswith(top) else ""

    def overlaps(self, other: Location) -> bool:
        """Return whether one of two folders is the other, or lies in it, whatever links lead there."""
        if type(self.filesystem) is not type(other.filesystem):
            return False
        own, theirs = self.real_path + "/", other.real_path + "/"
        return own.startswith(theirs) or theirs.startswith(own)

    def children(self) -> list[Location]:
        """Files and folders directly below, by name. Empty when there is no such folder."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        names = sorted(info.base_name for info in self.filesystem.get_file_info(selector))
        return [self / name for name in names]

    def irregular_children(self) -> Iterator[tuple[Location, str]]:
        """What lies directly below and is no file, such as a link or a folder, and what it is."""
        if not self.is_local:
            selector = fs.FileSelector(self.path, allow_not_found=True)
            found = self.filesystem.get_file_info(selector)
            yield from ((self / info.base_name, FOLDER) for info in found if info.type == fs.FileType.Directory)
        elif os.path.lexists(self.path):
            with os.scandir(self.path) as entries:
                names = sorted(entry.name for entry in entries if not entry.is_file(follow_symlinks=False))
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another run deletes what it is done with
                    yield self / name, kind_of(os.lstat(_join(self.path, name)))

    def files_below(self) -> Iterator[Location]:
        """Every file in the folder and its subfolders, by path. Names that start with `.` or `_` are skipped.

        Links to folders are followed, but no folder is walked twice: one may lead back up.
        """
        if self.is_local:
            yield from (self / inner for inner in sorted(self._local_files_below()))
            return
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        for info in sorted(self.filesystem.get_file_info(selector), key=lambda info: info.path):
            inner = info.path[len(self.path.rstrip("/")) + 1 :]
            if info.type == fs.FileType.File and not any(map(_is_hidden, inner.split("/"))):
                yield self / inner

    def _local_files_below(self) -> Iterator[str]:
        walked: set[str] = set()
        for folder, subfolders, names in os.walk(self.path, onerror=_raise, followlinks=True):
            real = os.path.realpath(folder)
            if real in walked:
                subfolders.clear()
                continue
            walked.add(real)
            subfolders[:] = sorted(name for name in subfolders if not _is_hidden(name))
            for name in names:
                path = os.path.join(folder, name)
                if not _is_hidden(name) and os.path.isfile(path):
                    yield os.path.relpath(path, self.path)

    def make_folder(self) -> None:
        self.filesystem.create_dir(self.path, recursive=True)

    def refuse_unwritable(self) -> None:
        """Raises OSError where a folder could not be made, or files in it not be written, renamed and deleted.

        Only trying tells: permissions say little to root, or of a disk that is full.
        """
        if not self.is_local:
            probe = self / ".vasuki-check"
            probe.write_bytes(b"")
            probe.delete()
            return
        folder = self.path
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        with _naming(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".vasuki-", delete=False) as file:
            try:
                file.write(b"\0" * 4096)
                file.flush()
                os.rename(file.name, file.name + ".tmp")
            except BaseException:
                os.unlink(file.name)
                raise
            os.unlink(file.name + ".tmp")

    def refuse_fixed(self) -> None:
        """Raises OSError for a local file that could not be replaced: nothing may be renamed over it to try that."""
        if not self.is_local:
            return
        file, folder, user = os.lstat(self.path), os.stat(os.path.dirname(self.path)), os.geteuid()
        if folder.st_mode & stat.S_ISVTX and user not in (0, file.st_uid, folder.st_uid):
            raise OSError(errno.EPERM, f"{self.name} is another user's, in a folder where only owners replace files")
        may_write = user == 0 or (user == file.st_uid and file.st_mode & stat.S_IWUSR)
        if may_write and not os.access(self.path, os.W_OK, effective_ids=True):  # whatever permissions say
            raise OSError(errno.EPERM, f"{self.name} is immutable")

    def delete(self) -> None:
        """Remove a file; fine if it is already gone."""
        if self.exists():
            self.filesystem.delete_file(self.path)

    def open(self) -> Any:
        """The raw file as a seekable `pyarrow.NativeFile`."""
        self._refuse_special()
        return self.filesystem.open_input_file(self.path)

    def open_stream(self) -> IO[bytes]:
        """The file's content from the start, unpacked if its name ends in .gz, .bz2, .zst or .lz4."""
        self._refuse_special()
        packing = _PACKINGS.get(self.name.lower().rpartition(".")[2])
        return cast(IO[bytes], self.filesystem.open_input_stream(self.path, compression=packing))

    def read_bytes(self) -> bytes:
        self._refuse_special()
        with self.filesystem.open_input_stream(self.path, compression=None) as stream:
            return bytes(stream.read())

    def _refuse_special(self) -> None:
        if self.is_local:
            refuse_special(self.path)

    def sibling(self, name: str) -> Location:
        """The file of that name in the same folder."""
        folder, _, own = self.path.rpartition("/")
        address, *options = self.url.split("?", 1)
        url = "?".join([address.removesuffix(quote(own)).removesuffix(own) + name, *options])
        return Location(self.filesystem, f"{folder}/{name}", url)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[IO[bytes]]:
        """A file to write to, which takes the place of this one when it is whole. Raises OSError."""
        folder = os.path.dirname(self.path) if self.is_local else None
        with contextlib.ExitStack() as stack:
            with _naming(self.path):
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".vasuki-"))
            yield cast(IO[bytes], file)
            if self.is_local:
                file.flush()
                os.chmod(file.name, 0o666 & ~_umask())
                with _naming(self.path):
                    os.replace(file.name, self.path)
                open(file.name, "xb").close()  # which is deleted in its stead
            else:
                file.seek(0)
                with self.filesystem.open_output_stream(self.path) as stream:
                    shutil.copyfileobj(file, stream)

    def write_bytes(self, data: bytes | pa.Buffer) -> None:
        """Replace the file's content: readers see the old one or the new one, never a half."""
        if not self.is_local:
            with self.filesystem.open_output_stream(self.path) as stream:
                stream.write(data)
            return
        folder, name = os.path.split(self.path)
        temporary = os.path.join(folder, f".vasuki-{name}.tmp")
        try:
            with _naming(self.path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)  # of a killed run, or a link
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _fsync_folder(folder)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Lets an error name what people know of, in place of a temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _umask() -> int:
    """Return what permissions new files are not given: reading it is to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def name_of_temporary(name: str) -> str:
    """The file that `Location.write_bytes` was about to replace; empty if the name is not that of a temporary file."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else ""


def open_own(path: str, mode: str) -> IO[Any]:
    """Open a local file of ours. Raises OSError for a link, since what it leads to would be written over, and for a
    pipe, which waits for its other end."""
    return open(path, mode, opener=_open_own)


def _open_own(path: str, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        if (kind := kind_of(os.lstat(path))) != FILE:
            raise OSError(errno.EINVAL, f"{os.path.basename(path)} is {kind}", path)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # should it be put there just now


@contextlib.contextmanager
def writing(place: Location) -> Iterator[None]:
    """Around all that a run writes: disks fill up, folders vanish, networks fail, and the same command can go on later.

    Raises Interrupted for every OSError.
    """
    try:
        yield
    except FileNotFoundError:
        raise Interrupted(f"cannot write {place}: what lay there was removed while the job ran") from None
    except OSError as error:
        raise Interrupted(
            f"cannot write {place}: {error.strerror or error}; rows finished before it are kept"
        ) from None


def find_files(text: str) -> list[Location]:
    """The files that `text` names: a file, a folder (with its subfolders) or a glob (`*`, `?`, `[ab]`, `**`).

    Sorted by path. Hidden files and files that start with `_` are skipped unless they are named outright.
    """
    root, pattern = _split(text)
    found = {file.path: file for match in _expand(root, pattern) for file in _files_at(match)}
    return [found[path] for path in sorted(found)]


def would_find(text: str, folder: Location) -> bool:
    """Whether `find_files` finds what a run writes to a folder, there or not: its parts or what lies beside them."""
    root, pattern = _split(text)
    if type(root.filesystem) is not type(folder.filesystem) or root.is_file():
        return False
    top, path = root.real_path.rstrip("/") + "/", folder.real_path
    if not path.startswith(top):
        return False
    inner = path.removeprefix(top).split("/")
    return any(_matches(pattern, [*inner, name]) for name in _WRITTEN)


def _matches(pattern: list[str], path: list[str]) -> bool:
    """As `_expand` walks a glob, by names alone."""
    if not pattern:
        return not any(map(_is_hidden, path))
    if not path:
        return False
    (head, *rest), (name, *below) = pattern, path
    if head != "**":
        shown = not _is_hidden(name) or _is_hidden(head)
        return shown and fnmatch.fnmatchcase(name, head) and _matches(rest, below)
    return _matches(rest, path) or (not _is_hidden(name) and _matches(pattern, below))


def unreadable_name(path: str) -> str:
    """Why a file cannot be read by its name; empty if it can. Arrow takes names as UTF-8, file systems any bytes."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return f"the name of {shown(path)} is not UTF-8; rename the file"
    return ""


def shown(path: str) -> str:
    """The path as text that logs and JSON can hold, whatever bytes its names are of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def folder_of(text: str) -> Location:
    """The folder that `find_files` looks into, whether it is there or not. Raises ValueError for a file."""
    root, _ = _split(text)
    if root.is_file():
        raise ValueError(f"{text} is a single file")
    return root


def _split(text: str) -> tuple[Location, list[str]]:
    """Split a path into the folder to look in and the segments of the glob that follow."""
    address, options = text, ""
    if "://" in text and (found := _OPTIONS.search(text)):
        address, options = text[: found.start()], found[0]
    if not _MAGIC.search(address) or ("://" not in text and Location.parse(text).exists()):
        return Location.parse(text), []
    parts = address.split("/")
    first_magic = next(index for index, part in enumerate(parts) if _MAGIC.search(part))
    base = "/".join(parts[:first_magic])
    return Location.parse((base or ("/" if text.startswith("/") else ".")) + options), parts[first_magic:]


def _files_at(place: Location) -> list[Location]:
    return [place] if place.is_file() else list(place.files_below())


def _expand(place: Location, parts: list[str], above: tuple[str, ...] = ()) -> Iterator[Location]:
    """Walk a glob one path segment at a time, listing only the folders that can match.

    `above` are the folders on the way here: a link back to one of them is not followed.
    """
    if not parts:
        yield place
        return
    head, *rest = parts
    if not _MAGIC.search(head):
        if (place / head).exists():
            yield from _expand(place / head, rest)
        return
    if head == "**":
        yield from _expand(place, rest)
        if not rest:  # a folder stands for all files below it
            return
    above = (*above, place.real_path)
    for child in place.children():
        if _is_hidden(child.name) and not _is_hidden(head):
            continue
        if head == "**":
            if child.is_folder() and child.real_path not in above:
                yield from _expand(child, parts, above)
        elif fnmatch.fnmatchcase(child.name, head) and (not rest or child.is_folder()):
            yield from _expand(child, rest)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _join(base: str, name: str) -> str:
    return base.rstrip("/") + "/" + name


def _fsync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
