"""A model's files: in a folder, or on a hub, which here is a small server with the addresses of the real one."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.models.files import description_folder

DATES = Path(__file__).resolve().parents[2] / "models" / "dates"
COMMIT = "0123456789" * 4


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the model dates/demo from DATES; dates/gated asks for its terms, and there is nothing else."""

    fetched: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[1]
        if "dates/gated" in path:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif "dates/demo" not in path:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif name == "v9":
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" not in path:
            files = sorted(DATES.iterdir())
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0"} for file in files]
            model = {"id": "dates/demo", "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}
            self._answer(200, json.dumps(tree if "/tree/" in path else model).encode())
        elif not (DATES / name).is_file():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            if self.command == "GET":
                self.fetched.append(name)
            self._answer(200, (DATES / name).read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    Hub.fetched = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _vasuki(tmp_path: Path, model: dict[str, str], endpoint: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command on a job with this model, in a process of its own, since the hub's address is read at its start."""
    pq.write_table(pa.table({"prompt": ["2024-05-01", "2023-12-31"]}), tmp_path / "rows.parquet")
    job = {
        "model": model,
        "input": {"path": str(tmp_path / "rows.parquet"), "prompt": "{prompt}"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    words = [sys.executable, "-m", "vasuki", command[0], str(tmp_path / "job.yaml"), *command[1:]]
    return subprocess.run(words, env={**os.environ, **hub}, capture_output=True, text=True, timeout=120)


def test_a_hub_model_is_planned_from_its_description_and_run_with_its_weights(
    tmp_path: Path, hub: http.server.ThreadingHTTPServer
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    planned = _vasuki(tmp_path, {"path": "dates/demo"}, endpoint, "plan", "--gpu", "a10", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)[0]["requests"] == 2
    assert "config.json" in Hub.fetched
    assert not [name for name in Hub.fetched if name.endswith(".safetensors")]
    done = _vasuki(tmp_path, {"path": "dates/demo"}, endpoint, "run")
    assert done.returncode == 0, done.stderr
    assert [name for name in Hub.fetched if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"path": "dates/gated"}, "HF_TOKEN"),
        ({"path": "dates/other"}, "no such model on the hub"),
        ({"path": "dates/demo", "revision": "v9"}, "no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line(
    tmp_path: Path, hub: http.server.ThreadingHTTPServer, model: dict[str, str], words: str
) -> None:
    refused = _vasuki(tmp_path, model, f"http://127.0.0.1:{hub.server_port}", "check")
    assert refused.returncode == 4
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_hub_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused = _vasuki(tmp_path, {"path": "dates/demo"}, "http://127.0.0.1:9", "check")
    assert refused.returncode == 4
    assert "http://127.0.0.1:9" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "words"), [("./nowhere", "no such folder"), ("a/b/c", "no name"), (str(DATES.parent), "no config.json")]
)
def test_no_folder_and_no_hub_name(path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        description_folder(ModelConfig(path=path))
