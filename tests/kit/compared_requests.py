"""The table compared_requests.toml: requests of all kinds as bytes, and the status that a
server gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import tomllib
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

GROUPS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)["group"]
HI = '[{"role":"user","content":"Hi"}]'
CHAT = f'{{"model":"policy","max_tokens":2,"messages":{HI}}}'
COMPRESSED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", lambda data: zlib.compress(data, wbits=-15)),
    "gzip twice": ("gzip, gzip", lambda data: gzip.compress(gzip.compress(data))),
    "cut gzip": ("gzip", lambda data: gzip.compress(data)[:-9]),
    "not gzip": ("gzip", bytes),
    "identity": ("identity", bytes),
    "br": ("br", bytes),
    "zstd": ("zstd", bytes),
}


def request(form: str, text: str, key: str) -> bytes:
    """Return the request of a text; KEY in it stands for the key."""
    text = text.replace("KEY", key)
    headers = {
        "Host": "x",
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Connection": "close",
    }
    line = "POST /v1/chat/completions HTTP/1.1"
    body = CHAT.encode()
    match form:
        case "line":
            line = text
            body = CHAT.encode() if text.startswith("POST") else b""
        case "headers":
            for each in text.splitlines():
                name, _, value = each.partition(":")
                headers[name] = value.removeprefix(" ")
        case "codec" if text in COMPRESSED:
            headers["Content-Encoding"], compress = COMPRESSED[text]
            body = compress(body)
        case "codec":
            body = CHAT.replace("Hi", "Hé").encode(text)
        case "body":
            body = text.encode("latin-1")
        case path:
            line = f"POST /v1/{path} HTTP/1.1"
            body = text.encode()
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        rest = b"%x;ext=1\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n"
        body = b"5\r\n" + body[:5] + b"\r\n" + rest % (len(body) - 5, body[5:])
    else:
        headers["Content-Length"] = str(len(body))
    given = [f"{name}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([line, *given, "", ""]).encode("latin-1") + body


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def wrong_statuses(
    connect: Connect, server: str, key_of: Callable[[], str]
) -> list[tuple[str, int]]:
    """Send the table to a server; return the texts with another status than that of the
    table.
    """
    wrong = []
    for group in GROUPS:
        for text in group["texts"]:
            data = request(group["form"], text, key_of())
            status = await status_of(connect, data)
            if status != group.get(server, group["vllm"]):
                wrong.append((text, status))
    return wrong


async def status_of(connect: Connect, data: bytes) -> int:
    """Return the status of the answer to a request."""
    async with asyncio.timeout(300):
        reader, writer = await connect()
        writer.write(data)
        status = 100
        with contextlib.suppress(ConnectionError):
            while status == 100:
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
        writer.close()
    return status
