"""`python -m asyncrl_servers.vllm --spec FILE --fd N`: one vLLM server, a child of the run. vLLM is imported
once all is checked.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from asyncrl.http import Refused, child_arguments, die_with_parent, fail, secret_of
from asyncrl.messages.base import SECRET_ENV
from asyncrl_servers.vllm import group
from asyncrl_servers.vllm.api_server import lock_with
from asyncrl_servers.vllm.arguments import VllmSpec
from asyncrl_servers.vllm.environment import check_start, set_environment

ORPHANED = 3


def main() -> None:
    """Read the spec, start vLLM on the given socket, serve until SIGTERM or until the parent is gone."""
    signal.signal(signal.SIGTERM, _end_start)  # vLLM sets its own once it serves
    group.lead_group()
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-vllm-"))
    group.start_warden(scratch)
    is_orphaned = threading.Event()

    def end_all() -> None:
        is_orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way out, which takes less than a second
        threading.Event().wait(group.GRACE_S)
        group.end_group(os.getpid(), grace_s=0.0)

    die_with_parent(end_all)
    try:
        _serve(scratch)
    except KeyboardInterrupt:
        pass  # told to end before it served
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_orphaned.is_set():  # a start that was cut short there may have failed first
            sys.exit(ORPHANED)


def _serve(scratch: Path) -> None:
    text, fd = child_arguments()
    try:
        spec = VllmSpec.model_validate_json(text)
    except ValidationError as error:
        fail(f"the spec of the vLLM server is wrong: {error}", rule="see asyncrl_servers/vllm/spec.py")
    lock_with(secret_of(SECRET_ENV))
    os.environ.pop(SECRET_ENV, None)  # vLLM's workers inherit the environment
    try:
        check_start(spec)
        set_environment(spec, scratch)
        from asyncrl_servers.vllm.api_server import serve_vllm

        serve_vllm(spec, fd)
    except Refused as refusal:
        fail(refusal.body.error, rule=refusal.body.rule, way_out=refusal.body.way_out)


def _end_start(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
