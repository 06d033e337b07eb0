"""vLLM's OpenAI server with our arguments on our socket. The only module of the API process that imports
vLLM.
"""

from __future__ import annotations

import argparse
import hmac
import socket
from typing import Any, NoReturn

import uvloop
from fastapi.responses import JSONResponse
from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from asyncrl.http import Refused
from asyncrl.messages.base import ErrorBody
from asyncrl_servers.vllm.arguments import VllmSpec, build_arguments
from asyncrl_servers.vllm.environment import engine_death, is_cpu_build, start_failure

# The lock on every route of a vLLM server. vLLM's own --api-key leaves /pause, /collective_rpc and others
# open, and lies in argv.


_expected: list[bytes] = []


def lock_with(secret: str) -> None:
    """From here on BearerOnly lets through whoever has this secret, and nobody else."""
    _expected[:] = [f"Bearer {secret}".encode()]


class BearerOnly:
    """ASGI middleware, given to vLLM by name (--middleware). Not locked yet, it lets nobody through."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand on what may pass, 401 or a closed websocket to all else."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = ErrorBody(
                error="wrong or missing bearer token",
                rule="internal servers answer to the run that started them alone",
            )
            await JSONResponse(body.model_dump(), status_code=401)(scope, receive, send)

    def _may_pass(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return bool(_expected) and hmac.compare_digest(given, _expected[0])


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser; what it cannot read is a refusal, not a usage text and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Refused(
            400,
            f"vLLM refuses its arguments: {message}",
            rule="see `vllm serve --help=all`",
            way_out="mend rollout.vllm.",
        )


def parse_arguments(spec: VllmSpec) -> argparse.Namespace:
    """What vLLM's own parser makes of this spec. Raises Refused."""
    parser = make_arg_parser(_Parser())
    known = {
        option.lstrip("-").replace("-", "_"): action.option_strings
        for action in parser._actions
        for option in action.option_strings
    }
    args: argparse.Namespace = parser.parse_args(build_arguments(spec, known, is_cpu=is_cpu_build()))
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise Refused(400, f"vLLM refuses its arguments: {error}", way_out="mend rollout.vllm.") from error
    return args


def serve_vllm(spec: VllmSpec, fd: int) -> None:
    """Start the engine and serve until SIGTERM. Raises Refused if it cannot start, and if the engine ends
    before it is told to.
    """
    args = parse_arguments(spec)
    listener = socket.socket(fileno=fd)
    host, args.port = listener.getsockname()[:2]
    args.host = host
    try:
        has_died = uvloop.run(_run(args, listener))
    except Exception as error:
        raise start_failure(spec, error) from error
    if has_died:
        raise engine_death(spec)


async def _run(args: argparse.Namespace, listener: socket.socket) -> bool:
    """Serve as vLLM's run_server_worker, which does not tell a server that was told to end from one whose
    engine died.
    """
    try:
        async with build_async_engine_client(args) as engine:
            ending = await build_and_serve(engine, f"http://{args.host}:{args.port}", listener, args)
        await ending
    finally:
        listener.close()
    has_died: bool = (
        ending.__name__ == "dummy_shutdown"
    )  # vLLM 0.32: what serve_http answers if the HTTP server stopped by itself
    return has_died
