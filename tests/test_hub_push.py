"""Exports reach the hub by its own client: against a stand-in of its API that listens on this machine, and
keeps what it is sent. Uploads by Xet, which the hub prefers for large files, are not part of it.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from asyncrl.base.errors import AsyncrlError, ConfigError, HubError
from asyncrl.job.export import open_repo, push_folder

TOKEN = "hf_for_tests"


class Hub(ThreadingHTTPServer):
    """Repositories by name: whether each is private, its files, its tags. `refuses`: paths of calls that this
    token may not make.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.refuses = "^$"
        self.num_commits = 0
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, call: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of one call, `POST /api/...`."""
        if call == "POST /api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            if name in self.private:
                return 409, {"error": "there already", "url": f"{self.url}/{name}"}
            self.private[name] = asked["visibility"] == "private"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if found := re.fullmatch(r"GET /api/models/([\w.-]+/[\w.-]+)(/revision/main)?", call):
            if found[1] not in self.private:
                return 404, {"error": "no such repository"}
            files = [{"rfilename": file} for file in self.files]
            told = {"id": found[1], "private": self.private[found[1]], "sha": f"{self.num_commits:040}"}
            return 200, told | {"siblings": files}
        if re.match(r"GET /api/models/.*/tree/", call):
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.files]
            return 200, tree
        if call.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            common = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [common | {"path": one["path"]} for one in asked]}
        if call.endswith("/commit/main"):
            self.num_commits += 1
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            oid = f"{self.num_commits:040}"
            return 200, {"commitUrl": f"{self.url}/me/model/commit/{oid}", "commitOid": oid}
        if found := re.search(r"^DELETE .*/tag/(.*)", call):
            return (200, {}) if self.tags.pop(found[1], None) else (404, {"error": "no such tag"})
        if found := re.search(r"^POST .*/tag/(.*)", call):
            self.tags[json.loads(body)["tag"]] = found[1]
            return 200, {}
        return 200, {"errors": [], "warnings": []}  # validate-yaml


class Call(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        body, call = self._body(), f"{self.command} {self.path.partition('?')[0]}"
        self.server.calls.append(call)
        status, answer = 403, {"error": "this token may only read"}
        if self.headers["Authorization"] == f"Bearer {TOKEN}" and not re.search(self.server.refuses, call):
            status, answer = self.server.answer(call, body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_DELETE = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = list[bytes]()
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    for name, value in {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text(f"this is {name}")
    return folder


def test_an_export_is_pushed_to_a_private_repository_and_tagged_by_its_step(hub: Hub, out: Path) -> None:
    address = push_folder(open_repo("me/model", is_public=False), out, 300)
    assert hub.private == {"me/model": True}
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.tags == {"step-300": f"{1:040}"}
    assert address == f"{hub.url}/me/model/tree/step-300"


def test_another_export_replaces_the_weights_and_leaves_what_others_have_written(hub: Hub, out: Path) -> None:
    repo = open_repo("model", is_public=True)  # of the token's owner
    assert hub.private == {"me/model": False}
    push_folder(repo, out, 300)
    hub.files |= {"demo.png": b"png", "model-00001-of-00002.safetensors": b"old"}
    (out / "config.json").write_text("other")
    push_folder(repo, out, 300)
    assert {*hub.files} == {"demo.png", *(path.name for path in out.iterdir())}
    assert hub.files["config.json"] == b"other"
    assert hub.tags == {"step-300": f"{2:040}"}


def test_what_the_hub_does_not_take_is_said_in_our_words(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[AsyncrlError], words: str, *, name: str = "me/model") -> str:
        with pytest.raises(kind, match=words) as caught:
            push_folder(open_repo(name, is_public=False), out, 1)
        assert TOKEN not in str(caught.value)
        return caught.value.way_out

    hub.private["me/open"] = False
    assert "--public" in refused(ConfigError, "this repository is public", name="me/open")
    assert hub.num_commits == 0, "nothing was published"
    refused(ConfigError, "--push a b: ", name="a b")
    hub.refuses = "commit"
    assert f"hf upload me/model {out}" in refused(HubError, r"refused me/.*403")
    hub.refuses = "repos/create"
    assert "hf auth login" in refused(HubError, r"refused me/.*403", name="me/new")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the network" in refused(HubError, "no answer")
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in refused(ConfigError, "no Hugging Face token")
