"""File systems of fsspec's, such as the Hugging Face hub (`hf://`), which raise OSErrors as pyarrow's do.

By themselves they let through what their HTTP client raises, which is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

from vasuki.base.errors import one_line


def file_system_of(url: str) -> tuple[Any, str]:
    """`pyarrow.fs.FileSystem.from_uri`, for `hf://` and `fsspec+...://`, which older pyarrow does not know. Raises
    OSError or ValueError."""
    from fsspec.core import url_to_fs  # few jobs need it

    with _as_os_errors(""):
        found, path = url_to_fs(url.removeprefix("fsspec+"))
        return fs.PyFileSystem(fs.FSSpecHandler(_Translated(found))), path


class _Translated:
    """A file system, or a file of it, whose methods raise no other errors."""

    def __init__(self, inner: Any, endpoint: str = "") -> None:
        self._inner = inner
        self._endpoint = endpoint or getattr(inner, "endpoint", "")  # that of a hub

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._translated(value) if callable(value) else value

    def _translated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with _as_os_errors(self._endpoint):
                result = method(*arguments, **options)
            return _Translated(result, self._endpoint) if hasattr(result, "seek") else result

        return call


@contextmanager
def _as_os_errors(endpoint: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if error.__cause__ is None:
            raise
        raise OSError(one_line(error)) from None  # more than a file is missing: the repository, or the right to see it
    except (OSError, ValueError):
        raise
    except Exception as error:
        words = one_line(error) or type(error).__name__
        raise OSError(f"{endpoint} cannot be reached: {words}" if endpoint else words) from None
