"""Forks vLLM servers from a process that has imported vLLM: a start takes a third of
the time. Runs in vLLM's Python, and imports nothing of the tests.

For each message on its Unix socket it forks a server: the message is its spec file, and
brings the files of its standard input, its log and its listener. The answers are its
pid, and later its exit status.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

IMPORTED = (
    "asyncrl_servers.vllm.worker_extension",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.serve.dev.server_info",
    "vllm.v1.worker.cpu_worker",
)


def import_all() -> Callable[[], None]:
    """Import what a server imports, and return its main()."""
    for name in IMPORTED:
        importlib.import_module(name)
    from vllm.model_executor.models import registry

    from asyncrl_servers.vllm.__main__ import main

    def run_here(look: Callable[[], Any]) -> Any:
        return look()

    # vLLM looks at a model's class in a new process, so that its own does not
    # initialize CUDA: 10 s for each class that it has not seen yet.
    registry._run_in_subprocess = run_here
    return main


def main() -> None:
    serve = import_all()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.send(b"ready")
    while True:
        message, files, _, _ = socket.recv_fds(requests, 4096, 3)
        if not message:
            return
        pid = os.fork()
        if pid:
            for fd in files:
                os.close(fd)
            requests.send(b"%d\n" % pid)
            _, status = os.waitpid(pid, 0)
            requests.send(b"%d\n" % os.waitstatus_to_exitcode(status))
            continue
        requests.close()
        os.setsid()
        stdin, log, listener = files
        os.dup2(stdin, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["vllm", "--spec", message.decode(), "--fd", str(listener)]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            serve()
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    main()
