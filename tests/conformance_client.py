"""A server as the conformance checks see it: its answers, its events, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

Json = Any


class NotOkError(Exception):
    """The server does not do what the endpoint's clients rely on."""


class NotOfferedError(Exception):
    """The server says that it does not do this."""


def expect(holds: object, what: str) -> None:
    """Raise NotOkError with `what` unless it holds."""
    if not holds:
        raise NotOkError(what)


def said_by(body: Json) -> str:
    """The message of an error, in OpenAI's form or Anthropic's. Raises NotOkError if it has neither."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    expect(isinstance(message, str) and message, f"an error has no error.message: {shortly(body)}")
    return str(message)


def shortly(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:160] + "..."


def _parsed(status: int, text: str) -> Json:
    """What a server has answered. Raises NotOkError for what is no JSON, unless there is no such route."""
    try:
        return json.loads(text)
    except ValueError:
        if status in _MISSING:
            return {"error": {"message": shortly(text) or "no text"}}
        raise NotOkError(f"status {status} without JSON: {shortly(text)}") from None


_MISSING = (404, 405, 501)


class CheckedServer:
    """One server, with the key that opens it. `model`: what calls name."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, model: str) -> None:
        self._http, self.url, self.key, self.model = http, url.rstrip("/").removesuffix("/v1"), key, model

    async def call(
        self, method: str, path: str, body: Json = None, *, key: str | None = None, is_anthropic: bool = False
    ) -> tuple[int, Json]:
        """(status, JSON); `body` may be bytes. Raises NotOkError if the answer is no JSON."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = self._headers(self.key if key is None else key, is_anthropic)
        async with self._http.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, _parsed(response.status, await response.text())

    async def ok(self, path: str, body: Json, *, is_optional: bool = False) -> Json:
        """The answer. Raises NotOfferedError if there is no such route, or if what is asked is refused and
        `is_optional`.
        """
        status, answer = await self.call("POST", path, body, is_anthropic="/messages" in path)
        self._judge(status, answer, is_optional)
        return answer

    async def events(self, path: str, body: Json, *, is_optional: bool = False) -> list[tuple[str, Json]]:
        """(event, data) of a stream to its end; the data of `[DONE]` is that text."""
        is_anthropic = "/messages" in path
        data, headers = json.dumps({**body, "stream": True}).encode(), self._headers(self.key, is_anthropic)
        async with self._http.post(self.url + path, data=data, headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                self._judge(response.status, _parsed(response.status, text), is_optional)
            kind = response.content_type
        expect(kind == "text/event-stream", f"a stream has the content type {kind}")
        found = []
        for block in text.split("\n\n"):
            fields = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
            named: Mapping[str, str] = {name: value for name, _, value in fields}
            if "data" in named:
                value = named["data"]
                try:
                    found.append((named.get("event", ""), value if value == "[DONE]" else json.loads(value)))
                except ValueError:
                    raise NotOkError(f"an event is no JSON: {shortly(value)}") from None
        expect(found, "the stream has no events")
        return found

    def _headers(self, key: str, is_anthropic: bool) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if is_anthropic:
            return headers | {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return headers | {"Authorization": f"Bearer {key}"}

    def _judge(self, status: int, answer: Json, is_optional: bool) -> None:
        if status == 200:
            return
        why = f"status {status}: {said_by(answer)}"
        if status in _MISSING or (is_optional and status in (400, 422)):
            raise NotOfferedError(shortly(why))
        raise NotOkError(shortly(why))
