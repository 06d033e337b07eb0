"""vLLM's OpenAI server with our arguments on our socket. The only module of the API process that imports vLLM."""

from __future__ import annotations

import argparse
import socket
from typing import NoReturn

import uvloop
from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from asyncrl.serving import Refused
from asyncrl_servers.vllm.arguments import build_arguments
from asyncrl_servers.vllm.environment import is_cpu_build
from asyncrl_servers.vllm.last_words import engine_death, start_failure
from asyncrl_servers.vllm.spec import VllmSpec


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser; what it cannot read is a refusal, not a usage text and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Refused(400, f"vLLM refuses its arguments: {message}", rule="see `vllm serve --help=all`", way_out="mend rollout.vllm.")


def parse_arguments(spec: VllmSpec) -> argparse.Namespace:
    """What vLLM's own parser makes of this spec. Raises Refused."""
    parser = make_arg_parser(_Parser())
    known = {option.lstrip("-").replace("-", "_"): action.option_strings for action in parser._actions for option in action.option_strings}
    args: argparse.Namespace = parser.parse_args(build_arguments(spec, known, is_cpu=is_cpu_build()))
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise Refused(400, f"vLLM refuses its arguments: {error}", way_out="mend rollout.vllm.") from error
    return args


def serve_vllm(spec: VllmSpec, fd: int) -> None:
    """Start the engine and serve until SIGTERM. Raises Refused if it cannot start, and if the engine ends before it is told to."""
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
    """Serve as vLLM's run_server_worker, which does not tell a server that was told to end from one whose engine died."""
    try:
        async with build_async_engine_client(args) as engine:
            ending = await build_and_serve(engine, f"http://{args.host}:{args.port}", listener, args)
        await ending
    finally:
        listener.close()
    has_died: bool = ending.__name__ == "dummy_shutdown"  # vLLM 0.32: what serve_http answers if the HTTP server stopped by itself
    return has_died
