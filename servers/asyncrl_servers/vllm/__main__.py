"""`python -m asyncrl_servers.vllm --spec FILE --fd N`: one vLLM server.

vLLM's workers outlive a killed API server, so a forked process ends the group after the leader.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil

from asyncrl.base.http import Refused, die_with_parent, fail, secret_of
from asyncrl.base.message import SECRET_ENV
from asyncrl_servers.engine_routes import read_spec
from asyncrl_servers.vllm.arguments import VllmSpec, check_start, set_environment

GRACE_S = 5.0


def main() -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-vllm-"))
    start_reaper(scratch)

    def end_all() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # vLLM shuts down in less than a second
        time.sleep(GRACE_S)  # then the reaper ends all

    die_with_parent(end_all)
    spec, fd = read_spec(VllmSpec)
    secret = secret_of(SECRET_ENV)
    os.environ.pop(SECRET_ENV, None)  # vLLM's workers inherit the environment
    try:
        check_start(spec)
        set_environment(spec, scratch)
        from asyncrl_servers.vllm.api_server import serve_vllm

        serve_vllm(spec, fd, secret)
    except Refused as refusal:
        fail(refusal.body.error, rule=refusal.body.rule, way_out=refusal.body.way_out)


def start_reaper(scratch: Path) -> None:
    """Fork a process that ends the group and removes `scratch` after the caller. Call it before starting
    threads.
    """
    leader = os.getpid()
    if os.fork():
        return
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        pidfd = os.pidfd_open(leader)
        os.closerange(3, pidfd)
        os.closerange(pidfd + 1, 4096)
        if os.getppid() == leader:
            select.select([pidfd], [], [])
        end_group(leader)
        shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os._exit(0)


def end_group(leader: int) -> None:
    """SIGTERM, then SIGKILL after GRACE_S. The resource tracker ends itself, after its cleanup."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_other = process.pid != os.getpid() and os.getpgid(process.pid) == leader
                is_live = process.status() != psutil.STATUS_ZOMBIE
                if is_other and is_live and "resource_tracker" not in " ".join(process.cmdline()):
                    process.send_signal(number)
                    members.append(process)
        psutil.wait_procs(members, GRACE_S)


if __name__ == "__main__":
    main()
