"""An object store for tests: moto's server in a process of its own, behind a proxy that can lose connections."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

BUCKET = "bucket"
METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")
DENIED = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: 77\r\nConnection: close\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message>no permission here</Message></Error>"
)
KEY, SECRET = "AKIDTESTING", "verysecretword"


class Proxy:
    """Hands requests on to a port, but for those that it loses with their connections.

    lost_share: of the requests, as a seed draws them. cut_uploads: how many of the next uploads end after a few bytes.
    delay_s: that every answer waits for. denied: requests for objects with this in their name have no permission.
    """

    def __init__(self, target: int) -> None:
        self.lost_share, self.cut_uploads, self.delay_s, self.denied = 0.0, 0, 0.0, ""
        self.requests = self.lost = self.cut = 0
        self._target, self._rng, self._lock = target, random.Random(1), threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as server,
        ):
            while self._hand_on(client, server):
                pass

    def _hand_on(self, client: socket.socket, server: socket.socket) -> bool:
        """Move what has come in either direction. False if that was the end."""
        for source in select.select([client, server], [], [])[0]:
            data = source.recv(2**16)
            if not data:
                return False
            if source is server:
                time.sleep(self.delay_s)
                client.sendall(data)
            elif data.startswith(METHODS) and self._is_to_be_lost():
                return False
            elif self.denied and self.denied.encode() in data.partition(b"\r\n")[0]:
                client.sendall(DENIED)
                return False
            elif data.startswith(b"PUT ") and b"part-" in data[:300] and self._is_to_be_cut():
                server.sendall(data[: len(data) // 2])
                return False
            else:
                server.sendall(data)
        return True

    def _is_to_be_lost(self) -> bool:
        with self._lock:
            is_lost = self._rng.random() < self.lost_share
            self.requests += 1
            self.lost += is_lost
            return is_lost

    def _is_to_be_cut(self) -> bool:
        with self._lock:
            if not self.cut_uploads:
                return False
            self.cut_uploads -= 1
            self.cut += 1
            return True


class ObjectStore:
    """A bucket that is empty at first. Raises RuntimeError if the server does not come up."""

    def __init__(self, moto_server: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._command = [str(moto_server), "-H", "127.0.0.1", "-p", str(self._port)]
        self._log = log.open("wb")
        self._server = self._start()
        self.proxy = Proxy(self._port)
        self.files = self.filesystem(self._port)
        self.files.create_dir(BUCKET)

    def _start(self) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return server
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("moto's server does not listen")

    def filesystem(self, port: int) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            allow_bucket_creation=True,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to find it, through the proxy."""
        return {
            **os.environ,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, name: str, data: bytes) -> None:
        with self.files.open_output_stream(f"{BUCKET}/{name}") as stream:
            stream.write(data)

    def get(self, name: str) -> bytes:
        with self.files.open_input_stream(f"{BUCKET}/{name}") as stream:
            return bytes(stream.read())

    def names(self, folder: str) -> list[str]:
        """Objects below a folder."""
        found = self.files.get_file_info(fs.FileSelector(f"{BUCKET}/{folder}", recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{BUCKET}/") for info in found if info.is_file)

    def freeze(self) -> None:
        """Let it accept connections and answer nothing."""
        self._server.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.proxy.close()
        self.thaw()
        self._server.kill()
        self._server.wait()
        self._log.close()


def table_bytes(table: pa.Table) -> bytes:
    """A Parquet file of a table."""
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    return bytes(sink.getvalue())
