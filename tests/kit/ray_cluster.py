"""A Ray cluster on hosts of a network, as frugal as Ray can be."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from job_runs import RUN, roomy
from network_hosts import Host

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORT = 6379
FRUGAL = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    "RAY_grpc_client_keepalive_timeout_ms": "30000",
    "PYTHONPATH": f"{HERE}:{ROOT}:{ROOT / 'servers'}",
    "OMP_NUM_THREADS": "1",
}
"""Workers are started when they are asked for; a node that is cut off sees it after 30
s instead of 120, and ends after 20 s without a head instead of 60; children find
modules of the tests.
"""
START_S = 300.0
UNTIL_STARTED = """
while :; do
    "$@" > "$0" 2>&1
    grep -q 'Ray runtime started' "$0" && exit
done
"""
"""Ray gives a raylet 30 s to start, which a busy machine may not do."""


@contextlib.contextmanager
def ray_cluster(
    hosts: Sequence[Host], options: Mapping[int, Sequence[str]], **env: str
) -> Iterator[str]:
    """The address of the head, on the first host; it is ended with the network.
    `options`: of `ray start`. `env`: of the head.
    """
    head = hosts[0].address
    for number, host in enumerate(hosts):
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if number == 0
            else []
        )
        where = where or [f"--address={head}:{PORT}"]
        start_ray(host, *where, *options.get(number, ()), env={} if number else env)
        if number == 0:
            wait_for(host, ["bash", "-c", f"echo > /dev/tcp/{head}/{PORT}"])
    counted = "sum(node['Alive'] for node in ray.nodes())"
    waits = (
        f"import ray\nray.init(log_to_driver=False)\nassert {counted} == {len(hosts)}"
    )
    wait_for(hosts[0], [sys.executable, "-c", waits], RAY_ADDRESS=f"{head}:{PORT}")
    yield f"{head}:{PORT}"


def start_ray(
    host: Host, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`ray start` there, until its raylet ends."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    ray += [f"--node-ip-address={host.address}", f"--temp-dir={host.folder / 'tmp'}"]
    ray += [
        "--object-store-memory=80000000",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    ]
    command = ["sh", "-c", UNTIL_STARTED, str(host.folder / "ray.log"), *ray, *options]
    return host.start(command, env={**FRUGAL, **(env or {})}, text=True)


def start_run(
    host: Host, *arguments: str | Path, command: Sequence[str] = RUN, **how: Any
) -> subprocess.Popen[str]:
    """`asyncrl run` there. `how`: as Host.start takes it."""
    return roomy(
        host.start(
            [*command, *map(str, arguments)],
            env=FRUGAL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,
        )
    )


def wait_for(host: Host, command: Sequence[str], **env: str) -> None:
    """Wait until the command succeeds there."""
    until_s = time.monotonic() + START_S
    while True:
        done = host.run(
            ["env", *(f"{name}={value}" for name, value in env.items()), *command]
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < until_s, (
            done.stdout + done.stderr + (host.folder / "ray.log").read_text()
        )
        time.sleep(0.1)
