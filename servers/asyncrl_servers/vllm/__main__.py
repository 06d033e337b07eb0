"""`python -m asyncrl_servers.vllm --spec FILE --fd N`: vLLM's OpenAI server with our
arguments and socket.

vLLM's workers outlive a killed API server, so a forked process ends the group after the
leader.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import psutil

from asyncrl.base.http import SECRET_ENV, Refused, die_with_parent, fail, secret_of
from asyncrl.base.signals import END, block_stops, end_by_sigterm
from asyncrl_servers.engine_routes import read_spec
from asyncrl_servers.vllm.arguments import (
    VllmSpec,
    build_arguments,
    can_fork,
    check_start,
    failure,
    is_cpu_build,
    set_environment,
)

GRACE_S = 5.0


def main() -> None:
    if os.getpgrp() != os.getpid():
        # Workers inherit the group, so the reaper finds them all, also grandchildren.
        os.setpgid(0, 0)
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-vllm-"))
    block_stops()  # for the reaper too
    start_reaper(scratch)

    def end_all() -> None:
        os.kill(os.getpid(), END)  # vLLM shuts down in less than a second
        time.sleep(GRACE_S)  # then the reaper ends all

    # After start_reaper, which forks: this starts a thread.
    die_with_parent(end_all, end_by_sigterm)
    spec, fd = read_spec(VllmSpec)
    secret = secret_of(SECRET_ENV)
    os.environ.pop(SECRET_ENV, None)  # vLLM's workers inherit the environment
    try:
        check_start(spec)
        set_environment(spec, scratch)
        serve_vllm(spec, fd, secret)
    except Refused as refusal:
        fail(refusal.body.error, rule=refusal.body.rule, way_out=refusal.body.way_out)


def serve_vllm(spec: VllmSpec, fd: int, secret: str) -> None:
    """Serve until END. Raises Refused if the engine cannot start or dies. Imports
    vLLM.
    """
    import uvloop

    try:
        from vllm.entrypoints.common.cli_args import (
            make_arg_parser,
            validate_parsed_serve_args,
        )
    except ImportError:  # its place until vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import (
            make_arg_parser,
            validate_parsed_serve_args,
        )
    from vllm.entrypoints.serve.dev.server_info import api_router as server_info
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from asyncrl_servers.vllm.monkeypatches import BearerOnly, patch_spawn

    BearerOnly.expected = f"Bearer {secret}".encode()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        build_arguments(spec, is_cpu=is_cpu_build())
    )
    validate_parsed_serve_args(args)
    # A socket object that knows its family. From the bare number asyncio would take a
    # Unix socket, leave Nagle's algorithm on, and every answer would wait some 40 ms.
    listener = socket.socket(fileno=fd)
    args.host, args.port = listener.getsockname()[:2]
    server_info._get_system_env_info_cached = dict  # saves 2 s of pip and gcc
    if can_fork(spec):
        import asyncrl_servers.vllm.worker_extension  # noqa: F401  (for forked processes)

        patch_spawn(listener)
    try:
        has_died = uvloop.run(_run(args, listener))
    except Exception as error:
        what = f"vLLM cannot start with {spec.model_path}"
        raise failure(what, f"{type(error).__name__}: {error}") from error
    if has_died:
        raise failure("vLLM's engine died", "")


async def _run(args: argparse.Namespace, listener: socket.socket) -> bool:
    """Serve like vLLM's run_server_worker; return whether the engine died."""
    from vllm.entrypoints.launchers.api_server.entry import (
        build_and_serve,
        build_async_engine_client,
    )

    try:
        async with build_async_engine_client(args) as engine:
            ending = await build_and_serve(
                engine, f"http://{args.host}:{args.port}", listener, args
            )
        await ending
    finally:
        listener.close()
    # vLLM 0.32 and 0.33: serve_http returns this if the HTTP server stopped by itself.
    return bool(ending.__name__ == "dummy_shutdown")


def start_reaper(scratch: Path) -> None:
    """Fork a process that ends the group and removes `scratch` after the caller. Call
    it before starting threads.
    """
    leader = os.getpid()
    if os.fork():
        return
    try:
        pidfd = os.pidfd_open(leader)
        # It inherited the listening socket. While it holds that, a dead server would
        # still accept connections into its backlog.
        os.closerange(3, pidfd)
        os.closerange(pidfd + 1, 4096)
        # Otherwise the leader died before pidfd_open, which may then name another
        # process.
        if os.getppid() == leader:
            select.select([pidfd], [], [])
        # This process is a member, so the number still means this group.
        end_group(leader)
        shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os._exit(0)


def end_group(leader: int) -> None:
    """END, then SIGKILL after GRACE_S. The resource tracker ends itself, after its
    cleanup.
    """
    for number in (END, signal.SIGKILL):
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_other = (
                    process.pid != os.getpid() and os.getpgid(process.pid) == leader
                )
                is_live = process.status() != psutil.STATUS_ZOMBIE
                if (
                    is_other
                    and is_live
                    and "resource_tracker" not in " ".join(process.cmdline())
                ):
                    process.send_signal(number)
                    members.append(process)
        psutil.wait_procs(members, GRACE_S)


if __name__ == "__main__":
    main()
