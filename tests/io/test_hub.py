"""Data sets on the hub, which here is a small server with the addresses of the real one."""

from __future__ import annotations

import http.server
import io
import json
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import parse_qs, unquote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rooms import MakeJob, ReadRequests

from vasuki.base.errors import InputError
from vasuki.io.input.tables import open_table

COMMIT = "0123456789" * 4
BREAKS_OFF_AFTER = 100_000  # bytes of a file, where it does


def _parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file, compression="none")
    return file.getvalue()


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the data set people/poems; people/gated asks for its terms, and there is nothing else."""

    files: ClassVar = {
        "data/a.parquet": _parquet(["a rose"] * 3),
        "data/b.parquet": _parquet([f"{number} roses" for number in range(20_000)]),
        "more.jsonl": b'{"text": "is a rose"}\n',
    }
    breaks_off = False  # connections, in the midst of a file

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = unquote(self.path).partition("?")
        if "people/gated" in path:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif "people/poems" not in path:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif "/v9" in path:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            folder = path.partition("/tree/main")[2].strip("/")
            self._json(self._entries(folder, parse_qs(query).get("recursive") == ["true"]))
        elif "/resolve/" in path:
            self._file(path.partition("/resolve/main/")[2])
        else:
            self._json({"id": "people/poems", "sha": COMMIT, "siblings": []})

    def do_POST(self) -> None:
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._json([entry for entry in self._entries("", True) if entry["path"] in wanted])

    def _entries(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        entries: dict[str, dict[str, object]] = {}
        for path, content in self.files.items():
            entries[path] = {"type": "file", "path": path, "size": len(content), "oid": "0"}
            if "/" in path:
                above = path.rpartition("/")[0]
                entries[above] = {"type": "directory", "path": above, "oid": "0"}
        inside = f"{folder}/" if folder else ""
        return [
            entry
            for path, entry in entries.items()
            if path.startswith(inside) and (recursive or "/" not in path.removeprefix(inside))
        ]

    def _file(self, name: str) -> None:
        content = self.files[name]
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), int(match[2])) if match else (0, len(content) - 1)
        ranges = {"Content-Range": f"bytes {first}-{last}/{len(content)}", "ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
        self._answer(206 if match else 200, content[first : last + 1], ranges)

    def _json(self, tree: object) -> None:
        self._answer(200, json.dumps(tree).encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.breaks_off and len(body) > BREAKS_OFF_AFTER:
            body = body[:BREAKS_OFF_AFTER]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class OfThisTest(Hub):
        """So that one may break."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OfThisTest)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    constants = {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    yield OfThisTest
    server.shutdown()
    thread.join()
    server.server_close()
    fsspec.get_filesystem_class("hf").clear_instance_cache()


def test_files_folders_and_globs(hub: type[Hub], job: MakeJob, read: ReadRequests) -> None:
    for path, rows in (("data/a.parquet", 3), ("data", 20_003), ("data/*.parquet", 20_003), ("*.jsonl", 1)):
        assert open_table(job(f"hf://datasets/people/poems/{path}")).num_rows == rows, path
    requests = read(job("hf://datasets/people/poems/data"))
    assert [bytes(request.prompt_token_ids.tolist()) for request in requests[:4]] == [b"a rose"] * 3 + [b"0 roses"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("datasets/people/poems/none.parquet", "does not exist"),
        ("datasets/people/nothing/x.parquet", "repository not found"),
        ("datasets/people/gated/x.parquet", "repository not found"),
        ("datasets/people/poems@v9/x.parquet", "revision not found"),
    ],
)
def test_what_is_not_there_is_a_line(hub: type[Hub], job: MakeJob, path: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        open_table(job(f"hf://{path}"))
    assert "\n" not in str(caught.value)


def test_a_hub_that_is_not_there_is_named(hub: type[Hub], job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"hf://.*: http://127\.0\.0\.1:9 cannot be reached: .*refused"):
        open_table(job("hf://datasets/people/poems/data"))


def test_a_connection_that_breaks_in_the_midst_of_a_file(hub: type[Hub], job: MakeJob) -> None:
    hub.breaks_off = True
    with pytest.raises(InputError, match=r"b\.parquet"):
        open_table(job("hf://datasets/people/poems/data/b.parquet"))
