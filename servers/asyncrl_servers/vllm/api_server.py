"""vLLM's OpenAI server with our arguments and socket; imports vLLM."""

from __future__ import annotations

import argparse
import hmac
import socket
from typing import Any

import uvloop
from fastapi.responses import JSONResponse
from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.dev.server_info import api_router as server_info
from vllm.utils.argparse_utils import FlexibleArgumentParser

from asyncrl.base.message import ErrorBody
from asyncrl_servers.vllm.arguments import VllmSpec, build_arguments, can_fork, failure, is_cpu_build
from asyncrl_servers.vllm.monkeypatches import patch_spawn


class BearerOnly:
    """Middleware that checks the bearer token on every route. vLLM's --api-key leaves /pause and
    /collective_rpc open, and shows in argv.
    """

    expected = b""
    """Required header; nothing passes while it is empty."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        may_pass = bool(self.expected) and hmac.compare_digest(given, self.expected)
        if scope["type"] == "lifespan" or may_pass:
            await self._app(scope, receive, send)
        else:
            rule = "internal servers answer only to the run that started them"
            body = ErrorBody(error="wrong or missing bearer token", rule=rule)
            await JSONResponse(body.model_dump(), status_code=401)(scope, receive, send)


def serve_vllm(spec: VllmSpec, fd: int, secret: str) -> None:
    """Serve until SIGTERM. Raises Refused if the engine cannot start or dies."""
    BearerOnly.expected = f"Bearer {secret}".encode()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(build_arguments(spec, is_cpu=is_cpu_build()))
    validate_parsed_serve_args(args)
    listener = socket.socket(fileno=fd)
    args.host, args.port = listener.getsockname()[:2]
    server_info._get_system_env_info_cached = dict  # saves 2 s of pip and gcc
    if can_fork(spec):
        import asyncrl_servers.vllm.worker_extension  # noqa: F401  (for forked processes)

        patch_spawn(listener)
    try:
        has_died = uvloop.run(_run(args, listener))
    except Exception as error:
        what = f"{spec.name}: vLLM cannot start with {spec.model_path}"
        raise failure(what, f"{type(error).__name__}: {error}") from error
    if has_died:
        raise failure(f"{spec.name}: vLLM's engine died", "")


async def _run(args: argparse.Namespace, listener: socket.socket) -> bool:
    """Serve like vLLM's run_server_worker; return whether the engine died."""
    try:
        async with build_async_engine_client(args) as engine:
            ending = await build_and_serve(engine, f"http://{args.host}:{args.port}", listener, args)
        await ending
    finally:
        listener.close()
    # vLLM 0.32: serve_http returns this if the HTTP server stopped by itself.
    return bool(ending.__name__ == "dummy_shutdown")
