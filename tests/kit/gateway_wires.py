"""Calls of each dialect, and raw bytes, for tests of the endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_cases import (
    HI,
    World,
)

from asyncrl.agents.endpoint import anthropic_dialect, openai_dialects

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": HI},
}


DIALECTS = (
    openai_dialects.CHAT,
    openai_dialects.TEXT,
    openai_dialects.RESPONSES,
    anthropic_dialect.MESSAGES,
)


GATEWAY = "asyncrl.agents.endpoint.gateway"


async def raw(
    world: World, data: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = world.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


def head(key: str, length: int, path: str = "/v1/chat/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def all_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Read until the gateway closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
