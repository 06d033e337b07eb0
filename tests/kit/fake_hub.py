"""A hub on this machine, as huggingface_hub talks to it: repositories, LFS, commits."""

from __future__ import annotations

import json
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"
FIXED = {
    "/api/whoami-v2": {"name": "me"},
    "/api/validate-yaml": {"errors": [], "warnings": []},
}


class FakeHub(ThreadingHTTPServer):
    """`private`: repositories by name; `files`: the files of the last commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private = dict[str, bool]()
        self.blobs = dict[str, bytes]()
        self.files = dict[str, bytes]()
        self.refuses = ""
        """A commit or a file is refused for lack of space."""


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "Transfer-Encoding" in self.headers:  # a commit is sent in chunks
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        status, answer = self.result(self.path.partition("?")[0], body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = handle_any

    def result(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.server
        if path.startswith("/blobs/"):
            hub.blobs[path.removeprefix("/blobs/")] = body
            return 403 if hub.refuses == "file" else 200, {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path in FIXED:
            return 200, FIXED[path]
        lines = [json.loads(line) for line in body.splitlines()]
        first = lines[0] if lines else {}
        if path == "/api/repos/create":
            name = f"{first['organization']}/{first['name']}"
            status = 409 if name in hub.private else 200
            hub.private.setdefault(name, first.get("visibility") == "private")
            return status, {"url": f"{hub.url}/{name}"}
        if path.endswith("/info/lfs/objects/batch"):
            for each in first["objects"]:
                each["actions"] = {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}
            return 200, first
        if path.endswith("/preupload/main"):
            for file in first["files"]:
                file["uploadMode"] = "lfs" if ".safe" in file["path"] else "regular"
                file["shouldIgnore"] = False
            return 200, first
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        if not lines:
            return 200, {"id": name, "private": hub.private[name]}
        if hub.refuses == "commit":
            return 403, {"error": "You have exceeded your storage"}
        hub.files = {}
        for line in lines[1:]:
            file = line["value"]
            is_blob = line["key"] == "lfsFile"
            data = hub.blobs[file["oid"]] if is_blob else b64decode(file["content"])
            hub.files[file["path"]] = data
        oid = "c" * 40
        return 200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid}

    def log_message(self, format: str, *args: object) -> None:
        pass
