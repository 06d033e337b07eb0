"""A hub on this machine, as huggingface_hub talks to it: repositories, LFS, commits."""

from __future__ import annotations

import base64
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"


class FakeHub(ThreadingHTTPServer):
    """`private`: repositories by name; `files`: what the last commit has."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private = dict[str, bool]()
        self.blobs = dict[str, bytes]()
        self.files = dict[str, bytes]()
        self.refuses = ""
        """What it has no space for: a commit or a file."""

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        is_blob = self.path.startswith("/blobs/")
        if not is_blob and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif is_blob:
            self.server.blobs[self.path.split("/")[2]] = body
            self.answer(403 if self.server.refuses == "file" else 200, {})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            self.answer(*self.result(lines))

    do_GET = do_POST = do_PUT = handle_any

    def result(self, lines: list[Any]) -> tuple[int, dict[str, Any]]:
        hub, path = self.server, self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, {"name": "me"}
        if path == "/api/repos/create":
            name = f"{lines[0].get('organization', 'me')}/{lines[0]['name']}"
            is_new = name not in hub.private
            hub.private.setdefault(name, lines[0].get("visibility") == "private")
            return 200 if is_new else 409, {"url": f"{hub.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **each,
                    "actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}},
                }
                for each in lines[0]["objects"]
            ]
            return 200, {"objects": objects}
        if path.endswith("/preupload/main"):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if ".safe" in file["path"] else "regular",
                    "shouldIgnore": False,
                }
                for file in lines[0]["files"]
            ]
            return 200, {"files": modes}
        if path.endswith("/commit/main"):
            if hub.refuses == "commit":
                return 403, {"error": "You have exceeded your storage"}
            hub.commit(lines)
            name = path.removeprefix("/api/models").removesuffix("/commit/main")
            oid = "c" * 40
            url = f"{hub.url}{name}/commit/{oid}"
            return 200, {"commitUrl": url, "commitOid": oid}
        found = re.fullmatch("/api/models/(.*)", path)
        assert found is not None, path
        return 200, {"id": found[1], "private": hub.private[found[1]]}

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass
