"""Rollouts of environments, and what they add."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from agent_cases import last_turn, tool_call

ROOT = Path(__file__).parents[2]


class Resources(BaseHTTPRequestHandler):
    """The routes of a NeMo Gym resources server: a tool, and a reward for its use."""

    seen: list[tuple[str, Any, str]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body, self.headers.get("cookie", "")))
        if self.path == "/add":
            answer: Any = {"sum": body["first"] + body["second"]}
        elif self.path == "/verify":
            texts = [
                part["text"]
                for item in body["response"]["output"]
                if item["type"] == "message"
                for part in item["content"]
            ]
            answer = {**body, "reward": float(body["expected"] in texts[-1])}
        else:
            answer = {}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("set-cookie", "session=7")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def resources() -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
    Resources.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Resources)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Resources.seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def adds(prompt: str) -> str:
    """Return the answers of a model that lets a tool add."""
    role, text = last_turn(prompt)
    if role == "tool":
        return f"It is {json.loads(text)['sum']}."
    return tool_call("add", first=12, second=30)
