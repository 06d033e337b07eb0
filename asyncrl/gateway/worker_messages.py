"""Messages of workers as HTTP bodies, and their errors, which are ErrorBody and not OpenAI's. Knows no lease."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from asyncrl.wire import ErrorBody, Message

Read = TypeVar("Read", bound=Message)


class Refusal(Exception):  # noqa: N818  an answer, not a crash
    """Answer this one request with `status` and an ErrorBody."""

    def __init__(self, status: int, error: str, *, rule: str = "", way_out: str = "") -> None:
        self.status, self.body = status, ErrorBody(error=error, rule=rule, way_out=way_out)
        super().__init__(error)


async def read_message(request: web.Request, shape: type[Read]) -> Read:
    """The body. Raises Refusal: 413 if it is larger than the request may be, 422 with the first field that is wrong."""
    try:
        return shape.model_validate_json(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(413, f"the message is larger than {request.client_max_size} bytes") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(
            422, f"{where + ': ' if where else ''}{first['msg']}",
            rule="see asyncrl/worker_wire.py for the message", way_out="run worker and trainer with the same asyncrl.",
        ) from error  # fmt: skip


def bearer(request: web.Request) -> str:
    """The token that this request shows; empty if none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def answer_message(message: Message, status: int = 200) -> web.Response:
    """A message as a response."""
    return web.Response(body=message.model_dump_json().encode(), status=status, content_type="application/json")
