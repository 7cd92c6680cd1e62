"""A CUDA device without a card: tensors that have a shape, a type and a device, and no memory (torch's FakeTensorMode).

Operators check what they are given and say what they would return. One that needs what the device has computed raises,
and so does one whose tensors lie on different devices. Torch built for a CPU lacks nothing for that but the guard that
switches between devices, so one that does nothing is linked in.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { static NoOpDeviceGuardImpl<DeviceType::CUDA> guard; }
extern "C" void install() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&c10::impl::guard);
}
"""
_TORCH = Path(torch.__file__).parent


@functools.cache
def install_guard(compiler: str) -> None:
    """Make this process's torch take CUDA for a device on which nothing has to be switched."""
    if torch.version.cuda is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}"]
        subprocess.run([compiler, *options, str(source), "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library)).install()


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Tensors that are made within are fake."""
    with FakeTensorMode() as mode:
        yield mode


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are dispatched and compute or copy something: views and empty memory do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        output = func(*args, **(kwargs or {}))
        if _crosses(func, args, output) or not (func.is_view or name.split(".")[0] in _FREE):
            self.counts[name] += 1
        return output


_FREE = {
    "prim::device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "dropout",  # of models that are not trained: what it is given
    "_unsafe_view",
    "lift_fresh",
    "_reshape_alias",
}


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses copies between host and device, as a CUDA graph that is recorded does: it would replay the first one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _crosses(func, args, output):
            raise RuntimeError("operation not permitted when stream is capturing: a copy from or to the host")
        return output


def _crosses(func: Any, args: Any, output: Any) -> bool:
    """Whether an operator copies between devices."""
    source = {"to": 0, "_to_copy": 0, "copy_": 1}.get(func.overloadpacket.__name__)
    return source is not None and bool(args[source].device != output.device)
