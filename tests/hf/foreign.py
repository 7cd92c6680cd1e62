"""Kernels for a processor that this machine has not: a cross compiler makes them, an emulator runs them, and the tests
call them as if they were loaded here.

A call's arguments travel as bytes to a process in the emulator (`cpu/call_server.cpp`), and what it leaves comes back.
So it must be known how much memory lies behind an address: tensors say so when somebody asks where they lie.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import torch

from vasuki.hf.kernels import native
from vasuki.hf.kernels.levels import Level

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]
_SERVER = Path(__file__).parent / "cpu" / "call_server.cpp"
_INTEGERS = (ctypes.c_int64, ctypes.c_void_p)
_NONE = -1  # instead of a buffer


class Machine:
    """An emulated 64-bit ARM processor. To be closed.

    Args:
        folder: for the server.
    """

    def __init__(self, folder: Path) -> None:
        server = folder / "call_server"
        subprocess.run([COMPILER, "-O1", "-std=c++17", str(_SERVER), "-o", str(server), "-ldl"], check=True)
        command = [EMULATOR, "-L", SYSTEM, str(server)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._data_ptr, self._storages = torch.Tensor.data_ptr, dict[int, int]()
        self._watching = mock.patch.object(torch.Tensor, "data_ptr", self._watched_data_ptr())
        self._watching.start()

    def load(self, source_name: str, level: Level, flags: tuple[str, ...] = ()) -> Library:
        """What `native.load` does, for the emulated processor."""
        return Library(self, native.build(source_name, level, flags, COMPILER))

    def close(self) -> None:
        self._watching.stop()
        self._process.communicate()

    def call(self, library: Path, function: str, arguments: Arguments) -> int:
        """What the function returns, when all memory that it was given is as it left it."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(b"".join(map(_text, (str(library), function))) + arguments.packed())
        to.flush()
        (result,) = struct.unpack("<q", _read(back, 8))
        structures = {buffer for buffer, *_ in arguments.places}  # whose addresses mean nothing here
        for buffer, (address, size) in enumerate(arguments.buffers):
            left = _read(back, size)
            if buffer not in structures:
                ctypes.memmove(address, left, size)
        return int(result)

    def storage_of(self, address: int) -> tuple[int, int]:
        """Where the tensor's memory that an address lies in begins, and its bytes."""
        # Memory that is used is never newer than what is known of it; what was freed may lie below.
        for begin, size in reversed(self._storages.items()):
            if begin <= address < begin + size:
                return begin, size
        raise AssertionError(f"no tensor lies at {address:#x}")

    def _watched_data_ptr(self) -> Callable[[torch.Tensor], int]:
        def data_ptr(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self._storages.pop(storage.data_ptr(), None)
            self._storages[storage.data_ptr()] = storage.nbytes()
            return self._data_ptr(tensor)

        return data_ptr


class Library:
    """What stands for a `ctypes.CDLL`."""

    def __init__(self, machine: Machine, path: Path) -> None:
        self._machine, self._path = machine, path

    def __getattr__(self, name: str) -> Function:
        function = Function(self._machine, self._path, name)
        setattr(self, name, function)
        return function


class Function:
    """What stands for a function of such a library."""

    def __init__(self, machine: Machine, library: Path, name: str) -> None:
        self._machine, self._library, self._name = machine, library, name
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int

    def __call__(self, *args: Any) -> int:
        arguments = Arguments([], [], [], [])
        for kind, value in zip(self.argtypes, args, strict=True):
            arguments.add(kind, value, self._machine)
        return self._machine.call(self._library, self._name, arguments)


class Arguments(NamedTuple):
    """The arguments of a call, with the memory behind them.

    Attributes:
        buffers: where each lies here, and its bytes.
        places: buffer and offset where an address is to be written, and the buffer and offset that it is of.
        numbers: buffer and offset, or no buffer and a number.
        floats: which the function takes last.
    """

    buffers: list[tuple[int, int]]
    places: list[tuple[int, int, int, int]]
    numbers: list[tuple[int, int]]
    floats: list[float]

    def add(self, kind: Any, value: Any, machine: Machine) -> None:
        if kind is ctypes.c_float:
            self.floats.append(value)
        elif kind is ctypes.c_int64 or value is None:
            self.numbers.append((_NONE, value or 0))
        elif kind is ctypes.c_void_p:
            self.numbers.append(self._memory(value, machine) if value else (_NONE, 0))
        else:  # a pointer to a structure
            buffer = self._buffer(ctypes.addressof(value), ctypes.sizeof(value))
            self._relocate(value, 0, buffer, machine)
            self.numbers.append((buffer, 0))

    def _relocate(self, structure: ctypes.Structure, offset: int, buffer: int, machine: Machine) -> None:
        """Have the addresses that a structure holds written again."""
        for name, kind, *_ in structure._fields_:
            value, at = getattr(structure, name), offset + getattr(type(structure), name).offset
            if issubclass(kind, ctypes.Structure):
                self._relocate(value, at, buffer, machine)
            elif kind is ctypes.c_void_p and value:
                self.places.append((buffer, at, *self._memory(value, machine)))

    def _memory(self, address: int, machine: Machine) -> tuple[int, int]:
        begin, size = machine.storage_of(address)
        return self._buffer(begin, size), address - begin

    def _buffer(self, begin: int, size: int) -> int:
        if (begin, size) not in self.buffers:
            self.buffers.append((begin, size))
        return self.buffers.index((begin, size))

    def packed(self) -> bytes:
        """As the server reads them."""
        parts = [_numbers(len(self.buffers))]
        for address, size in self.buffers:
            parts += [_numbers(size), ctypes.string_at(address, size)]
        for table in (self.places, self.numbers):
            parts += [_numbers(len(table)), *(_numbers(*row) for row in table)]
        parts += [_numbers(len(self.floats)), struct.pack(f"<{len(self.floats)}f", *self.floats)]
        return b"".join(parts)


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _text(text: str) -> bytes:
    return _numbers(len(text)) + text.encode()


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    assert len(data) == size, "the call server ended"
    return data
